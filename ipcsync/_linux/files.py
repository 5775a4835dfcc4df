"""Files that processes share: in memory without a name, and locks on bytes of them, which go with their holder."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FD = struct.Struct("i")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid


def memory_file(name: str) -> int:
    """The descriptor of an empty one, closed by exec, `name` in /proc; on /dev/shm if memfds are refused. OSError."""
    try:
        return os.memfd_create(name)
    except OSError as refused:
        try:
            return os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)  # noqa: S108 - it has no name
        except OSError:
            raise refused from None


# --- locks of open file descriptions (fcntl(2)): held by a descriptor, gone with the process --------------------------


def try_lock(fd: int, offset: int) -> bool:
    """Take the exclusive lock of the byte at `offset`; False if another open file description has it."""
    try:
        _ask(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, offset)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, offset: int) -> None:
    """Release the lock of the byte at `offset`, for every descriptor of this open file, those of children too."""
    _ask(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, offset)


def is_locked(fd: int, offset: int) -> bool:
    """Whether a descriptor other than `fd`'s own open file description holds a lock of the byte at `offset`."""
    return _ask(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, offset) != fcntl.F_UNLCK


def _ask(fd: int, what: int, kind: int, offset: int) -> int:
    answer = fcntl.fcntl(fd, what, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))
    return int(_FLOCK.unpack(answer)[0])


class LastLock:
    """Shared locks of bytes of the file at `path`, held while any process lives that has this one's open files.

    Such a process is this one, until it ends or calls exec, and each child forked from it. No method releases one lock.
    The kernel closes a dying process's files one by one, the youngest first since Linux 4.3, and a driver's may take
    long. The locks must be released last, so no descriptor holds them: the open file lies unread in a socket. Closing
    the socket is one of those steps, and adds the close of the file in it after all others (task_work_run).
    """

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            keeper, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            with keeper, sender:
                socket.send_fds(sender, [b"\0"], [file])
                self._fd = keeper.detach()  # a socket object would be closed when the interpreter ends
        finally:
            os.close(file)
        self.inode: int = os.fstat(self._fd).st_ino

    def hold(self, offset: int) -> None:
        """Take the shared lock of the byte at `offset`. Raises OSError."""
        with self._open_file() as file:
            _ask(file, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, offset)  # for which reading is enough

    @contextmanager
    def _open_file(self) -> Iterator[int]:
        """A descriptor of the open file in the socket, which stays in the socket."""
        flags = socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        keeper = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, 0, self._fd)
        try:
            _, passed, *_ = keeper.recvmsg(1, socket.CMSG_LEN(_FD.size), flags)
        finally:
            keeper.detach()
        if not passed:  # the kernel's word for it (unix(7))
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        (file,) = _FD.unpack(passed[0][2])
        try:
            yield file
        finally:
            os.close(file)

    def survive_exec(self) -> None:
        """Keep the locks across exec, of this process and of its children."""
        os.set_inheritable(self._fd, True)

    def is_held_by_others(self, offset: int) -> bool:
        """Whether another open file has a lock of the byte at `offset`."""
        with self._open_file() as file:
            return is_locked(file, offset)

    def drop(self) -> None:
        """Release this process's locks, once no process asks for them any more."""
        os.close(self._fd)


def holders(inodes: set[int]) -> dict[int, list[int]]:
    """The processes that have the sockets of these `LastLock`s, as far as /proc shows them to this one."""
    found: dict[str, set[int]] = {f"socket:[{inode}]": set() for inode in inodes}
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # it was closed meanwhile
            if (target := os.readlink(path)) in found:
                found[target].add(int(path.split("/")[2]))
    return dict(zip(inodes, map(sorted, found.values()), strict=True))
