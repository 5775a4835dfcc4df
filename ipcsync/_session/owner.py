"""The thread that owns a session: it does what other threads ask for, one after the other, and beats in between.

An exception that ends a caller never reaches it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

from ipcsync._deadline import left_of
from ipcsync._native import fork
from ipcsync._session.lease import LONGEST_BEAT_S, SessionLease
from ipcsync._worker import Job, beats, has_a_beat
from ipcsync.errors import (
    ClientClosed,
    ForkedProcessError,
    ProtocolError,
    Reentered,
    SessionLost,
)

log = logging.getLogger("ipcsync")

_ENDS = (SessionLost, ClientClosed, ForkedProcessError, ProtocolError)
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS)
_LONGEST_CALL_NS = 60_000_000_000  # of a finalizer on the owner's thread; nothing else is done meanwhile


# As `os.eventfd_write`, but it keeps the GIL: the thread that is woken would take it, and the caller, which is about to
# wait, have to be woken once more for that. No `argtypes`: they would be called, and near the limit of recursion ctypes
# turns what that raises into an error of its own.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_ONE = ctypes.c_uint64(1)


def block_signals() -> None:
    """Leave all signals to other threads than this one and those that it starts, but for faults of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - set(_FAULTS))


def check_may_wait() -> None:
    """Raise Reentered on a thread that owns a session, where the collector may call any finalizer."""
    if has_a_beat():
        raise Reentered("a finalizer on a thread of ipcsync's own makes a call that waits for such a thread")


class Owner:
    """What the owner of one session does, and what other threads have it do.

    Its bell is an eventfd that it polls for edges, so that nobody reads it. Any thread may ring it; the last reference
    closes it.
    """

    _fd = -1  # until there is one: an exception may end the constructor anywhere

    def __init__(self, lease: SessionLease) -> None:
        self._lease = lease
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.job: Job[Any] | None = None
        """The one under way."""
        self._is_due = False  # a beat, whatever the time
        self.is_over: bool = False
        """Set by the owner before it works for the last time."""
        self._beats_until_ns = 0  # in calls within a beat
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bell = ctypes.c_int(self._fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # also when this module is gone
        if self._fd >= 0:
            close(self._fd)

    # --- the owner's thread -------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], at_beat: Callable[[], float], work: Callable[[], object]) -> None:
        """Work and beat on the calling thread until `until()`, asked after each `work()`, for which `ring` wakes it.

        `at_beat` is called behind each beat, and returns in how many seconds there is more to do.
        """
        with ExitStack() as undo:
            beats[threading.get_ident()] = self._beat_within
            undo.callback(beats.pop, threading.get_ident(), None)  # none if the module was reloaded meanwhile
            poll = undo.enter_context(select.epoll())
            poll.register(self._fd, select.EPOLLIN | select.EPOLLET)
            next_ns = 0
            while True:
                work()
                if until():
                    return
                if self._is_due or time.monotonic_ns() >= next_ns:
                    self._is_due = False
                    next_ns = time.monotonic_ns() + int(1e9 * min(self._lease.period_s, self._beat(at_beat)))
                    continue  # to what was asked for meanwhile
                poll.poll(left_of(next_ns))
                if fork.is_in_bad_fork():
                    return

    def _beat(self, at_beat: Callable[[], float]) -> float:
        self._lease.beat()
        self._beats_until_ns = time.monotonic_ns() + _LONGEST_CALL_NS
        try:
            return at_beat()
        except _ENDS as error:
            self._lease.lose(error)
        except Exception:  # it says nothing about the session, and the next beat may do better
            log.exception("the heartbeat of %s failed", self._lease.endpoint)
        return LONGEST_BEAT_S

    def _beat_within(self) -> None:
        """Beat in a wait of a finalizer's call, which interrupts this thread's own work."""
        if time.monotonic_ns() < self._beats_until_ns:
            self._lease.beat()

    def work(self) -> None:
        """Do what was asked for."""
        while not self._queue.empty():
            self._queue.get()()

    def do(self, job: Job[Any]) -> None:
        """Do a job, unless its caller is gone; other threads `post` that."""
        if job.is_wanted:
            self.job = job
            job.run()
            self.job = None

    @property
    def is_unwanted(self) -> bool:
        """Whether the caller of the job under way is gone."""
        return self.job is not None and not self.job.is_wanted

    # --- other threads ------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Have the owner look for work now. Nothing in a forked child, which shares the parent's bell."""
        if not fork.is_in_bad_fork():
            _eventfd_write(self._bell, _ONE)

    def wake(self) -> None:
        """Have the owner beat now; nothing once it has ended."""
        self._is_due = True
        self.ring()

    def post(self, function: Callable[[], object]) -> None:
        """Have the owner call a function, behind those before. An exception of it ends the session."""
        self._queue.put(function)
        self.ring()
