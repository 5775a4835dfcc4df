"""What one of our programs does not take over from the one that started it.

That one may have blocked or ignored signals, closed its standard descriptors, and be a service that its manager
watches. Each of our programs calls `forget_parent` before anything else; variables of a service manager are kept from
it by `child.spawn`, which starts all of our processes. It keeps the rest: working directory, resource limits, niceness,
OOM score, CPU affinity, and all other variables.
"""

from __future__ import annotations

import os
import signal

OF_A_SERVICE = frozenset(
    ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
)
"""The variables that a service manager means for the one process that it started."""

# Ignored by nohup(1), by a shell for what runs in its background, or by Python itself.
_MAY_BE_IGNORED = frozenset(
    (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGPIPE,
        signal.SIGXFSZ,
    )
)


def forget_parent() -> None:
    """Unblock all signals, and have none ignored but those that nohup(1) or a shell ignores on purpose.

    For a program of ours before it starts a thread: a mask is each thread's own.
    """
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
