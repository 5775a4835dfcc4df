"""Streams of one process, the default ones included."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver as drv

from tests.kit.until import DEADLINE_S
from tests.softcuda.kit import NONBLOCK, code, ok


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


def test_what_was_destroyed_is_no_handle(ctx: Any) -> None:
    s, other, e = ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuEventCreate(2))
    ok(drv.cuStreamDestroy(s))
    ok(drv.cuEventDestroy(e))
    for call in (drv.cuStreamQuery, drv.cuStreamDestroy):
        assert code(call(s)) == code(call(drv.CUstream(0x1234560))) == 400
    for r in (
        drv.cuEventQuery(e),
        drv.cuEventSynchronize(e),
        drv.cuEventRecord(e, other),
        drv.cuStreamWaitEvent(other, e, 0),
        drv.cuEventDestroy(e),
    ):
        assert code(r) == 400
