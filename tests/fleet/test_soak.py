"""A short soak of hosts, and that its judge finds what is wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.fleet import history, hosts, soak, soak_host
from tests.fleet.history import Away, Held, History, Seen
from tests.kit.peer import Peer

RECORDED = {"u": [1.0, 2.0, 3.0]}


def seen(*ends: tuple[int, str, float, float], by: str = "w") -> list[Seen]:
    return [Seen(by, "a", "u", *end) for end in ends]


@pytest.mark.process
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_fleet_soak() -> None:
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    said: list[str] = []
    assert soak.run(20.0, 2, 2, 7, said.append) == [], said


def _work_well() -> None:
    """In a peer."""


def _fail() -> None:
    raise ValueError("planted")


def _hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


@pytest.mark.process
@pytest.mark.parametrize(
    ("work", "is_killed", "problems"), [(_work_well, False, 0), (_hang, True, 0), (_fail, False, 1), (_hang, False, 1)]
)
def test_a_worker_that_hangs_or_fails_at_the_end_is_told(
    work: Callable[[], None],
    is_killed: bool,
    problems: int,
    new_peer: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = new_peer()
    peer.call(int)
    peer.begin(work)
    if is_killed:
        peer.signal(signal.SIGKILL)
        assert peer.wait(30)
    monkeypatch.setattr(soak_host, "LONGEST_WAIT_S", 0.5 if work is _hang else soak_host.LONGEST_WAIT_S)
    monkeypatch.setattr(peer, "signal", lambda number: None)  # a worker has a handler by then
    tender = soak_host.Tender.__new__(soak_host.Tender)
    tender._node, tender._peers, tender._problems = "a", [peer], []
    monkeypatch.setattr(peer, "close", lambda: None)
    tender.end()
    monkeypatch.undo()
    if work is _hang:
        peer.kill()
    assert len(tender._problems) == problems, tender._problems


@pytest.mark.parametrize(
    ("ends", "what"),
    [
        (seen((4, "complete", 5, 6)), "and 3 were recorded"),
        (seen((3, "complete", 1, 2.5)), "before it was recorded"),
        (seen((2, "NodeLost", 4, 5), (3, "complete", 6, 7)), "after #2 was lost"),
        (seen((2, "complete", 4, 5), (1, "RecorderLost", 5, 6)), "after #2 was seen complete"),
        ([*seen((2, "NodeLost", 4, 5)), *seen((2, "complete", 6, 7), by="another")], "after #2 was lost"),
    ],
)
def test_the_judge_finds_a_violation(ends: list[Seen], what: str) -> None:
    (wrong,) = history.check(RECORDED, ends)
    assert what in wrong


def test_the_judge_takes_what_is_right() -> None:
    ends = [
        *seen((1, "complete", 0, 2), (3, "complete", 2, 4), (4, "NodeLost", 4, 5)),
        *seen((3, "complete", 4.5, 6), by="began before another knew of the loss"),
    ]
    assert history.check(RECORDED, ends) == []


@pytest.mark.parametrize(
    ("second", "away", "is_wrong"),
    [
        (Held("b", "x", 12, 20, 30), [], False),  # the first has released it
        (Held("b", "x", 12, 15, 30), [], True),
        (Held("b", "x", 12, 15, 30), [Away("b", 10, 14)], True),  # not the holder's node
        (Held("b", "x", 12, 15, 30), [Away("a", 10, 14)], False),  # a takeover
        (Held("b", "x", 14, 15, 30), [Away("a", 10, 14)], True),  # sooner than a TTL
        (Held("b", "x", 12, 15, 30), [Away("a", 1, 4)], True),  # long ago
        (Held("a", "x", 12, 15, 30), [Away("a", 10, 14)], True),  # one node takes nothing over from itself
        (Held("b", "y", 12, 15, 30), [], False),
    ],
)
def test_the_judge_finds_two_holders(second: Held, away: list[Away], is_wrong: bool) -> None:
    first = Held("a", "x", 9, 10, 18)
    assert bool(history.check_names([second, first], away, ttl_s=2.0, recovery_s=5.0)) == is_wrong


def test_a_journal_outlives_its_writer_and_a_line_that_was_cut_short_does_not_count(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "w"
    journal = history.Journal(path)
    journal.write("recorded", "u", 1)
    journal.write("holds", "x", 1.0)
    journal.write("ended")
    journal.write("holds", "y", 1.0)
    with path.open("ab") as file:
        file.write(b'["recorded", 1')
    told = History()
    told.add("a", "w", history.read(path))
    assert list(map(len, told.recorded.values())) == [1]
    assert [(each.name, each.until < float("inf")) for each in told.held] == [("x", True)]
