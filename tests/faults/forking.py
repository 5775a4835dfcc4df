"""Forks of every kind, and what a child says of itself."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import ipcsync
from ipcsync import _drivers
from ipcsync._board import Board

DEADLINE_S = 20.0
_AWAKE_S = 0.5
_TRIES = 20
_PROT_NONE = 0
_py_dll = ctypes.PyDLL(None)


def _python_fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        return os.fork()


def _with_the_gil() -> int:
    """C's fork by PyDLL, which keeps the GIL, while no thread asks for it.

    A child whose parent was asked waits for the thread that did, which is not there, as soon as it releases the GIL.
    A thread asks once it has waited for the switch interval.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(DEADLINE_S)
    try:
        time.sleep(4 * interval)  # whoever has asked, or is about to, gets it
        return int(_py_dll.fork())
    finally:
        sys.setswitchinterval(interval)


def _in_thread() -> int:
    """A fork by another thread of the parent; in the child, that thread is the only one."""
    pids: list[int] = []
    thread = threading.Thread(target=lambda: pids.append(_python_fork()))
    thread.start()
    thread.join()
    return pids[0]


FORKS: dict[str, Callable[[], int]] = {
    "os.fork": _python_fork,
    # C's own fork tells Python nothing. PyDLL keeps the GIL over it, CDLL lets go of it.
    "PyDLL": _with_the_gil,
    "CDLL": ctypes.CDLL(None).fork,
}


class Child:
    """A child that one kind of fork makes of this process, and that runs `body` and ends by os._exit."""

    def __init__(self, kind: str, body: Callable[[], Any]) -> None:
        statuses: list[int] = []
        for _ in range(_TRIES):
            self._read, write = os.pipe()
            self.pid = FORKS[kind]()
            if self.pid == 0:
                _end_child(write, body)
            os.close(write)
            if self._is_awake(_AWAKE_S if kind == "CDLL" else DEADLINE_S):
                return
            self.end()
            statuses.append(self.status)
        raise AssertionError(f"no child of {_TRIES} began to run; they ended with {statuses}")

    def _is_awake(self, timeout: float) -> bool:
        """Whether the child's first byte comes.

        CDLL gives the GIL away for the call. A thread that takes it in the instant of the fork has it in the child too,
        where that thread is not: such a child never runs, whatever it was to do. Every second one may be such a child
        while a thread polls.
        """
        ready, _, _ = select.select([self._read], [], [], timeout)
        return bool(ready) and os.read(self._read, 1) == b"!"

    def result(self) -> Any:
        """What `body` returned; AssertionError with its traceback, or if the child hangs or dies."""
        try:
            data = self._read_all()
        finally:
            self.end()
        assert data, f"the child ended without a word, status {self.status}"
        value, problem = pickle.loads(data)
        assert not problem, problem
        return value

    def _read_all(self) -> bytes:
        data = b""
        while True:
            ready, _, _ = select.select([self._read], [], [], DEADLINE_S)
            assert ready, "the child hangs"
            chunk = os.read(self._read, 65536)
            if not chunk:
                return data
            data += chunk

    def end(self) -> None:
        """Kill it if it still runs, and reap it."""
        os.kill(self.pid, signal.SIGKILL)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._read)


def _end_child(write: int, body: Callable[[], Any]) -> NoReturn:
    os.write(write, b"!")
    try:
        answer: tuple[Any, str] = (body(), "")
    except BaseException:  # noqa: BLE001 - the parent raises it
        answer = (None, traceback.format_exc())
    data = pickle.dumps(answer)
    while data:
        data = data[os.write(write, data) :]
    os._exit(0)


def thread_forked(body: Callable[[], Any]) -> Any:
    """The result of a child that another thread of this process forks."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(Child("os.fork", body).result()))
    thread.start()
    thread.join()
    return results[0]


class Untouchable(types.ModuleType):
    """A driver of which every function notes that it was asked for."""

    def __init__(self) -> None:
        super().__init__("untouchable")
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.asked.append(name)
        raise AssertionError(f"{name} was asked of the driver in a forked child")


def forbid_touching(board: Board) -> Untouchable:
    """In a child: from now on a touch of the board is the end of it, and a call of the driver is noted."""
    length = os.fstat(os.open(board.path, os.O_RDONLY)).st_size
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(board.address), length, _PROT_NONE) == 0
    driver = Untouchable()
    _drivers._chosen = (_drivers.name(), driver)
    return driver


def not_refused(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Those of the calls that did anything but raise ForkedProcessError, and what they did."""
    answers = {name: _answer(call) for name, call in calls.items()}
    return {name: answer for name, answer in answers.items() if answer}


def _answer(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()!r}"
    except ipcsync.ForkedProcessError:
        return ""
    except BaseException:  # noqa: BLE001 - it is told
        return traceback.format_exc()


def collect_everything(kept: dict[str, Any]) -> None:
    """Drop every reference, and have the garbage collector finalize what is left in cycles."""
    kept.clear()
    gc.collect()
