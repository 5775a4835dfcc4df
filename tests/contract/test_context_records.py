"""Records of all of a context (cuCtxRecordEvent): whose work they cover, and what they do to captures."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ipcsync._drivers import handle_bytes
from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, in_thread, ok
from tests.kit.peer import Peer

pytestmark = [pytest.mark.alone, pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]


@pytest.fixture(autouse=True)
def _records_contexts(drv: ModuleType) -> None:
    if ok(drv.cuDriverGetVersion()) < 12050:
        pytest.skip("the driver is older than CUDA 12.5, which brought cuCtxRecordEvent")


KINDS = ["non-blocking", "blocking", "legacy", "per-thread", "destroyed"]


def _stream_of(kind: str, drv: ModuleType, new_stream: New) -> Any:
    if kind == "destroyed":
        return ok(drv.cuStreamCreate(kit.NON_BLOCKING))
    if kind in ("non-blocking", "blocking"):
        return new_stream(kit.NON_BLOCKING if kind == "non-blocking" else 0)
    return drv.CUstream(kit.LEGACY if kind == "legacy" else kit.PER_THREAD)


@pytest.mark.parametrize("flags", [kit.SHAREABLE, kit.DISABLE_TIMING, 0], ids=["shareable", "local", "timed"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_complete_only_once_the_work_of_each_stream_is(
    drv: ModuleType, ctx: Any, new_stream: New, new_event: New, kind: str, flags: int
) -> None:
    held, others = _stream_of(kind, drv, new_stream), [new_stream(), new_stream()]
    event = new_event(flags)
    latch = Latch(held)
    if kind == "destroyed":
        ok(drv.cuStreamDestroy(held))  # what was submitted to it is still done
    ok(drv.cuCtxRecordEvent(ctx, event))
    for stream in others:
        finish(stream)
    assert code(drv.cuEventQuery(event)) == kit.NOT_READY
    latch.open()
    complete(event)


def test_it_covers_what_other_threads_submitted(drv: ModuleType, ctx: Any, ipc_event: Any) -> None:
    latch = in_thread(lambda: Latch(drv.CUstream(kit.PER_THREAD)), ctx)
    ok(drv.cuCtxRecordEvent(ctx, ipc_event))
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    latch.open()
    complete(ipc_event)


def test_it_captures_only_the_work_before_it(drv: ModuleType, ctx: Any, new_stream: New, ipc_event: Any) -> None:
    first, second = new_stream(), new_stream()
    before = Latch(first)
    ok(drv.cuCtxRecordEvent(ctx, ipc_event))
    after = Latch(second)
    before.open()
    complete(ipc_event)
    assert code(drv.cuStreamQuery(second)) == kit.NOT_READY
    after.open()


def test_a_stream_waits_for_it_and_a_later_record_takes_its_place(
    drv: ModuleType, ctx: Any, new_stream: New, ipc_event: Any
) -> None:
    held, waiting, other = new_stream(), new_stream(), new_stream()
    latch = Latch(held)
    ok(drv.cuCtxRecordEvent(ctx, ipc_event))
    ok(drv.cuStreamWaitEvent(waiting, ipc_event, 0))
    held_too = Latch(other)
    ok(drv.cuEventRecord(ipc_event, other))  # the wait keeps what the event stood for
    assert code(drv.cuStreamQuery(waiting)) == kit.NOT_READY
    latch.open()
    finish(waiting)
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    held_too.open()
    complete(ipc_event)


def test_a_record_of_an_idle_context_is_complete(drv: ModuleType, ctx: Any, ipc_event: Any) -> None:
    ok(drv.cuCtxRecordEvent(ctx, ipc_event))
    complete(ipc_event)


def test_another_process_sees_it(drv: ModuleType, ctx: Any, stream: Any, ipc_event: Any, partner: Peer) -> None:
    assert partner.call(actions.open_event, "e", handle_bytes(ok(drv.cuIpcGetEventHandle(ipc_event)))) == kit.SUCCESS
    latch = Latch(stream)
    ok(drv.cuCtxRecordEvent(ctx, ipc_event))
    assert partner.call(actions.query, "e") == kit.NOT_READY
    latch.open()
    complete(ipc_event)
    assert partner.call(actions.query, "e") == kit.SUCCESS


def test_what_is_no_context_or_no_event_is_refused(drv: ModuleType, ctx: Any, new_event: New, kind: str) -> None:
    if kind == "gpu":
        pytest.skip("NVIDIA's driver may crash on handles that are none")
    event = new_event()
    assert code(drv.cuCtxRecordEvent(drv.CUcontext(12345), event)) == kit.INVALID_CONTEXT
    assert code(drv.cuCtxRecordEvent(ctx, drv.CUevent(12345))) == kit.INVALID_HANDLE


def test_an_event_of_another_context_is_refused(two_devices: Callable[..., Peer]) -> None:
    assert two_devices().call(actions.record_context_of_another_device) == kit.INVALID_HANDLE


@pytest.mark.parametrize("mode", [kit.GLOBAL, kit.THREAD_LOCAL, kit.RELAXED])
def test_a_capture_in_the_context_refuses_it_and_every_such_capture_is_invalidated(
    drv: ModuleType, ctx: Any, new_stream: New, ipc_event: Any, mode: int
) -> None:
    capturing = [new_stream(), new_stream(0)]
    for stream in capturing:
        ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(mode)))
    ok(drv.cuThreadExchangeStreamCaptureMode(drv.CUstreamCaptureMode(kit.RELAXED)))
    assert code(drv.cuCtxRecordEvent(ctx, ipc_event)) == kit.CAPTURE_UNSUPPORTED
    for stream in capturing:
        assert int(ok(drv.cuStreamIsCapturing(stream))) == kit.INVALIDATED
        assert code(drv.cuStreamEndCapture(stream)) == kit.CAPTURE_INVALIDATED
    ok(drv.cuCtxRecordEvent(ctx, ipc_event))
    complete(ipc_event)


def test_a_captured_event_is_a_plain_one_again_behind_it(
    drv: ModuleType, ctx: Any, stream: Any, new_event: New
) -> None:
    event = new_event(kit.DISABLE_TIMING)
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(kit.RELAXED)))
    ok(drv.cuEventRecord(event, stream))
    ok(drv.cuGraphDestroy(ok(drv.cuStreamEndCapture(stream))))
    assert code(drv.cuEventQuery(event)) == kit.INVALID_VALUE
    ok(drv.cuCtxRecordEvent(ctx, event))
    complete(event)
