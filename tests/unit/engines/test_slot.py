"""What one process sees of a slot: how its event ended, who records, and what is on the board."""

from __future__ import annotations

import math
import time

import pytest

import ipcsync
from ipcsync._board import BROKEN, CLOSED, layout
from ipcsync._deadline import FOREVER, deadline_of
from ipcsync._engines.loss import Loss
from ipcsync.errors import NodeLost, RecorderLost, WaitTimeout
from tests.kit.steps import at_step
from tests.unit.engines.chain_row import BASE, ME, Row, serial_of


@pytest.mark.parametrize(
    ("ends", "cause", "reason", "lost_from"),
    [
        ("died", "died", None, 2),
        ("expired", "expired", None, 2),
        ("closed", "closed", None, 4),
        ("killed", "died", "bridge", 2),
        ("restarted", "died", "restarted", 2),
    ],
)
@pytest.mark.parametrize("node", ["", "two"])
def test_how_an_event_ended_is_how_its_open_generations_are_lost(
    row: Row, ends: str, cause: str, reason: str | None, lost_from: int, node: str
) -> None:
    view, line = row.view(0, node=node), row.board.slot(0)
    row.complete(0, 1)
    row.record(0, 3)
    assert [view.outcome_of(generation) for generation in (1, 2, 3, 4)] == [True, None, None, None]
    if ends == "closed":
        line.finish(CLOSED)
    elif ends == "killed":
        row.kill(0)
    else:
        line.break_at(BASE + 1, has_expired=ends == "expired", reason="restarted" if ends == "restarted" else "")
    said = (node, reason) if node else ("", None)
    who = ("", 0) if node else ("s0", 4711)
    for generation in range(1, 5):
        outcome = view.outcome_of(generation)
        if generation < lost_from:
            assert outcome is (True if generation == 1 else None)
            continue
        assert outcome == Loss(cause, serial_of(0), *who, node=said[0], reason=said[1])  # type: ignore[arg-type]
        with pytest.raises(RecorderLost) as caught:
            view.synchronize(generation, 0)
        error = caught.value
        assert error.generation == generation
        assert error.event == "e0"
        if node and reason:
            assert isinstance(error, NodeLost)
            assert (error.node, error.reason) == ("two", reason)
            assert str(error).startswith(f"generation {generation} of 'e0' will never be complete: its node 'two' ")
        else:
            assert (error.cause, error.session, error.pid, error.over) == (cause, *who, None)
        assert str(error).endswith("; its data counts as never written: repeat the work on a new event")
    assert view.state == {"closed": "closed", "killed": "open"}.get(ends, "broken")


def test_what_was_found_lost_once_is_lost_whatever_the_board_says_later(row: Row) -> None:
    view = row.view(0)
    row.record(0, 3)
    row.kill(0)
    with pytest.raises(RecorderLost):
        view.synchronize(2, 0)
    row.complete(0, 3)
    row.board.words[row._owner(0)] = 1
    assert view.outcome_of(1) is True
    assert isinstance(view.outcome_of(2), Loss)
    assert view.completed == 1
    assert view.query(1)
    with pytest.raises(RecorderLost):
        view.query(2)


def test_a_view_knows_who_records_now(row: Row) -> None:
    view = row.view(0)
    row.board.slot(0).recorder = 0
    assert view._recorder() == ("", 0)
    with pytest.raises(
        WaitTimeout,
        match=r"^generation 1 of 'e0' was not recorded within 0 s: nobody has opened the event as its recorder "
        r"\(recorder=True\)$",
    ) as caught:
        view.synchronize(1, 0)
    assert (caught.value.event, caught.value.generation, caught.value.timeout) == ("e0", 1, 0)
    row.board.slot(0).recorder = serial_of(2)
    row.kill(0)
    assert view._recorder() == ("s2", 4713)
    assert view.line.recorder == serial_of(2)
    with pytest.raises(WaitTimeout, match=r"^generation 1 of 'e0' was not recorded within 0.01 s$"):
        view.synchronize(1, 0.01)


def test_who_does_not_record_says_who_does(row: Row) -> None:
    stream = ipcsync.Stream()
    view = row.theirs[1]
    why = r"^this session did not open 'e1' with recorder=True; the session 's1' \(pid 4712\) records on it$"
    with pytest.raises(ipcsync.NotRecorder, match=why) as caught:
        view.record(stream._handle, 0, 1)
    assert (caught.value.event, caught.value.recorder, caught.value.pid) == ("e1", "s1", 4712)
    row.board.slot(1).recorder = 0
    with pytest.raises(ipcsync.NotRecorder, match=r"recorder=True; no session has so far$") as caught:
        view.record(stream._handle, 0, 1)
    assert (caught.value.event, caught.value.recorder, caught.value.pid) == ("e1", "", 0)


def test_a_deadline_is_counted_from_when_the_wait_began() -> None:
    assert deadline_of(None) == deadline_of(None, 5) == FOREVER
    assert deadline_of(0, 5) == 5
    assert deadline_of(1.5, 10**9) == 2_500_000_000
    assert deadline_of(1e9, 7) == deadline_of(1e30, 7) == deadline_of(math.inf, 7) == 7 + 10**18
    before = time.monotonic_ns()
    assert before + 10**9 <= deadline_of(1) <= time.monotonic_ns() + 10**9
    for wrong in (-1, -0.001, math.nan):
        with pytest.raises(ValueError, match=rf"^timeout is a number of seconds from 0 up, or None, not {wrong!r}$"):
            deadline_of(wrong)


def test_what_a_gpu_wrote_after_its_event_broke_is_not_on_the_board(row: Row) -> None:
    view, line = row.view(0), row.board.slot(0)
    row.complete(0, 2)
    line.break_at(BASE + 1)
    line.store_completed(layout.INT64_MAX)
    assert line.state == BROKEN
    assert (view.outcome_of(1), isinstance(view.outcome_of(2), Loss)) == (True, True)
    assert view.completed == 1


def test_an_event_that_breaks_while_it_is_looked_at_has_completed_what_its_watermark_says(row: Row) -> None:
    """Its word was written behind a wait that was released, and the look at whom it stands behind was too early."""
    view, line = row.view(0), row.board.slot(0)
    row.complete(0, 2)
    line.first_dependent = BASE + 1
    with at_step("load valid_as_of", lambda: line.break_at(BASE + 1)):
        assert view.completed == 1


def test_an_event_that_breaks_behind_the_first_look_at_it_has_completed_what_its_watermark_says(row: Row) -> None:
    view, line = row.view(0), row.board.slot(0)
    row.complete(0, 2)

    def break_it() -> None:
        line.break_at(BASE)
        line.first_dependent = BASE + 1

    with at_step("load first_dependent", break_it):
        assert view.completed == 0


def test_after_a_close_a_death_loses_what_was_recorded_and_the_close_what_was_not(row: Row) -> None:
    view = row.view(0)
    row.record(0, 3)
    row.board.slot(0).finish(CLOSED)
    row.kill(0)
    fates = [view.outcome_of(generation) for generation in (3, 4)]
    assert [isinstance(outcome, Loss) and outcome.cause for outcome in fates] == ["died", "closed"]


@pytest.mark.parametrize("is_over", [True, False, None])
def test_a_lost_recorders_error_says_whether_it_can_touch_anything_any_more(
    row: Row, monkeypatch: pytest.MonkeyPatch, is_over: bool | None
) -> None:
    view = row.view(0)
    row.record(0, 1)
    monkeypatch.setattr("ipcsync._board.Peer.is_over", lambda _: is_over)
    assert view.recorder_is_over() == is_over
    row.kill(0)
    with pytest.raises(RecorderLost) as caught:
        view.check_liveness(1)
    assert caught.value.over is (True if is_over else None)
    assert row.view(0, node="two").recorder_is_over() is None
    assert row.mine.recorder_is_over() is None
    row.board.slot(1).recorder = 0
    assert row.theirs[1].recorder_is_over() is False
    row.extend(1, row.wait(2))
    row.kill(2)
    row.mine.publish_completed()
    with pytest.raises(RecorderLost) as caught:
        row.view(ME).query(1)
    assert (caught.value.cause, caught.value.over) == ("behind", None), "its recorder is not the one that ended"


def test_a_wait_for_a_record_looks_whether_the_recorder_lives(row: Row) -> None:
    view = row.theirs[0]
    row.kill(0)
    with pytest.raises(RecorderLost, match=r"^generation 2 of 'e0' will never be complete: its recorder 's0'"):
        view.await_recorded(2, time.monotonic_ns() + 30 * 10**9, 30)
    with pytest.raises(RecorderLost) as caught:
        view.check_liveness(2)
    assert caught.value.generation == 2
    row.complete(1, 1)
    assert not row.theirs[1].query(2)
    row.board.slot(1).finish(CLOSED)
    assert row.theirs[1].query(1)
    with pytest.raises(RecorderLost, match="closed the event before"):
        row.theirs[1].query(2)
