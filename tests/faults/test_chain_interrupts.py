"""Chains in the middle of which a call is interrupted, or its process dies, and what comes after that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ipcsync
from ipcsync._board import SlotLine
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import chain_actions as do
from tests.faults.chain_line import Line, NewPeer, of_events
from tests.kit.peer import PeerError
from tests.kit.until import until


def test_a_wait_that_the_driver_never_got_is_not_proven_by_a_record_that_ends(line: Line) -> None:
    """B's first record is behind nothing; the wait is repeated before that is settled, and the second is behind A."""
    data = line.begin()
    b, c = line.add("b"), line.add("c", records=False)
    b.call(do.interrupted_wait, data)
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
    b.call(do.interrupted_wait, data, "first")
    b.call(do.wait, data, "second")
    ended = b.call(do.record, "b/out", "first")
    assert c.call(do.await_end, ended) is None
    until(lambda: b.call(do.beat) or b.call(do.words, "b/out")["completed"] == 1, "it is settled")
    point = b.call(do.record, "b/out", "second")
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


def _assert_unproven(line: Line, step: str) -> None:
    """B's record behind A is interrupted, and repeated on a stream that waits for nothing; the next one is behind A."""
    data = line.begin()
    b, c = line.add("b"), line.add("c", records=False)
    b.call(do.record, "b/out", "other")
    b.call(do.wait, data)
    b.call(do.interrupted_record, "b/out", step)
    ended = b.call(do.record, "b/out", "other")
    assert c.call(do.await_end, ended) is None
    until(lambda: b.call(do.beat) or b.call(do.is_settled, "b/out"), "it is settled")
    point = b.call(do.record, "b/out")
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


def test_a_record_repeated_on_another_stream_does_not_prove_the_first_ones_waits(line: Line) -> None:
    _assert_unproven(line, "_driver_stream_wait")


def test_an_event_recorded_on_another_stream_after_an_interrupt_does_not_prove_the_first_ones_waits(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer
) -> None:
    """Its driver is not told to wait for the first stream: the record there may not have been made."""
    _assert_unproven(of_events(coordinator, new_peer), "_driver_record")


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
            b.call(do.reserve_again_after_an_interrupt, data, line.engine)
        return
    point = b.call(do.reserve_again_after_an_interrupt, data, line.engine)
    c.call(do.keep, point)
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


def test_a_record_that_was_never_made_does_not_keep_its_event_from_being_released(line: Line) -> None:
    data = line.begin()
    b = line.add("b")
    b.call(do.record, "b/out")
    b.call(do.wait, data)
    b.call(do.interrupted_record, "b/out")
    b.call(do.close_event, "b/out")
    line.peers["a"].call(do.open_gate)
    until(lambda: b.call(do.beat) or not b.call(do.draining), "it is released")


def _kill(line: Line) -> None:
    b = line.peers["b"]
    b.begin(do.die_before_the_record, "b/out")
    b.wait(10)
    line.kill_a()


def _interrupt(line: Line) -> None:
    b = line.peers["b"]
    b.call(do.interrupted_record, "b/out")
    line.kill_a()
    until(lambda: b.call(do.beat) or b.call(do.words, "b/out")["lost"] == 2, "the loss is told")
    b.kill()


@pytest.mark.parametrize("end", [_kill, _interrupt])
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


def test_what_was_judged_is_said_though_an_exception_came_before_it(
    new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    a, b, c = (new_client(name, lease_ttl=60) for name in "abc")
    first = a.event("a", recorder=True, engine=engine)
    second, seen = b.event("b", recorder=True, engine=engine), c.event("b")
    ours, theirs = ipcsync.Stream(), ipcsync.Stream()
    chain = second._attached.engine.chain

    def store() -> None:
        del chain.__dict__["store"]
        raise KeyboardInterrupt

    def is_interrupted() -> bool:
        with StreamGate(theirs) as gate:
            data = bytes(first.record(theirs))
            b.point(data).wait(ours)
            point = second.record(ours)
            gate.open()
        ours.synchronize()
        chain.__dict__["store"] = store
        try:
            point.query()
        except KeyboardInterrupt:
            return True
        chain.__dict__.pop("store", None)
        return False  # a beat was first

    until(is_interrupted, "a judgement was interrupted")
    a.close()
    point = second.record(ours)
    point.synchronize(10)
    seen.at(point.generation).synchronize(10)
    until(lambda: second._attached.engine.line.behind == 0, "nobody is told to ask whom it stood behind")


def test_a_handlers_record_amid_the_end_of_a_judgement_is_said_to_stand_behind_its_wait(
    new_client: Callable[..., ipcsync.Client], engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (new_client(name, lease_ttl=60) for name in "ab")
    first, second = (client.event(client.name, recorder=True, engine=engine) for client in (a, b))
    ours, theirs, held = (ipcsync.Stream() for _ in range(3))
    line = second._attached.engine.line
    with StreamGate(theirs) as gate, StreamGate(held):
        b.point(bytes(first.record(theirs))).wait(ours)
        point = second.record(ours)
        real = SlotLine.store_behind
        handled: list[ipcsync.Point] = []

        def store_behind(of: SlotLine, count: int) -> None:
            if of is line and not count and not handled:
                b.point(bytes(first.record(held))).wait(ours)
                handled.append(second.record(ours))
            real(of, count)

        monkeypatch.setattr(SlotLine, "store_behind", store_behind)
        gate.open()
        until(lambda: point.query() and handled, "the judgement ended, and a handler recorded in it")
        assert line.behind == handled[0].generation + second._attached.engine.base
        assert line.bits
