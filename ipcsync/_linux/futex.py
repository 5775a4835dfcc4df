"""Waiting on a 32-bit word of memory that processes share (futex(2))."""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Callable
from functools import partial

_MACHINE = platform.machine()
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(_MACHINE)
if _SYS_FUTEX is None:  # pragma: no cover - said here rather than by a wrong system call
    raise ImportError(f"ipcsync knows the futex system call of x86_64 and aarch64, not of {_MACHINE}")

_WAIT, _WAKE = 0, 1  # the shared forms: the word may lie in a page of several processes
_EVERYBODY = 0x7FFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
# Without argtypes the call is three times as fast; hence every pointer below is a ctypes object of its own.
_syscall = _libc.syscall
_short_syscall = ctypes.PyDLL(None).syscall  # keeps the GIL and errno as they are: for a call that never sleeps


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Futex:
    """A futex on the 32-bit word at `address`, which must be aligned to 4 and stay mapped.

    `wake()` wakes every process and thread that waits on the word.
    """

    __slots__ = ("_address", "wake")

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)
        self.wake: Callable[[], object] = partial(_short_syscall, _SYS_FUTEX, self._address, _WAKE, _EVERYBODY)

    def wait(self, expected: int, timeout_ns: int | None = None) -> bool:
        """Sleep while the word equals `expected`, with the GIL released.

        Returns False when `timeout_ns` (None: no limit) ran out, True otherwise: after a wake, a signal, or at once if
        the word is different. A True is only a reason to look again.
        """
        if timeout_ns is None:
            limit = None
        elif timeout_ns <= 0:
            return False
        else:
            limit = ctypes.byref(_Timespec(timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000))
        if _syscall(_SYS_FUTEX, self._address, _WAIT, ctypes.c_uint32(expected & 0xFFFFFFFF), limit) == 0:
            return True
        code = ctypes.get_errno()
        if code == errno.ETIMEDOUT:
            return False
        if code in (errno.EAGAIN, errno.EINTR):
            return True
        raise OSError(code, f"futex wait: {errno.errorcode.get(code, code)}")
