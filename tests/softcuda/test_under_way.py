"""Work that is under way when its process is killed: it goes on to its end, and the process ends after it."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ipcsync._linux.process import PidFd
from tests.kit.until import DEADLINE_S, until
from tests.softcuda.processes import MakeServers, Server, py

SIZE = 4096
DONE, NOT_READY = 0, 600
LATENCY = {"IPCSYNC_HOST_LATENCY_US": "200000"}  # of each operation: a test does not depend on how long it is

HOST_FUNCTION = """
held.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(bool)
drv.cuLaunchHostFunc(held.streams[0], drv.CUhostFn(ctypes.cast(held.call, ctypes.c_void_p).value), 0)
"""


@pytest.fixture
def victim(servers: MakeServers, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A process with a stream and memory, whose operations are long."""
    monkeypatch.setenv("IPCSYNC_HOST_DEATH", "pending")
    with monkeypatch.context() as patch:
        for name, value in LATENCY.items():
            patch.setenv(name, value)
        made: Server = servers()
        made("stream", 0)
    return made


def watch(watcher: Server, victim: Server) -> None:
    """The watcher has the victim's event and memory."""
    assert watcher("open", "e", victim("create", "e")) == 0
    assert watcher("openmem", "m", victim("alloc", "m", SIZE)) == 0
    watcher("stream", 0)


def byte(watcher: Server) -> Any:
    """The first byte of the victim's memory, as the watcher reads it."""
    return watcher("python", "answer = ctypes.c_ubyte.from_address(int(held.memory['m'])).value")


def kill_amid(watcher: Server, victim: Server) -> None:
    """SIGKILL while its first operation, a fill with 1, is under way; return when the process is a zombie."""
    until(lambda: byte(watcher), "the first operation has begun")
    with closing(PidFd(victim.pid)) as pidfd:
        victim.kill()
        until(lambda: watcher("stat", "dead"), "it is marked")
        assert pidfd.has_ended(DEADLINE_S)


def test_what_a_killed_process_had_under_way_ends_and_then_the_process_does(
    servers: MakeServers, victim: Server
) -> None:
    """The operation that ran, and all behind it that need not wait: a GPU has them already."""
    watcher = servers()
    watch(watcher, victim)
    for value in range(1, 6):
        victim("fill", "m", value, SIZE, 0)
    victim("record", "e", 0)
    kill_amid(watcher, victim)
    assert watcher("query", "e") == DONE
    assert byte(watcher) == 5
    watcher("stat", "reap")
    assert watcher("stat", "processes") == 2
    assert watcher("query", "e") == DONE


@pytest.mark.parametrize("what", ["an event", "a word", "the program"])
def test_what_waits_in_a_killed_process_never_goes_on(servers: MakeServers, victim: Server, what: str) -> None:
    watcher = servers()
    watch(watcher, victim)
    assert victim("open", "w", watcher("create", "w")) == 0
    watcher("hold", 0)
    watcher("record", "w", 0)
    victim("fill", "m", 1, SIZE, 0)
    if what == "an event":
        victim("wait", 0, "w")
    elif what == "a word":
        victim("hold", 0)
    else:
        victim("python", HOST_FUNCTION)
    victim("fill", "m", 2, SIZE, 0)
    victim("record", "e", 0)
    kill_amid(watcher, victim)
    watcher("let", 0)
    assert watcher("ssync", 0) == 0
    watcher("stat", "reap")
    assert watcher("stat", "processes") == 2
    assert watcher("query", "e") == NOT_READY
    assert byte(watcher) == 1


def test_what_the_dead_left_pending_stays_so_by_default(
    servers: MakeServers, victim: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_DEATH", "")
    watcher = servers()
    watch(watcher, victim)
    victim("hold", 0)
    victim("record", "e", 0)
    victim.kill()
    victim.p.join()
    watcher("stat", "reap")
    assert watcher("query", "e") == NOT_READY


def test_a_process_that_is_stopped_goes_on_with_its_work(servers: MakeServers, victim: Server) -> None:
    watcher = servers()
    watch(watcher, victim)
    victim("fill", "m", 1, SIZE, 0)
    victim("fill", "m", 2, SIZE, 0)
    victim("record", "e", 0)
    until(lambda: byte(watcher), "the first operation has begun")
    os.kill(victim.pid, signal.SIGSTOP)
    assert watcher("sync", "e") == 0
    assert byte(watcher) == 2
    os.kill(victim.pid, signal.SIGCONT)
    assert victim("ssync", 0) == 0


def test_the_program_does_not_see_who_does_its_long_operations(ctx: Any) -> None:
    py(
        """
    import ctypes, subprocess
    from tests.kit.until import until
    start()
    s = ok(drv.cuStreamCreate(NONBLOCK)); a, b = ok(drv.cuEventCreate(0)), ok(drv.cuEventCreate(0))
    p = ok(drv.cuMemAlloc(4096)); done = []
    ok(drv.cuEventRecord(a, s))
    for value in range(1, 4): ok(drv.cuMemsetD8Async(p, value, 4096, s))
    ok(drv.cuEventRecord(b, s))
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: done.append(os.getpid()))
    ok(drv.cuLaunchHostFunc(s, drv.CUhostFn(ctypes.cast(call, ctypes.c_void_p).value), 0))
    for value in range(4, 7): ok(drv.cuMemsetD8Async(p, value, 4096, s))
    try:
        os.waitpid(-1, 0); raise AssertionError("it has a child")
    except ChildProcessError:
        pass
    assert subprocess.run(["true"]).returncode == 0
    ok(drv.cuStreamSynchronize(s))
    assert done == [os.getpid()] and ctypes.string_at(int(p), 1) == bytes([6])
    assert ok(drv.cuEventElapsedTime(a, b)) > 0
    ok(drv.cuStreamDestroy(s)); until(lambda: stat("streams") == 0, "the stream is gone")
    def children(task):
        try: return open(f"/proc/self/task/{task}/children").read()
        except (FileNotFoundError, ProcessLookupError): return ""  # a thread that has ended meanwhile
    assert not any(map(children, os.listdir("/proc/self/task")))
    """,
        IPCSYNC_HOST_LATENCY_US=20000,
        IPCSYNC_HOST_SEGMENT=f"selftest-u-{os.getpid()}",
    )


@pytest.mark.parametrize("queues", [1, 8])
def test_a_full_stream_has_room_when_its_first_long_operation_is_over(queues: int) -> None:
    py(
        """
    import ctypes
    start()
    s, p = ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuMemAlloc(4096))
    for value in range(1, 10): ok(drv.cuMemsetD8Async(p, value, 4096, s))
    assert ctypes.string_at(int(p), 1)[0] < 8, "the ninth call did not wait for all eight"
    ok(drv.cuStreamSynchronize(s))
    """,
        IPCSYNC_HOST_LATENCY_US=100_000,
        IPCSYNC_HOST_CAPACITY=8,
        IPCSYNC_HOST_QUEUES=queues,
        IPCSYNC_HOST_SEGMENT=f"selftest-u-{os.getpid()}",
    )


def test_who_waits_for_room_is_woken_though_the_stream_stands_behind_another_one() -> None:
    """In one hardware queue: the stream has done one operation, and the next one stands behind the other's wait."""
    py(
        """
    import threading
    from tests.kit.until import until
    context = start()
    s, t, p = ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuMemAlloc(8))
    first = Latch(s)
    second = Latch(t)
    def write():
        ok(drv.cuCtxSetCurrent(context))
        for value in range(32): ok(drv.cuStreamWriteValue64(s, p, value, 0))
    thread = threading.Thread(target=write)
    thread.start()
    blocked = lambda: open(f"/proc/self/task/{thread.native_id}/syscall").read().split()[0] in ("202", "98")
    until(blocked, "the stream is full")
    first.open()
    until(lambda: not thread.is_alive(), "the last write has room")
    second.open()
    ok(drv.cuStreamSynchronize(s))
    """,
        IPCSYNC_HOST_CAPACITY=32,
        IPCSYNC_HOST_QUEUES=1,
        IPCSYNC_HOST_SEGMENT=f"selftest-u-{os.getpid()}",
    )


def test_a_late_end_is_made_of_pages_to_unmap(servers: MakeServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many is the machine's affair, which is measured anew in each process: as many as take so long there."""

    def mappings(ms: str) -> int:
        monkeypatch.setenv("IPCSYNC_HOST_TEARDOWN_MS", ms)
        server = servers()
        server("stream", 0)
        return Path(f"/proc/{server.pid}/maps").read_text().count("softcuda-teardown")

    assert mappings("0") == 0
    assert mappings("5") > 0
    assert mappings("50") > 0
