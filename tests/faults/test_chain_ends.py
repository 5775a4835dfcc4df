"""What a chain stands behind beyond one wait, and how that ends: expiry, `resume`, `after`, releases."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync._engines import core, queued
from tests.faults import chain_actions as do
from tests.faults import fixtures
from tests.faults.chain_line import Line, NewPeer, of_events, waits
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until


def test_ahead_never_recorded(timeline: Line) -> None:
    """A closes without the record that B's stream waits for: what B recorded behind that is lost."""
    a, b = timeline.add("a"), timeline.add("b")
    b.call(do.wait, a.call(do.point_of, "a/out", 1), "main", True)
    point = b.call(do.record, "b/out")
    c = timeline.add("c", records=False)
    assert c.call(do.error_of, do.synchronize_briefly, point) == "WaitTimeout"
    a.call(do.close_event, "a/out")
    loss = c.call(do.await_end, point)
    timeline.assert_lost(loss, a.pid)


def test_ahead_recorded_later(timeline: Line) -> None:
    a, b = timeline.add("a"), timeline.add("b")
    b.call(do.wait, a.call(do.point_of, "a/out", 1), "main", True)
    point = b.call(do.record, "b/out")
    c = timeline.add("c", records=False)
    a.call(do.record, "a/out")
    assert c.call(do.await_end, point) is None


def test_a_expires_and_goes_on(line: Line) -> None:
    data = line.begin(lease_ttl=2.0)
    point = line.follow("b", data)
    c, a = line.add("c", records=False), line.peers["a"]
    fixtures.stop(a.pid)
    line.assert_lost(c.call(do.await_end, point), a.pid, within_s=10)
    fixtures.resume(a.pid)
    a.call(do.open_gate)
    assert a.call(do.error_of, do.record, "a/out") == "SessionExpired"
    line.assert_lost(c.call(do.await_end, point), a.pid)


def test_b_stopped_c_ends_by_ttl(line: Line) -> None:
    point = line.follow("b", line.begin(), lease_ttl=2.0)
    c, b = line.add("c", records=False), line.peers["b"]
    fixtures.stop(b.pid)
    line.kill_a()
    loss = c.call(do.await_end, point)
    assert loss is not None, "a silent pass"
    assert (loss["cause"], loss["session"]) == ("expired", "b")
    fixtures.resume(b.pid)


@pytest.fixture
def few_sessions() -> Iterator[ipcsync.Coordinator]:
    """A coordinator that gives a dead session's line away at once, and whose sessions beat seldom."""
    with ipcsync.launch(max_sessions=3, lease_ttl=60.0) as coordinator:
        yield coordinator


def test_line_used_again(few_sessions: ipcsync.Coordinator, new_peer: NewPeer, engine: str) -> None:
    line = Line(few_sessions.endpoint, new_peer, engine)
    point = line.follow("b", line.begin())
    c = line.add("c", records=False)
    index = line.peers["b"].call(do.words, "b/out")["bits"].bit_length() - 1
    pid = line.kill_a()
    d = new_peer()
    until(lambda: not d.call(do.error_of, do.connect, few_sessions.endpoint, "d"), "the line is free")
    assert d.call(do.session_line) == index
    loss = c.call(do.await_end, point)
    assert loss is not None, "a silent pass"
    assert (loss["cause"], loss["session"], loss["pid"]) in [("behind", "a", pid), ("behind", "", 0)]


def test_earlier_generation_not_released(timeline: Line) -> None:
    """What is not lost is not torn: the event is broken only once that is complete."""
    data = timeline.begin()
    b, d = timeline.add("b"), timeline.add("d")
    b.call(do.hold, "first")
    first = b.call(do.record, "b/out", "first")
    d.call(do.wait, first)
    good = d.call(do.record, "d/out")
    b.call(do.wait, data)
    behind = b.call(do.record, "b/out")
    c = timeline.add("c", records=False)
    pid = timeline.kill_a()
    timeline.assert_lost(c.call(do.await_end, behind), pid)
    assert c.call(do.state_of, first) == "open"
    assert c.call(do.error_of, do.synchronize_briefly, good) == "WaitTimeout"
    b.call(do.open_gate)
    assert c.call(do.await_end, first) is None
    assert c.call(do.await_end, good) is None
    until(lambda: c.call(do.state_of, first) == "broken", "the event is broken at its recorder's word")


def test_a_second_death_loses_what_the_first_one_left_open(line: Line) -> None:
    """B's first record waits for A, its second one for D too; D dies, then A."""
    data = line.begin()
    d = line.add("d")
    d.call(do.hold)
    further = d.call(do.record, "d/out")
    b = line.add("b")
    b.call(do.wait, data)
    first = b.call(do.record, "b/out")
    b.call(do.wait, further)
    b.call(do.record, "b/out")
    c = line.add("c", records=False)
    d.kill()
    until(lambda: b.call(do.loss_of, do.record, "b/out") is not None, "the first death is seen")
    c.call(do.error_of, do.synchronize_briefly, first)  # has it judged
    assert b.call(do.words, "b/out")["lost"] == 2
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, first), pid)
    assert b.call(do.words, "b/out")["lost"] == 1


def test_harvest_stores_nothing_over_a_loss(coordinator: ipcsync.Coordinator, new_peer: NewPeer) -> None:
    """B's heartbeat would store what the driver calls complete."""
    line = of_events(coordinator, new_peer)
    line.follow("b", line.begin(), lease_ttl=3.0)
    b = line.peers["b"]
    line.kill_a()
    until(lambda: b.call(do.words, "b/out")["lost"] == 1, "a beat finds the loss")
    assert b.call(do.words, "b/out")["completed"] == 0


def test_full_ring_behind_the_dead(coordinator: ipcsync.Coordinator, new_peer: NewPeer) -> None:
    line = of_events(coordinator, new_peer, "pending")
    line.follow("b", line.begin(), depth=1)
    b = line.peers["b"]
    b.begin(do.loss_of, do.record, "b/out", "another stream")
    until(lambda: waits(b), "the record waits for room")
    fixtures.stop(coordinator.pid)  # no break is needed for it
    try:
        pid = line.kill_a()
        loss = b.result()
    finally:
        fixtures.resume(coordinator.pid)
    assert loss is not None
    assert (loss["cause"], loss["session"], loss["pid"]) == ("behind", "a", pid)


def test_new_stream_same_event(line: Line) -> None:
    """A record on another stream follows the event's last one, and stands behind what that does, as does all after."""
    line.follow("b", line.begin())
    b = line.peers["b"]
    b.call(do.open_event, "b/more", line.engine)
    second = b.call(do.record, "b/out", "another stream")
    more = b.call(do.record, "b/more", "another stream")
    c = line.add("c", records=False)
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, second), pid)
    line.assert_lost(c.call(do.await_end, more), pid)


def test_a_new_stream_is_not_made_to_follow_a_record_that_is_known_to_be_lost(line: Line) -> None:
    """It would stand still too, on the engine event."""
    data = line.begin()
    line.death = "pending"
    line.follow("b", data)
    b = line.peers["b"]
    b.call(do.end_beats)
    pid = line.kill_a()
    assert b.call(do.loss_of, do.await_point, data) is not None
    line.assert_lost(b.call(do.loss_of, do.record, "b/out", "another stream"), pid)
    b.call(do.finish, "another stream")


@pytest.mark.parametrize("resume", [(do.resume, "main", 10.0), (do.resume_by_another_client, "main")])
def test_what_is_recorded_behind_a_resume_is_on_no_event_that_is_lost(timeline: Line, resume: tuple[Any, ...]) -> None:
    data = timeline.begin()
    b = timeline.add("b", records=False)
    b.call(do.wait, data)
    b.call(do.record_unnamed)
    b.call(do.end_beats)
    timeline.kill_a()
    assert b.call(do.loss_of, do.await_point, data) is not None
    b.call(*resume)
    assert b.call(do.await_end, b.call(do.record_unnamed)) is None


def test_resume(line: Line) -> None:
    line.follow("b", line.begin())
    b = line.peers["b"]
    unnamed = b.call(do.record_unnamed)
    c = line.add("c", records=False)
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, unnamed), pid)
    until(lambda: b.call(do.loss_of, do.record_unnamed) is not None, "the stream is spoiled")
    b.call(do.open_event, "b/new", line.engine)
    line.assert_lost(b.call(do.loss_of, do.record, "b/new"), pid)
    is_past = not b.call(do.error_of, do.resume, "main", 5.0)
    assert is_past or line.engine == "event"  # a driver may leave that stream stuck for ever
    stream = "main" if is_past else "a new one"
    assert c.call(do.await_end, b.call(do.record, "b/new", stream)) is None
    assert c.call(do.await_end, b.call(do.record_unnamed, stream)) is None
    line.assert_lost(b.call(do.loss_of, do.record, "b/out"), pid)  # the event stays lost


def test_resume_forgets_a_lost_wait_that_is_released_meanwhile(
    client: ipcsync.Client, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ipcsync.Stream()
    peer.call(remote.connect, client.endpoint, "second")
    point = client.point(peer.call(remote.reserve, "r", {"engine": "timeline"}))
    point.wait(stream, ahead=True)
    peer.call(remote.close)
    until(point.exception, "it is lost")
    engine, await_passed = point._bound().engine, queued.await_passed

    def await_passed_and_release(*args: Any) -> bool:
        is_passed = await_passed(*args)
        core.release(engine)  # as the heartbeat's thread does, once no stream waits for it any more
        return is_passed

    monkeypatch.setattr(queued, "await_passed", await_passed_and_release)
    client.resume(stream, 15)
    client.record(stream).synchronize(15)


def test_resume_of_a_stream_that_is_stuck_times_out(timeline: Line) -> None:
    timeline.follow("b", timeline.begin())
    b = timeline.peers["b"]
    b.call(do.hold)
    timeline.kill_a()
    until(lambda: b.call(do.loss_of, do.record, "b/out") is not None, "the stream is spoiled")
    assert b.call(do.error_of, do.resume, "main", 0.1) == "WaitTimeout"
    assert b.call(do.loss_of, do.record_unnamed) is not None
    b.call(do.open_gate)
    b.call(do.resume, "main", 10.0)
    assert b.call(do.loss_of, do.record_unnamed) is None


def test_after(line: Line) -> None:
    """The stream was joined by means that this library does not see; the record says so itself."""
    data = line.begin()
    b = line.add("b")
    b.call(do.open_event, "b/more", line.engine)
    b.call(do.keep, data)
    behind = b.call(do.record, "b/out", "main", (data,))
    c = line.add("c", records=False)
    assert not c.call(do.is_complete, behind), "complete before what it is declared to stand behind"
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, behind), pid)
    line.assert_lost(b.call(do.loss_of, do.record, "b/more", "another stream", (data,)), pid)
    assert c.call(do.await_end, b.call(do.record, "b/more", "another stream")) is None  # nothing was submitted before


@pytest.mark.parametrize("is_killed", [True, False], ids=["lost", "good"])
def test_chains_session(line: Line, is_killed: bool) -> None:
    """Every record stands behind all waits of the process, and is complete only after all that they are for."""
    data = line.begin()
    b = line.add("b", chains="session")
    b.call(do.wait, data)
    behind = b.call(do.record, "b/out", "another stream")
    c = line.add("c", records=False)
    b.call(do.finish, "another stream")
    assert not c.call(do.is_complete, behind)
    if is_killed:
        pid = line.kill_a()
        line.assert_lost(c.call(do.await_end, behind), pid)
    else:
        line.peers["a"].call(do.open_gate)
        assert c.call(do.await_end, behind) is None


def test_the_default_stream_and_the_blocking_ones_share_what_they_stand_behind(line: Line) -> None:
    data = line.begin()
    b = line.add("b")
    b.call(do.use_blocking_stream, "blocking")
    b.call(do.use_default_stream, "default")
    b.call(do.wait, data, "blocking")
    behind = b.call(do.record, "b/out", "default")
    c = line.add("c", records=False)
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, behind), pid)


def test_blocking_streams_are_resumed_once_each_of_them_is_past_its_lost_waits(line: Line) -> None:
    data = line.begin()
    b = line.add("b")
    for each in ("one", "two"):
        b.call(do.use_blocking_stream, each)
    b.call(do.hold, "one")
    b.call(do.wait, data, "one")
    line.kill_a()
    until(lambda: b.call(do.loss_of, do.record, "b/out", "two") is not None, "the loss is seen")
    assert b.call(do.error_of, do.resume, "two", 0.2) == "WaitTimeout"
    assert b.call(do.loss_of, do.record, "b/out", "one") is not None, "a silent pass"
    b.call(do.open_gate)
    if b.call(do.error_of, do.resume, "two", 5.0):
        assert line.engine == "event"  # a driver may leave the other stream stuck for ever
        return
    b.call(do.open_event, "b/new", line.engine)
    b.call(do.record, "b/new", "one")
    point = b.call(do.record, "b/new", "two")
    assert line.add("c", records=False).call(do.await_end, point) is None


@pytest.mark.parametrize("further", [(2,), (2, 3), (1, 3)])
def test_a_blocking_stream_that_waits_for_another_generation_is_not_resumed_with_the_others(
    line: Line, further: tuple[int, ...]
) -> None:
    """One list has one wait for an event. Stream one is held before its own, and stream two gets past its `further`."""
    first = line.begin()
    a, b = line.peers["a"], line.add("b")
    points = [first, a.call(do.record, "a/out"), a.call(do.record, "a/out")]
    for each in ("one", "two"):
        b.call(do.use_blocking_stream, each)
    b.call(do.hold, "one")
    b.call(do.wait, points[1 if 1 in further else 0], "one")
    for generation in further:
        b.call(do.wait, points[generation - 1], "two")
    line.kill_a()
    until(lambda: b.call(do.loss_of, do.record, "b/out", "two") is not None, "the loss is seen")
    assert b.call(do.error_of, do.resume, "two", 0.2) == "WaitTimeout"
    assert b.call(do.loss_of, do.record, "b/out", "one") is not None, "a silent pass"
    b.call(do.open_gate)


def test_a_blocking_stream_that_follows_a_lost_record_is_not_resumed_with_the_others(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer
) -> None:
    line = of_events(coordinator, new_peer, "pending")
    line.follow("b", line.begin())
    b = line.peers["b"]
    for each in ("one", "two"):
        b.call(do.use_blocking_stream, each)
    point = b.call(do.record, "b/out", "one")
    pid = line.kill_a()
    line.assert_lost(b.call(do.await_end, point), pid)
    assert b.call(do.error_of, do.resume, "two", 0.2) == "WaitTimeout"


def test_loss_without_coordinator(coordinator: ipcsync.Coordinator, line: Line) -> None:
    """Nobody but the processes of the chain is needed for the verdict."""
    point = line.follow("b", line.begin())
    c = line.add("c", records=False)
    assert c.call(do.error_of, do.synchronize_briefly, point) == "WaitTimeout"
    fixtures.stop(coordinator.pid)
    try:
        pid = line.kill_a()
        line.assert_lost(c.call(do.await_end, point), pid)
    finally:
        fixtures.resume(coordinator.pid)


def test_let_go_behind_the_dead(line: Line) -> None:
    """B let go of A's event, whose slot may be another's by the time at which the loss is asked for."""
    data = line.begin()
    point = line.follow("b", data)
    b = line.peers["b"]
    pid = line.kill_a()
    b.call(do.forget_point, data)
    until(lambda: not b.call(do.draining), "B has let go")
    c = line.add("c", records=False)
    line.assert_lost(c.call(do.await_end, point), pid)
    until(lambda: b.call(do.loss_of, do.record, "b/out") is not None, "the stream is spoiled")


def test_let_go_of_what_is_well(line: Line) -> None:
    """Whatever was recorded behind it or not."""
    data = line.begin()
    b, c = line.add("b"), line.add("c", records=False)
    b.call(do.wait, data)
    b.call(do.forget_point, data)
    assert b.call(do.draining) == 1  # its stream still waits there
    line.peers["a"].call(do.open_gate)
    until(lambda: not b.call(do.draining), "B has let go")
    line.peers["a"].kill()
    assert c.call(do.await_end, b.call(do.record, "b/out")) is None


def test_the_name_is_free_and_the_slot_comes_back_once_a_lost_event_is_closed(line: Line) -> None:
    point = line.follow("b", line.begin())
    b, c = line.peers["b"], line.add("c", records=False)
    line.kill_a()
    assert c.call(do.await_end, point) is not None
    until(lambda: c.call(do.state_of, point) == "broken", "the event is broken at its recorder's word")
    b.call(do.close_event, "b/out")
    c.call(do.open_event, "b/out", line.engine)  # by somebody else, since the name is free
    for peer in (b, c):
        peer.kill()  # B's stream may be stuck for ever behind what A left
    watcher = line.add("watcher", records=False)
    until(lambda: watcher.call(do.quarantined) == 0, "every slot is free")


def test_a_chain_that_is_well_sends_no_message(line: Line) -> None:
    a, b = line.add("a"), line.add("b")
    points = [a.call(do.record, "a/out")]
    b.call(do.wait, points[0])
    c = line.add("c", records=False)
    assert c.call(do.await_end, b.call(do.record, "b/out")) is None
    before = [peer.call(do.messages_sent) for peer in (a, b, c)]
    for _ in range(20):
        b.call(do.wait, a.call(do.record, "a/out"))
        assert c.call(do.await_end, b.call(do.record, "b/out")) is None
    assert [peer.call(do.messages_sent) for peer in (a, b, c)] == before


def test_killing_every_process_of_a_chain_leaves_nothing(line: Line) -> None:
    point = line.follow("b", line.begin())
    c = line.add("c", records=False)
    c.call(do.keep, point)
    os.kill(line.peers["b"].pid, signal.SIGKILL)
    line.kill_a()
    loss = c.call(do.await_end, point)
    assert loss is not None
    assert (loss["cause"], loss["session"]) == ("died", "b")
