"""When a session's process is gone: by its pidfd, or its lifeline. And credit for this process's own pauses."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipcsync._board import Board
from ipcsync._linux.process import PidFd, PidFdError, is_running, start_time
from ipcsync._logs import fields

if TYPE_CHECKING:
    from ipcsync_coordinator.limits import Sender

log = logging.getLogger("ipcsync.coordinator")


class ProcessWatch:
    """The process of the session on a line of the board. Of an earlier coordinator's it is known who it was.

    The pidfd is opened at the first message, and counts only once the peer has sent another one on the same connection:
    the pid may have been reused between the connection and the first message, but a dead process sends nothing.

    A session of an earlier coordinator that was ready had a lifeline: if that is gone by now, its process is dead.
    Until the session is confirmed again, or by `watch_at_once`, the process of its next connection is taken for its.
    """

    def __init__(self, board: Board, line: int, pid: int = 0, started: int = 0, *, has_lifeline: bool = False) -> None:
        self.pid = pid
        self.started = started
        self._board = board
        self._line = board.session(line)
        self._routing = b""
        self._pidfd: PidFd | None = None
        self._watched_by: asyncio.AbstractEventLoop | None = None
        self.has_lifeline = has_lifeline

    @property
    def is_confirmed(self) -> bool:
        """Whether the pidfd counts."""
        return self._watched_by is not None

    def begin(self, sender: Sender) -> None:
        """Take the sender of this message for the session's process."""
        self.pid, self.started, self._routing = sender.pid, 0, sender.routing
        if self.pid:
            try:
                self.started = start_time(self.pid) or 0
                self._pidfd = PidFd(self.pid) if self.started else None
            except OSError:
                self._pidfd = None  # it is gone, or descriptors are short: the TTL and the lifeline decide

    def watch_at_once(self, on_death: Callable[[], None]) -> bool:
        """Watch a process that was confirmed earlier; False if it is proven dead."""
        try:
            self._pidfd = PidFd(self.pid)
            if start_time(self.pid) != self.started:
                return False
        except ProcessLookupError:
            return False
        except OSError:  # descriptors are short, which proves nothing: the TTL and the lifeline decide
            self.close()
            return True
        self._confirm(self._pidfd, on_death)
        return True

    def confirm(self, sender: Sender, on_death: Callable[[], None]) -> bool:
        """Note another message of the session; returns whether this made the pidfd count."""
        if self.is_confirmed:
            return False
        if not self._routing and sender.pid:  # its earlier messages went to another coordinator
            self.begin(sender)
            return False
        if self._pidfd is None or sender.routing != self._routing:
            return False
        self._confirm(self._pidfd, on_death)
        return True

    def _confirm(self, pidfd: PidFd, on_death: Callable[[], None]) -> None:
        self._watched_by = asyncio.get_running_loop()
        self._watched_by.add_reader(pidfd, on_death)

    def has_let_go(self) -> bool:
        """Whether the process has released its lifeline: its last step when it closes, or calls exec.

        A dying one releases it before a driver's files are closed: its pidfd, if there is one, says when it is gone.
        """
        if not self.has_lifeline or self.holds_lifeline():
            return False
        return not self.is_confirmed or is_running(self.pid, self.started)

    def holds_lifeline(self) -> bool:
        """Whether a process holds the session's lifeline now."""
        return self._board.has_lifeline(self._line)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd is not None:
            if self._watched_by is not None:
                self._watched_by.remove_reader(self._pidfd)
            self._pidfd.close()
            self._pidfd = None


def warn_without_pidfds() -> None:
    """Log what is lost where a sandbox refuses pidfds."""
    try:
        PidFd(os.getpid()).close()
    except PidFdError as error:
        log.warning("dead sessions' ends are noticed at the next tick", extra=fields(why=error))
    except OSError:
        return  # descriptors are short, which says nothing of them


class PauseCredit:
    """The time from which silence counts.

    A coordinator that was stopped itself (its ticks are late) cannot tell which sessions were silent meanwhile: every
    session gets a full TTL from the moment at which it goes on.
    """

    def __init__(self, now_ns: int, tick_ns: int) -> None:
        self.since_ns = now_ns
        self._last_ns = now_ns
        self._late_ns = 4 * tick_ns

    def tick(self, now_ns: int) -> None:
        """Note that a tick ran."""
        if now_ns - self._last_ns > self._late_ns:
            self.since_ns = now_ns
        self._last_ns = now_ns
