"""Other processes for these tests: some that obey orders, and fresh interpreters."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.kit.until import DEADLINE_S, until
from tests.softcuda.kit import IPC, NONBLOCK, Latch, code, handle_bytes, ok, open_event, open_memory, raw, start, stat

_ROOT = Path(__file__).parents[2]
_FUTEX, CLONE, _EXIT = {"x86_64": (202, 56, 60), "aarch64": (98, 220, 93)}[platform.machine()]
"""The numbers of system calls."""
_NEW_PID_NAMESPACE = 0x20000000  # CLONE_NEWPID
_PRELUDE = "import glob, os, sys, time\nfrom tests.softcuda.kit import *\nfrom tests.softcuda.processes import Server\n"
# Children are forked by a process that has loaded what they need and used none of it: they start in milliseconds.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["cuda.bindings.driver", "pytest"])

MakeServers = Callable[..., Any]
"""Makes so many servers, one if no number is given."""


def py(source: str, succeeds: bool = True, **env: object) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter, with the environment given."""
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(source)],
        env={**os.environ, **{name: str(value) for name, value in env.items()}},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert not succeeds or done.returncode == 0, done.stdout + done.stderr
    return done


def _run(settings: dict[str, str], stderr: Any, function: Callable[..., None], *args: Any) -> None:
    for name in [name for name in os.environ if name.startswith("IPCSYNC_HOST_")]:
        del os.environ[name]  # what the forkserver began with
    os.environ.update(settings)
    os.dup2(stderr.detach(), 2)
    function(*args)
    # The end that a program comes to, with what the library does then: a forked child would skip it.
    ctypes.CDLL(None).exit(0)


class Child:
    """A process beside this one that runs `function(connection, *args)`, with this one's IPCSYNC_HOST variables."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self.conn, there = _FORKSERVER.Pipe()
        settings = {name: value for name, value in os.environ.items() if name.startswith("IPCSYNC_HOST_")}
        self.p = _FORKSERVER.Process(target=_run, args=(settings, DupFd(2), function, there, *args), daemon=True)
        self.p.start()
        there.close()

    def send(self, order: Any) -> None:
        """Send it a message."""
        self.conn.send(order)

    def get(self) -> Any:
        """Its next message; AssertionError if none comes within 30 s."""
        assert self.conn.poll(DEADLINE_S), "child does not answer"
        return self.conn.recv()

    def until_blocked(self) -> None:
        """Wait until it sleeps in the driver: on a futex, where it waits for no message."""
        calls = Path(f"/proc/{self.p.pid}/syscall")
        until(lambda: calls.read_text().split()[0] == str(_FUTEX), "it sleeps in the driver")

    @property
    def pid(self) -> int:
        """Its process id, as this process knows it."""
        assert self.p.pid is not None
        return self.p.pid

    def kill(self) -> None:
        """SIGKILL; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait until it has ended by itself."""
        self.p.join(DEADLINE_S)
        assert self.p.exitcode == 0


class Server(Child):
    """A process that obeys one order at a time: `server("record", "e", 0)` returns what the order came to."""

    _function: Callable[..., None]

    def __init__(self, device: int = 0) -> None:
        super().__init__(type(self)._function, device)

    def __call__(self, *order: Any) -> Any:
        """The answer to an order."""
        self.send(order)
        return self.get()

    def end(self) -> None:
        """Tell it to end, and wait for it."""
        self("end")
        super().end()


class _Held:
    """What a server holds, by the names that its orders use."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.streams: dict[Any, Any] = {}
        self.events: dict[Any, Any] = {}
        self.latches: dict[Any, Latch] = {}
        self.memory: dict[Any, Any] = {}

    def stream(self, name: Any) -> None:
        self.streams[name] = ok(drv.cuStreamCreate(NONBLOCK))

    def create(self, name: Any) -> bytes:
        self.events[name] = ok(drv.cuEventCreate(IPC))
        return handle_bytes(self.events[name])

    def create_many(self, count: int) -> bytes:
        return [self.create(k) for k in range(count)][-1]

    def open(self, name: Any, handle: bytes) -> int:
        return _keep(open_event(handle), self.events, name)

    def destroy(self, name: Any) -> int:
        return code(drv.cuEventDestroy(self.events.pop(name)))

    def record(self, name: Any, stream: Any, flags: int = 0) -> int:
        return code(drv.cuEventRecordWithFlags(self.events[name], self.streams[stream], flags))

    def race(self, name: Any, path: str, rounds: int, holds: bool) -> int:
        """Record when another process does, so often; how often the event was complete while one record was held."""
        event, stream, complete = self.events[name], self.streams[0], 0
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as page, memoryview(page).cast("Q") as words:

            def meet(step: int) -> None:
                mine, other = 2 * step + holds, 2 * step + (not holds)
                words[mine] += 1
                while words[other] < words[mine]:
                    os.sched_yield()

            for _ in range(rounds):
                latch = Latch(stream) if holds else None
                meet(0)
                ok(drv.cuEventRecord(event, stream))
                meet(1)
                if latch is not None:
                    complete += code(drv.cuEventQuery(event)) == 0
                    latch.open()
                ok(drv.cuStreamSynchronize(stream))
                meet(2)
        return complete

    def wait(self, stream: Any, name: Any) -> int:
        return code(drv.cuStreamWaitEvent(self.streams[stream], self.events[name], 0))

    def query(self, name: Any) -> int:
        return code(drv.cuEventQuery(self.events[name]))

    def sync(self, name: Any) -> int:
        return code(drv.cuEventSynchronize(self.events[name]))

    def squery(self, stream: Any) -> int:
        return code(drv.cuStreamQuery(self.streams[stream]))

    def ssync(self, stream: Any) -> int:
        return code(drv.cuStreamSynchronize(self.streams[stream]))

    def sdestroy(self, stream: Any) -> int:
        return code(drv.cuStreamDestroy(self.streams.pop(stream)))

    def capture(self, stream: Any, mode: int = 0) -> int:
        return code(drv.cuStreamBeginCapture(self.streams[stream], drv.CUstreamCaptureMode(mode)))

    def endcapture(self, stream: Any) -> int:
        return code(drv.cuStreamEndCapture(self.streams[stream]))

    def launch(self, stream: Any) -> int:
        """End the stream's capture, and launch what it captured there."""
        graph = ok(drv.cuStreamEndCapture(self.streams[stream]))
        return code(drv.cuGraphLaunch(ok(drv.cuGraphInstantiate(graph, 0)), self.streams[stream]))

    def hold(self, stream: Any) -> None:
        self.latches[stream] = Latch(self.streams[stream])

    def let(self, stream: Any) -> None:
        self.latches.pop(stream).open()

    def alloc(self, name: Any, size: int) -> bytes:
        self.memory[name] = ok(drv.cuMemAlloc(size))
        return raw(ok(drv.cuIpcGetMemHandle(self.memory[name])))

    def fill(self, name: Any, value: int, size: int, stream: Any) -> None:
        ok(drv.cuMemsetD8Async(self.memory[name], value, size, self.streams[stream]))

    def free(self, name: Any) -> int:
        return code(drv.cuMemFree(self.memory.pop(name)))

    def openmem(self, name: Any, handle: bytes) -> int:
        return _keep(open_memory(handle), self.memory, name)

    def stat(self, what: str) -> int:
        return stat(what)

    def exit(self) -> None:
        os._exit(7)

    def python(self, source: str) -> Any:
        names = {"conn": self.conn, "ctypes": ctypes, "held": self, "libc": ctypes.CDLL(None), "os": os, "drv": drv}
        exec(textwrap.dedent(source), names)
        return names.get("answer")


def _keep(result: tuple[Any, ...], where: dict[Any, Any], name: Any) -> int:
    if not code(result):
        where[name] = result[1]
    return code(result)


def _serve(conn: Connection, device: int) -> None:
    start(device)
    held = _Held(conn)
    while (order := conn.recv())[0] != "end":
        conn.send(getattr(held, order[0])(*order[1:]))
    conn.send(None)


def _serve_on_another_thread(conn: Connection, device: int) -> None:
    threading.Thread(target=_serve, args=(conn, device)).start()
    ctypes.CDLL(None).syscall(_EXIT, 0)


def _serve_elsewhere(conn: Connection, device: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    error = 0 if libc.unshare(_NEW_PID_NAMESPACE) == 0 else ctypes.get_errno()
    if error:
        conn.send((0, error))
        return
    if pid := os.fork():
        conn.send((pid, 0))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    assert os.getpid() == 1
    _serve(conn, device)


Server._function = staticmethod(_serve)


class HeadlessServer(Server):
    """A server whose main thread has ended."""

    _function = staticmethod(_serve_on_another_thread)


class ServerElsewhere(Server):
    """A server that is process 1 of a pid namespace of its own. Skips the test where that is not permitted."""

    _function = staticmethod(_serve_elsewhere)

    def __init__(self, device: int = 0) -> None:
        super().__init__(device)
        self._pid: int
        self._pid, error = self.get()
        if error:
            pytest.skip(f"a pid namespace cannot be made: {os.strerror(error)}")

    @property
    def pid(self) -> int:
        """Its process id out here."""
        return self._pid
