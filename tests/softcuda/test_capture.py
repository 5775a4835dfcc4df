"""Stream capture: what is captured, what invalidates it, and which calls it forbids."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.kit.until import DEADLINE_S
from tests.softcuda.kit import IPC, NONBLOCK, code, ok

MODES = GLOBAL, THREAD_LOCAL, RELAXED = tuple(drv.CUstreamCaptureMode)


NONE, ACTIVE, INVALIDATED = tuple(drv.CUstreamCaptureStatus)


def begin(mode: Any = GLOBAL, flags: int = NONBLOCK) -> Any:
    s = ok(drv.cuStreamCreate(flags))
    ok(drv.cuStreamBeginCapture(s, mode))
    return s


def status(s: Any) -> Any:
    return ok(drv.cuStreamIsCapturing(s))


def capture_id(s: Any) -> int:
    return int(ok(drv.cuStreamGetCaptureInfo(s))[1])


def in_thread(ctx: Any, fn: Callable[[], Any], mode: Any = None) -> Any:
    """What `fn()` returns in a thread of its own."""
    out: list[Any] = []

    def work() -> None:
        ok(drv.cuCtxSetCurrent(ctx))
        if mode is not None:
            assert ok(drv.cuThreadExchangeStreamCaptureMode(mode)) == GLOBAL
        out.append(fn())

    t = threading.Thread(target=work)
    t.start()
    t.join(DEADLINE_S)
    return out[0]


def test_captured_event(ctx: Any) -> None:
    s, e, timed = ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuEventCreate(2)), ok(drv.cuEventCreate(0))
    ok(drv.cuEventRecord(timed, s))
    ok(drv.cuStreamSynchronize(s))
    ok(drv.cuStreamBeginCapture(s, GLOBAL))
    ok(drv.cuEventRecord(e, s))
    ok(drv.cuEventRecord(timed, s))
    ok(drv.cuGraphDestroy(ok(drv.cuStreamEndCapture(s))))
    assert code(drv.cuEventQuery(e)) == 1
    assert code(drv.cuEventSynchronize(e)) == code(drv.cuEventElapsedTime(timed, timed)) == 1
    assert code(drv.cuStreamWaitEvent(s, e, 0)) == 1
    # a plain record makes it plain again
    ok(drv.cuEventRecord(e, s))
    ok(drv.cuEventSynchronize(e))
    ok(drv.cuEventQuery(e))
    for look in (drv.cuEventQuery, drv.cuEventSynchronize):
        for mode in MODES:
            ok(drv.cuStreamBeginCapture(s, mode))
            ok(drv.cuEventRecord(e, s))
            assert code(in_thread(ctx, partial(look, e), RELAXED)) == 1
            assert status(s) == INVALIDATED
            assert code(drv.cuStreamEndCapture(s)) == 901
    ok(drv.cuEventDestroy(e))


def test_capture_is_invalidated(ctx: Any) -> None:
    e, p = ok(drv.cuEventCreate(2)), ok(drv.cuMemAlloc(4))
    x = ok(drv.cuGraphInstantiate(ok(drv.cuGraphCreate(0)), 0))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(lambda s, r, x: None)
    cb = drv.CUstreamCallback(ctypes.cast(function, ctypes.c_void_p).value)
    for mode in MODES:
        for bad in (
            drv.cuStreamQuery,
            drv.cuStreamSynchronize,
            drv.cuStreamGetId,
            partial(drv.cuGraphLaunch, x),
            lambda s: drv.cuStreamAddCallback(s, cb, 0, 0),
            lambda s: drv.cuCtxSynchronize(),
        ):
            s = begin(mode)
            ok(drv.cuEventRecord(e, s))
            assert code(bad(s)) == 900
            assert status(s) == INVALIDATED
            assert capture_id(s) == 0
            for r in (
                drv.cuEventRecord(e, s),
                drv.cuStreamWaitEvent(s, e, 0),
                drv.cuStreamQuery(s),
                drv.cuMemsetD8Async(p, 0, 4, s),
            ):
                assert code(r) == 901
            assert code(drv.cuStreamEndCapture(s)) == 901
            assert status(s) == NONE
            assert code(drv.cuStreamEndCapture(s)) == 401
            ok(drv.cuEventRecord(e, s))
            ok(drv.cuEventSynchronize(e))
            ok(drv.cuStreamQuery(s))


def test_capture_begin_and_end(ctx: Any) -> None:
    for s in (0, drv.CU_STREAM_LEGACY):
        assert code(drv.cuStreamBeginCapture(s, GLOBAL)) == 900
    s = begin(THREAD_LOCAL)
    assert code(drv.cuStreamBeginCapture(s, GLOBAL)) == 401
    assert status(s) == ACTIVE
    assert in_thread(ctx, lambda: code(drv.cuStreamEndCapture(s))) == 908
    assert status(s) == ACTIVE
    ok(drv.cuStreamEndCapture(s))
    s = begin(RELAXED)
    assert in_thread(ctx, lambda: code(drv.cuStreamEndCapture(s))) == 0
    assert status(s) == NONE
    ok(drv.cuStreamBeginCapture(drv.CU_STREAM_PER_THREAD, GLOBAL))
    ok(drv.cuStreamEndCapture(drv.CU_STREAM_PER_THREAD))
    s, e, t = begin(), ok(drv.cuEventCreate(2)), ok(drv.cuStreamCreate(NONBLOCK))
    ok(drv.cuEventRecord(e, s))
    ok(drv.cuStreamWaitEvent(t, e, 0))
    ok(drv.cuStreamDestroy(s))  # takes its capture along
    assert status(t) == NONE
    ok(drv.cuStreamQuery(t))
    ok(drv.cuMemFree(ok(drv.cuMemAlloc(4))))


def test_capture_and_legacy_stream(ctx: Any) -> None:
    p = ok(drv.cuMemAlloc(4))
    ok(drv.cuCtxSynchronize())
    uses: tuple[Callable[[], Any], ...] = (
        lambda: drv.cuStreamQuery(0),
        lambda: drv.cuStreamSynchronize(0),
        lambda: drv.cuMemcpyHtoD(p, b"1234", 4),
        lambda: drv.cuMemsetD8Async(p, 0, 4, 0),
        lambda: drv.cuMemcpyDtoH(bytearray(4), p, 4),
    )
    for use in uses:
        for mode, flags, want in [(RELAXED, NONBLOCK, 0), (RELAXED, 0, 906), (GLOBAL, 0, 906)]:
            s = begin(mode, flags)
            assert code(drv.cuStreamIsCapturing(0)) == code(drv.cuStreamGetCaptureInfo(0)) == want
            assert status(s) == ACTIVE  # asking does no harm
            assert code(use()) == want
            assert status(s) == (INVALIDATED if want else ACTIVE)
            assert code(drv.cuStreamEndCapture(s)) == (901 if want else 0)
            ok(use())


@pytest.mark.parametrize("mine", MODES)
@pytest.mark.parametrize("theirs", MODES)
def test_capture_and_potentially_unsafe_calls(ctx: Any, mine: Any, theirs: Any) -> None:
    """`mine`: how this thread captures; `theirs`: the mode of another thread, or of this one, that makes the call."""
    e, s = ok(drv.cuEventCreate(2)), ok(drv.cuStreamCreate(NONBLOCK))
    timed, p = ok(drv.cuEventCreate(0)), ok(drv.cuMemAlloc(4))
    for each in (e, timed):
        ok(drv.cuEventRecord(each, s))
    ok(drv.cuStreamSynchronize(s))
    unsafe: tuple[Callable[[], Any], ...] = (
        lambda: drv.cuEventQuery(e),
        lambda: drv.cuEventSynchronize(e),
        lambda: drv.cuStreamQuery(s),
        lambda: drv.cuStreamSynchronize(s),
        lambda: drv.cuMemAlloc(4),
        lambda: drv.cuMemAllocHost(4),
    )
    for call in unsafe:
        c = begin(mine)
        bad = mine == theirs == GLOBAL
        assert code(in_thread(ctx, call, theirs)) == (900 if bad else 0)
        assert status(c) == (INVALIDATED if bad else ACTIVE)
        assert code(drv.cuStreamEndCapture(c)) == (901 if bad else 0)
        c = begin(mine)
        bad = RELAXED not in (mine, theirs)
        assert ok(drv.cuThreadExchangeStreamCaptureMode(theirs)) == GLOBAL
        assert code(call()) == (900 if bad else 0)
        assert ok(drv.cuThreadExchangeStreamCaptureMode(GLOBAL)) == theirs
        assert status(c) == (INVALIDATED if bad else ACTIVE)
        assert code(drv.cuStreamEndCapture(c)) == (901 if bad else 0)
        ok(call())
    c = begin(GLOBAL)
    safe: tuple[Callable[[], Any], ...] = (
        lambda: drv.cuEventCreate(2),
        lambda: drv.cuEventCreate(IPC),
        lambda: drv.cuEventRecord(e, s),
        lambda: drv.cuEventElapsedTime(timed, timed),
        lambda: drv.cuMemsetD8(p, 0, 4),
        lambda: drv.cuStreamWaitEvent(s, e, 0),
        lambda: drv.cuStreamCreate(NONBLOCK),
        lambda: drv.cuStreamGetId(s),
        lambda: drv.cuStreamIsCapturing(s),
    )
    for f in safe:
        ok(f())
        ok(in_thread(ctx, f))
    ok(drv.cuStreamEndCapture(c))
