"""When a session's process is gone: by its pidfd, or its lifeline. And credit for this process's own pauses."""

from __future__ import annotations

import logging
import os
from contextlib import closing

from ipcsync._board import Board
from ipcsync._linux.process import PidFd, PidFdError, is_running, start_time
from ipcsync._logs import fields
from ipcsync_coordinator.state import Session

log = logging.getLogger("ipcsync.coordinator")


def has_ended(pid: int, started: int) -> bool | None:
    """Whether the kernel has torn a process down; None where pidfds are refused."""
    try:
        with closing(PidFd(pid)) as pidfd:
            return pidfd.is_dead or start_time(pid) != started
    except ProcessLookupError:
        return True
    except PidFdError:
        return None
    except OSError:  # descriptors are short, which proves nothing: the next tick asks again
        return False


def is_gone(board: Board, session: Session) -> bool:
    """Whether a session's process has ended, or released its lifeline: its last step when it closes, or calls exec.

    A dying one releases it before a driver's files are closed: its pidfd, if there is one, says when it is gone. Whose
    process it is, is known once the session is ready: before it spoke again, its pid might have been reused.
    """
    ended = has_ended(session.pid, session.started) if session.is_ready and session.started else None
    if ended or not session.has_lifeline or board.has_lifeline(board.session(session.line)):
        return bool(ended)
    return ended is None or is_running(session.pid, session.started)


def warn_without_pidfds() -> None:
    """Log what is lost where a sandbox refuses pidfds."""
    try:
        PidFd(os.getpid()).close()
    except PidFdError as error:
        log.warning("dead sessions' ends are seen by their lifelines alone", extra=fields(why=error))
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
