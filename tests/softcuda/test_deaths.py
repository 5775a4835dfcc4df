"""What a process leaves that ends, in whatever way, and what becomes of those that wait for it."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.kit.until import until
from tests.softcuda.kit import IPC, SIM, code, handle_bytes, ok, stat
from tests.softcuda.processes import MakeServers, py


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit", "return"])
def test_process_ends_with_pending_record(servers: MakeServers, how: str) -> None:
    a, b = servers(2)
    h, h2 = a("create", "e"), a("create", "f")
    b("stream", 0)
    assert b("open", "e", h) == 0
    a("stream", 0)
    a("hold", 0)
    a("record", "e", 0)
    assert b("query", "e") == 600
    b("wait", 0, "e")
    assert b("squery", 0) == 600
    b.send(("sync", "e"))
    b.until_blocked()
    t = time.monotonic()
    if how == "SIGKILL":
        a.kill()
    elif how == "os._exit":
        a.send(("exit",))
    else:
        a.send(("end",))
    assert b.get() == 0
    assert time.monotonic() - t < 5
    assert b("query", "e") == 0
    assert b("ssync", 0) == 0
    assert b("open", "f", h2) == 0  # its events are there as long as there is room
    assert b("record", "e", 0) == 0
    assert b("sync", "e") == 0


def test_importer_dies(servers: MakeServers) -> None:
    a, b, c = servers(3)
    base = c("stat", "events")
    h = a("create", "e")
    for x in (b, c):
        assert x("open", "e", h) == 0
    b("stream", 0)
    b("hold", 0)
    b("record", "e", 0)
    assert a("query", "e") == 600
    assert c("query", "e") == 600
    b.kill()
    until(lambda: a("query", "e") == 0, "the record is complete")
    assert c("sync", "e") == 0
    a("destroy", "e")
    c("destroy", "e")
    c("stat", "reap")
    assert c("stat", "events") == base


@pytest.fixture
def pending(servers: MakeServers, monkeypatch: pytest.MonkeyPatch) -> MakeServers:
    """Makes servers for which what the dead left pending stays pending."""

    def make(n: int | None = None) -> Any:
        with monkeypatch.context() as m:
            m.setenv("IPCSYNC_HOST_DEATH", "pending")
            return servers(n)

    return make


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit", "return"])
def test_death_pending(servers: MakeServers, pending: MakeServers, how: str) -> None:
    a, other = servers(2)
    b = pending()
    late, hs = a("create", "late"), {k: a("create", k) for k in ("before", "lost")}
    for x in (b, other):
        assert x("open", "before", hs["before"]) == x("open", "lost", hs["lost"]) == 0
        x("stream", 0)
        x("stream", 1)
    a("stream", 0)
    a("record", "before", 0)
    a("ssync", 0)
    a("hold", 0)
    a("record", "lost", 0)
    for x in (b, other):
        assert x("wait", 0, "lost") == 0
        assert x("squery", 0) == 600
    other.send(("sync", "lost"))
    if how == "SIGKILL":
        a.kill()
    elif how == "os._exit":
        a.send(("exit",))
    else:
        a.send(("end",))
    a.p.join()
    assert other.get() == 0
    assert other("ssync", 0) == 0
    assert other("query", "lost") == 0
    for _ in range(3):
        assert b("query", "lost") == 600
        assert b("squery", 0) == 600
        assert b("query", "before") == 0
        assert b("sync", "before") == 0
        assert b("open", "late", late) == 0
        b("stat", "reap")
    assert b("wait", 1, "lost") == 0
    assert b("squery", 1) == 600
    for k in range(100, 200):  # new streams are not touched by it
        b("stream", k)
        assert b("squery", k) == 0
    assert b("record", "lost", 100) == 0
    assert b("query", "lost") == b("squery", 100) == 600
    assert b("squery", 0) == b("squery", 1) == 600
    assert b("sdestroy", 0) == 0
    b.end()  # with two streams blocked


def test_death_pending_passes_on(servers: MakeServers, pending: MakeServers) -> None:
    a, other = servers(2)
    b, c = pending(2)
    ha, hc = a("create", "a"), c("create", "c")
    for x in (b, other):
        assert x("open", "c", hc) == 0
    b("stream", 0)
    b("open", "a", ha)
    a("stream", 0)
    a("hold", 0)
    a("record", "a", 0)
    b("wait", 0, "a")
    b("record", "c", 0)
    a.kill()
    a.p.join()
    assert b("squery", 0) == c("query", "c") == other("query", "c") == 600  # b still lives: its record may yet come
    b.kill()
    b.p.join()
    until(lambda: other("query", "c") == 0, "the record is complete")
    assert c("query", "c") == 600


def test_death_pending_leaves_nothing() -> None:
    seg = f"selftest-d-{os.getpid()}"
    path = py(
        """
    start(); print(SIM.softcudaPath().decode())
    a = Server(); h = a("create", "e"); a("alloc", "m", 4096), a("stream", 0), a("hold", 0), a("record", "e", 0)
    e = ok(open_event(h)); s = ok(drv.cuStreamCreate(NONBLOCK))
    ok(drv.cuStreamWaitEvent(s, e, 0)); ok(drv.cuMemAlloc(4096))
    a.kill(), a.p.join(), stat("reap")
    assert code(drv.cuEventQuery(e)) == 600 and code(drv.cuStreamQuery(s)) == 600
    assert stat("processes") == 1 and stat("memory") == 4096 and len(files("~m.*")) == 1
    ok(drv.cuEventDestroy(e)); assert stat("events") == 0
    """,
        IPCSYNC_HOST_SEGMENT=seg,
        IPCSYNC_HOST_DEATH="pending",
    ).stdout.strip()
    assert seg in path
    assert glob.glob(path + "*") == []
    assert "complete or pending" in py("start()", succeeds=False, IPCSYNC_HOST_DEATH="sudden").stderr


def test_last_process_leaves_nothing() -> None:
    code = "start(); ok(drv.cuMemAlloc(4096)); ok(drv.cuEventCreate(IPC)); print(SIM.softcudaPath().decode()); "
    seg = f"selftest-x-{os.getpid()}"
    path = py(code, IPCSYNC_HOST_SEGMENT=seg).stdout.strip()
    assert seg in path
    assert glob.glob(path + "*") == []
    code += f"print(len(glob.glob('{path}*')), flush=True); os.kill(os.getpid(), 9)"
    assert py(code, succeeds=False, IPCSYNC_HOST_SEGMENT=seg).stdout.split() == [path, "3"]
    py("start()", IPCSYNC_HOST_SEGMENT=seg + "-other")  # any process's start cleans up; another test's may have
    until(lambda: not glob.glob(path + "*"), "it is cleaned up")  # by a third process, if that has the lock


def test_a_segment_whose_maker_was_killed_before_it_was_ready_goes(ctx: Any) -> None:
    seg = f"selftest-w-{os.getpid()}"
    path = py("start(); print(SIM.softcudaPath().decode())", IPCSYNC_HOST_SEGMENT=seg).stdout.strip()
    size = os.stat(SIM.softcudaPath().decode()).st_size
    with open(path, "wb") as made:
        made.truncate(size)
    py("start()", IPCSYNC_HOST_SEGMENT=seg + "-other")
    until(lambda: not glob.glob(path + "*"), "it is cleaned up")


def test_a_segment_whose_name_goes_on_where_anothers_ends_is_left_alone() -> None:
    seg = f"selftest-n-{os.getpid()}"
    longer = f"py('start()', IPCSYNC_HOST_SEGMENT={seg!r}); assert os.path.exists(SIM.softcudaPath())"
    py("from tests.softcuda.processes import py\nstart(); " + longer, IPCSYNC_HOST_SEGMENT=seg + ".m.0")


def test_segments_do_not_meet(ctx: Any) -> None:
    h = handle_bytes(ok(drv.cuEventCreate(IPC)))
    alone = f"start(); assert code(open_event({h!r})) == 205; assert stat('processes') == 1"
    py(alone, IPCSYNC_HOST_SEGMENT=f"selftest-y-{os.getpid()}")
    py(f"start(); ok(open_event({h!r}))")


_FORKS_WITHIN_CUINIT = """
import fcntl, signal, threading
from tests.kit.until import until
hold, held = os.pipe(), os.pipe()
if not (locker := os.fork()):
    is_held = False
    while not is_held:  # another process that starts may remove what nobody holds yet
        holder = os.open({path!r}, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(holder, fcntl.LOCK_EX)
        is_held = os.fstat(holder).st_nlink > 0
    os.write(held[1], b"x")
    os.read(hold[0], 1)
    os._exit(0)
os.read(held[0], 1)
codes = []
thread = threading.Thread(target=lambda: codes.append(code(drv.cuInit(0))))
thread.start()
waits = lambda: any("->" in line and str(os.getpid()) in line.split() for line in open("/proc/locks"))
until(waits, "cuInit waits for the lock of the segment")
if not (child := os.fork()):
    signal.alarm(20)
    os._exit(code(drv.cuInit(0)))
status = os.waitpid(child, 0)[1]
os.write(hold[1], b"x")
thread.join()
os.waitpid(locker, 0)
assert (status, codes) == (3 << 8, [0]), (status, codes)
"""


def test_a_child_that_was_forked_within_cuinit_is_told(ctx: Any) -> None:
    name = f"selftest-i-{os.getpid()}"
    path = SIM.softcudaPath().decode().replace(os.environ["IPCSYNC_HOST_SEGMENT"], name)
    py(_FORKS_WITHIN_CUINIT.format(path=path), IPCSYNC_HOST_SEGMENT=name)


def test_fork(ctx: Any) -> None:
    e = ok(drv.cuEventCreate(IPC))
    rd, wr = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            rs = [
                drv.cuInit(0),
                drv.cuCtxGetCurrent(),
                drv.cuEventQuery(e),
                drv.cuEventCreate(0),
                drv.cuDeviceGetCount(),
            ]
            os.write(wr, b" ".join(str(code(r)).encode() for r in rs))
        finally:
            os._exit(0)
    os.close(wr)
    assert os.read(rd, 100) == b"3 3 3 3 3"
    os.waitpid(pid, 0)
    ok(drv.cuEventQuery(e))  # the child's end took nothing away
    py(
        "pid = os.fork()\nif pid: assert os.waitpid(pid, 0)[1] == 0\nelse: start(); ok(drv.cuEventCreate(IPC))"
    )  # fork first: fine


def test_exec_starts_afresh() -> None:
    py(
        """
    start(); e = ok(drv.cuEventCreate(IPC)); ok(drv.cuMemAlloc(4096))
    if not os.environ.get("AGAIN"):
        os.environ["AGAIN"] = "1"
        again = "from tests.softcuda.kit import *; start(); assert stat('events') == stat('memory') == 0"
        os.execv(sys.executable, [sys.executable, "-c", again])
    """,
        IPCSYNC_HOST_SEGMENT=f"selftest-z-{os.getpid()}",
    )


def test_reaping_waits_for_another_process_that_looks_at_the_segment(servers: MakeServers) -> None:
    server = servers()
    assert server("stat", "processes") == 2
    server.kill()
    server.p.join()
    code = "import fcntl, sys\nfcntl.lockf(file := open(sys.argv[1], 'r+b'), fcntl.LOCK_EX)\nprint(flush=True)\ninput()"
    looker = subprocess.Popen(
        [sys.executable, "-c", code, SIM.softcudaPath()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert looker.stdin
    assert looker.stdout
    looker.stdout.readline()
    looks = threading.Timer(0.1, looker.stdin.close)
    looks.start()
    stat("reap")
    assert stat("processes") == 1
    looks.join()
    looker.wait()
    looker.stdout.close()
