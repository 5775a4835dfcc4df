"""Whether a session's process is over: it, and every child forked from it, has closed all files.

A driver tears down a process's GPU work when the last descriptor of its files is closed. A forked child that lives (a
library may fork, to write a checkpoint for example) keeps them, and the dead process's work may then go on. So each
session has a shared lock of a byte of its own, far behind the board's end, through an open file that children keep and
the kernel closes last (`LastLock`). The byte is never another session's, unlike the line. The line says whether the
lock was taken. A session whose work is done by a server (CUDA MPS) does not take it: there closed files prove nothing.
"""

from __future__ import annotations

import logging

from ipcsync._board.board import Board
from ipcsync._board.session_line import SessionLine
from ipcsync._linux.last_lock import LastLock
from ipcsync._locks import CallLock, under
from ipcsync._shared import items_of

log = logging.getLogger("ipcsync")

_FIRST_BYTE = 1 << 40
_COORDINATOR = 0  # its lock, on the board's first byte

_held: dict[bytes, LastLock] = {}  # by epoch; one for each coordinator that lives
_lock = CallLock()


def hold(board: Board, line: SessionLine, *, by_exec: bool = False) -> None:
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
        for epoch, other in items_of(_held):
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
