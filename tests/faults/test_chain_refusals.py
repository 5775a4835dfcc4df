"""Chains in which the driver refuses a call, or its process dies amid one, and what comes after that."""

from __future__ import annotations

import pytest

import ipcsync
from tests.faults import chain_actions as do
from tests.faults.chain_line import Line, NewPeer, of_events
from tests.kit.peer import Peer, PeerError
from tests.kit.until import until


def test_a_wait_that_the_driver_never_got_is_not_proven_by_a_record_that_ends(line: Line) -> None:
    """B's first record is behind nothing; the wait is repeated before that is settled, and the second is behind A."""
    data = line.begin()
    b, c = line.add("b"), line.add("c", records=False)
    b.call(do.refused_wait, data)
    first = b.call(do.record, "b/out")
    b.call(do.wait, data)
    point = b.call(do.record, "b/out")
    assert c.call(do.await_end, first) is None
    until(lambda: b.call(do.words, "b/out")["behind"] == 2, "the first one is settled")
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


def test_a_wait_that_one_stream_never_got_is_not_proven_there_though_another_one_of_its_list_has_it(line: Line) -> None:
    """Blocking streams share a list, and a record on the first one is behind nothing."""
    data = line.begin()
    b, c = line.add("b"), line.add("c", records=False)
    for name in ("first", "second"):
        b.call(do.use_blocking_stream, name)
    b.call(do.refused_wait, data, "first")
    b.call(do.wait, data, "second")
    ended = b.call(do.record, "b/out", "first")
    assert c.call(do.await_end, ended) is None
    until(lambda: b.call(do.beat) or b.call(do.words, "b/out")["completed"] == 1, "it is settled")
    point = b.call(do.record, "b/out", "second")
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


def _assert_unproven(line: Line, step: str) -> None:
    """B's record behind A is refused, and repeated on a stream that waits for nothing; the next one is behind A."""
    data = line.begin()
    b, c = line.add("b"), line.add("c", records=False)
    b.call(do.record, "b/out", "other")
    b.call(do.wait, data)
    b.call(do.refused_record, "b/out", step)
    ended = b.call(do.record, "b/out", "other")
    assert c.call(do.await_end, ended) is None
    until(lambda: b.call(do.beat) or b.call(do.is_settled, "b/out"), "it is settled")
    point = b.call(do.record, "b/out")
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


def test_a_record_repeated_on_another_stream_does_not_prove_the_first_ones_waits(line: Line) -> None:
    _assert_unproven(line, "follow")


def test_an_event_recorded_on_another_stream_after_a_refusal_does_not_prove_the_first_ones_waits(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer
) -> None:
    """Its driver is not told to wait for the first stream: the record there may not have been made."""
    _assert_unproven(of_events(coordinator, new_peer), "record")


def _refused(line: Line, before: int) -> Peer:
    """B, whose record behind A the driver has made, and refused."""
    data = line.begin()
    b = line.add("b")
    for _ in range(before):
        b.call(do.record, "b/out", "other")
    b.call(do.wait, data)
    b.call(do.refused_record, "b/out", "record", True)
    return b


@pytest.mark.parametrize("before", [0, 1])
def test_a_refused_record_that_is_repeated_behind_a_loss_leaves_its_second_stream_behind_nothing(
    pending: Line, before: int
) -> None:
    """What the record was made to wait for would never end."""
    b = _refused(pending, before)
    pending.kill_a()
    assert b.call(do.error_of, do.record, "b/out", "second") == "RecorderLost"
    b.call(do.finish, "second")
    b.call(do.record_unnamed, "second")


@pytest.mark.parametrize("before", [0, 1])
def test_a_stream_on_which_a_refused_record_was_repeated_stands_behind_what_that_was(
    pending: Line, before: int
) -> None:
    b = _refused(pending, before)
    b.call(do.record, "b/out", "second")
    point, c = b.call(do.record_unnamed, "second"), pending.add("c", records=False)
    c.call(do.keep, point)
    pid = pending.kill_a()
    pending.assert_lost(c.call(do.await_end, point), pid)
    b.call(do.error_of, do.finish, "second")  # in either way it ends


def test_a_repeated_record_is_behind_what_its_first_stream_waits_for_by_the_time_that_shows_its_place(
    timeline: Line,
) -> None:
    data = timeline.begin()
    b, c = timeline.add("b"), timeline.add("c", records=False)
    b.call(do.record, "b/out")
    b.call(do.refused_place, "b/out", "main")
    b.call(do.wait, data)
    point = b.call(do.record, "b/out", "second")
    c.call(do.keep, point)
    pid = timeline.kill_a()
    timeline.assert_lost(c.call(do.await_end, point), pid)
    assert b.call(do.error_of, do.record_unnamed, "second") == "RecorderLost"


def test_a_stream_that_was_refused_a_record_since_its_first_place_is_not_known_stands_behind_nothing(
    timeline: Line,
) -> None:
    data = timeline.begin()
    b = timeline.add("b")
    b.call(do.use_default_stream, "default")
    b.call(do.record, "b/out", "default")
    b.call(do.wait, data, "default")
    b.call(do.refused_place, "b/out", "default")
    assert b.call(do.error_of, do.record, "b/out") == "IpcSyncError"
    b.call(do.close_event, "b/out")
    b.call(do.record_unnamed)


def test_a_session_that_waited_ahead_for_an_event_records_it_with_a_chain_of_its_own(timeline: Line) -> None:
    """It had closed the event, and that use still drained, when it opened the event again as its recorder."""
    a, b, c = timeline.add("a"), timeline.add("b", records=False), timeline.add("c", records=False)
    c.call(do.keep, b.call(do.wait_ahead, "b/out"))
    b.call(do.close_event, "b/out, seen")
    assert b.call(do.draining) == 1
    b.call(do.open_event, "b/out", "timeline")
    assert c.call(do.await_end, b.call(do.record, "b/out")) is None
    until(lambda: not b.call(do.draining), "the earlier use is released")
    a.call(do.hold)
    b.call(do.wait, a.call(do.record, "a/out"))
    point = b.call(do.record, "b/out")
    pid = timeline.kill_a()
    timeline.assert_lost(c.call(do.await_end, point), pid)


def test_a_reservation_whose_record_is_repeated_stands_behind_what_the_second_call_names(line: Line) -> None:
    data = line.begin()
    b, c = line.add("b", records=False), line.add("c", records=False)
    b.call(do.keep, data)
    if line.engine == "timeline":  # the first record may have been made, and then writes the word
        with pytest.raises(PeerError, match="EventClosed"):
            b.call(do.reserve_again_after_a_refusal, data, line.engine)
        return
    point = b.call(do.reserve_again_after_a_refusal, data, line.engine)
    c.call(do.keep, point)
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


def test_a_record_that_was_never_made_does_not_keep_its_event_from_being_released(line: Line) -> None:
    data = line.begin()
    b = line.add("b")
    b.call(do.record, "b/out")
    b.call(do.wait, data)
    b.call(do.refused_record, "b/out")
    b.call(do.close_event, "b/out")
    line.peers["a"].call(do.open_gate)
    until(lambda: b.call(do.beat) or not b.call(do.draining), "it is released")


def test_a_refused_record_does_not_hide_that_the_one_before_it_is_pending_where_an_event_is_broken(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer
) -> None:
    """The refused one's place in the ring has an older record, which is complete."""
    line = of_events(coordinator, new_peer, "pending")
    data = line.begin()
    b = line.add("b", depth=2)
    b.call(do.record, "b/out")
    until(lambda: b.call(do.beat) or b.call(do.is_settled, "b/out"), "the first record counts")
    b.call(do.wait, data)
    b.call(do.record, "b/out")
    b.call(do.refused_record, "b/out")
    line.kill_a()
    until(lambda: b.call(do.beat) or b.call(do.state_of, b.call(do.point_of, "b/out", 1)) == "broken", "it is broken")
    b.call(do.close_event, "b/out")
    for _ in range(3):
        b.call(do.beat)
    assert b.call(do.draining, "b/out") == 1, "the second record is pending for ever"


def test_an_event_whose_record_was_refused_is_released_though_the_stream_stands_still(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer
) -> None:
    """Its marker was tried behind what never ends, and nothing of it was queued there."""
    line = of_events(coordinator, new_peer, "pending")
    data = line.begin()
    b = line.add("b", records=False)
    b.call(do.wait, data)
    line.kill_a()
    assert b.call(do.error_of, do.synchronize_briefly, data) == "RecorderLost"
    b.call(do.open_event, "b/out", "timeline")
    assert b.call(do.error_of, do.record, "b/out") == "RecorderLost"
    b.call(do.close_event, "b/out")
    until(lambda: b.call(do.beat) or not b.call(do.draining, "b/out"), "it is released")


def test_a_record_behind_a_lost_wait_is_refused_at_once_though_the_stream_takes_in_nothing_more(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer
) -> None:
    line = of_events(coordinator, new_peer, "pending")
    data = line.begin()
    b = new_peer(IPCSYNC_HOST_DEATH="pending", IPCSYNC_HOST_CAPACITY="8")
    b.call(do.connect, line.endpoint, "b")
    b.call(do.wait, data)
    b.call(do.fill_queue, 5)
    line.kill_a()
    assert b.call(do.error_of, do.synchronize_briefly, data) == "RecorderLost"
    for number in range(3):
        b.call(do.open_event, f"b/{number}", "timeline")
        assert b.call(do.error_of, do.record, f"b/{number}") == "RecorderLost"


def _kill(line: Line) -> None:
    b = line.peers["b"]
    b.begin(do.die_before_the_record, "b/out")
    b.wait(10)
    line.kill_a()


def _refuse(line: Line) -> None:
    b = line.peers["b"]
    b.call(do.refused_record, "b/out")
    line.kill_a()
    until(lambda: b.call(do.beat) or b.call(do.words, "b/out")["lost"] == 2, "the loss is told")
    b.kill()


@pytest.mark.parametrize("end", [_kill, _refuse])
def test_row_03_the_next_use_of_a_slot_stands_behind_nothing_of_the_last_one(line: Line, end: object) -> None:
    """B ends with a record that it said to stand behind A, and did not publish; the next use gives its number again."""
    data = line.begin()
    b = line.add("b")
    b.call(do.record, "b/out")
    until(lambda: b.call(do.is_settled, "b/out"), "the first record counts")
    b.call(do.wait, data)
    slot = b.call(do.slot_of, "b/out")
    assert callable(end)
    end(line)
    d, c = line.add("d", records=False), line.add("c", records=False)
    until(lambda: d.call(do.quarantined) == 0, "every slot is free")
    d.call(do.open_in_slot, "again", line.engine, slot)
    point = d.call(do.record, "again")
    assert c.call(do.await_end, point) is None
    assert d.call(do.await_end, point) is None
