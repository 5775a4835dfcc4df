"""A second process for a test: spawned, told over a pipe which functions to run, killed if need be, never orphaned."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from tests.kit.until import DEADLINE_S

_ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1

T = TypeVar("T")

at_end: list[Callable[[], None]] = []
"""What a peer calls before it ends by itself."""


class PeerError(AssertionError):
    """The function raised in the peer (the text is its traceback), or the peer ended without an answer."""


class Peer:
    """A fresh Python process that imports what it is asked to run, and shares nothing with this one but `env`."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._pipe, theirs = Pipe()
        fd = theirs.fileno()
        command = [sys.executable, "-c", "from tests.kit.peer import main; main()", str(fd), str(os.getpid())]
        # Warnings are errors there too, as they are in the tests themselves.
        settings = {**os.environ, "PYTHONWARNINGS": "error", **(env or {})}
        self._process = subprocess.Popen(command, pass_fds=[fd], cwd=_ROOT, env=settings)
        theirs.close()
        self._owed = 0

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def call(self, fn: Callable[..., T], *args: Any) -> T:
        """What `fn(*args)` returns there; `fn` is a module-level function. PeerError if it raises or takes 30 s."""
        self.begin(fn, *args)
        answer: T = self.result()
        return answer

    def begin(self, fn: Callable[..., Any], *args: Any) -> None:
        """Start `fn(*args)` there; `result` fetches what it returns."""
        self._pipe.send((fn, args))
        self._owed += 1

    @property
    def has_result(self) -> bool:
        """Whether what was begun has returned already."""
        return self._pipe.poll(0)

    def result(self) -> Any:
        """What the function begun first returned."""
        if not self._pipe.poll(DEADLINE_S):
            raise PeerError(f"the peer {self.pid} did not answer within {DEADLINE_S:g} s")
        try:
            succeeded, value = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise PeerError(f"the peer ended without an answer, status {self._process.wait(DEADLINE_S)}") from error
        self._owed -= 1
        if not succeeded:
            raise PeerError(f"in the peer:\n{value}")
        return value

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it by SIGKILL, and reap it."""
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        """Let it end by itself, or kill it if it is inside a call. AssertionError if it does not end."""
        if self._process.poll() is None:
            if self._owed:
                self.kill()
            else:
                self._pipe.send(None)
        self._pipe.close()
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the peer {self.pid} did not end within {DEADLINE_S:g} s of being told") from None


def serve(pipe: Connection) -> None:
    """Run what comes over the pipe, until None or its end."""
    while (request := pipe.recv()) is not None:
        fn, args = request
        try:
            answer = (True, fn(*args))
        except BaseException:  # noqa: BLE001 - the other side raises it
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def main() -> None:
    """The peer's side, with the pipe's descriptor and the parent's pid as arguments."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not orphaned, even inside a driver call
    if os.getppid() != parent:
        return
    try:
        serve(Connection(fd))
    except EOFError:
        return  # the parent closed its side: that is the end as well
    for function in at_end:
        function()
