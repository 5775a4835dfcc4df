"""Whether sessions live: deaths by pidfd (or lifeline), silence by the TTL, and our own pauses credited to everyone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ipcsync._board import Board
from ipcsync._linux.process import PidFd, start_time
from ipcsync._linux.robust import OWNER_DIED


class ProcessWatch:
    """One session's process.

    The pidfd is opened at the first word and counts only once the peer spoke again on the same connection: a pid may
    have come again between the connection and the first word, but a process that is gone does not speak.
    """

    def __init__(self, pid: int, routing: bytes, board: Board, line: int) -> None:
        self.pid = pid
        self.started = 0
        self._routing = routing
        self._board = board
        self._line = board.session(line)
        self._pidfd: PidFd | None = None
        self._watched_by: asyncio.AbstractEventLoop | None = None
        self.has_lifeline = False
        self.is_confirmed = False
        if pid:
            try:
                self.started = start_time(pid) or 0
                self._pidfd = PidFd(pid) if self.started else None
            except OSError:
                self._pidfd = None  # it is gone, or descriptors are short: the TTL and the lifeline tell

    def confirm(self, routing: bytes, loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> None:
        """The session spoke again: from now on the pidfd tells of its death."""
        if self._pidfd is None or self._watched_by is not None or routing != self._routing:
            return
        self._watched_by = loop
        self.is_confirmed = True
        loop.add_reader(self._pidfd, on_death)

    def lifeline_is_cut(self) -> bool:
        """Whether a lifeline is gone of which no pidfd tells: there is none, or the process has called exec."""
        may_be_cut = self._watched_by is None or self._line.owner & OWNER_DIED
        return bool(may_be_cut) and self.gave_up_lifeline()

    def gave_up_lifeline(self) -> bool:
        """Whether the process let its lifeline go: it does so last of all, when it exits, calls exec, or has let go."""
        return self.has_lifeline and not self._board.has_lifeline(self._line)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd is not None:
            if self._watched_by is not None:
                self._watched_by.remove_reader(self._pidfd)
            self._pidfd.close()
            self._pidfd = None


class PauseCredit:
    """Since when silence counts.

    A coordinator that was itself stopped (its ticks are late) cannot tell who was silent meanwhile: everyone gets a
    full TTL from the moment at which it goes on.
    """

    def __init__(self, now_ns: int, tick_ns: int) -> None:
        self.since_ns = now_ns
        self._last_ns = now_ns
        self._late_ns = 4 * tick_ns

    def tick(self, now_ns: int) -> None:
        """Tell that a tick ran."""
        if now_ns - self._last_ns > self._late_ns:
            self.since_ns = now_ns
        self._last_ns = now_ns
