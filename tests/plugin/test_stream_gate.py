"""A StreamGate holds a stream, and nothing else, until it is opened."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from itertools import permutations

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.testing import StreamGate
from tests.kit.until import until

pytestmark = pytest.mark.driver


def _mark(stream: ipcsync.Stream) -> ipcsync.Event:
    event = ipcsync.Event()
    event.record(stream)
    return event


def test_later_work_is_held_until_the_gate_opens() -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        assert not gate.is_open
        event = _mark(stream)
        assert not event.query()
        assert not stream.query()
        gate.open()
        assert gate.is_open
        until(event.query, "the work behind the gate is done")
    stream.synchronize()


def test_it_holds_from_its_construction() -> None:
    stream = ipcsync.Stream()
    gate = StreamGate(stream)
    event = _mark(stream)
    assert not gate.is_open
    assert not event.query()
    gate.open()
    event.synchronize()


def test_the_end_of_the_block_opens_it() -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        event = _mark(stream)
        assert not event.query()
    assert gate.is_open
    event.synchronize()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_leaving_a_gate_waits_for_no_other_on_its_stream(order: tuple[int, ...]) -> None:
    stream = ipcsync.Stream()
    gates, marks = [], []
    for _ in range(3):
        gates.append(StreamGate(stream))
        marks.append(_mark(stream))
    for place, index in enumerate(order):
        gates[index].__exit__(None, None, None)
        opened = set(order[: place + 1])
        passed = next((gate for gate in range(3) if gate not in opened), 3)  # the stream stands at the first closed one
        for mark in marks[:passed]:
            mark.synchronize()
        assert not any(mark.query() for mark in marks[passed:])
    stream.synchronize()


def test_a_gate_that_is_dropped_opens_and_says_so() -> None:
    stream = ipcsync.Stream()
    gate = StreamGate(stream)
    event = _mark(stream)
    with pytest.warns(ResourceWarning, match="dropped before it was opened"):
        del gate
    event.synchronize()


def test_a_gate_in_a_circle_opens_when_the_collector_finds_it() -> None:
    stream = ipcsync.Stream()
    gc.disable()  # else the collector may come by itself, too early
    try:
        circle: list[object] = [StreamGate(stream)]
        circle.append(circle)
        event = _mark(stream)
        assert not event.query()
        del circle
        with pytest.warns(ResourceWarning, match="dropped before it was opened"):
            gc.collect()
    finally:
        gc.enable()
    event.synchronize()


def test_a_gate_keeps_its_stream() -> None:
    stream = ipcsync.Stream()
    kept = weakref.ref(stream)
    gate = StreamGate(stream)
    event = _mark(stream)
    del stream
    gc.collect()
    assert kept() is not None
    assert not event.query()
    gate.open()
    event.synchronize()
    del gate
    assert kept() is None


_HELD_AT_EXIT = """
import ipcsync, ipcsync.testing
stream = ipcsync.Stream()
gate = ipcsync.testing.StreamGate(stream)
ipcsync.Event().record(stream)
print("held")
"""


@pytest.mark.process
def test_a_process_that_ends_with_a_closed_gate_ends_at_once_and_quietly() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _HELD_AT_EXIT], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "held\n"
    assert "Traceback" not in done.stderr
    assert "ResourceWarning" not in done.stderr


_RECORDS_BEHIND_A_GATE = """
import atexit, sys, ipcsync, ipcsync.testing
atexit.register(lambda: print("open" if gate.is_open else "closed"))  # which comes behind the session's end
client, stream = ipcsync.connect(sys.argv[1]), ipcsync.Stream()
gate = ipcsync.testing.StreamGate(stream)
client.record(stream)
"""


@pytest.mark.process
def test_a_process_that_ends_opens_its_gates_before_it_ends_its_sessions(coordinator: ipcsync.Coordinator) -> None:
    """Else the session would wait for what is held, and then lose it."""
    command = [sys.executable, "-c", _RECORDS_BEHIND_A_GATE, coordinator.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "open\n"


def test_an_opened_gate_is_not_entered_again() -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        pass
    with pytest.raises(ValueError, match="make another one"), gate:
        pytest.fail("it would hold nothing")


def test_a_gate_holds_however_many_there_were() -> None:
    """More than a page has words, each behind a closed one, then all opened: none holds, none passes early."""
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    first = StreamGate(stream)
    for _ in range(1100):
        StreamGate(other).open()
    second = StreamGate(stream)
    event = _mark(stream)
    first.open()
    assert not event.query()
    second.open()
    event.synchronize()


def test_an_error_inside_the_block_opens_it_too() -> None:
    stream = ipcsync.Stream()
    events = []

    def fail() -> None:
        with StreamGate(stream):
            events.append(_mark(stream))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    events[0].synchronize()


def test_work_before_the_gate_goes_on() -> None:
    stream = ipcsync.Stream()
    before = _mark(stream)
    with StreamGate(stream):
        until(before.query, "what was queued before the gate is done")


def test_other_streams_are_not_held() -> None:
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(stream):
        event = _mark(other)
        until(event.query, "another stream goes on")


def test_gates_of_several_streams_open_one_by_one() -> None:
    first, second = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(first) as gate, StreamGate(second):
        held, waiting = _mark(first), _mark(second)
        gate.open()
        until(held.query, "the first stream goes on")
        assert not waiting.query()


def test_two_gates_on_one_stream_hold_until_both_are_open() -> None:
    stream = ipcsync.Stream()
    outer = StreamGate(stream)
    with outer, StreamGate(stream) as inner:
        between = _mark(stream)
        inner.open()
        assert not between.query()
        outer.open()
        until(between.query, "both are open")


def test_opening_twice_is_nothing_and_so_is_opening_after_the_end() -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        gate.open()
        gate.open()
    gate.open()
    assert gate.is_open


def test_any_kind_of_stream_is_taken() -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream.cuda_stream):
        assert not stream.query()
    with StreamGate(ipcsync.ExternalStream(stream.cuda_stream)):
        assert not stream.query()
    with ipcsync.stream(stream), StreamGate():
        assert not stream.query()
    stream.synchronize()


def test_a_waiter_of_a_held_record_is_held() -> None:
    stream, waiter = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(stream) as gate:
        _mark(stream).wait(waiter)
        assert not waiter.query()
        gate.open()
        until(waiter.query, "the waiter goes on with the record")


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(TypeError):
        StreamGate("main")  # type: ignore[arg-type]


def test_a_capturing_stream_is_refused_and_its_capture_is_unharmed() -> None:
    stream = ipcsync.Stream()
    driver = _drivers.load()
    mode = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    unwrap(driver.cuStreamBeginCapture(stream.cuda_stream, mode), "cuStreamBeginCapture")
    try:
        with pytest.raises(ipcsync.StreamCapturing), StreamGate(stream):
            pytest.fail("a gate in a graph would hold every replay")
    finally:
        graph = unwrap(driver.cuStreamEndCapture(stream.cuda_stream), "cuStreamEndCapture")
    unwrap(driver.cuGraphDestroy(graph), "cuGraphDestroy")


def test_the_legacy_stream_is_refused_while_a_blocking_stream_captures_and_its_capture_is_unharmed() -> None:
    driver = _drivers.load()
    ipcsync.set_device(0)
    blocking = unwrap(driver.cuStreamCreateWithPriority(0, 0), "cuStreamCreateWithPriority")
    mode = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    unwrap(driver.cuStreamBeginCapture(blocking, mode), "cuStreamBeginCapture")
    try:
        with pytest.raises(ipcsync.StreamCapturing, match="legacy stream"), StreamGate(ipcsync.default_stream()):
            pytest.fail("the gate's wait would invalidate the capture")
    finally:
        graph = unwrap(driver.cuStreamEndCapture(blocking), "cuStreamEndCapture")
    unwrap(driver.cuGraphDestroy(graph), "cuGraphDestroy")
    unwrap(driver.cuStreamDestroy(blocking), "cuStreamDestroy")
