"""Events of one process."""

from __future__ import annotations

import threading
import time
from typing import Any

from cuda.bindings import driver as drv

from tests.kit.until import DEADLINE_S
from tests.softcuda.kit import NONBLOCK, Latch, code, ok


def test_event_basics(ctx: Any) -> None:
    s = ok(drv.cuStreamCreate(NONBLOCK))
    e = ok(drv.cuEventCreate(2))
    # never recorded
    ok(drv.cuEventQuery(e))
    ok(drv.cuEventSynchronize(e))
    ok(drv.cuStreamWaitEvent(s, e, 0))
    assert code(drv.cuStreamQuery(s)) == 0
    assert code(drv.cuEventCreate(4)) == 1  # INTERPROCESS without DISABLE_TIMING
    assert code(drv.cuEventCreate(8)) == 1
    for flags in (0, 1, 2, 3, 6, 7):
        ok(drv.cuEventDestroy(ok(drv.cuEventCreate(flags))))
    assert code(drv.cuEventRecordWithFlags(e, s, 1)) == 401  # EXTERNAL: only while capturing
    ok(drv.cuEventRecordWithFlags(e, s, 0))
    ok(drv.cuEventDestroy(e))
    for r in (
        drv.cuEventQuery(e),
        drv.cuEventSynchronize(e),
        drv.cuEventRecord(e, s),
        drv.cuStreamWaitEvent(s, e, 0),
        drv.cuEventDestroy(e),
        drv.cuEventQuery(drv.CUevent(0)),
    ):
        assert code(r) == 400


def test_record_and_wait_capture_the_moment(ctx: Any) -> None:
    a, b, c = (ok(drv.cuStreamCreate(NONBLOCK)) for _ in range(3))
    e = ok(drv.cuEventCreate(2))
    la = Latch(a)
    ok(drv.cuEventRecord(e, a))
    ok(drv.cuStreamWaitEvent(c, e, 0))  # captures the record on a
    assert code(drv.cuEventQuery(e)) == 600
    lb = Latch(b)
    ok(drv.cuEventRecord(e, b))  # moves the event, not the wait
    la.open()
    ok(drv.cuStreamSynchronize(c))
    assert code(drv.cuEventQuery(e)) == 600
    l2 = Latch(b)  # work queued after the record does not count
    lb.open()
    ok(drv.cuEventSynchronize(e))
    assert code(drv.cuStreamQuery(b)) == 600
    l2.open()
    ok(drv.cuStreamSynchronize(b))
    # an event that is destroyed while pending still releases who waits for it
    la = Latch(a)
    ok(drv.cuEventRecord(e, a))
    ok(drv.cuStreamWaitEvent(c, e, 0))
    ok(drv.cuEventDestroy(e))
    ok(drv.cuStreamDestroy(a))
    assert code(drv.cuStreamQuery(c)) == 600
    la.open()
    ok(drv.cuStreamSynchronize(c))


def test_elapsed_time(ctx: Any) -> None:
    s = ok(drv.cuStreamCreate(NONBLOCK))
    t0, t1, never, plain = (ok(drv.cuEventCreate(f)) for f in (0, 0, 0, 2))
    began = time.monotonic()
    ok(drv.cuEventRecord(t0, s))
    ok(drv.cuEventRecord(plain, s))
    ok(drv.cuEventSynchronize(plain))  # the stream's thread takes the first one's time
    latch = Latch(s)
    ok(drv.cuEventRecord(t1, s))
    assert code(drv.cuEventElapsedTime(t0, t1)) == 600
    assert code(drv.cuEventElapsedTime(t0, never)) == 400
    assert code(drv.cuEventElapsedTime(t0, plain)) == 400
    time.sleep(0.05)
    latch.open()
    ok(drv.cuEventSynchronize(t1))
    assert 45 < ok(drv.cuEventElapsedTime(t0, t1)) <= 1000 * (time.monotonic() - began)
    assert ok(drv.cuEventElapsedTime(t1, t0)) < 0


def test_threads_share_streams_and_events(ctx: Any) -> None:
    s = [ok(drv.cuStreamCreate(NONBLOCK)) for _ in range(4)]
    e = [ok(drv.cuEventCreate(f)) for f in (0, 2, 6, 0)]
    bad: list[Any] = []

    def work(k: int) -> None:
        ok(drv.cuCtxSetCurrent(ctx))
        for i in range(400):
            rs = [
                drv.cuEventRecord(e[(i + k) % 4], s[i % 4]),
                drv.cuStreamWaitEvent(s[(i * 3 + k) % 4], e[i % 4], 0),
                drv.cuEventSynchronize(e[k % 4]),
            ]
            bad.extend(r for r in rs if code(r))

    ts = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in ts:
        t.start()
    for t in ts:
        t.join(DEADLINE_S)
    assert not bad
    assert not any(t.is_alive() for t in ts)
    ok(drv.cuCtxSynchronize())
