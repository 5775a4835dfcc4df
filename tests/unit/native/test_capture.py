"""Stream capture: our queries break nobody's, and what cannot be asked is refused before it does harm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync._drivers import load, unwrap
from ipcsync._native.context import refuse_capturing, relaxed_call

pytestmark = pytest.mark.driver

GLOBAL = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def end(stream: ipcsync.Stream) -> None:
    """End the capture of `stream`, which must be whole."""
    graph = unwrap(load().cuStreamEndCapture(stream.cuda_stream), "cuStreamEndCapture")
    unwrap(load().cuGraphDestroy(graph), "cuGraphDestroy")


@pytest.fixture
def captured() -> Iterator[ipcsync.Stream]:
    """A stream in a global capture, which is still whole at the end."""
    stream = ipcsync.Stream()
    unwrap(load().cuStreamBeginCapture(stream.cuda_stream, GLOBAL), "cuStreamBeginCapture")
    yield stream
    end(stream)


def test_capturing_is_told(captured: ipcsync.Stream) -> None:
    assert captured.is_capturing()
    assert not ipcsync.Stream().is_capturing()
    assert not ipcsync.default_stream().is_capturing()
    assert not ipcsync.is_current_stream_capturing()
    with ipcsync.stream(captured):
        assert ipcsync.is_current_stream_capturing()


def test_queries_of_other_work_spoil_no_capture(captured: ipcsync.Stream) -> None:
    other = ipcsync.Stream()
    start, stop = ipcsync.Event(enable_timing=True), ipcsync.Event(enable_timing=True)
    other.record_event(start)
    other.record_event(stop)

    def body() -> None:
        stop.synchronize()
        other.synchronize()
        assert start.query()
        assert other.query()
        assert start.elapsed_time(stop) >= 0

    body()
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    assert failures == []


def test_a_capturing_stream_is_refused_before_its_capture_is_spoiled(captured: ipcsync.Stream) -> None:
    for call in (captured.query, captured.synchronize):
        with pytest.raises(ipcsync.StreamCapturing):
            call()
    with pytest.raises(ipcsync.StreamCapturing, match="cannot record on a stream that is being captured"):
        refuse_capturing(captured.cuda_stream, "record")
    other = ipcsync.Stream()
    refuse_capturing(other.cuda_stream, "record")


def test_native_events_can_be_recorded_and_waited_for_within_a_capture(captured: ipcsync.Stream) -> None:
    event, foreign = ipcsync.Event(), ipcsync.Event()
    event.record(captured)
    event.wait(captured)
    foreign.record(captured.cuda_stream)
    assert foreign.device == ipcsync.Device(0)


def test_the_legacy_stream_is_refused_while_a_blocking_stream_captures() -> None:
    api = load()
    ipcsync.set_device(0)
    blocking = unwrap(api.cuStreamCreateWithPriority(0, 0), "cuStreamCreateWithPriority")
    unwrap(api.cuStreamBeginCapture(blocking, GLOBAL), "cuStreamBeginCapture")
    stream = ipcsync.ExternalStream(int(blocking))
    default = ipcsync.default_stream()
    assert stream.is_capturing()
    assert not default.is_capturing()
    for call in (default.query, default.synchronize):
        with pytest.raises(ipcsync.StreamCapturing):
            call()
    end(stream)
    unwrap(api.cuStreamDestroy(blocking), "cuStreamDestroy")


def mode() -> Any:
    """The thread's capture mode."""
    exchange = load().cuThreadExchangeStreamCaptureMode
    before = unwrap(exchange(RELAXED), "cuThreadExchangeStreamCaptureMode")
    unwrap(exchange(before), "cuThreadExchangeStreamCaptureMode")
    return before


def test_the_threads_own_mode_comes_back() -> None:
    ipcsync.set_device(0)
    assert mode() == GLOBAL
    assert relaxed_call(mode) == RELAXED
    assert mode() == GLOBAL
    assert relaxed_call(lambda: (relaxed_call(mode), mode())) == (RELAXED, RELAXED)
    assert mode() == GLOBAL

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        relaxed_call(fails)
    assert mode() == GLOBAL
