"""Processes by (pid, start time), and the file descriptors that tell of their death."""

from __future__ import annotations

import os
import select


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which process `pid` started (proc(5), field 22); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name stands in parentheses and may hold anything: count fields behind the last one.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_running(pid: int, started: int) -> bool:
    """Whether the process `pid` that started at `started` still runs. A zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[19]) == started and fields[0] not in (b"Z", b"X")


def pid_namespace() -> int:
    """The inode of this process's pid namespace: pids mean the same only where it is equal."""
    return os.stat("/proc/self/ns/pid").st_ino


class PidFd:
    """A descriptor of one process, which becomes readable when it dies, also while it is a zombie (pidfd_open(2))."""

    __slots__ = ("_fd", "_poll", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor, for an event loop."""
        return self._fd

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Give the descriptor back; twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
