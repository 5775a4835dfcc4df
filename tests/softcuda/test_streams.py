"""Streams of one process, the default ones included."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from cuda.bindings import driver as drv

from tests.kit.until import DEADLINE_S
from tests.softcuda.kit import NONBLOCK, Latch, code, ok


def test_streams(ctx: Any) -> None:
    for want, got in [(0, 0), (-1, -1), (-5, -5), (-9, -5), (3, 0)]:
        assert ok(drv.cuStreamGetPriority(ok(drv.cuStreamCreateWithPriority(NONBLOCK, want)))) == got
    s = ok(drv.cuStreamCreate(NONBLOCK))
    assert ok(drv.cuStreamGetFlags(s)) == NONBLOCK
    assert code(drv.cuStreamCreate(2)) == 1
    assert ok(drv.cuStreamIsCapturing(s)) == drv.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    ids = {ok(drv.cuStreamGetId(x)) for x in (s, 0, drv.CU_STREAM_LEGACY, drv.CU_STREAM_PER_THREAD)}
    assert len(ids) == 3
    latch = Latch(s)
    assert code(drv.cuStreamQuery(s)) == 600
    latch.open()
    ok(drv.cuStreamSynchronize(s))
    assert code(drv.cuStreamQuery(s)) == 0
    ok(drv.cuStreamDestroy(s))
    assert code(drv.cuStreamQuery(s)) == 400
    assert code(drv.cuStreamDestroy(s)) == 400
    assert code(drv.cuStreamQuery(drv.CUstream(0x1234560))) == 400


def test_stream_ids_are_never_used_again(ctx: Any) -> None:
    ids: list[int] = []

    def work() -> None:
        ok(drv.cuCtxSetCurrent(ctx))
        for _ in range(300):
            s = ok(drv.cuStreamCreate(NONBLOCK))
            i = ok(drv.cuStreamGetId(s))
            ids.append(i)
            assert ok(drv.cuStreamGetId(s)) == i
            ok(drv.cuStreamDestroy(s))
        ids.append(ok(drv.cuStreamGetId(drv.CU_STREAM_PER_THREAD)))

    ts = [threading.Thread(target=work) for _ in range(4)]
    for t in ts:
        t.start()
    for t in ts:
        t.join(DEADLINE_S)
    dev = ok(drv.cuCtxGetDevice())
    for _ in range(3):  # the default streams of another context are other streams
        c2 = ok(drv.cuCtxCreate(None, 0, dev))
        ids.extend(ok(drv.cuStreamGetId(x)) for x in (0, drv.CU_STREAM_PER_THREAD))
        ok(drv.cuCtxDestroy(c2))
    ok(drv.cuCtxSetCurrent(ctx))
    ids.append(ok(drv.cuStreamGetId(0)))
    assert len(ids) == 4 * 301 + 7
    assert len(set(ids)) == len(ids)


def test_order_in_a_stream(ctx: Any) -> None:
    s = ok(drv.cuStreamCreate(NONBLOCK))
    out: list[int] = []
    fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(out.append)
    latch = Latch(s)
    for i in range(1, 200):
        ok(drv.cuLaunchHostFunc(s, drv.CUhostFn(ctypes.cast(fn, ctypes.c_void_p).value), i))
    assert out == []
    latch.open()
    ok(drv.cuStreamSynchronize(s))
    assert out == list(range(1, 200))


def test_default_streams(ctx: Any) -> None:
    blocking, free = ok(drv.cuStreamCreate(0)), ok(drv.cuStreamCreate(NONBLOCK))
    latch = Latch(blocking)
    e = ok(drv.cuEventCreate(2))
    ok(drv.cuEventRecord(e, 0))  # the legacy stream comes after all blocking streams
    assert code(drv.cuEventQuery(e)) == 600
    assert code(drv.cuStreamQuery(0)) == 600
    assert code(drv.cuStreamQuery(free)) == 0
    late = ok(drv.cuStreamCreate(0))
    ok(drv.cuEventRecord(ok(drv.cuEventCreate(2)), late))  # and blocking streams after the legacy one
    assert code(drv.cuStreamQuery(late)) == 600
    ok(drv.cuEventRecord(ok(drv.cuEventCreate(2)), free))
    ok(drv.cuStreamSynchronize(free))
    latch.open()
    for s in (0, late, drv.CU_STREAM_PER_THREAD):
        ok(drv.cuStreamSynchronize(s))
    assert code(drv.cuEventQuery(e)) == 0
    ok(drv.cuCtxSynchronize())
