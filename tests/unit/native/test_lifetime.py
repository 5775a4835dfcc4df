"""Events and streams that are dropped: while work is pending, in cycles, by the thousand, and at the exit."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import ipcsync
from ipcsync import _drivers
from ipcsync._native.stream import made_here
from ipcsync.testing import StreamGate
from tests.kit.driver_kit import INVALID_HANDLE, NOT_READY, SUCCESS, code
from tests.kit.scripts import run

pytestmark = pytest.mark.driver


def test_an_event_dropped_while_pending_does_no_harm(held: tuple[ipcsync.Stream, StreamGate]) -> None:
    stream, gate = held
    other = ipcsync.Stream()
    other.wait_event(stream.record_event())
    gc.collect()
    assert other.query() is False
    gate.open()
    other.synchronize()


def test_a_stream_dropped_while_pending_does_no_harm() -> None:
    stream = ipcsync.Stream()
    event = ipcsync.Event()
    gate = StreamGate(stream)
    other = ipcsync.Stream()
    event.record(stream)
    event.wait(other)
    keep = ipcsync.Stream()
    gate._stream = keep
    del stream
    assert event.query() is False
    gate.open()
    other.synchronize()
    event.synchronize()


def test_events_can_be_made_and_dropped_by_the_thousand() -> None:
    stream = ipcsync.Stream()
    for _ in range(5000):
        stream.record_event(ipcsync.Event(interprocess=True))


@pytest.mark.process
def test_objects_in_cycles_may_be_collected_in_the_middle_of_any_call() -> None:
    run(
        """
        import faulthandler, gc, ipcsync
        faulthandler.dump_traceback_later(60, exit=True)
        class Node:
            pass
        def leak():
            node = Node()
            node.me, node.stream = node, ipcsync.Stream()
            node.event = node.stream.record_event(ipcsync.Event(interprocess=True))
        gc.set_threshold(7, 2, 2)
        for _ in range(1500):
            leak()
        """
    )


@pytest.mark.skipif(ipcsync.driver_name() == "cuda", reason="a GPU's driver may crash at a handle that is gone")
def test_what_the_collector_finalizes_is_given_back_at_once() -> None:
    def cycle() -> int:
        event = ipcsync.Event()
        event.record()
        around: list[Any] = [event]
        around.append(around)
        return int(event.cuda_event)

    gc.disable()
    try:
        handle = cycle()
        query = _drivers.load().cuEventQuery
        assert code(query(handle)) in (SUCCESS, NOT_READY)
        gc.collect()
        assert code(query(handle)) == INVALID_HANDLE
    finally:
        gc.enable()


@pytest.mark.skipif(ipcsync.driver_name() == "cuda", reason="a GPU's driver may crash at a handle that is gone")
def test_a_stream_that_a_list_of_all_has_is_destroyed_with_the_list() -> None:
    stream = ipcsync.Stream()
    handle = stream.cuda_stream
    listed = made_here()
    del stream
    query = _drivers.load().cuStreamQuery
    assert handle in [one.cuda_stream for one in listed]
    assert code(query(handle)) == SUCCESS
    listed.clear()
    assert code(query(handle)) == INVALID_HANDLE
    assert handle not in [one.cuda_stream for one in made_here()]


@pytest.mark.process
def test_a_collection_that_finds_a_stream_beside_a_finalizer_that_calls_ends() -> None:
    run(
        """
        import faulthandler, gc, ipcsync
        from ipcsync.testing import StreamGate
        faulthandler.dump_traceback_later(60, exit=True)

        class Calls:
            def __del__(self):
                for stream in (ipcsync.Stream(), ipcsync.Stream()):
                    ended.append(ipcsync.Event(interprocess=True).record(stream))

        ended = []
        gc.disable()
        with StreamGate(ipcsync.Stream()):
            node = Calls()
            node.me, node.stream, node.event = node, ipcsync.Stream(), ipcsync.Event(interprocess=True)
            node.event.record(node.stream)
            del node
            gc.collect()
        assert len(ended) == 2
        """
    )


@pytest.mark.process
def test_objects_alive_at_exit_do_not_disturb_it() -> None:
    run(
        """
        import faulthandler, ipcsync
        faulthandler.dump_traceback_later(60, exit=True)
        stream = ipcsync.Stream()
        events = [stream.record_event() for _ in range(10)]
        cycle = [events, stream]
        cycle.append(cycle)
        class Late:
            held = ipcsync.Event(interprocess=True)
        Late.held.record(stream)
        ipcsync.set_stream(stream)
        """
    )
