"""The thread that owns a session, and the session's lease, which it keeps.

It does what others ask for, one after the other, and beats. An exception that ends a caller never reaches it.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import select
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import get_ident
from time import monotonic_ns
from typing import Any

from ipcsync._board import Board, SessionLine
from ipcsync._deadline import left_of
from ipcsync._engines.core import SessionCheck
from ipcsync._linux.futex import DeathMark
from ipcsync._linux.process import Process, pid_namespace
from ipcsync._native import fork
from ipcsync._threads import Job, beats
from ipcsync._wire.messages import Welcome
from ipcsync.errors import (
    ClientClosed,
    CoordinatorLost,
    ForkedProcessError,
    IpcSyncError,
    ProtocolError,
    SessionExpired,
    SessionLost,
)

log = logging.getLogger("ipcsync")

LONGEST_BEAT_S = 2.0  # a beat releases what is over, for which others wait, however long this lease's TTL is
_UNMARKED_BEAT_S = 0.25  # where only a beat sees that the coordinator died
_ENDS = (SessionLost, ClientClosed, ForkedProcessError, ProtocolError)
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS)


# As `os.eventfd_write`, but it keeps the GIL: the thread that is woken would take it, and the caller, which is about to
# wait, have to be woken once more for that. No `argtypes`: they would be called, and near the limit of recursion ctypes
# turns what that raises into an error of its own.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_ONE = ctypes.c_uint64(1)


def block_signals() -> None:
    """Leave all signals to other threads than this one and those that it starts, but for faults of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - set(_FAULTS))


class SessionLease:
    """One session, from Welcome to goodbye. It is what the engines ask whether they may go on.

    The client judges its lease by its own monotonic clock: when its heartbeat did not run for a TTL, the session counts
    as expired here too, whatever the board says, and is never revived.
    """

    def __init__(self, board: Board, welcome: Welcome, endpoint: str) -> None:
        self.board = board
        self.welcome = welcome
        self.endpoint = endpoint
        self.full_rings: int = 0  # how many records had to wait for room in their rings
        self.depends_on_all = False  # whether each record depends on every wait of the process, whatever its stream
        self.line_index: int = welcome.line
        self.line: SessionLine = board.session(welcome.line)
        self._ttl_ns = int(welcome.lease_ttl * 1e9)
        self.period_s: float = min(welcome.heartbeat, LONGEST_BEAT_S if board.has_mark else _UNMARKED_BEAT_S)
        self._problem: IpcSyncError | None = None
        self._label, _ = board.who(welcome.serial)
        self.is_judged = True
        """False once the client is closed by its user: only what was wrong before counts then."""
        pid, started, namespace = board.coordinator
        self._coordinator = Process(pid, started) if namespace == pid_namespace() else None  # else by its lifeline
        self._last_ns = monotonic_ns()
        reference = weakref.ref(self)

        def check_slowly() -> None:
            if (lease := reference()) is None:
                raise ClientClosed("the session is over: connect again")
            lease.check_slowly()

        self.session_check: SessionCheck = SessionCheck(fork.arm(), board, self.line, welcome.serial, check_slowly)
        self.session_check.good_until = self._last_ns + self._ttl_ns
        self.check: Callable[[], None] = self.session_check.check
        self.line.heartbeat = self._last_ns
        self.mark: DeathMark = DeathMark(self.line.owner_address, self.line.doorbell)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_slowly(self) -> None:
        fork.check()
        if self._problem is None and self.is_judged:
            self.lose(self._diagnosis())
        if self._problem is not None:
            raise copy.copy(self._problem)  # each with a traceback of its own

    def _diagnosis(self) -> IpcSyncError:
        try:
            self.check_coordinator()
        except IpcSyncError as error:
            return error
        return SessionExpired(
            f"this process (pid {os.getpid()}, session {self._label!r}) was silent for longer than its lease's "
            f"{self._ttl_ns / 1e9:g} s: it was stopped, or held the GIL; connect again",
            endpoint=self.endpoint,
            session=self._label,
        )

    def check_liveness(self) -> None:
        """`check`, and ask whether the coordinator's process lives. Each wait calls it now and then.

        A finalizer may wait on a thread that beats, for this session or another one: then this beats.
        """
        if (beat := beats.get(get_ident())) is not None:
            beat()
        self.check()
        if not self.coordinator_is_alive():
            self.check_slowly()

    def check_coordinator(self) -> None:
        """Raise CoordinatorLost if it died or stopped, ProtocolError if the board's header was overwritten.

        Whatever became of the lease.
        """
        try:
            self.board.check()
            if not self.coordinator_is_alive():
                raise self.board.lost("died")
        except CoordinatorLost as error:
            error.endpoint = self.endpoint
            raise

    def coordinator_is_alive(self) -> bool:
        """Whether the coordinator serves: it has not stopped, and by the kernel's word its process lives."""
        if self.board.coordinator_is_over:
            return False
        if self._coordinator is None:
            return self.board.coordinator_holds_lifeline
        return self._coordinator.is_alive()

    def lose(self, error: IpcSyncError) -> None:
        """The session cannot be used any more, for good: every check raises this error, if it is the first."""
        if self._problem is None:
            self._problem = copy.copy(error)
        self.session_check.good_until = -1

    # --- the owner's thread -------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Tell the board that this process lives, and look whether the session does."""
        now = monotonic_ns()
        if self._problem is not None or not self.is_judged:
            return
        try:
            self.check()
            if not self.coordinator_is_alive():
                self.check_slowly()
        except IpcSyncError as error:
            self.lose(error)
            return
        if now < self._last_ns:
            return  # a call within this one has beaten since
        self._last_ns = now
        self.session_check.good_until = now + self._ttl_ns
        if self._problem is not None:  # found by another thread meanwhile, whose word is the last
            self.session_check.good_until = -1
        self.line.heartbeat = now

    def beat_and_check(self) -> None:
        """In each slice of a request: beat, and raise if the session or its coordinator is lost."""
        self.beat()
        self.check_liveness()

    def show_heartbeat(self) -> None:
        """Store the heartbeat of a session that said goodbye, and judges its last records: others may wait for that."""
        self.line.heartbeat = monotonic_ns()


class Owner:
    """What the owner of one session does, and what other threads have it do.

    Its bell is an eventfd, which only it reads. Any thread may ring it; the last reference closes it.
    """

    _fd = -1  # until there is one: an exception may end the constructor anywhere

    def __init__(self, lease: SessionLease) -> None:
        self._lease = lease
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.job: Job[Any] | None = None
        self._is_due = False  # a beat, whatever the time
        self.is_over: bool = False  # set by the owner before it works for the last time
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
        poll = select.poll()  # epoll(7) would need a descriptor, and there may be none left
        poll.register(self._fd, select.POLLIN)
        next_ns = 0
        while True:
            work()
            if until():
                return
            if self._is_due or monotonic_ns() >= next_ns:
                self._is_due = False
                next_ns = monotonic_ns() + int(1e9 * min(self._lease.period_s, self._beat(at_beat)))
                continue  # to what was asked for meanwhile
            has_rung = poll.poll(1000 * left_of(next_ns))
            if fork.is_in_bad_fork():
                return
            if has_rung:
                with suppress(BlockingIOError):  # a child may have read it
                    os.eventfd_read(self._fd)

    def _beat(self, at_beat: Callable[[], float]) -> float:
        self._lease.beat()
        try:
            return at_beat()
        except _ENDS as error:
            self._lease.lose(error)
        except Exception:  # it says nothing about the session, and the next beat may do better
            log.exception("the heartbeat of %s failed", self._lease.endpoint)
        return LONGEST_BEAT_S

    def work(self) -> None:
        for _ in range(self._queue.qsize()):  # no more: callers without a pause would keep it from its beats
            self._queue.get()()

    def do(self, job: Job[Any]) -> None:
        if job.is_wanted:
            self.job = job
            job.run()
            self.job = None

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
