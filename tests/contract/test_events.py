"""Events within one process: what a record captures, and what never recorded, pending and destroyed events answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from cuda import bindings

from ipcsync._native.context import await_event
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import DISABLE_TIMING, SHAREABLE, Latch, code, complete, finish, in_thread, in_threads, ok
from tests.kit.until import DEADLINE_S

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
FLAG_COMBINATIONS = [
    0,
    kit.BLOCKING_SYNC,
    DISABLE_TIMING,
    DISABLE_TIMING | kit.BLOCKING_SYNC,
    SHAREABLE,
    SHAREABLE | 1,
]


@pytest.mark.parametrize("flags", FLAG_COMBINATIONS)
def test_a_never_recorded_event_counts_as_complete_for_query_wait_and_synchronize(
    drv: ModuleType, stream: Any, new_event: New, flags: int
) -> None:
    event = new_event(flags)
    assert code(drv.cuEventQuery(event)) == kit.SUCCESS
    assert code(drv.cuEventSynchronize(event)) == kit.SUCCESS
    assert code(drv.cuStreamWaitEvent(stream, event, 0)) == kit.SUCCESS
    finish(stream)


def test_a_query_of_a_pending_record_says_not_ready(drv: ModuleType, stream: Any, ipc_event: Any) -> None:
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    latch.open()
    complete(ipc_event)
    assert code(drv.cuEventSynchronize(ipc_event)) == kit.SUCCESS


def test_a_record_captures_only_the_work_before_it(drv: ModuleType, stream: Any, ipc_event: Any) -> None:
    before = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    after = Latch(stream)
    before.open()
    complete(ipc_event)
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    after.open()
    finish(stream)


def test_a_re_record_while_pending_replaces_what_the_event_captures(
    drv: ModuleType, new_stream: New, ipc_event: Any
) -> None:
    first, second = new_stream(), new_stream()
    early, late = Latch(first), Latch(second)
    ok(drv.cuEventRecord(ipc_event, first))
    ok(drv.cuEventRecord(ipc_event, second))
    early.open()
    finish(first)
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    late.open()
    complete(ipc_event)


def test_a_re_record_makes_an_event_of_one_process_independent_of_the_earlier_stream(
    drv: ModuleType, new_stream: New, new_event: New
) -> None:
    held, free, event = new_stream(), new_stream(), new_event(kit.DISABLE_TIMING)
    Latch(held)
    ok(drv.cuEventRecord(event, held))
    ok(drv.cuEventRecord(event, free))
    complete(event)
    assert code(drv.cuStreamQuery(held)) == kit.NOT_READY


@pytest.mark.parametrize("waiter_is_busy", [False, True])
def test_a_wait_keeps_what_the_event_captured_at_the_call(
    drv: ModuleType, new_stream: New, ipc_event: Any, waiter_is_busy: bool
) -> None:
    first, second, waiter = new_stream(), new_stream(), new_stream()
    early, busy = Latch(first), Latch(waiter)
    if not waiter_is_busy:
        busy.open()
        finish(waiter)
    ok(drv.cuEventRecord(ipc_event, first))
    ok(drv.cuStreamWaitEvent(waiter, ipc_event, 0))
    Latch(second)
    ok(drv.cuEventRecord(ipc_event, second))
    assert code(drv.cuStreamQuery(waiter)) == kit.NOT_READY
    busy.open()
    early.open()
    finish(waiter)
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY


def test_a_wait_enqueued_before_the_first_record_waits_for_nothing(
    drv: ModuleType, new_stream: New, ipc_event: Any
) -> None:
    recorder, waiter = new_stream(), new_stream()
    busy = Latch(waiter)
    ok(drv.cuStreamWaitEvent(waiter, ipc_event, 0))
    Latch(recorder)
    ok(drv.cuEventRecord(ipc_event, recorder))
    busy.open()
    finish(waiter)


def test_a_stream_may_wait_for_its_own_record(drv: ModuleType, stream: Any, ipc_event: Any) -> None:
    ok(drv.cuEventRecord(ipc_event, stream))
    ok(drv.cuStreamWaitEvent(stream, ipc_event, 0))
    finish(stream)


def test_waits_chain_across_streams(drv: ModuleType, new_stream: New, new_event: New) -> None:
    streams, events = [new_stream() for _ in range(4)], [new_event(DISABLE_TIMING) for _ in range(4)]
    latch = Latch(streams[0])
    ok(drv.cuEventRecord(events[0], streams[0]))
    for i in range(1, 4):
        ok(drv.cuStreamWaitEvent(streams[i], events[i - 1], 0))
        ok(drv.cuEventRecord(events[i], streams[i]))
    assert [code(drv.cuEventQuery(event)) for event in events] == [kit.NOT_READY] * 4
    latch.open()
    complete(events[3])
    assert [code(drv.cuEventQuery(event)) for event in events] == [kit.SUCCESS] * 4


def test_synchronize_blocks_until_the_record_is_complete(
    drv: ModuleType, ctx: Any, stream: Any, ipc_event: Any
) -> None:
    latch, steps = Latch(stream), []
    ok(drv.cuEventRecord(ipc_event, stream))

    def open_soon() -> None:
        steps.append("opened")
        latch.open()

    def synchronize() -> int:
        in_thread(open_soon)
        result = code(drv.cuEventSynchronize(ipc_event))
        steps.append("returned")
        return result

    assert in_thread(synchronize, ctx) == kit.SUCCESS
    assert steps == ["opened", "returned"]
    assert code(drv.cuEventQuery(ipc_event)) == kit.SUCCESS


def test_the_bounded_wait_gives_up_at_its_deadline_and_else_returns_when_complete(
    drv: ModuleType, stream: Any, ipc_event: Any
) -> None:
    assert await_event(ipc_event, time.monotonic_ns()) is True  # never recorded
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    assert await_event(ipc_event, time.monotonic_ns() - 1) is False
    assert await_event(ipc_event, time.monotonic_ns() + 20_000_000) is False
    latch.open()
    assert await_event(ipc_event, time.monotonic_ns() + int(DEADLINE_S * 1e9)) is True
    assert await_event(ipc_event, time.monotonic_ns() - 1) is True


def test_destroying_a_pending_event_does_not_block_and_its_waiters_still_go_on(
    drv: ModuleType, new_stream: New
) -> None:
    recorder, waiter = new_stream(), new_stream()
    event = ok(drv.cuEventCreate(SHAREABLE))
    latch = Latch(recorder)
    ok(drv.cuEventRecord(event, recorder))
    ok(drv.cuStreamWaitEvent(waiter, event, 0))
    assert code(drv.cuEventDestroy(event)) == kit.SUCCESS  # would hang here if it blocked: only we open the latch
    assert code(drv.cuStreamQuery(waiter)) == kit.NOT_READY
    latch.open()
    finish(waiter)
    finish(recorder)


def test_creating_and_destroying_many_events_with_pending_records_works(drv: ModuleType, stream: Any) -> None:
    latch = Latch(stream)
    for _ in range(300):
        event = ok(drv.cuEventCreate(SHAREABLE))
        ok(drv.cuEventRecord(event, stream))
        ok(drv.cuEventDestroy(event))
    latch.open()
    finish(stream)


def test_waiting_for_the_null_event_is_an_invalid_handle(drv: ModuleType, stream: Any) -> None:
    assert code(drv.cuStreamWaitEvent(stream, drv.CUevent(0), 0)) == kit.INVALID_HANDLE


@pytest.mark.parametrize("call", ["cuEventQuery", "cuEventSynchronize", "cuEventDestroy"])
def test_the_null_event_is_an_invalid_handle(drv: ModuleType, ctx: Any, call: str) -> None:
    assert code(getattr(drv, call)(drv.CUevent(0))) == kit.INVALID_HANDLE


def test_recording_the_null_event_is_an_invalid_handle(drv: ModuleType, stream: Any) -> None:
    assert code(drv.cuEventRecord(drv.CUevent(0), stream)) == kit.INVALID_HANDLE


def test_waiting_with_unknown_flags_is_an_invalid_value(drv: ModuleType, stream: Any, ipc_event: Any) -> None:
    assert code(drv.cuStreamWaitEvent(stream, ipc_event, 0x08000000)) == kit.INVALID_VALUE


@pytest.mark.parametrize("flags", [kit.INTERPROCESS, kit.INTERPROCESS | kit.BLOCKING_SYNC, 0x08000000, 8 | SHAREABLE])
def test_creating_with_interprocess_and_timing_or_with_unknown_flags_is_an_invalid_value(
    drv: ModuleType, ctx: Any, flags: int
) -> None:
    assert code(drv.cuEventCreate(flags)) == kit.INVALID_VALUE


def test_creating_needs_a_current_context(drv: ModuleType, ctx: Any) -> None:
    codes = in_thread(lambda: (code(drv.cuEventCreate(SHAREABLE)), code(drv.cuStreamCreate(kit.NON_BLOCKING))))
    assert codes == (kit.INVALID_CONTEXT, kit.INVALID_CONTEXT)


def test_a_thread_without_a_context_may_query_synchronize_and_record(
    drv: ModuleType, stream: Any, ipc_event: Any
) -> None:
    def use() -> list[int]:
        return [
            code(drv.cuEventRecord(ipc_event, stream)),
            code(drv.cuEventSynchronize(ipc_event)),
            code(drv.cuEventQuery(ipc_event)),
            code(drv.cuStreamWaitEvent(stream, ipc_event, 0)),
        ]

    assert in_thread(use) == [kit.SUCCESS] * 4


def test_recording_on_a_stream_of_another_context_is_an_invalid_handle(
    drv: ModuleType, ctx: Any, stream: Any, ipc_event: Any
) -> None:
    if not hasattr(drv, "cuCtxCreate"):
        pytest.skip("this driver has primary contexts only; tests with two devices ask the same")
    parameters = () if bindings.__version__.startswith("12.") else (None,)  # since CUDA 13
    other = ok(drv.cuCtxCreate(*parameters, 0, ok(drv.cuCtxGetDevice())))
    try:
        foreign = ok(drv.cuStreamCreate(kit.NON_BLOCKING))
        assert code(drv.cuEventRecord(ipc_event, foreign)) == kit.INVALID_HANDLE
        assert code(drv.cuStreamWaitEvent(foreign, ipc_event, 0)) == kit.SUCCESS
        finish(foreign)
    finally:
        ok(drv.cuCtxDestroy(other))
        ok(drv.cuCtxSetCurrent(ctx))


def test_elapsed_time_of_two_complete_records_is_not_negative_in_stream_order(
    drv: ModuleType, stream: Any, new_event: New
) -> None:
    start, end = new_event(0), new_event(0)
    ok(drv.cuEventRecord(start, stream))
    ok(drv.cuEventRecord(end, stream))
    complete(end)
    assert ok(drv.cuEventElapsedTime(start, end)) >= 0
    assert ok(drv.cuEventElapsedTime(end, start)) <= 0
    assert ok(drv.cuEventElapsedTime(end, end)) == 0


def test_elapsed_time_needs_timing_on_both_events(drv: ModuleType, stream: Any, new_event: New) -> None:
    timed, plain = new_event(0), new_event(DISABLE_TIMING)
    for event in (timed, plain):
        ok(drv.cuEventRecord(event, stream))
        complete(event)
    assert code(drv.cuEventElapsedTime(timed, plain)) == kit.INVALID_HANDLE
    assert code(drv.cuEventElapsedTime(plain, timed)) == kit.INVALID_HANDLE


def test_elapsed_time_needs_both_events_recorded(drv: ModuleType, stream: Any, new_event: New) -> None:
    recorded, never = new_event(0), new_event(0)
    ok(drv.cuEventRecord(recorded, stream))
    complete(recorded)
    assert code(drv.cuEventElapsedTime(recorded, never)) == kit.INVALID_HANDLE
    assert code(drv.cuEventElapsedTime(never, recorded)) == kit.INVALID_HANDLE


def test_elapsed_time_of_an_incomplete_record_says_not_ready(drv: ModuleType, stream: Any, new_event: New) -> None:
    start, end = new_event(0), new_event(0)
    ok(drv.cuEventRecord(start, stream))
    complete(start)
    latch = Latch(stream)
    ok(drv.cuEventRecord(end, stream))
    assert code(drv.cuEventElapsedTime(start, end)) == kit.NOT_READY
    latch.open()
    complete(end)
    ok(drv.cuEventElapsedTime(start, end))


def test_threads_may_share_streams_and_events(drv: ModuleType, ctx: Any, new_stream: New, new_event: New) -> None:
    streams, events = [new_stream() for _ in range(3)], [new_event() for _ in range(3)]

    def use(offset: int) -> set[int]:
        codes = set()
        for i in range(60):
            event, stream = events[(i + offset) % 3], streams[i % 3]
            codes.add(code(drv.cuEventRecord(event, stream)))
            codes.add(code(drv.cuStreamWaitEvent(streams[(i + 1) % 3], event, 0)))
            codes.add(code(drv.cuEventSynchronize(event)))
        return codes

    assert in_threads([partial(use, offset) for offset in range(4)], ctx) == [{kit.SUCCESS}] * 4
