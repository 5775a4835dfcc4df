"""Stream capture: what is refused because of a capture, which captures it invalidates, and how captures meet."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, complete, finish, ok

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
MERGE, ISOLATION, IMPLICIT = 902, 905, 906
EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL
BLOCKING = 0  # CU_STREAM_DEFAULT


def test_a_capture_that_waits_for_a_record_from_outside_of_it_is_invalidated(
    drv: ModuleType, stream: Any, new_event: New, begin: New
) -> None:
    outside = new_event(kit.DISABLE_TIMING)
    ok(drv.cuEventRecord(outside, stream))
    capturing = begin()
    assert code(drv.cuStreamWaitEvent(capturing, outside, 0)) == ISOLATION
    assert kit.capture_status(drv, capturing) == kit.INVALIDATED
    assert code(drv.cuEventRecord(new_event(kit.DISABLE_TIMING), capturing)) == kit.CAPTURE_INVALIDATED
    assert kit.end_capture(drv, capturing) == kit.CAPTURE_INVALIDATED
    finish(capturing)


def test_a_capture_that_waits_for_an_event_that_was_never_recorded_goes_on(
    drv: ModuleType, new_event: New, begin: New
) -> None:
    capturing = begin()
    ok(drv.cuStreamWaitEvent(capturing, new_event(kit.DISABLE_TIMING), 0))
    assert kit.end_capture(drv, capturing) == kit.SUCCESS


def test_two_captures_that_meet_are_both_invalidated_and_the_event_between_them_is_of_no_use(
    drv: ModuleType, stream: Any, new_event: New, begin: New
) -> None:
    event = new_event(kit.DISABLE_TIMING)
    first, second = begin(), begin()
    ok(drv.cuEventRecord(event, first))
    assert code(drv.cuStreamWaitEvent(second, event, 0)) == MERGE
    assert (kit.capture_status(drv, first), kit.capture_status(drv, second)) == (kit.INVALIDATED, kit.INVALIDATED)
    assert code(drv.cuStreamWaitEvent(stream, event, 0)) != kit.SUCCESS
    assert kit.capture_status(drv, stream) == kit.NONE
    assert (kit.end_capture(drv, first), kit.end_capture(drv, second)) == (
        kit.CAPTURE_INVALIDATED,
        kit.CAPTURE_INVALIDATED,
    )


def test_external_records_and_waits_belong_to_captures_only(
    drv: ModuleType, stream: Any, new_event: New, begin: New
) -> None:
    event = new_event(kit.DISABLE_TIMING)
    ok(drv.cuEventRecordWithFlags(event, stream, 0))
    complete(event)
    assert code(drv.cuEventRecordWithFlags(event, stream, EXTERNAL)) == kit.ILLEGAL_STATE
    assert code(drv.cuStreamWaitEvent(stream, event, EXTERNAL)) == kit.ILLEGAL_STATE
    capturing = begin()
    ok(drv.cuStreamWaitEvent(capturing, event, EXTERNAL))
    ok(drv.cuEventRecordWithFlags(event, capturing, EXTERNAL))
    assert kit.end_capture(drv, capturing) == kit.SUCCESS
    complete(event)


def test_a_shareable_event_is_recorded_in_a_capture_by_an_external_record_only(
    drv: ModuleType, stream: Any, ipc_event: Any, begin: New
) -> None:
    ok(drv.cuEventRecord(ipc_event, stream))
    complete(ipc_event)
    capturing = begin()
    ok(drv.cuEventRecordWithFlags(ipc_event, capturing, EXTERNAL))
    assert code(drv.cuEventRecord(ipc_event, capturing)) == kit.CAPTURE_UNSUPPORTED
    assert kit.end_capture(drv, capturing) in (kit.SUCCESS, kit.CAPTURE_INVALIDATED)
    complete(ipc_event)


def test_a_graph_is_not_launched_on_a_capturing_stream(drv: ModuleType, ctx: Any, begin: New) -> None:
    graph = ok(drv.cuGraphCreate(0))
    executable = ok(drv.cuGraphInstantiate(graph, 0))
    capturing = begin(kit.RELAXED)
    assert code(drv.cuGraphLaunch(executable, capturing)) == kit.CAPTURE_UNSUPPORTED
    assert kit.end_capture(drv, capturing) in (kit.SUCCESS, kit.CAPTURE_INVALIDATED)
    ok(drv.cuGraphLaunch(executable, capturing))
    finish(capturing)
    ok(drv.cuGraphExecDestroy(executable))
    ok(drv.cuGraphDestroy(graph))


def test_a_blocking_streams_capture_forbids_the_legacy_stream(drv: ModuleType, ctx: Any, begin: New) -> None:
    legacy = drv.CUstream(kit.LEGACY)
    memory = ok(drv.cuMemAlloc(8))
    uses: tuple[Callable[[], Any], ...] = (
        lambda: drv.cuStreamQuery(legacy),
        lambda: drv.cuMemsetD8Async(memory, 1, 8, legacy),
    )
    for use in uses:
        beside, capturing = begin(kit.RELAXED), begin(kit.RELAXED, BLOCKING)
        assert code(drv.cuStreamIsCapturing(legacy)) == IMPLICIT
        assert kit.capture_status(drv, capturing) == kit.ACTIVE, "asking does no harm"
        assert code(use()) == IMPLICIT
        assert (kit.capture_status(drv, capturing), kit.capture_status(drv, beside)) == (kit.INVALIDATED, kit.ACTIVE)
        assert (kit.end_capture(drv, capturing), kit.end_capture(drv, beside)) == (kit.CAPTURE_INVALIDATED, kit.SUCCESS)
        ok(use())
    finish(legacy)
    ok(drv.cuMemFree(memory))


def test_synchronizing_the_context_invalidates_every_capture_in_it(drv: ModuleType, begin: New) -> None:
    captures = [begin(kit.RELAXED), begin(kit.THREAD_LOCAL)]
    assert code(drv.cuCtxSynchronize()) == kit.CAPTURE_UNSUPPORTED
    assert [kit.end_capture(drv, stream) for stream in captures] == [kit.CAPTURE_INVALIDATED] * 2


def test_a_capture_ends_with_the_stream_that_it_began_on(
    drv: ModuleType, kind: str, stream: Any, new_event: New
) -> None:
    if kind == "gpu":
        pytest.skip("no public source says what becomes of the other streams")
    origin = ok(drv.cuStreamCreate(kit.NON_BLOCKING))
    fork = new_event(kit.DISABLE_TIMING)
    ok(drv.cuStreamBeginCapture(origin, drv.CUstreamCaptureMode(kit.GLOBAL)))
    ok(drv.cuEventRecord(fork, origin))
    ok(drv.cuStreamWaitEvent(stream, fork, 0))
    assert kit.capture_status(drv, stream) == kit.ACTIVE
    ok(drv.cuStreamDestroy(origin))
    assert kit.capture_status(drv, stream) == kit.NONE
    finish(stream)


def test_what_a_global_capture_allows_on_its_own_thread(
    drv: ModuleType, stream: Any, new_event: New, ipc_event: Any, begin: New
) -> None:
    timed, memory, host = new_event(0), ok(drv.cuMemAlloc(64)), ok(drv.cuMemAllocHost(64))
    context = ok(drv.cuCtxGetCurrent())
    ok(drv.cuEventRecord(timed, stream))
    complete(timed)
    capturing = begin(kit.GLOBAL)
    ok(drv.cuEventElapsedTime(timed, timed))
    ok(drv.cuMemsetD8(memory, 0, 64))
    ok(drv.cuMemsetD8Async(memory, 0, 64, stream))
    ok(drv.cuStreamWriteValue64(stream, memory, 1, 0))
    ok(drv.cuMemHostGetDevicePointer(host, 0))
    ok(drv.cuIpcGetEventHandle(ipc_event))
    ok(drv.cuStreamGetId(stream))
    ok(drv.cuStreamGetCtx(capturing))
    ok(drv.cuCtxSetCurrent(context))
    new_event()
    assert kit.capture_status(drv, capturing) == kit.ACTIVE
    assert kit.end_capture(drv, capturing) == kit.SUCCESS
    ok(drv.cuMemFree(memory))
    ok(drv.cuMemFreeHost(host))


@pytest.mark.parametrize("allocate", ["cuMemAlloc", "cuMemAllocHost"])
def test_a_global_capture_forbids_allocations_which_invalidate_it(
    drv: ModuleType, ctx: Any, begin: New, allocate: str
) -> None:
    capturing = begin(kit.GLOBAL)
    assert code(getattr(drv, allocate)(64)) == kit.CAPTURE_UNSUPPORTED
    assert kit.end_capture(drv, capturing) == kit.CAPTURE_INVALIDATED
    memory = ok(getattr(drv, allocate)(64))
    ok((drv.cuMemFree if allocate == "cuMemAlloc" else drv.cuMemFreeHost)(memory))
