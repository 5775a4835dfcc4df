"""One coordinator process, as its keeper sees it."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import ExitStack

import msgspec

from ipcsync._linux.child import ends_within, in_words, spawn
from ipcsync._logs import fields
from ipcsync_keeper.link import Link, Peer
from ipcsync_keeper.resources import Resources

log = logging.getLogger("ipcsync.coordinator")

_KILLED_S = 5.0  # a killed process that takes longer is stuck in the kernel, and is left alone


class CoordinatorProcess(Peer):
    """A coordinator process, which imports its modules and waits until it is told to serve.

    The keeper's main thread starts it, and it ends with that thread (PR_SET_PDEATHSIG). OSError if no process can be
    started.
    """

    def __init__(self, resources: Resources, command: list[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            with open(resources.board.file, "r+b") as board:  # opened anew, so without the keeper's lifeline
                descriptors = [theirs.fileno(), *resources.descriptors, board.fileno()]
                kept = ",".join(map(str, [os.getpid(), *descriptors]))
                self._process = spawn([*command, "--kept", kept], fds=descriptors)
            undo.pop_all()
        super().__init__(Link(ours), self._process.pid)
        self.began = time.monotonic()  # the start of waiting, later of serving
        self.versions: dict[str, str] | None = None  # its versions, from its greeting
        self.settings: dict[str, object] = {}  # and what it has read of them
        self.refusal = ""  # or why it cannot start
        self.was_started = self.was_dismissed = False  # to serve, once the driver is free for it; to end
        self.has_hung = self.was_killed = False
        self.is_silent = True  # until its greeting comes

    @property
    def is_dead(self) -> bool:
        """Whether it has ended. The keeper's signals say when to ask (SIGCHLD)."""
        return self._process.poll() is not None

    def receive_greeting(self) -> None:
        """Read its greeting, if it has come. A process with another greeting is killed."""
        try:
            message = self.link.receive()
            if message is not None:
                what, arguments = message
                self.is_silent = False
                if what == "refuse":
                    self.refusal = str(arguments[0])
                else:
                    versions, self.settings = arguments
                    self.versions = msgspec.convert(versions, dict[str, str])
        except EOFError:
            self.is_silent = False  # it has ended, or has half a minute to do so
        except Exception as error:  # noqa: BLE001 - the code on disk may be anything by now
            log.warning("not a coordinator's greeting", extra=fields(pid=self.pid, why=error))
            self.kill()

    def how_it_ended(self) -> str:
        """Its exit status in words, and what it said of it; it has ended."""
        how = in_words(self.end())
        return f"{how}: {self.refusal}" if self.refusal else how

    def why_not_started(self) -> str:
        """Why it ended before its greeting, in its own words if it had any."""
        how = self.how_it_ended()
        return self.refusal or f"the new code did not start ({how})"

    def dismiss(self) -> None:
        """Have it end after its current request."""
        self.was_dismissed = True
        self.link.close()

    def kill(self) -> None:
        """Kill it, stopped or not."""
        self.was_killed, self.is_silent = True, False
        self._process.kill()

    def end(self, seconds: float = 0.0) -> int | None:
        """Have it end, killed after `seconds`; returns its exit status (negative: the signal), also if called again."""
        if self.is_silent:
            self.receive_greeting()
        self.link.close()
        if not ends_within(self._process, seconds):
            self.kill()
            ends_within(self._process, _KILLED_S)
        return self._process.returncode
