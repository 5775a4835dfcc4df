"""Rows 1, 2, 3, 6 and 7: sessions whose process dies."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

import ipcsync
from ipcsync._board import INT64_MAX, Board
from ipcsync._linux.process import Process, is_running, pid_namespace, start_time
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_coordinator import deaths
from ipcsync_coordinator.state import Session
from tests.faults import actions, fixtures, pid_reuse
from tests.faults.fixtures import Blocked, ForeignPeer, sleeps_in_core, until_lost
from tests.kit import remote
from tests.kit.descriptors import descriptors
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.core, pytest.mark.driver, pytest.mark.keeper, pytest.mark.own_coordinator]


def _assert_a_name_can_be_opened_anew(
    client: ipcsync.Client, name: str, engine: EngineName, old: ipcsync.SharedEvent
) -> None:
    """And the new event has nothing of the old one, which still stands in quarantine."""
    with client.event(name, recorder=True, engine=engine) as event:
        assert (event.generation, event.completed, event.state) == (0, 0, "open")
        assert event._engine.slot != old._engine.slot  # `old` is still attached: its slot must not be used again
        fixtures.finish(event.record(ipcsync.Stream()))


# --- row 1 ------------------------------------------------------------------------------------------------------------


def test_row_01_a_killed_holder_loses_each_lease_once_and_its_peers_are_told(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    names = [f"{kind}/{number}" for kind in fixtures.ENGINES for number in range(4)]
    peer.call(actions.connect, coordinator.endpoint, "holder")
    for name in names:
        peer.call(actions.open_event, name, name.partition("/")[0])
    ours = [client.event(name) for name in names]
    client.event("not-its-own", recorder=True)
    peer.call(actions.open_event, "not-its-own", "auto", False)
    waiting = [Blocked(event.at(1).synchronize) for event in ours]
    watch = client.watch(timeout=DEADLINE_S)
    # A snapshot of nine events and two sessions.
    assert sorted(notice.kind for notice in (next(watch) for _ in range(11))) == ["opened"] * 9 + ["session_opened"] * 2
    before = client.stats()["feed_number"]

    peer.kill()

    told = Counter((notice.kind, notice.name) for notice in (next(watch) for _ in range(17)))
    broken = [(kind, name) for kind in ("broken", "recorder_died") for name in names]
    assert told == Counter([*broken, ("session_closed", "holder")])
    for call in waiting:
        assert isinstance(call.outcome(), ipcsync.RecorderLost)
    for event in ours:
        assert event.state == "broken"
        _assert_a_name_can_be_opened_anew(client, event.name, event.engine, event)
    # The new events are let go of once a marker behind their work is over, which may be a moment later.
    until(lambda: client.stats()["quarantined"] == len(names), "the quarantine of the broken ones alone")
    stats = client.stats()
    assert stats["deaths"] == {"pidfd": 1, "ttl": 0}
    assert stats["feed_number"] == before + 9 + 2 * len(names)  # the new events were opened and closed
    # A dead process's uses end once it is gone, which may be a moment after its death.
    until(lambda: {info.name: info.attached for info in client.list_events()}["not-its-own"] == 1, "it is not attached")
    for event in ours:
        event.close()
    until(lambda: client.stats()["pool_in_use"] == 1, "all slots but one free again")


def test_row_01_a_killed_waiter_breaks_nothing(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream = ipcsync.Stream()
    peer.call(actions.connect, coordinator.endpoint, "waiter")
    with StreamGate(stream) as gate:
        point = event.record(stream)
        peer.call(actions.take, bytes(point), "p")
        peer.call(actions.wait_on_stream, "p")
        peer.begin(actions.synchronize, "p")
        peer.kill()
        until_lost(client, "pidfd")
        assert (event.state, event.completed) == ("open", 0)
        gate.open()
        fixtures.finish(point)
    for _ in range(2 * event.depth):
        fixtures.finish(event.record(stream))


# --- row 2 ------------------------------------------------------------------------------------------------------------


def test_row_02_work_that_a_dead_recorder_left_unfinished_is_lost_for_every_waiter_and_for_ever(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[[], Peer], engine: EngineName
) -> None:
    recorder, waiter = new_peer(), new_peer()
    recorder.call(actions.open_recorder, coordinator.endpoint, "e", engine)
    good = recorder.call(actions.record_complete, "e")
    recorder.call(remote.hold)
    lost = client.point(recorder.call(actions.record, "e"))
    event = client.event("e", engine=engine)
    waiter.call(actions.connect, coordinator.endpoint, "waiter")
    waiter.call(actions.take, bytes(lost), "lost")
    waiter.call(actions.wait_on_stream, "lost")
    waiter.begin(actions.error_of, actions.synchronize, "lost")
    told: list[ipcsync.Point] = []
    lost.add_done_callback(told.append)
    waiting = [Blocked(lost.synchronize), Blocked(event.at(3).synchronize)]
    assert not lost.query()
    quarantined = client.stats()["quarantined"]

    recorder.kill()

    for call in waiting:
        assert isinstance(call.outcome(), ipcsync.RecorderLost)
    assert waiter.result() == "RecorderLost"
    until(lambda: bool(told), "the callback")
    until_lost(client, "pidfd")
    for _ in range(3):
        with pytest.raises(ipcsync.RecorderLost) as caught:
            lost.query()
        assert caught.value.generation == lost.generation
    assert isinstance(told[0].exception(), ipcsync.RecorderLost)
    assert client.point(good).query()  # what was known complete stays good
    assert (event.state, event.completed, client.stats()["quarantined"]) == ("broken", 1, quarantined + 1)
    _assert_a_name_can_be_opened_anew(client, "e", engine, event)
    assert waiter.call(actions.error_of, actions.query, "lost") == "RecorderLost"
    if engine == "timeline":
        # What was queued on a stream is released, and does not count as success.
        until(lambda: waiter.call(remote.stream_is_idle), "the stream's release")
        assert waiter.call(actions.error_of, actions.query, "lost") == "RecorderLost"
    waiter.kill()
    event.close()
    until(lambda: client.stats()["quarantined"] == 0, "the end of the quarantine")


@pytest.mark.parametrize("told_by", ["a robust futex", "/proc"])
def test_row_02_work_that_its_driver_calls_complete_after_the_death_does_not_count(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[[], Peer], told_by: str
) -> None:
    """Before the coordinator knows: it is stopped, so that only the look at the recorder's process can tell."""
    recorder = new_peer()
    if told_by == "/proc":
        recorder.call(actions.have_no_robust_futexes)
    recorder.call(actions.open_recorder, coordinator.endpoint, "e", "event")
    recorder.call(remote.hold)
    lost = client.point(recorder.call(actions.record, "e"))
    assert not lost.query()
    fixtures.stop(coordinator.pid)
    try:
        recorder.kill()
        with pytest.raises(ipcsync.RecorderLost):
            lost.synchronize(DEADLINE_S)
    finally:
        fixtures.resume(coordinator.pid)
    until_lost(client, "pidfd")
    with pytest.raises(ipcsync.RecorderLost):
        lost.query()


# --- row 3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "held"), [*((step, False) for step in actions.STEPS), *((step, True) for step in actions.STEPS[1:])]
)
def test_row_03_a_recorder_killed_inside_a_record_leaves_nothing_half_published(
    coordinator: ipcsync.Coordinator,
    client: ipcsync.Client,
    new_peer: Callable[[], Peer],
    engine: EngineName,
    step: str,
    held: bool,
) -> None:
    peer, waiter = new_peer(), new_peer()
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
    first = client.point(peer.call(actions.record_complete, "e"))
    event = client.event("e", engine=engine)
    second = event.at(2)
    waiting = [Blocked(second.synchronize), Blocked(event.at(3).synchronize)]
    waiter.call(actions.connect, coordinator.endpoint, "waiter")
    waiter.call(actions.take, bytes(second), "second")
    waiter.begin(actions.error_of, actions.wait_on_stream, "second")
    until(lambda: sleeps_in_core(waiter.pid), "the stream's wait sleeps")
    if held:
        peer.call(remote.hold)

    peer.begin(actions.die_in_record, "e", step)

    outcomes = [call.outcome() for call in waiting]
    of_stream = waiter.result()
    was_published = step == "before the wake"
    assert event.generation == (2 if was_published else 1)
    assert isinstance(outcomes[1], ipcsync.RecorderLost)
    if held or not was_published:
        assert isinstance(outcomes[0], ipcsync.RecorderLost)
        assert second.is_recorded == was_published
    else:
        assert outcomes[0] is None or isinstance(outcomes[0], ipcsync.RecorderLost)
    # A wait is queued once the point is recorded: whether it counts is then asked of the point.
    assert of_stream == "RecorderLost" or (was_published and of_stream == "")
    waiter.kill()  # on `event` its stream may stand behind the dead for ever
    until_lost(client, "pidfd")
    assert first.query()
    if outcomes[0] is not None:
        for point in (second, event.at(3)):
            with pytest.raises(ipcsync.RecorderLost):
                point.query()
    assert event.completed == (2 if outcomes[0] is None else 1)
    _assert_a_name_can_be_opened_anew(client, "e", engine, event)


@pytest.mark.parametrize("step", actions.STEPS)
def test_row_03_a_ring_that_a_record_was_killed_in_is_not_used_again(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, step: str
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "e", "event")
    event = client.event("e")
    peer.call(remote.hold)
    recorded = event.handles[0]
    peer.begin(actions.die_in_record, "e", step)
    until_lost(client, "pidfd")
    left = ipcsync.Event.from_ipc_handle(0, recorded)
    event.close()
    until(lambda: client.stats()["pool_in_use"] == 0, "the slot free again")
    stream = ipcsync.Stream()
    for number in range(40):  # more than there are spare ones
        new = client.event(f"new-{number}", recorder=True, engine="event")
        # Work of the dead may end after its death was told, and its event is free from then on.
        assert recorded not in new.handles or left.query()
        for _ in new.handles:
            new.record(stream).synchronize(30)


# --- row 6 ------------------------------------------------------------------------------------------------------------


def test_row_06_a_zombie_that_nobody_reaps_is_dead(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
    peer.call(remote.hold)
    point = client.point(peer.call(actions.record, "e"))
    started = start_time(peer.pid)
    assert started is not None
    waiting = Blocked(point.synchronize)

    os.kill(peer.pid, signal.SIGKILL)  # the test is its parent, and does not wait for it

    assert isinstance(waiting.outcome(), ipcsync.RecorderLost)
    until_lost(client, "pidfd")
    until(lambda: fixtures.state_of(peer.pid) == "Z", "its end")
    assert not is_running(peer.pid, started)
    assert client.stats()["deaths"] == {"pidfd": 1, "ttl": 0}
    client.event("e", recorder=True, engine=engine)


# --- row 7 ------------------------------------------------------------------------------------------------------------


def test_row_07_a_pid_with_another_start_time_is_another_process() -> None:
    started = start_time(os.getpid())
    assert started is not None
    assert Process(os.getpid(), started).is_alive()
    assert not Process(os.getpid(), started + 1).is_alive()
    assert not is_running(os.getpid(), started - 1)


def test_row_07_a_process_is_gone_once_its_pid_is_anothers_and_counts_only_for_a_session_that_is_ready(
    client: ipcsync.Client,
) -> None:
    board, me, started = client._session.lease.board, os.getpid(), start_time(os.getpid()) or 0
    assert [deaths.has_ended(me, when) for when in (started, started + 1)] == [False, True]
    session = Session(1 << 16 | 1, "s", "s", me, started=started + 1)
    with closing(Board.open(board.path)) as other:
        assert other.hold_lifeline(board.session(session.line))
        assert not deaths.is_gone(board, session)  # before it spoke again, its pid might have been reused
        session.is_ready = True
        assert deaths.is_gone(board, session)


def test_row_07_a_process_that_cannot_be_looked_at_for_want_of_a_descriptor_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has_none(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(deaths, "start_time", has_none)
    before = descriptors()
    assert deaths.has_ended(os.getpid(), 1) is False
    assert descriptors().items() <= before.items()


@pytest.mark.process
@pytest.mark.parametrize("engine", ["event", pytest.param("timeline", marks=pytest.mark.thorough)])
def test_row_07_a_new_process_with_the_pid_of_a_dead_recorder_is_not_taken_for_it(engine: EngineName) -> None:
    """All of it, the coordinator too, in a pid namespace of its own: see `reborn`."""
    why_not = ForeignPeer.why_not()
    if why_not:
        pytest.skip(why_not)
    foreign = ForeignPeer(alone=True)
    try:
        why_not = foreign.call(pid_reuse.why_not, pid_namespace())
        if why_not:
            pytest.skip(why_not)
        found = foreign.call(pid_reuse.scenario, engine, pid_namespace())
    finally:
        foreign.kill()
    assert found == {
        "complete while it lived": False,
        "before the coordinator knew": "RecorderLost",
        "afterwards": "RecorderLost",
        "the new session has the old pid": True,
        "deaths": {"pidfd": 1, "ttl": 0},
    }


# --- rows 61 and 63 ---------------------------------------------------------------------------------------------------


def test_row_61_at_its_mark_a_recorder_is_dead_for_all_and_its_slot_stays_until_it_is_gone(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
    peer.call(remote.hold)
    point = client.point(peer.call(actions.record, "e"))
    event, stream = client.event("e"), ipcsync.Stream()
    slot = event._engine.slot
    point.wait(stream)
    waiting = [Blocked(point.synchronize), Blocked(event.at(2).synchronize)]

    peer.call(actions.be_marked_as_dead)

    for call in waiting:
        assert isinstance(call.outcome(), ipcsync.RecorderLost)
    if engine == "timeline":
        until(stream.query, "the stream goes on")
    until_lost(client, "pidfd")
    peer.call(remote.let_go)  # what it submitted ends, and lowers a timeline's word
    if engine == "timeline":
        until(lambda: event._engine.line.completed == INT64_MAX, "the word is released again")
    assert event.completed == 0, "nothing late counts"
    with client.event("e", recorder=True, engine=engine) as anew:
        assert anew._engine.slot != slot
    event.close()
    until(lambda: client.stats()["pool_in_use"] == 1, "the others have let go")
    assert client.stats()["quarantined"] == 1
    peer.kill()
    until(lambda: client.stats()["pool_in_use"] == 0, "it is gone, and over")


@pytest.mark.process
def test_row_63_many_recorders_die_at_once_while_clients_start(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[[], Peer], engine: EngineName
) -> None:
    recorders, points = [new_peer() for _ in range(8)], []
    for number, recorder in enumerate(recorders):
        recorder.call(actions.open_recorder, coordinator.endpoint, str(number), engine)
        recorder.call(remote.hold)
        points.append(client.point(recorder.call(actions.record, str(number))))
    waiting = [Blocked(point.synchronize) for point in points]
    newcomers = [new_peer() for _ in range(4)]

    for recorder in recorders:
        os.kill(recorder.pid, signal.SIGKILL)
    for newcomer in newcomers:
        newcomer.call(actions.open_recorder, coordinator.endpoint, f"of {newcomer.pid}", engine)

    for call in waiting:
        assert isinstance(call.outcome(), ipcsync.RecorderLost)
    for newcomer in newcomers:
        assert client.point(newcomer.call(actions.record_complete, f"of {newcomer.pid}")).query()
    until(lambda: client.stats()["deaths"]["pidfd"] == len(recorders), "each death is counted")
    until(lambda: client.stats()["pool_in_use"] == len(recorders) + len(newcomers), "nothing is lost")
