"""The waits of a session that need no thread each: one thread looks at all of them.

Never inside a driver's callback, where Python has deadlocked others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ipcsync._engines import Engine, deadline_of
from ipcsync._worker import Worker
from ipcsync.errors import IpcSyncError, WaitTimeout

log = logging.getLogger("ipcsync")

_ALONE_S = 0.005
_AMONG_S = 0.001
_LOOK_NS = 50_000_000
_STUCK_S = 1.0


class Pending:
    """One wait: for a point to be complete, or (`recorded`) merely to be recorded.

    It ends as `Point.synchronize` and `Point.wait` do on the host, with the same errors; `timeout` in seconds or None.
    """

    def __init__(
        self, engine: Engine, generation: int, timeout: float | None = None, *, recorded: bool = False
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._timeout = timeout
        self._deadline = deadline_of(timeout)
        self._recorded = recorded
        self._next_look = time.monotonic_ns() + _LOOK_NS

    def is_over(self) -> bool:
        """Whether what is waited for is there; does not block. Raises what ends the wait otherwise."""
        if self._is_there():
            return True
        now = time.monotonic_ns()
        if now >= self._next_look:
            self._next_look = now + _LOOK_NS
            self._engine.check_liveness(self._generation)
        if now >= self._deadline:
            is_recorded = self._engine.generation >= self._generation
            self._engine.raise_timeout(self._generation, self._timeout, "complete" if is_recorded else "recorded")
        return False

    def _is_there(self) -> bool:
        if not self._recorded:
            return self._engine.query(self._generation)
        self._engine.check()
        try:
            self._engine.await_recorded(self._generation, 0, self._timeout)
        except WaitTimeout:
            return False
        return True

    def __str__(self) -> str:
        return f"generation {self._generation} of {self._engine.name!r}"

    def pause(self, seconds: float) -> None:
        """Sleep until it may be over, at most for so long."""
        try:
            if self._recorded:
                self._engine.await_recorded(self._generation, deadline_of(seconds), seconds)
            else:
                self._engine.await_complete(self._generation, seconds)
        except IpcSyncError:
            return  # the next look says so


class WaitEntry:
    """One wait of `Waits`, and what to call when it is over: with None, or with the error that ended it."""

    __slots__ = ("error", "is_callback", "pending", "settle")

    def __init__(
        self, pending: Pending, settle: Callable[[Exception | None], object], *, is_callback: bool = False
    ) -> None:
        self.pending: Pending = pending
        self.settle: Callable[[Exception | None], object] = settle
        self.is_callback: bool = is_callback
        self.error: Exception | None = None

    def is_over(self) -> bool:
        """Whether it is over; then `error` is what ended it, if not what was hoped for."""
        try:
            return self.pending.is_over()
        except Exception as error:  # noqa: BLE001 - whoever waits is told, whatever it is
            self.error = error
            return True

    def call(self) -> None:
        """Tell whoever waits. What that raises is logged, also what would end a thread (SystemExit)."""
        try:
            self.settle(self.error)
        except BaseException:
            log.exception("a done callback of %s failed", self.pending)


class Waits:
    """The waits of a client, looked at by one thread that is started with the first and ends when none is left.

    Callbacks of users are called by another one, in the order in which their waits were over. One that does not return
    keeps the others for a second: then they go on on a thread of their own.
    """

    def __init__(self) -> None:
        self._waiting: dict[WaitEntry, None] = {}  # in the order in which they came
        self._due: deque[WaitEntry] = deque()
        self._looker = Worker("ipcsync-waits", lambda: bool(self._waiting or self._due), self._look)
        self._caller = _Caller(self._due)

    def add(
        self, pending: Pending, settle: Callable[[Exception | None], object], *, is_callback: bool = False
    ) -> WaitEntry:
        """Call `settle(None)` once it is over as hoped, or `settle(error)`; on a thread of the client's.

        `is_callback`: it is a user's, and may do anything. Else it returns at once.
        """
        entry = WaitEntry(pending, settle, is_callback=is_callback)
        self._waiting[entry] = None
        self._looker.ensure()
        return entry

    def remove(self, entry: WaitEntry) -> None:
        """Wait for it no more. If it is over this very moment, `settle` may still be called."""
        self._waiting.pop(entry, None)

    @property
    def count(self) -> int:
        """How many waits are not over."""
        return len(self._waiting)

    def _look(self) -> None:
        waiting = list(self._waiting)
        began = time.monotonic()
        # Asked from the last on and told from the first on: of two that end in this moment, the one that was added
        # first is told first.
        over = [entry for entry in reversed(waiting) if entry.is_over()]
        for entry in reversed(over):
            self._settle(entry)
        if self._due:
            if self._caller.is_stuck:
                self._caller = _Caller(self._due)
            self._caller.ensure()
        if over:
            return
        # The first is the likeliest to come first. With many, half of the time at most is spent on looking.
        took = time.monotonic() - began
        if waiting:
            waiting[0].pending.pause(_ALONE_S if len(waiting) == 1 else max(_AMONG_S, took))
        else:
            self._caller.join(_LOOK_NS / 1e9)

    def _settle(self, entry: WaitEntry) -> None:
        if self._waiting.pop(entry, entry) is entry:
            return  # taken back meanwhile
        if entry.is_callback:
            self._due.append(entry)
        else:
            entry.call()

    def join(self, timeout: float, closer: int) -> None:
        """Wait until every callback was called; the client is closed, so each of them is due.

        `closer` is the thread that waits for this: a callback may close its own client.
        """
        deadline = time.monotonic() + timeout
        self._looker.join(timeout)
        if self._caller.thread != closer:
            self._caller.join(max(0.0, deadline - time.monotonic()))


class _Caller:
    """Calls what is due, in order, until one of the calls does not return."""

    def __init__(self, due: deque[WaitEntry]) -> None:
        self._due = due
        self._is_replaced = False
        self._since = 0.0  # when the callback began that runs now
        self._worker = Worker("ipcsync-callbacks", lambda: bool(due) and not self._is_replaced, self._call)
        self.thread = 0
        self.ensure = self._worker.ensure
        self.join = self._worker.join

    @property
    def is_stuck(self) -> bool:
        """Whether a callback has not returned for long; then this calls no other."""
        since = self._since
        self._is_replaced = bool(since) and time.monotonic() - since > _STUCK_S
        return self._is_replaced

    def _call(self) -> None:
        self.thread = threading.get_ident()
        self._since = time.monotonic()
        try:
            self._due.popleft().call()
        finally:
            self._since = 0.0
