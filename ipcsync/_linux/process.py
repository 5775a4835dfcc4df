"""This process: what it takes over, where it runs, whether it was forked. Others: by (pid, start time), until they end.

A program of ours may be started by one that has blocked or ignored signals, closed its standard descriptors, and is a
service that its manager watches. Each calls `forget_parent` before anything else; variables of a service manager are
kept from it by `child.spawn`, which starts all of our processes. It keeps the rest: working directory, resource limits,
niceness, OOM score, CPU affinity, and all other variables.
"""

from __future__ import annotations

import ctypes
import errno
import io
import logging
import math
import mmap
import os
import select
import signal
import socket
import struct
from contextlib import closing
from functools import partial

from ipcsync.errors import IpcSyncError

log = logging.getLogger("ipcsync")

_UCRED = struct.Struct("3i")  # pid, uid, gid
_MADV_WIPEONFORK = 18  # Linux 4.14; not named by the mmap module
OF_A_SERVICE = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
"""The variables that a service manager means for the one process that it started."""

# Ignored by nohup(1), by a shell for what runs in its background, or by Python itself.
_MAY_BE_IGNORED = {
    getattr(signal, name)
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGPIPE", "SIGXFSZ")
}


# --- this process -----------------------------------------------------------------------------------------------------


def forget_parent() -> None:
    """Unblock all signals, and ignore none but those of nohup(1) or a shell; call it before any thread is started."""
    for number in signal.valid_signals() - _MAY_BE_IGNORED:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # last: what was pending comes now
    open_standard()


def open_standard() -> None:
    """Have /dev/null at each standard descriptor that is closed.

    Else the next file, maybe one that processes share, gets that number, and any library's message is written into it.
    """
    fd = 0
    while fd <= 2:  # the kernel gives the lowest number that is free
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if fd <= 2:
            os.set_inheritable(fd, True)
    os.close(fd)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal: then SIGHUP may say that it was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def pid_namespace() -> int:
    """The inode of this process's pid namespace: pids are comparable only within one."""
    return os.stat("/proc/self/ns/pid").st_ino


def time_namespace() -> int:
    """The inode of this process's time namespace, 0 if the kernel has none: CLOCK_MONOTONIC is common to it."""
    try:
        return os.stat("/proc/self/ns/time").st_ino
    except FileNotFoundError:
        return 0


def shm_identity() -> str:
    """The identity of the /dev/shm that this process sees: equal for the same mount."""
    status = os.stat("/dev/shm")  # noqa: S108 - only looked at
    return f"{status.st_dev}:{status.st_ino}"


class ForkMark:
    """A page that the kernel fills with zeros in every child forked from this process (madvise(2)).

    Its `byte` is 1 in this one. Reading that costs 0.02 µs, against 0.2 µs of `os.getpid`, and sees a fork made by C
    code too. Where kernel or sandbox refuses that, Python clears the byte, and C code's forks are not seen (logged).
    """

    __slots__ = ("_page", "address", "byte")

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.byte: memoryview[int] = memoryview(self._page)
        try:
            self._page.madvise(_MADV_WIPEONFORK)
        except OSError as error:
            log.warning("the kernel refuses MADV_WIPEONFORK (%s): forks by C code are not noticed", error.strerror)
            os.register_at_fork(after_in_child=partial(self.byte.__setitem__, 0, 0))
        self.byte[0] = 1
        self.address: int = ctypes.addressof(ctypes.c_char.from_buffer(self._page))


# --- any process ------------------------------------------------------------------------------------------------------


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which process `pid` started (proc(5), field 22); None if there is no such process."""
    return int(fields[19]) if (fields := _stat(pid)) else None


def is_stopped(pid: int) -> bool:
    """Whether process `pid` is stopped, by a signal or a debugger (proc(5), state T or t); False if it is not there."""
    return _stat(pid)[:1] in ([b"T"], [b"t"])


def _stat(pid: int) -> list[bytes]:
    """The fields of the process from its state on (proc(5), field 3); empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name stands in parentheses and may hold anything.
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_running(pid: int, started: int) -> bool:
    """Whether the process `pid` that started at `started` still runs. A zombie does not."""
    with closing(Process(pid, started)) as process:
        return process.is_alive()


def watched(process: str) -> Process:
    """The process PID:START (its start time)."""
    pid, _, started = process.partition(":")
    return Process(int(pid), int(started))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket, when it connected or began to listen. OSError."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def resident_bytes(pid: int) -> int:
    """A process's resident memory (proc(5), statm), shared pages included; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0


class Process:
    """One process of this pid namespace; its start time distinguishes it from a later one of the same pid.

    `is_alive` costs about 1 µs. It asks whether the process has memory (proc(5), statm): a dying process loses its
    memory before its files are closed, and so before its device work is torn down (do_exit: exit_mm, then exit_files).
    A pidfd is readable only afterwards (exit_notify): before that a driver may report unfinished work as complete.
    Threads may ask at the same time: the descriptor stays open until `close`, or until the object is collected.
    """

    _file: io.FileIO | None = None  # until there is one: an exception may end the constructor anywhere

    def __init__(self, pid: int, started: int) -> None:
        try:
            # In this order: the descriptor belongs to one process for good, and the start time is then read by the pid.
            self._file = io.FileIO(f"/proc/{pid}/statm")
            self._fd = self._file.fileno()
            self._is_gone = start_time(pid) != started or not self._has_memory()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: another user's, under hidepid=1
            self._is_gone = True

    def __del__(self) -> None:
        self.close()

    def _has_memory(self) -> bool:
        return os.pread(self._fd, 1, 0) != b"0"  # a number of pages begins with 0 only if it is 0

    def is_alive(self) -> bool:
        """Whether the process runs, or is stopped, and has not begun to exit."""
        if self._is_gone:
            return False
        try:
            return self._has_memory()
        except ProcessLookupError:
            self._is_gone = True
            return False

    def close(self) -> None:
        """Close the descriptor; afterwards the process counts as dead. Only while no other thread asks."""
        self._is_gone = True
        if self._file is not None:
            self._file.close()


class PidFdError(IpcSyncError, OSError):
    """The kernel, or a sandbox's filter, refuses pidfds."""


class PidFd:
    """A descriptor of one process, which becomes readable when it dies, also while it is a zombie (pidfd_open(2)).

    Raises ProcessLookupError if there is no such process, PidFdError if the kernel refuses.
    """

    _fd = -1  # until there is one: an exception may end the constructor anywhere

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno == errno.ENOENT:  # the number is a thread's by now
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL):
                raise
            raise PidFdError(
                f"process {os.getpid()} may not watch process {pid}: the kernel refuses pidfd_open ({error.strerror}), "
                "as a container's filter of system calls may have it: allow it there"
            ) from None
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        return self._fd

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether it ends within `seconds`."""
        return bool(self._poll.poll(math.ceil(seconds * 1000)))

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self._fd = self._fd, -1  # first: an exception of a signal's handler must not have it closed again
        if fd >= 0:
            os.close(fd)
