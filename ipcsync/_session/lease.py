"""A session's lease: its heartbeat, and the checks whether the session and its coordinator live."""

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
from threading import get_ident
from time import monotonic_ns

from ipcsync._board import LIVE, Board, SessionLine
from ipcsync._board.words import words
from ipcsync._deadline import left_of
from ipcsync._engines.core import SessionCheck
from ipcsync._linux.death_mark import DeathMark
from ipcsync._linux.process import PidFd, PidFdError, Process, pid_namespace
from ipcsync._locks import know_turns
from ipcsync._native import fork
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

_ENDS = (SessionLost, ClientClosed, ForkedProcessError, ProtocolError)
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS)
_LIFELINE_S = 0.25
_LONGEST_CALL_NS = 60_000_000_000  # of a finalizer on the owner's thread; nothing else is done meanwhile
LONGEST_BEAT_S = 2.0  # a beat releases what is over, for which others wait, however long this lease's TTL is


# As `os.eventfd_write`, but it keeps the GIL: the thread that is woken would take it, and the caller, which is about to
# wait, have to be woken once more for that. No `argtypes`: they would be called, and near the limit of recursion ctypes
# turns what that raises into an error of its own.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_ONE = ctypes.c_uint64(1)


class Bell:
    """Wakes a thread that polls its descriptor for edges. Any thread may ring it; the last reference closes it."""

    def __init__(self) -> None:
        self._fd = -1
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._argument = ctypes.c_int(self._fd)

    def fileno(self) -> int:
        """For the poll."""
        return self._fd

    def ring(self) -> None:
        """Have the thread's poll return, or the next one."""
        _eventfd_write(self._argument, _ONE)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # also when this module is gone
        if self._fd >= 0:
            close(self._fd)


class SessionLease:
    """One session, from Welcome to goodbye. It is what the engines ask whether they may go on.

    The client judges its lease by its own monotonic clock: when its heartbeat did not run for a TTL, the session counts
    as expired here too, whatever the board says, and is never revived.
    """

    def __init__(
        self,
        board: Board,
        welcome: Welcome,
        endpoint: str,
        at_beat: Callable[[], float],
        on_ring: Callable[[], None] | None = None,
    ) -> None:
        self.board = board
        self.welcome = welcome
        self.endpoint = endpoint
        self.full_rings: int = 0
        self.depends_on_all = False
        self.line_index: int = welcome.line
        self.line: SessionLine = board.session(welcome.line)
        self._at_beat = at_beat  # returns in how many seconds there is more to do
        self._ttl_ns = int(welcome.lease_ttl * 1e9)
        self._beat_s = min(welcome.heartbeat, LONGEST_BEAT_S)
        self._problem: IpcSyncError | None = None
        self._label, _ = board.who(welcome.serial)
        self._closed = False
        self._has_said_goodbye = False
        self._bell = Bell()
        self._is_due = False  # a beat, whatever the time
        self._coordinator, self._pidfd = self._watch_coordinator()
        self._state_and_serial, self._live = self.line.state_and_serial, words(LIVE, welcome.serial)
        self._last_ns = monotonic_ns()
        self.session_check: SessionCheck = SessionCheck(
            fork.mark(), board, self.line, welcome.serial, LIVE, _slowly(weakref.ref(self))
        )
        self.session_check.good_until = self._last_ns + self._ttl_ns
        self.check: Callable[[], None] = self.session_check.check
        self.line.heartbeat = self._last_ns
        self._due_ns = 0  # until when a call within a beat beats
        # By it peers see on the board when this process dies.
        self._life = DeathMark(self.line.owner_address, self.line.doorbell, on_ring or self.wake)

    def _watch_coordinator(self) -> tuple[Process | None, PidFd | None]:
        """By its process where its pid means the same here, else (None, None): by its lifeline."""
        pid, started, namespace = self.board.coordinator
        if namespace != pid_namespace():
            return None, None
        try:
            return Process(pid, started), PidFd(pid)
        except ProcessLookupError:
            return Process(pid, started), None  # it is gone, which the first look says
        except PidFdError as error:
            log.warning("%s; until then a coordinator's death is noticed only when this process looks", error)
            return Process(pid, started), None

    def show(self) -> None:
        """Have the kernel mark this process's death for its peers from now on."""
        self._life.show()

    @property
    def is_good(self) -> bool:
        """Whether no problem is known."""
        return self._problem is None and not self._closed

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_slowly(self) -> None:
        """Something is wrong: say what."""
        fork.check()
        if self._problem is not None:
            self._raise()
        if not self._has_said_goodbye:
            self._diagnose()

    def check_liveness(self) -> None:
        """`check`, and ask whether the coordinator's process lives. Each wait calls it now and then.

        A finalizer may wait on a thread that beats, for this session or another one: then this beats, for a minute.
        """
        beating = _beating.get(get_ident())
        if beating is not None:
            beating.beat_within()
        self.check()
        if not self._has_said_goodbye and not self.coordinator_is_alive():
            self._diagnose()

    def check_coordinator(self) -> None:
        """Raise CoordinatorLost if it died or stopped, whatever became of the lease."""
        self._check_board()
        if not self.coordinator_is_alive():
            raise self._coordinator_died()

    def say_goodbye(self) -> None:
        """The client is closed by its user: nothing of the lease is judged any more, only what was wrong before."""
        self._has_said_goodbye = True

    def coordinator_is_alive(self) -> bool:
        """Whether the coordinator serves: it has not stopped, and by the kernel's word its process lives."""
        if self.board.coordinator_is_over:
            return False
        if self._coordinator is None:
            return self.board.coordinator_holds_lifeline
        return self._coordinator.is_alive()

    def count_full_ring(self) -> None:
        """A record had to wait for its ring."""
        self.full_rings += 1

    def _check_board(self) -> None:
        try:
            self.board.check()
        except CoordinatorLost as error:
            error.endpoint = self.endpoint
            raise

    def _coordinator_died(self) -> CoordinatorLost:
        error = self.board.lost("died")
        error.endpoint = self.endpoint
        return error

    def lose(self, error: IpcSyncError) -> None:
        """The session cannot be used any more, for good: every check raises this error, if it is the first."""
        if self._problem is None:
            self._problem = copy.copy(error)
        self.session_check.good_until = -1

    def _raise(self) -> None:
        assert self._problem is not None
        raise copy.copy(self._problem)  # each with a traceback of its own

    def _diagnose(self) -> None:
        """Something about the lease is wrong: say what, for good."""
        if self._has_said_goodbye:
            return
        try:
            self._check_board()
        except (CoordinatorLost, ProtocolError) as error:
            self.lose(error)
            raise
        if not self.coordinator_is_alive():
            self.lose(self._coordinator_died())
        else:
            self.lose(
                SessionExpired(
                    f"this process (pid {os.getpid()}, session {self._label!r}) was silent for longer than its lease's "
                    f"{self._ttl_ns / 1e9:g} s: it was stopped, or held the GIL; connect again",
                    endpoint=self.endpoint,
                    session=self._label,
                )
            )
        self._raise()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], work: Callable[[], None] = lambda: None) -> None:
        """Beat on the calling thread until `until()`, asked after each `work()`, for which `ring` wakes it."""
        pidfd = -1 if self._pidfd is None else self._pidfd.fileno()
        period_s = self._beat_s if pidfd >= 0 else min(self._beat_s, _LIFELINE_S)
        _beating[get_ident()] = self
        try:
            with select.epoll() as poll:
                poll.register(self._bell.fileno(), select.EPOLLIN | select.EPOLLET)  # the edge, so that nobody reads it
                if pidfd >= 0:
                    poll.register(pidfd, select.EPOLLIN)
                next_ns = 0
                while True:
                    work()
                    if until():
                        return
                    if self._is_due or monotonic_ns() >= next_ns:
                        self._is_due = False
                        next_ns = monotonic_ns() + int(1e9 * min(period_s, self._beat()))
                        continue  # to what was asked for meanwhile
                    events = poll.poll(left_of(next_ns))
                    if fork.is_in_bad_fork():
                        return
                    if any(fd == pidfd for fd, _ in events):
                        poll.unregister(pidfd)
                        with suppress(IpcSyncError):  # the next call raises it
                            self._diagnose()
        finally:
            _beating.pop(get_ident(), None)  # not there if this module was reloaded meanwhile

    def _beat(self) -> float:
        self.beat()
        self._due_ns = monotonic_ns() + _LONGEST_CALL_NS
        try:
            return self._at_beat()
        except _ENDS as error:
            self.lose(error)
        except Exception:  # it says nothing about the session, and the next beat may do better
            log.exception("the heartbeat of %s failed", self.endpoint)
        return LONGEST_BEAT_S

    def beat(self) -> None:
        """Tell the board that this process lives, and look whether the session does."""
        now = monotonic_ns()
        if self._problem is not None or self._has_said_goodbye:
            return
        try:
            is_silent = now - self._last_ns > self._ttl_ns or self._state_and_serial != self._live
            if is_silent or (self._pidfd is None and not self.coordinator_is_alive()):
                self._diagnose()
            self._check_board()
        except IpcSyncError as error:
            self.lose(error)
        else:
            if now < self._last_ns:
                return  # a call within this one has beaten since
            self._last_ns = now
            self.session_check.good_until = now + self._ttl_ns
            if self._problem is not None:  # found by another thread meanwhile, whose word is the last
                self.session_check.good_until = -1
            self.line.heartbeat = now

    def beat_within(self) -> None:
        """Beat in a wait of a call that interrupts this thread's own work; a minute long."""
        if monotonic_ns() < self._due_ns:
            self.beat()

    def show_heartbeat(self) -> None:
        """Store the heartbeat of a session that said goodbye, and judges its last records: others may wait for that."""
        self.line.heartbeat = monotonic_ns()

    def wake(self) -> None:
        """Have the thread run a beat now; nothing once it has ended."""
        self._is_due = True
        self.ring()

    def ring(self) -> None:
        """Have the thread look for work now. Nothing in a forked child, which shares the parent's bell."""
        if not fork.is_in_bad_fork():
            self._bell.ring()

    def stop(self) -> None:
        """Release the resources of `run`; called by the thread that runs it, or that would have."""
        self._closed = True
        self._life.end()
        if self._pidfd is not None:
            self._pidfd.close()
        self._at_beat = _nothing  # breaks a reference cycle with the session, which would keep board and descriptors

    def announce_death(self) -> None:
        """Mark this process as dead for its peers: it is about to end, though this session may still drain."""
        self._life.give_up()


def block_signals() -> None:
    """Leave all signals to other threads than this one and those that it starts, but for faults of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - set(_FAULTS))


_beating: dict[int, SessionLease] = {}
"""The lease that a thread keeps alive."""


def has_a_beat() -> bool:
    """Whether the calling thread keeps a session alive, so that it may wait for no such thread."""
    return get_ident() in _beating


know_turns(has_a_beat)  # a finalizer that the garbage collector calls there waits for no lock for long


def _slowly(reference: weakref.ref[SessionLease]) -> Callable[[], None]:
    """The function for a quick look that finds a problem. The lease holds it, so it has a weak reference only."""

    def check() -> None:
        lease = reference()
        if lease is None:
            raise ClientClosed("the session is over: connect again")
        lease.check_slowly()

    return check


def _nothing() -> float:
    """The beat of a lease that is over."""
    return LONGEST_BEAT_S
