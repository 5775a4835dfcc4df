"""Waiting on a 32-bit word of memory that processes share (futex(2))."""

from __future__ import annotations

import ctypes
import errno
import platform
import time

_MACHINE = platform.machine()
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(_MACHINE)
if _SYS_FUTEX is None:  # pragma: no cover - better than a wrong system call
    raise ImportError(f"ipcsync knows the futex system call of x86_64 and aarch64, not of {_MACHINE}")

_WAIT, _WAKE = 0, 1  # the shared forms: the word may lie in a page of several processes
_EVERYBODY = 0x7FFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
# Without argtypes the call is three times as fast; hence every pointer below is a ctypes object of its own, made at the
# call: a coordinator has many futexes, and calls few.
_syscall = _libc.syscall
_short_syscall = ctypes.PyDLL(None).syscall  # keeps the GIL and errno as they are: for a call that never sleeps


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Futex:
    """A futex on the 32-bit word at `address`, which must be aligned to 4 and stay mapped."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address: int = address

    def wake(self) -> None:
        """Wake every process and thread that waits on the word."""
        _short_syscall(_SYS_FUTEX, ctypes.c_void_p(self.address), _WAKE, _EVERYBODY)

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
        word, value = ctypes.c_void_p(self.address), ctypes.c_uint32(expected & 0xFFFFFFFF)
        if _syscall(_SYS_FUTEX, word, _WAIT, value, limit) == 0:
            return True
        code = ctypes.get_errno()
        if code == errno.ETIMEDOUT:
            return False
        if code in (errno.EAGAIN, errno.EINTR):
            return True
        raise OSError(code, f"futex wait: {errno.errorcode.get(code, code)}")


_SYS_FUTEX_WAITV = 449  # of every machine; Linux 5.16
MOST_FUTEXES = 128  # of one call
_SIZE_U32 = 2
_CLOCK_MONOTONIC = 1


class Word:
    """A word of this process's own, to wake a `FutexSet` by."""

    __slots__ = ("_futex", "_word", "address")

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._word)
        self._futex = Futex(self.address)

    @property
    def value(self) -> int:
        """Its value."""
        return self._word.value

    def bump(self) -> None:
        """Change it, and wake its waiters."""
        self._word.value = (self._word.value + 1) & 0xFFFFFFFF
        self._futex.wake()


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class FutexSet:
    """Up to `MOST_FUTEXES` futexes, any of which wakes a waiter; the first `count` are waited on.

    Where the kernel has no `futex_waitv`, or a sandbox refuses it, a wait is a sleep of `pause_s` seconds.
    """

    __slots__ = ("_pause_s", "_waiters", "count")

    def __init__(self, pause_s: float = 0.001) -> None:
        self.count = 0
        self._pause_s = pause_s
        self._waiters = (_Waiter * MOST_FUTEXES)()

    def put(self, index: int, address: int) -> None:
        """Wait on the word at `address`, at this place."""
        self._waiters[index] = _Waiter(0, address, _SIZE_U32, 0)

    def expect(self, index: int, value: int) -> None:
        """Set the value that the word at this place had when it was read."""
        self._waiters[index].value = value & 0xFFFFFFFF

    def wait(self, timeout_ns: int) -> None:
        """Sleep while all words have their expected values, for at most `timeout_ns`, with the GIL released."""
        until = time.monotonic_ns() + timeout_ns
        limit = _Timespec(until // 1_000_000_000, until % 1_000_000_000)
        count, clock = ctypes.c_uint(self.count), ctypes.c_int(_CLOCK_MONOTONIC)
        if _syscall(_SYS_FUTEX_WAITV, self._waiters, count, 0, ctypes.byref(limit), clock) < 0:
            code = ctypes.get_errno()
            if code in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
                time.sleep(min(timeout_ns / 1e9, self._pause_s))
            elif code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, f"futex_waitv: {errno.errorcode.get(code, code)}")
