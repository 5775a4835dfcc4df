"""What wakes the keeper's loop: a pipe for signals, and for its other thread."""

from __future__ import annotations

import os
import signal

from ipcsync._board.runtime_dir import RELOAD


class Wake:
    """Catches signals from its construction on; the pipe keeps their numbers until the loop reads them."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)  # first: what a handler swallows must be kept
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, RELOAD, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup(1) ignores it
                signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._read

    def wake(self) -> None:
        """Have the loop look again."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            return  # the pipe is full, so it wakes anyway

    def signals(self) -> list[int]:
        """The signals that came since the last call, without SIGCHLD: that one only wakes."""
        try:
            return [number for number in os.read(self._read, 4096) if number not in (0, signal.SIGCHLD)]
        except BlockingIOError:
            return []
