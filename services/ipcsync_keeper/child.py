"""One coordinator process, as its keeper sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

from ipcsync._linux.process import PidFd
from ipcsync_keeper.holdings import Holdings
from ipcsync_keeper.link import Link


class Child:
    """A coordinator that was started, and waits with its imports done until it is told to serve.

    Called from the keeper's main thread: the child ends with the thread that started it (PR_SET_PDEATHSIG).
    """

    def __init__(self, holdings: Holdings, command: list[str]) -> None:
        ours, theirs = socket.socketpair()
        descriptors = [
            theirs.fileno(),
            *holdings.journal.descriptors,
            *(listening.fileno() for listening in holdings.sockets),
            holdings.directory.lock,
        ]
        kept = ",".join(map(str, [os.getpid(), *descriptors]))
        with theirs:
            self._process = subprocess.Popen(
                [*command, "--kept", kept],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        self.pidfd = PidFd(self.pid)
        self.link = Link(ours)
        self.began = time.monotonic()
        self.versions: dict[str, str] | None = None  # what it speaks, once it told
        self.is_serving = False
        self.is_asking = False  # its question is with the driver
        self._number = 0

    def hear(self) -> bool:
        """Take in its greeting, if it has come by now; whether it has. EOFError if the child is gone."""
        message = self.link.receive()
        if message is not None:
            self._number, op, (self.versions,) = message
            if op != "serve":
                raise EOFError(f"a coordinator begins by asking {op!r}")
        return self.versions is not None

    def serve(self, holdings: Holdings) -> None:
        """Tell it to serve."""
        self.began = time.monotonic()
        self.link.send(self._number, False, holdings.next_terms())

    def end(self, seconds: float = 0.0) -> int:
        """Have it end, killed after so many seconds, and return its exit status, negative for a signal's."""
        self.link.close()
        try:
            if not seconds:
                self.kill()
            status = self._process.wait(seconds or None)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self.pidfd.close()
        return status

    def kill(self) -> None:
        """Kill it, stopped or not."""
        self._process.send_signal(signal.SIGKILL)
