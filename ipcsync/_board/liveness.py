"""Whether the process of another session lives, and whether it is over: the one place that says so, for everybody.

The compiled core reads the same words, and asks here where they do not say it.

A process is over once it, and every child forked from it, has closed all files. A driver tears down a process's GPU
work when the last descriptor of its files is closed. A forked child that lives (a library may fork, to write a
checkpoint for example) keeps them, and the dead process's work may then go on. So each session has a shared lock of a
byte of its own, far behind the board's end, through an open file that children keep and the kernel closes last
(`LastLock`). The byte is never another session's, unlike the line. The line says whether the lock was taken. A session
whose work is done by a server (CUDA MPS) does not take it: there closed files prove nothing.
"""

from __future__ import annotations

import logging
import os

from ipcsync._board.board import Board
from ipcsync._board.lines import SessionLine
from ipcsync._linux.files import LastLock
from ipcsync._linux.futex import OWNER_DIED
from ipcsync._linux.process import Process, pid_namespace, start_time
from ipcsync._locks import CallLock, under

log = logging.getLogger("ipcsync")


class Peer:
    """The process behind one session serial; `label` is the session's name or id, `pid` as the coordinator sees it.

    A thread of the process holds a word of the session's line, which the kernel marks when the thread ends. While the
    word is not held (before the session has started, or if the kernel has no robust futexes), the kernel is asked: in
    this pid namespace by (pid, start time), elsewhere by the lifeline, the lock that the process holds on its line.
    """

    __slots__ = ("_board", "_is_own", "_process", "_shows_end", "label", "line", "lock", "pid", "serial")

    def __init__(self, board: Board, serial: int, *, is_own: bool = False) -> None:
        self.serial = serial
        self._is_own = is_own  # of this process, which is alive whenever it asks
        self._board = board
        self.line: SessionLine = board.session(serial & 0xFFFF)
        self._process: Process | None = None
        # Kept, since the line may be another session's later; ("", 0) if it is already.
        self._shows_end = self.line.end_is_shown
        self.lock = self.line.lock if self._shows_end else 0  # of what shows the process's end; 0: nothing
        self.label, self.pid = board.who(serial)  # after the process: the line was this session's then
        self._shows_end = self._shows_end and self.line.serial == serial

    def is_alive(self) -> bool:
        """Whether the process still runs and still has its session's line. Costs about 0.2 µs."""
        owner = self.line.owner  # before the serial, which another session changes later
        if self.line.serial != self.serial:
            return False
        if self._is_own:
            return True
        return not owner & OWNER_DIED if owner else self._ask_the_kernel()

    def is_over(self) -> bool | None:
        """Whether the process, and every child forked from it, has closed all files; None if that is never known.

        It counts only if the coordinator is found alive afterwards. Costs about 2 µs.
        """
        return is_over(self._board, self.serial) if self._shows_end and not self._is_own else None

    def _ask_the_kernel(self) -> bool:
        pid, started, namespace = self.line.process
        if not pid or namespace != pid_namespace():
            return self._board.has_lifeline(self.line)
        if self._process is None:
            self._process = Process(pid, started)
        return self._process.is_alive() and self.line.serial == self.serial


def peer_of(board: Board, serial: int) -> Peer:
    """The peer with that serial; this process's own session is known to live."""
    myself = os.getpid(), start_time(os.getpid()) or 0, pid_namespace()
    return Peer(board, serial, is_own=board.session(serial & 0xFFFF).process == myself)


_FIRST_BYTE = 1 << 40
_COORDINATOR = 0  # its lock, on the board's first byte

_held: dict[bytes, LastLock] = {}  # by epoch; one for each coordinator that lives
_lock = CallLock()


def show_end(board: Board, line: SessionLine, *, by_exec: bool = False) -> None:
    """Show the end of this process, whose session has `line`, to others; `by_exec`: also across exec.

    The lock is kept while the coordinator lives, also when the session ends: its work may still be under way.
    """
    try:
        lock = under(_lock, _hold, board, line.serial, by_exec)
    except OSError as error:
        log.debug("the end of this process will not be seen on %s: %s", board.path, error)
        return
    line.shows_end(lock)


def _hold(board: Board, serial: int, by_exec: bool) -> int:
    held = _held.get(board.epoch)
    if held is None:
        for epoch, other in _held.copy().items():
            if not other.is_held_by_others(_COORDINATOR):  # it is dead, so its board is not used any more
                del _held[epoch]
                other.drop()
        held = LastLock(board.file)
        _held.setdefault(board.epoch, held)
    if by_exec:
        held.survive_exec()
    held.hold(_byte(serial))
    return held.inode


def is_over(board: Board, serial: int) -> bool:
    """Whether the process of session `serial`, which took its lock, is over; False once this board was closed.

    It counts only if the coordinator is found alive afterwards: the lock is released with it.
    """
    return board.is_free(_byte(serial))


def _byte(serial: int) -> int:
    return _FIRST_BYTE + (serial >> 16)
