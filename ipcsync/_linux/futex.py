"""32-bit words of memory that processes share: waiting on one, and holding one until the thread ends.

The kernel marks the words that a thread holds when it ends (robust futexes, get_robust_list(2)). By such a word other
processes see with a single load that this one lives.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_CALLS = {"x86_64": (202, 273, 274), "aarch64": (98, 99, 100)}
if platform.machine() not in _CALLS:  # pragma: no cover - better than a wrong system call
    raise ImportError(f"ipcsync knows the futex system call of x86_64 and aarch64, not of {platform.machine()}")
_SYS_FUTEX, _SYS_SET, _SYS_GET = _CALLS[platform.machine()]
_SYS_FUTEX_WAITV = 449  # of every machine; Linux 5.16
MOST_FUTEXES = 128  # of one call of it
_SIZE_U32 = 2
_WAIT, _WAKE = 0, 1  # the shared forms: the word may lie in a page of several processes
_EVERYBODY = 0x7FFFFFFF

OWNER_DIED = 0x4000_0000  # FUTEX_OWNER_DIED: the holder ended without releasing it
WAITERS = 0x8000_0000  # FUTEX_WAITERS: the kernel wakes one who waits on the word as it marks it
_THREAD = 0x3FFF_FFFF  # FUTEX_TID_MASK
_LONGEST_SLEEP_NS = 10**9
_GIVE_UP_S = 0.1

_libc = ctypes.CDLL(None, use_errno=True)
# Without argtypes the call is three times as fast; hence every pointer below is a ctypes object of its own, made at the
# call: a coordinator has many futexes, and calls few.
_syscall = _libc.syscall
_short_syscall = ctypes.PyDLL(None).syscall  # keeps the GIL and errno as they are: for a call that never sleeps


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


# --- words that processes wait on -------------------------------------------------------------------------------------


class Futex:
    """A futex on the 32-bit word at `address`, which must be aligned to 4 and stay mapped."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address: int = address

    def wake(self) -> None:
        _short_syscall(_SYS_FUTEX, ctypes.c_void_p(self.address), _WAKE, _EVERYBODY)

    def wait(self, expected: int, timeout_ns: int) -> bool:
        """Sleep, without the GIL, while the word equals `expected`; False after `timeout_ns`, else True: look again."""
        if timeout_ns <= 0:
            return False
        limit = ctypes.byref(_Timespec(*divmod(timeout_ns, 10**9)))
        word, value = ctypes.c_void_p(self.address), ctypes.c_uint32(expected & 0xFFFFFFFF)
        if _syscall(_SYS_FUTEX, word, _WAIT, value, limit) == 0:
            return True
        code = ctypes.get_errno()
        if code == errno.ETIMEDOUT:
            return False
        if code in (errno.EAGAIN, errno.EINTR):
            return True
        raise OSError(code, f"futex wait: {errno.errorcode.get(code, code)}")


class Word(Futex):
    """A word of this process's own, to wake a `FutexSet` by."""

    __slots__ = ("_word",)

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        super().__init__(ctypes.addressof(self._word))

    @property
    def value(self) -> int:
        return self._word.value

    def bump(self) -> None:
        """Change it, and wake its waiters."""
        self._word.value += 1  # and 0 after the last number
        self.wake()


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class FutexSet:
    """Up to `MOST_FUTEXES` futexes, any of which wakes a waiter; the first `count` are waited on.

    Where the kernel has no `futex_waitv`, or no memory for it, or a sandbox refuses it, a wait sleeps for `pause_s`.
    """

    __slots__ = ("_pause_s", "_waiters", "count")

    def __init__(self, pause_s: float = 0.001) -> None:
        self.count = 0
        self._pause_s = pause_s
        self._waiters = (_Waiter * MOST_FUTEXES)()

    def put(self, index: int, address: int, value: int) -> None:
        """Put the word at `address` to a place; it had that value when it was read."""
        self._waiters[index] = _Waiter(value & 0xFFFFFFFF, address, _SIZE_U32, 0)

    def wait(self, timeout_ns: int) -> None:
        """Sleep while all words have their expected values, for at most `timeout_ns`, with the GIL released."""
        limit = _Timespec(*divmod(time.monotonic_ns() + timeout_ns, 10**9))
        count, clock = ctypes.c_uint(self.count), ctypes.c_int(time.CLOCK_MONOTONIC)
        if _syscall(_SYS_FUTEX_WAITV, self._waiters, count, 0, ctypes.byref(limit), clock) < 0:
            code = ctypes.get_errno()
            if code in (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.ENOMEM):
                time.sleep(min(timeout_ns / 1e9, self._pause_s))
            elif code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, f"futex_waitv: {errno.errorcode.get(code, code)}")


# --- words that a thread holds until it ends --------------------------------------------------------------------------


class Abandon(Exception):  # noqa: N818 - control flow, not an error
    """Raised inside `held` by a thread that is about to end: the kernel then marks the word, as at a death."""


class _Head(ctypes.Structure):
    """struct robust_list_head, followed by the only entry of its list; `offset` is from an entry to its word."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("offset", ctypes.c_long),
        ("pending", ctypes.c_void_p),
        ("entry", ctypes.c_void_p),
    )


_LENGTH = ctypes.c_size_t(_Head.entry.offset)


@contextmanager
def held(address: int, *, wakes: bool = False) -> Iterator[bool]:
    """Hold the 32-bit word at `address`, which is aligned and stays mapped, on the calling thread.

    The word is the thread's id while the thread is inside, and 0 once it has left. If the thread ends inside, by its
    process's death or exec too, the kernel stores OWNER_DIED, and does so before the process gives up its memory and
    files, and with them its device work (do_exit: exit_mm begins with the robust futexes; exit_files comes later). It
    touches the word only while that is the thread's id. `wakes`: the word has WAITERS too, before and after. Gives
    False, and leaves the word alone, if the kernel refuses. Inside, libc's own robust mutexes of this thread are not
    robust: a thread has one list. `Abandon` raised inside ends here, with the word still held.
    """
    before, length = ctypes.c_void_p(), ctypes.c_size_t()
    # Shared memory: if memory is short, the kernel may free private pages before the threads end (oom_reaper).
    head = _Head.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
    start = ctypes.addressof(head)
    entry = start + _Head.entry.offset
    head.first, head.entry, head.offset = entry, start, address - entry
    if (
        _libc.syscall(_SYS_GET, 0, ctypes.byref(before), ctypes.byref(length)) != 0
        or _libc.syscall(_SYS_SET, ctypes.byref(head), _LENGTH) != 0
    ):
        yield False
        return
    word = ctypes.c_uint32.from_address(address)
    thread = threading.get_native_id()
    word.value = thread | (WAITERS if wakes else 0)
    is_abandoned = False
    try:
        yield True
    except Abandon:
        is_abandoned = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(head))  # never freed: the kernel reads it when the thread ends
    finally:
        if not is_abandoned:
            if word.value & _THREAD == thread:  # else it belongs to another thread by now
                word.value = 0
            if _libc.syscall(_SYS_SET, before, _LENGTH) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"set_robust_list: {os.strerror(code)}")


class DeathMark:
    """A word at `address`: not 0 once `show` returned, OWNER_DIED after this process's death or exec.

    With a `doorbell` the mark wakes one process that waits on the word, and the thread calls `on_ring` when another
    process wakes `doorbell`, a word that stays 0. It calls nothing else: a library may have robust mutexes of its own,
    and a thread has one list of them. A ring that comes while it is awake is missed: who needs an answer repeats it. If
    no thread can be started, or the kernel refuses, the word stays 0, and other processes have to ask the kernel.
    """

    def __init__(self, address: int, doorbell: Futex | None = None) -> None:
        self._address = address
        self._doorbell = doorbell
        self.on_ring: Callable[[], object] = bool  # nothing
        self._has_begun = threading.Event()
        self._end = threading.Event()
        self._is_given_up = False
        self.thread: threading.Thread | None = None
        """The one that holds the word, once `show` was called."""

    def show(self) -> None:
        """Hold the word from when this returns; a second call does nothing."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._hold, name="ipcsync-life", daemon=True)
            with suppress(RuntimeError):
                self.thread.start()
                self._has_begun.wait()

    def _hold(self) -> None:
        try:
            with suppress(OSError), held(self._address, wakes=self._doorbell is not None) as is_held:
                self._has_begun.set()
                self._sleep()
                if is_held and self._is_given_up:
                    raise Abandon
        finally:
            self._has_begun.set()

    def _sleep(self) -> None:
        if self._doorbell is None:
            self._end.wait()
            return
        while not self._end.is_set():
            if self._doorbell.wait(0, _LONGEST_SLEEP_NS) and not self._end.is_set():
                self.on_ring()

    def end(self) -> None:
        """Release the word, before another process may get it: it is 0 when this returns."""
        self._end.set()
        self._await_end(threading.TIMEOUT_MAX)
        self.on_ring = bool  # breaks a reference cycle with its owner

    def _await_end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if self.thread is None or self.thread.ident is None:
            return
        while self.thread.is_alive() and time.monotonic() < deadline:
            if self._doorbell is not None:
                self._doorbell.wake()  # repeatedly: the thread may have been about to sleep
            self.thread.join(0.001)

    def give_up(self) -> None:
        """Have the kernel mark the word now, as at this process's death, which is about to come."""
        if not self._end.is_set():
            self._is_given_up = True
            self._end.set()
            self._await_end(_GIVE_UP_S)
