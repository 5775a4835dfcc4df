"""A StreamGate holds a stream, and nothing else, until it is opened."""

from __future__ import annotations

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.testing import StreamGate
from tests.contract.rig import until


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
    assert stream.query()


def test_the_end_of_the_block_opens_it_and_waits_for_the_stream() -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream):
        event = _mark(stream)
        assert not event.query()
    assert event.query()


def test_an_error_inside_the_block_opens_it_too() -> None:
    stream = ipcsync.Stream()
    events = []

    def fail() -> None:
        with StreamGate(stream):
            events.append(_mark(stream))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert events[0].query()


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
    assert stream.query()


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
