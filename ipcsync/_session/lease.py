"""A session's lease: its heartbeat, and the checks whether the session and its coordinator live."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns

from ipcsync._board import LIVE, Board, SessionLine
from ipcsync._engines.core import SessionCheck
from ipcsync._linux.futex import DeathMark
from ipcsync._linux.process import Process, pid_namespace
from ipcsync._locks import know_turns
from ipcsync._native import fork
from ipcsync._wire.messages import Welcome
from ipcsync._worker import beats, has_a_beat
from ipcsync.errors import ClientClosed, CoordinatorLost, IpcSyncError, SessionExpired

LONGEST_BEAT_S = 2.0  # a beat releases what is over, for which others wait, however long this lease's TTL is
_UNMARKED_BEAT_S = 0.25  # where only a beat sees that the coordinator died


class SessionLease:
    """One session, from Welcome to goodbye. It is what the engines ask whether they may go on.

    The client judges its lease by its own monotonic clock: when its heartbeat did not run for a TTL, the session counts
    as expired here too, whatever the board says, and is never revived.
    """

    def __init__(self, board: Board, welcome: Welcome, endpoint: str) -> None:
        self.board = board
        self.welcome = welcome
        self.endpoint = endpoint
        self.full_rings: int = 0
        self.depends_on_all = False
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
        self.session_check: SessionCheck = SessionCheck(
            fork.mark(), board, self.line, welcome.serial, LIVE, _slowly(weakref.ref(self))
        )
        self.session_check.good_until = self._last_ns + self._ttl_ns
        self.check: Callable[[], None] = self.session_check.check
        self.line.heartbeat = self._last_ns
        self.mark: DeathMark = DeathMark(self.line.owner_address, self.line.doorbell)
        """By it peers see on the board when this process dies."""

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_slowly(self) -> None:
        """Something is wrong: say what."""
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

        A finalizer may wait on a thread that beats, for this session or another one: then this beats, for a minute.
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

    def count_full_ring(self) -> None:
        """A record had to wait for its ring."""
        self.full_rings += 1

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

    def stop(self) -> None:
        """Release its mark; called by the owner's thread, or that which would have been."""
        self.mark.end()


know_turns(has_a_beat)  # a finalizer that the garbage collector calls there waits for no lock for long


def _slowly(reference: weakref.ref[SessionLease]) -> Callable[[], None]:
    """The function for a quick look that finds a problem. The lease holds it, so it has a weak reference only."""

    def check() -> None:
        lease = reference()
        if lease is None:
            raise ClientClosed("the session is over: connect again")
        lease.check_slowly()

    return check
