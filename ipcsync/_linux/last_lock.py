"""Locks of a file that the kernel gives up after all else that a process and its forked children have open."""

from __future__ import annotations

import os
import socket
import struct

from ipcsync._linux import locks
from ipcsync._locks import CallLock, holding

_FD = struct.Struct("i")


class LastLock:
    """Shared locks of bytes of the file at `path`, held for as long as a process lives that has this one's open files.

    That is this process, until it ends or calls exec, and each child that was forked from it, whoever called fork. No
    method gives one up.

    The kernel closes a dying process's files in an order of its own, the youngest first since Linux 4.3, and takes its
    time for a driver's. So what holds the locks is no descriptor: it lies unread in a socket, whose end is one of those
    closings, and only then is what lay in it closed (task_work_run: what a closing adds, it runs after all the others).
    """

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            keeper, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            with keeper, sender:
                socket.send_fds(sender, [b"\0"], [file])
                self._fd = keeper.detach()  # as an object, it would be closed when the interpreter ends
        finally:
            os.close(file)
        self._lock = CallLock()

    @holding("_lock")
    def hold(self, offset: int) -> None:
        """Take the lock of the byte at `offset`, which others may share. Raises OSError."""
        file = self._look()
        try:
            locks.share(file, offset)
        finally:
            os.close(file)

    def _look(self) -> int:
        """A descriptor of the open file that lies in the socket, and goes on lying there."""
        flags = socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        keeper = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, 0, self._fd)
        try:
            _, [(_, _, data)], *_ = keeper.recvmsg(1, socket.CMSG_LEN(_FD.size), flags)
        finally:
            keeper.detach()
        return int(_FD.unpack(data)[0])

    def survive_exec(self) -> None:
        """Have it held by what this process becomes, or its children, by exec too."""
        os.set_inheritable(self._fd, True)

    def is_held_by_others(self, offset: int) -> bool:
        """Whether anybody else holds a lock of the byte at `offset`."""
        file = self._look()
        try:
            return locks.is_locked(file, offset)
        finally:
            os.close(file)

    def drop(self) -> None:
        """Give up this process's hold: nobody asks any more."""
        os.close(self._fd)
