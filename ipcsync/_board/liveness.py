"""Whether the process of another session lives."""

from __future__ import annotations

import os

from ipcsync._board.board import Board
from ipcsync._board.layout import SessionLine
from ipcsync._linux.process import Process, pid_namespace


class Peer:
    """The process behind one session serial.

    In this pid namespace it is asked of the kernel by (pid, start time); elsewhere by the lifeline, the lock that the
    process holds on its session's line.
    """

    __slots__ = ("_board", "_line", "_process", "serial")

    def __init__(self, board: Board, serial: int) -> None:
        self.serial = serial
        self._board = board
        self._line = board.session(serial & 0xFFFF)
        pid, started, namespace = self._line.process
        same = pid and namespace == pid_namespace()
        self._process = Process(pid, started) if same else None

    @property
    def name(self) -> str:
        """What to call it in an error."""
        return f"session {self.serial:x}" + (f" (pid {self._process.pid})" if self._process else "")

    def is_alive(self) -> bool:
        """Whether the process still runs and still has its session's line."""
        if self._line.serial != self.serial:
            return False
        if self._process is None:
            return self._board.has_lifeline(self._line)
        return self._process.is_alive()


class OwnPeer(Peer):
    """A session of this very process, which lives whenever it asks."""

    def is_alive(self) -> bool:
        """Whether the session still has its line."""
        return self._line.serial == self.serial


def peer_of(board: Board, serial: int) -> Peer:
    """The peer with that serial; this process's own session is known to live."""
    line: SessionLine = board.session(serial & 0xFFFF)
    mine = line.process == _myself()
    return OwnPeer(board, serial) if mine else Peer(board, serial)


def _myself() -> tuple[int, int, int]:
    from ipcsync._linux.process import start_time

    return os.getpid(), start_time(os.getpid()) or 0, pid_namespace()
