"""What the fault tests need on this side: blocked calls, conditions with a deadline, coordinators that misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ipcsync
from ipcsync._launch import Coordinator
from ipcsync._linux.process import PidFd, start_time
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit.collector import collector_off
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until
from tests.kit.zygote import children_of

ENGINES: tuple[EngineName, ...] = ("event", "timeline")
_ROOT = Path(__file__).parents[2]


def each_once(*others: str) -> list[Any]:
    """Each engine with each of these, for `parametrize`: in an everyday run every other pair, in a long one all."""
    return [
        pytest.param(engine, other, marks=pytest.mark.thorough if (row + column) % 2 else [])
        for row, other in enumerate(others)
        for column, engine in enumerate(ENGINES)
    ]


IN_CORE = "the compiled core"
_FUTEX, _SLEEPS = {"x86_64": ("202", ("35", "230")), "aarch64": ("98", ("101", "115"))}.get(
    os.uname().machine, ("", ())
)
_OPERATION, _FUTEX_WAIT = 0x7F, 0


def sleeps_in_core(task: int | None) -> bool:
    """Whether the thread of that id, of any process, sleeps on a word, a turn's lock or for a time, each with an end.

    No other part of a call does. Python's own locks sleep by FUTEX_WAIT_BITSET, the C library's without an end.
    """
    call = Path(f"/proc/{task}/syscall").read_text().split()
    if call[0] != _FUTEX:
        return call[0] in _SLEEPS
    operation, end = int(call[2], 16), int(call[4], 16)
    return operation & _OPERATION == _FUTEX_WAIT and end != 0


class Blocked:
    """A call on a thread of its own, which counts as blocked once it is inside of the function named `entered`.

    If that is IN_CORE: once it sleeps in the compiled core.
    """

    def __init__(self, fn: Callable[[], object], entered: str = IN_CORE) -> None:
        self._fn = fn
        self._entered = entered
        self._outcome: BaseException | object = None
        self.ended = 0.0
        self._thread = threading.Thread(target=self._run, name=f"blocked-{entered}", daemon=True)
        self._thread.start()
        until(lambda: self._is_inside() or not self._thread.is_alive(), f"a thread inside {entered}")
        assert self._thread.is_alive(), f"it did not block: {self._outcome!r}"

    def _run(self) -> None:
        try:
            self._outcome = self._fn()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks
            self._outcome = error
        self.ended = time.monotonic()

    def _is_inside(self) -> bool:
        if self._entered == IN_CORE:
            return self._thread.is_alive() and sleeps_in_core(self._thread.native_id)
        with collector_off():  # CPython before 3.12 hangs for ever if a finalizer gives up the GIL in this call
            frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            if self._entered in frame.f_code.co_name:  # a mutant of it is called after it
                return True
            frame = frame.f_back
        return False

    def outcome(self, seconds: float = DEADLINE_S) -> BaseException | object:
        """What the call returned, or the exception that it raised; AssertionError if it is still blocked."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"a call still hangs inside {self._entered} after {seconds:g} s"
        return self._outcome


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, D, T (stopped), Z (zombie); empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_ended(pid: int) -> bool:
    """Whether a process has ended with all its threads; a zombie may still have open files."""
    try:
        process = PidFd(pid)
    except ProcessLookupError:
        return True
    try:
        return process.has_ended()
    finally:
        process.close()


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has stopped; of a keeper, its coordinator too."""
    for each in (pid, *_kept_by(pid)):
        os.kill(each, signal.SIGSTOP)
        until(lambda: state_of(each) == "T", f"process {each} stopped")  # noqa: B023 - called at once


def resume(pid: int) -> None:
    """SIGCONT."""
    for each in (*_kept_by(pid), pid):
        os.kill(each, signal.SIGCONT)


def _kept_by(pid: int) -> list[int]:
    """The coordinator of a keeper, where the run is over such ones (IPCSYNC_TEST_KEEPER)."""
    if not os.environ.get("IPCSYNC_TEST_KEEPER"):
        return []
    return children_of(pid)


def serving(coordinator: Coordinator) -> int:
    """The process that listens to clients: of a keeper, its coordinator."""
    return (_kept_by(coordinator.pid) or [coordinator.pid])[0]


def kill(coordinator: Coordinator, client: ipcsync.Client) -> None:
    """SIGKILL a coordinator, and remove the board of it, as the next one to start would: another test's already may."""
    os.kill(coordinator.pid, signal.SIGKILL)
    until(lambda: has_ended(coordinator.pid), "it has let go of its directory")
    Path(client._session.lease.board.path).unlink(missing_ok=True)


def deaths(client: ipcsync.Client) -> dict[str, int]:
    """How many sessions were lost, and how that was found."""
    found: dict[str, int] = client.stats()["deaths"]
    return found


def until_lost(client: ipcsync.Client, how: str, count: int = 1) -> None:
    """Wait until the coordinator has lost `count` sessions in that way."""
    until(lambda: deaths(client)[how] >= count, f"{count} sessions lost by {how}")


def private_dir() -> str:
    """A new runtime directory, short enough for a socket's path."""
    return tempfile.mkdtemp(prefix="ipcsync-test-")


def launch_patched(patch: str, runtime_dir: str, *flags: str) -> Coordinator:
    """A coordinator that runs with one of the patches of `tests.faults.patched`."""
    keeper = [] if "--keeper" in flags else ["--no-keeper"]
    command = [sys.executable, "-m", "tests.faults.patched", patch, *flags, *keeper, "--runtime-dir", runtime_dir]
    command += ["--exit-with", f"{os.getpid()}:{start_time(os.getpid())}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])}
    return Coordinator(command, environment, runtime_dir, temporary=True)


_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# Shared memory and temporary files of its own: who judges by pids there would take everybody else's for abandoned.
_ALONE = 'mount -t tmpfs tmpfs /dev/shm && mkdir -m 700 /dev/shm/tmp && export TMPDIR=/dev/shm/tmp && exec "$@"'


class ForeignPeer(Peer):
    """A peer in a pid namespace of its own, where the pids of this one mean nothing.

    `alone`: it also has a /dev/shm and a temporary folder of its own, and so reaches nothing of anybody else.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._enter = [*_UNSHARE, "sh", "-c", _ALONE, "sh"] if alone else [*_UNSHARE]
        super().__init__()

    def _command(self, fd: int) -> list[str]:
        return [*self._enter, sys.executable, "-m", "tests.faults.foreign", str(fd)]

    @staticmethod
    def why_not() -> str | None:
        """Why a pid namespace cannot be made here, None if one can."""
        try:
            enter = [*_UNSHARE, "sh", "-c", _ALONE, "sh", "true"]
            done = subprocess.run(enter, capture_output=True, check=False, timeout=DEADLINE_S)
        except FileNotFoundError:
            return "there is no unshare(1) here"
        return None if done.returncode == 0 else f"no new pid namespace here: {done.stderr.decode().strip()}"


def finish(point: ipcsync.Point) -> None:
    """Wait for a point that must become complete."""
    point.synchronize(DEADLINE_S)
    assert point.query()


class Held:
    """A client that is blocked in every way that there is."""

    def __init__(self, client: ipcsync.Client, engine: EngineName) -> None:
        self.client = client
        self.stream = ipcsync.Stream()
        self.gate = StreamGate(self.stream)
        self.event = client.event("e", recorder=True, engine=engine, depth=1)
        self.point = self.event.record(self.stream)
        self.nobodys = client.event("nobody's")
        self.watch = client.watch()
        for _ in range(len(client.list_events()) + len(client.list_sessions())):
            next(self.watch)
        self.told: list[ipcsync.Point] = []
        self.point.add_done_callback(self.told.append)
        free = ipcsync.Stream()
        self.calls = {
            "synchronize": Blocked(self.point.synchronize),
            "synchronize what is not recorded": Blocked(self.nobodys.at(1).synchronize),
            "wait for a record": Blocked(lambda: self.nobodys.at(1).wait(free)),
            "watch": Blocked(lambda: next(self.watch), "_receive"),
        }
        if engine == "event":
            self.calls["record on a full ring"] = Blocked(lambda: self.event.record(self.stream))

    def ask(self) -> None:
        """Begin requests that a stopped coordinator does not answer."""
        self.calls["a request in flight"] = Blocked(self.client.stats, "_call")
        self.calls["a request behind it"] = Blocked(lambda: self.client.event("x"), "_call")

    def assert_all_are_lost(self) -> None:
        for what, call in self.calls.items():
            assert isinstance(call.outcome(), ipcsync.CoordinatorLost), what
        until(lambda: bool(self.told), "the callback")
        assert isinstance(self.told[0].exception(), ipcsync.CoordinatorLost)
        uses: dict[str, Callable[[], object]] = {
            "query": self.point.query,
            "wait": lambda: self.point.wait(ipcsync.Stream()),
            "record": self.event.record,
            "record unnamed": self.client.record,
            "open": lambda: self.client.event("other"),
            "point": lambda: self.client.point(bytes(self.point)),
            "stats": self.client.stats,
            "watch": lambda: next(self.client.watch()),
        }
        for what, use in uses.items():
            with pytest.raises(ipcsync.CoordinatorLost):
                pytest.fail(f"{what} gave {use()!r}")
        assert not self.client.is_connected
        self.nobodys.close()  # raises nothing, and does not wait for an answer

    def end(self) -> None:
        self.gate.open()
