"""Many processes at once, some of them killed in the middle of everything."""

from __future__ import annotations

import ctypes
import glob
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.kit.until import DEADLINE_S
from tests.softcuda.kit import IPC, NONBLOCK, code, handle_bytes, ok, open_event, open_memory, raw, start, stat
from tests.softcuda.processes import Child


def _ring(conn: Connection, rounds: int) -> None:
    start()
    s = ok(drv.cuStreamCreate(NONBLOCK))
    mine = ok(drv.cuEventCreate(IPC))
    conn.send(handle_bytes(mine))
    before, mem = conn.recv()
    before = ok(open_event(before))
    p = ok(open_memory(mem))
    host = ok(drv.cuMemAllocHost(4))
    word = ctypes.c_uint32.from_address(int(host))
    for _ in range(rounds):
        conn.recv()  # the one before me has recorded
        ok(drv.cuStreamWaitEvent(s, before, 0))
        ok(drv.cuMemcpyDtoHAsync(int(host), p, 4, s))
        ok(drv.cuStreamSynchronize(s))
        ok(drv.cuMemsetD32Async(p, word.value + 1, 1, s))
        ok(drv.cuEventRecord(mine, s))
        conn.send("recorded")
    conn.recv()
    conn.send("bye")


def test_64_processes(ctx: Any) -> None:
    n, rounds = 64, 3
    p = ok(drv.cuMemAlloc(4))
    ok(drv.cuMemsetD32(p, 0, 1))
    ok(drv.cuCtxSynchronize())
    mem = raw(ok(drv.cuIpcGetMemHandle(p)))
    cs = [Child(_ring, rounds) for _ in range(n)]
    hs = [c.get() for c in cs]
    assert stat("processes") >= n + 1
    for k, c in enumerate(cs):
        c.send((hs[k - 1], mem))
    for _ in range(rounds):
        for c in cs:
            c.send("go")
            assert c.get() == "recorded"
    out = bytearray(4)
    last = ok(open_event(hs[-1]))
    ok(drv.cuEventSynchronize(last))
    ok(drv.cuMemcpyDtoH(out, p, 4))
    assert int.from_bytes(out, "little") == n * rounds
    for c in cs[::2]:
        c.kill()
    for c in cs[1::2]:
        c.send("end")
        c.get()
    for c in cs:
        c.p.join(DEADLINE_S)
    stat("reap")
    assert stat("processes") == 1
    ok(drv.cuEventDestroy(last))
    ok(drv.cuMemFree(p))


def _publish(handle: bytes, name: str) -> None:
    Path(name + "~").write_bytes(handle)
    os.rename(name + "~", name + ".h")


def _use(what: int, event: Any, stream: Any) -> None:
    if what == 4:
        ok(drv.cuEventRecord(event, stream))
    elif what == 5:
        ok(drv.cuStreamWaitEvent(stream, event, 0))
    elif what == 6:
        ok(drv.cuEventSynchronize(event))
    else:
        assert code(drv.cuEventQuery(event)) in (0, 600)


def _chaos(conn: Connection, seed: int, where: str) -> None:
    """Records, waits for, opens, destroys events of all, at random, until told to stop."""
    rnd = random.Random(seed)
    start()
    streams = [ok(drv.cuStreamCreate(NONBLOCK)) for _ in range(3)]
    mine: list[Any] = []
    others: list[Any] = []
    n = 0
    ok(drv.cuMemAlloc(10_000))
    conn.send("up")
    while not n or not os.path.exists(os.path.join(where, "stop")):
        n += 1
        what = rnd.randrange(8)
        if what == 0 and len(mine) < 8:
            mine.append(ok(drv.cuEventCreate(IPC)))
            _publish(handle_bytes(mine[-1]), os.path.join(where, f"{os.getpid()}.{n}"))
        elif what == 1 and len(mine) > 4:
            ok(drv.cuEventDestroy(mine.pop(rnd.randrange(len(mine)))))
        elif what == 2 and len(others) < 20:
            hs = glob.glob(os.path.join(where, "*.h"))
            if hs:
                r = open_event(Path(rnd.choice(hs)).read_bytes())
                assert code(r) in (0, 201, 400), r
                if not code(r):
                    others.append(r[1])
        elif what == 3 and len(others) > 10:
            ok(drv.cuEventDestroy(others.pop(rnd.randrange(len(others)))))
        elif mine + others:
            _use(what, rnd.choice(mine + others), rnd.choice(streams))
    for s in streams:
        ok(drv.cuStreamSynchronize(s))
    conn.send(n)


@pytest.mark.parametrize("latency", [0, 300])
def test_chaos(ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency: int) -> None:
    """Processes are killed in the middle of everything: nobody hangs, nothing is left behind."""
    monkeypatch.setenv("IPCSYNC_HOST_LATENCY_US", str(latency))
    base, seed = stat("events"), 0
    cs: list[Child] = []
    for _ in range(12):
        cs = [c for c in cs if c.p.is_alive()]
        while len(cs) < 6:
            cs.append(Child(_chaos, seed, str(tmp_path)))
            seed += 1
        for c in cs[-3:]:
            if c.p.is_alive():
                c.conn.poll(DEADLINE_S)
        time.sleep(0.1)
        for c in cs[:2]:
            c.kill()
            c.p.join()
    (tmp_path / "stop").touch()
    for c in cs[2:]:
        assert c.get() == "up"
        assert c.get() > 0
        c.end()
    stat("reap")
    assert stat("processes") == 1
    assert stat("events") == base
