"""Stream capture: what a capturing stream answers, and that queries in relaxed mode leave every capture unharmed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, in_thread, ok

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
MODES = [kit.GLOBAL, kit.THREAD_LOCAL, kit.RELAXED]


def exchange(drv: ModuleType, mode: int) -> int:
    return int(ok(drv.cuThreadExchangeStreamCaptureMode(drv.CUstreamCaptureMode(mode))))


def unsafe_calls(drv: ModuleType, event: Any, stream: Any) -> dict[str, Callable[[], int]]:
    """What ipcsync asks of events and streams that do not capture, which a global capture elsewhere may forbid."""
    return {
        "query an event": lambda: code(drv.cuEventQuery(event)),
        "synchronize with an event": lambda: code(drv.cuEventSynchronize(event)),
        "query a stream": lambda: code(drv.cuStreamQuery(stream)),
        "synchronize a stream": lambda: code(drv.cuStreamSynchronize(stream)),
    }


UNSAFE = ["query an event", "synchronize with an event", "query a stream", "synchronize a stream"]


def test_a_stream_tells_whether_it_captures_and_asking_does_no_harm(drv: ModuleType, stream: Any) -> None:
    assert kit.capture_status(drv, stream) == kit.NONE
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(kit.GLOBAL)))
    for _ in range(3):
        assert kit.capture_status(drv, stream) == kit.ACTIVE
    assert kit.end_capture(drv, stream) == kit.SUCCESS
    assert kit.capture_status(drv, stream) == kit.NONE


def test_each_capture_has_an_id_of_its_own(drv: ModuleType, begin: New) -> None:
    ids = set()
    for _ in range(3):
        stream = begin()
        state, identity = drv.cuStreamGetCaptureInfo(stream)[1:3]
        assert int(state) == kit.ACTIVE
        ids.add(int(identity))
        assert kit.end_capture(drv, stream) == kit.SUCCESS
        assert int(drv.cuStreamGetCaptureInfo(stream)[1]) == kit.NONE
    assert len(ids) == 3


def test_captured_operations_are_not_executed(drv: ModuleType, begin: New, new_event: New) -> None:
    memory, target = ok(drv.cuMemAlloc(8)), bytearray(8)
    ok(drv.cuMemsetD8(memory, 1, 8))
    finish(drv.CUstream(kit.LEGACY))
    stream = begin()
    ok(drv.cuMemsetD8Async(memory, 2, 8, stream))
    assert kit.end_capture(drv, stream) == kit.SUCCESS
    finish(stream)
    ok(drv.cuMemcpyDtoH(target, memory, 8))
    assert target == b"\1" * 8
    ok(drv.cuMemFree(memory))


def test_a_captured_event_is_an_invalid_value_until_it_is_recorded_outside_of_a_capture(
    drv: ModuleType, begin: New, new_event: New
) -> None:
    event = new_event(0)
    stream = begin()
    ok(drv.cuEventRecord(event, stream))
    assert kit.end_capture(drv, stream) == kit.SUCCESS
    assert code(drv.cuEventQuery(event)) == kit.INVALID_VALUE
    assert code(drv.cuEventSynchronize(event)) == kit.INVALID_VALUE
    assert code(drv.cuEventElapsedTime(event, event)) == kit.INVALID_VALUE
    assert code(drv.cuStreamWaitEvent(stream, event, 0)) == kit.INVALID_VALUE
    ok(drv.cuEventRecord(event, stream))
    complete(event)


@pytest.mark.parametrize("call", ["cuStreamQuery", "cuStreamSynchronize"])
@pytest.mark.parametrize("mode", MODES)
def test_querying_or_synchronizing_a_capturing_stream_is_refused_and_invalidates_its_capture(
    drv: ModuleType, begin: New, call: str, mode: int
) -> None:
    stream = begin(mode)
    assert code(getattr(drv, call)(stream)) == kit.CAPTURE_UNSUPPORTED
    assert kit.capture_status(drv, stream) == kit.INVALIDATED
    assert kit.end_capture(drv, stream) == kit.CAPTURE_INVALIDATED
    assert kit.capture_status(drv, stream) == kit.NONE
    finish(stream)


def test_beginning_on_a_capturing_stream_and_ending_on_another_are_illegal_states(
    drv: ModuleType, stream: Any, begin: New
) -> None:
    capturing = begin()
    again = drv.cuStreamBeginCapture(capturing, drv.CUstreamCaptureMode(kit.GLOBAL))
    assert code(again) == kit.ILLEGAL_STATE
    assert kit.end_capture(drv, stream) == kit.ILLEGAL_STATE
    assert kit.capture_status(drv, capturing) == kit.ACTIVE
    assert kit.end_capture(drv, capturing) == kit.SUCCESS


def test_a_stream_that_waits_for_a_captured_record_joins_the_capture(
    drv: ModuleType, stream: Any, new_event: New, begin: New
) -> None:
    first = begin()
    fork, join = new_event(kit.DISABLE_TIMING), new_event(kit.DISABLE_TIMING)
    ok(drv.cuEventRecord(fork, first))
    ok(drv.cuStreamWaitEvent(stream, fork, 0))
    assert kit.capture_status(drv, stream) == kit.ACTIVE
    ok(drv.cuEventRecord(join, stream))
    ok(drv.cuStreamWaitEvent(first, join, 0))
    assert kit.end_capture(drv, first) == kit.SUCCESS
    assert kit.capture_status(drv, stream) == kit.NONE


@pytest.mark.parametrize("unsafe", UNSAFE)
@pytest.mark.parametrize("mode", MODES)
def test_calls_in_relaxed_mode_leave_a_capture_of_another_thread_unharmed(
    drv: ModuleType, ctx: Any, stream: Any, ipc_event: Any, begin: New, mode: int, unsafe: str
) -> None:
    ok(drv.cuEventRecord(ipc_event, stream))
    complete(ipc_event)
    finish(stream)
    capturing = begin(mode)

    def call_relaxed() -> int:
        assert exchange(drv, kit.RELAXED) == kit.GLOBAL  # what a thread begins with
        try:
            return unsafe_calls(drv, ipc_event, stream)[unsafe]()
        finally:
            assert exchange(drv, kit.GLOBAL) == kit.RELAXED

    assert in_thread(call_relaxed, ctx) == kit.SUCCESS
    assert kit.capture_status(drv, capturing) == kit.ACTIVE
    assert kit.end_capture(drv, capturing) == kit.SUCCESS


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_calls_in_relaxed_mode_leave_a_capture_of_the_same_thread_unharmed(
    drv: ModuleType, stream: Any, ipc_event: Any, begin: New, unsafe: str
) -> None:
    ok(drv.cuEventRecord(ipc_event, stream))
    complete(ipc_event)
    finish(stream)
    capturing = begin(kit.GLOBAL)
    assert exchange(drv, kit.RELAXED) == kit.GLOBAL
    assert unsafe_calls(drv, ipc_event, stream)[unsafe]() == kit.SUCCESS
    assert exchange(drv, kit.GLOBAL) == kit.RELAXED
    assert kit.capture_status(drv, capturing) == kit.ACTIVE
    assert kit.end_capture(drv, capturing) == kit.SUCCESS


def test_a_query_of_a_pending_event_in_relaxed_mode_says_not_ready_beside_a_capture(
    drv: ModuleType, stream: Any, ipc_event: Any, begin: New
) -> None:
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    capturing = begin(kit.GLOBAL)
    exchange(drv, kit.RELAXED)
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    latch.open()
    complete(ipc_event)
    exchange(drv, kit.GLOBAL)
    assert kit.end_capture(drv, capturing) == kit.SUCCESS


def test_a_query_in_global_mode_spoils_a_global_capture_of_another_thread(
    drv: ModuleType, ctx: Any, stream: Any, ipc_event: Any, begin: New
) -> None:
    ok(drv.cuEventRecord(ipc_event, stream))
    complete(ipc_event)
    capturing = begin(kit.GLOBAL)
    assert in_thread(lambda: code(drv.cuEventQuery(ipc_event)), ctx) == kit.CAPTURE_UNSUPPORTED
    assert kit.capture_status(drv, capturing) == kit.INVALIDATED
    assert kit.end_capture(drv, capturing) == kit.CAPTURE_INVALIDATED


def test_recording_and_waiting_outside_of_a_capture_leave_it_unharmed(
    drv: ModuleType, ctx: Any, stream: Any, ipc_event: Any, begin: New
) -> None:
    capturing = begin(kit.GLOBAL)

    def use() -> list[int]:
        return [code(drv.cuEventRecord(ipc_event, stream)), code(drv.cuStreamWaitEvent(stream, ipc_event, 0))]

    assert use() == [kit.SUCCESS] * 2
    assert in_thread(use, ctx) == [kit.SUCCESS] * 2
    assert kit.capture_status(drv, capturing) == kit.ACTIVE
    assert kit.end_capture(drv, capturing) == kit.SUCCESS


def test_the_capture_mode_is_each_threads_own(drv: ModuleType, ctx: Any) -> None:
    assert exchange(drv, kit.RELAXED) == kit.GLOBAL
    assert in_thread(lambda: exchange(drv, kit.THREAD_LOCAL), ctx) == kit.GLOBAL
    assert exchange(drv, kit.GLOBAL) == kit.RELAXED
