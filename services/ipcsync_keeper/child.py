"""One coordinator process, as its keeper sees it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from contextlib import ExitStack

import msgspec

from ipcsync._linux.process import PidFd
from ipcsync._logs import fields
from ipcsync_holdings.holdings import Holdings, Terms
from ipcsync_holdings.link import Link

log = logging.getLogger("ipcsync.coordinator")

_KILLED_S = 5.0  # a killed process that takes longer is stuck in the kernel, and left to its fate


class Child:
    """A coordinator that was started, and waits with its imports done until it is told to serve.

    Started from the keeper's main thread, with which it ends (PR_SET_PDEATHSIG). OSError if no process can be started.
    """

    def __init__(self, holdings: Holdings, command: list[str]) -> None:
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), *holdings.descriptors]
        kept = ",".join(map(str, [os.getpid(), *descriptors]))
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [*command, "--kept", kept],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the keeper's business
            )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.pidfd = PidFd(self._process.pid)
            undo.pop_all()
        self.pid = self._process.pid
        self.link = Link(ours)
        self.began = time.monotonic()  # waiting, then serving
        self.versions: dict[str, str] | None = None  # what it speaks, by its greeting
        self.was_told = self.was_dismissed = False  # to serve; to end
        self.is_serving = self.is_asking = self.has_hung = self.was_killed = False
        self.is_silent, self._greeting = True, 0  # it is to come

    def hear(self) -> None:
        """Take in its greeting, if it has come. One that greets as no coordinator does is killed."""
        try:
            message = self.link.receive()
            if message is not None:
                self._greeting, _, (versions,) = message
                self.versions, self.is_silent = msgspec.convert(versions, dict[str, str]), False
        except EOFError:
            self.is_silent = False  # it has ended, or has half a minute to
        except Exception as error:  # noqa: BLE001 - any code may stand on the disk by now
            log.warning("it does not greet as a coordinator", extra=fields(pid=self.pid, why=error))
            self.kill()

    def begin(self, terms: Terms) -> None:
        """Tell it to serve. EOFError if it is gone."""
        self.link.send(self._greeting, False, terms)

    def dismiss(self) -> None:
        """Have it end after the request in hand."""
        self.was_dismissed = True
        self.link.close()

    def kill(self) -> None:
        """Kill it, stopped or not."""
        self.was_killed, self.is_silent = True, False
        self._process.kill()

    def end(self, seconds: float = 0.0) -> int | None:
        """Have it end, killed after so many seconds; its exit status, negative for a signal's. Twice gives the same."""
        if self._process.returncode is None:
            self.link.close()
            if not self.pidfd.wait(seconds):
                self.kill()
            if self.pidfd.wait(_KILLED_S):
                self._process.wait()
            self.pidfd.close()
        return self._process.returncode
