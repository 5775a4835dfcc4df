"""Open-file-description locks on bytes of a file (fcntl(2)): held by a descriptor, gone with the process."""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid


def try_lock(fd: int, offset: int) -> bool:
    """Take the exclusive lock of the byte at `offset`; False if another open file description has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, offset: int) -> None:
    """Release the lock of the byte at `offset`, for every descriptor of this open file, those of children too."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, offset, 1, 0))


def share(fd: int, offset: int) -> None:
    """Take a shared lock of the byte at `offset`, for which reading is enough. Raises OSError."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, offset, 1, 0))


def is_locked(fd: int, offset: int) -> bool:
    """Whether a descriptor other than `fd`'s own open file description holds a lock of the byte at `offset`."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
