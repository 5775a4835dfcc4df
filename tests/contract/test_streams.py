"""Streams: work in order, independent of each other, priorities, identities, the default streams, host functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, in_thread, ok

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
Launch = Callable[[Any, Callable[[], None]], None]


@pytest.fixture
def launch(drv: ModuleType) -> Launch:
    """Puts a Python function on a stream; the test must finish the stream before it ends."""
    kept = []
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def put(stream: Any, fn: Callable[[], None]) -> None:
        kept.append(prototype(lambda _: fn()))
        address = ctypes.cast(kept[-1], ctypes.c_void_p).value
        ok(drv.cuLaunchHostFunc(stream, drv.CUhostFn(address), 0))

    return put


def test_host_functions_run_in_the_order_of_their_stream(drv: ModuleType, stream: Any, launch: Launch) -> None:
    seen: list[int] = []
    latch = Latch(stream)
    for i in range(50):
        launch(stream, partial(seen.append, i))
    assert seen == []
    latch.open()
    finish(stream)
    assert seen == list(range(50))


def test_a_host_function_runs_before_the_record_after_it_completes(
    drv: ModuleType, stream: Any, ipc_event: Any, launch: Launch
) -> None:
    seen: list[str] = []
    latch = Latch(stream)
    launch(stream, lambda: seen.append("ran"))
    ok(drv.cuEventRecord(ipc_event, stream))
    latch.open()
    complete(ipc_event)
    assert seen == ["ran"]


def test_a_host_function_after_a_wait_runs_after_the_record_is_complete(
    drv: ModuleType, new_stream: New, ipc_event: Any, launch: Launch
) -> None:
    recorder, waiter = new_stream(), new_stream()
    seen: list[str] = []
    latch = Latch(recorder)
    launch(recorder, lambda: seen.append("before the record"))
    ok(drv.cuEventRecord(ipc_event, recorder))
    ok(drv.cuStreamWaitEvent(waiter, ipc_event, 0))
    launch(waiter, lambda: seen.append("after the wait"))
    latch.open()
    finish(waiter)
    assert seen == ["before the record", "after the wait"]


def test_a_held_stream_does_not_hold_another(drv: ModuleType, new_stream: New) -> None:
    held, free = new_stream(), new_stream()
    Latch(held)
    finish(free)
    assert code(drv.cuStreamSynchronize(free)) == kit.SUCCESS
    assert code(drv.cuStreamQuery(held)) == kit.NOT_READY


def test_synchronize_returns_after_the_streams_work(
    drv: ModuleType, ctx: Any, stream: Any, ipc_event: Any, launch: Launch
) -> None:
    seen: list[str] = []
    latch = Latch(stream)
    launch(stream, lambda: seen.append("ran"))
    latch.open()
    assert in_thread(lambda: code(drv.cuStreamSynchronize(stream)), ctx) == kit.SUCCESS
    assert seen == ["ran"]
    assert code(drv.cuStreamQuery(stream)) == kit.SUCCESS


@pytest.mark.alone
def test_synchronizing_the_context_returns_after_the_work_of_all_its_streams(
    drv: ModuleType, ctx: Any, new_stream: New, launch: Launch
) -> None:
    streams, seen = [new_stream(), new_stream()], []
    latches = [Latch(each) for each in streams]
    for each in streams:
        launch(each, lambda: seen.append("ran"))
    for latch in latches:
        latch.open()
    assert in_thread(lambda: code(drv.cuCtxSynchronize()), ctx) == kit.SUCCESS
    assert seen == ["ran", "ran"]


def test_destroying_a_stream_with_pending_work_does_not_block_and_the_work_is_still_done(
    drv: ModuleType, ctx: Any, ipc_event: Any
) -> None:
    doomed = ok(drv.cuStreamCreate(kit.NON_BLOCKING))
    latch = Latch(doomed)
    ok(drv.cuEventRecord(ipc_event, doomed))
    assert code(drv.cuStreamDestroy(doomed)) == kit.SUCCESS
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    latch.open()
    complete(ipc_event)


def test_the_priority_range_reaches_from_zero_to_at_most_minus_one(drv: ModuleType, ctx: Any) -> None:
    least, greatest = ok(drv.cuCtxGetStreamPriorityRange())
    assert least == 0
    assert greatest <= -1


def test_a_priority_outside_the_range_is_clamped(drv: ModuleType, ctx: Any) -> None:
    least, greatest = ok(drv.cuCtxGetStreamPriorityRange())
    expected = {0: 0, -1: -1, greatest: greatest, greatest - 7: greatest, 5: least}
    for asked, given in expected.items():
        made = ok(drv.cuStreamCreateWithPriority(kit.NON_BLOCKING, asked))
        assert int(ok(drv.cuStreamGetPriority(made))) == given
        ok(drv.cuStreamDestroy(made))


def test_a_stream_tells_its_flags_and_its_context(drv: ModuleType, ctx: Any, new_stream: New) -> None:
    for flags in (0, kit.NON_BLOCKING):
        made = new_stream(flags)
        assert int(ok(drv.cuStreamGetFlags(made))) == flags
        assert int(ok(drv.cuStreamGetCtx(made))) == int(ctx)


def test_creating_a_stream_with_unknown_flags_is_an_invalid_value(drv: ModuleType, ctx: Any) -> None:
    assert code(drv.cuStreamCreate(0x40)) == kit.INVALID_VALUE


def test_a_stream_id_is_stable_and_never_used_again(drv: ModuleType, ctx: Any, new_stream: New) -> None:
    ids = []
    for _ in range(100):
        made = ok(drv.cuStreamCreate(kit.NON_BLOCKING))
        first = int(ok(drv.cuStreamGetId(made)))
        assert int(ok(drv.cuStreamGetId(made))) == first
        ids.append(first)
        ok(drv.cuStreamDestroy(made))
    ids += [int(ok(drv.cuStreamGetId(new_stream()))) for _ in range(10)]
    ids += [int(ok(drv.cuStreamGetId(drv.CUstream(handle)))) for handle in (kit.LEGACY, kit.PER_THREAD)]
    assert len(set(ids)) == len(ids)


def test_stream_zero_is_the_legacy_stream_unless_built_per_thread(new_peer: New) -> None:
    for per_thread_build in (False, True):
        # Without the variable it is off; "0" means so only in later bindings.
        other = new_peer(**({"CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": "1"} if per_thread_build else {}))
        other.call(actions.start)
        zero, legacy, per_thread = other.call(actions.default_stream_ids)
        assert legacy != per_thread
        assert zero == (per_thread if per_thread_build else legacy)


def test_the_per_thread_stream_is_another_one_on_each_thread(drv: ModuleType, ctx: Any) -> None:
    def identity() -> int:
        return int(ok(drv.cuStreamGetId(drv.CUstream(kit.PER_THREAD))))

    assert len({identity(), in_thread(identity, ctx), in_thread(identity, ctx)}) == 3


@pytest.mark.parametrize("legacy", [0, kit.LEGACY])
def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(
    drv: ModuleType, new_stream: New, new_event: New, legacy: int
) -> None:
    blocking, later, free = new_stream(0), new_stream(0), new_stream()
    in_legacy, after_legacy, beside = new_event(), new_event(), new_event()
    latch = Latch(blocking)
    ok(drv.cuEventRecord(in_legacy, drv.CUstream(legacy)))
    ok(drv.cuEventRecord(after_legacy, later))
    ok(drv.cuEventRecord(beside, free))
    complete(beside)
    assert code(drv.cuEventQuery(in_legacy)) == kit.NOT_READY
    assert code(drv.cuEventQuery(after_legacy)) == kit.NOT_READY
    latch.open()
    complete(after_legacy)
    assert code(drv.cuEventQuery(in_legacy)) == kit.SUCCESS


def test_a_non_blocking_stream_does_not_wait_for_the_legacy_stream(
    drv: ModuleType, new_stream: New, ipc_event: Any
) -> None:
    held, free = new_stream(0), new_stream()
    latch = Latch(held)
    ok(drv.cuEventRecord(ipc_event, drv.CUstream(kit.LEGACY)))
    finish(free)
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    latch.open()
    complete(ipc_event)


def test_events_record_and_wait_on_the_per_thread_stream(drv: ModuleType, stream: Any, ipc_event: Any) -> None:
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    mine = drv.CUstream(kit.PER_THREAD)
    ok(drv.cuStreamWaitEvent(mine, ipc_event, 0))
    assert code(drv.cuStreamQuery(mine)) == kit.NOT_READY
    latch.open()
    finish(mine)
