"""The asynchronous waits of a session: one thread looks at all of them.

It uses no driver callbacks, in which Python can deadlock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ipcsync._deadline import deadline_of
from ipcsync._engines import Engine
from ipcsync._worker import Worker
from ipcsync.errors import DriverError, IpcSyncError, WaitTimeout

log = logging.getLogger("ipcsync")

_ALONE_S = 0.005
_AMONG_S = 0.001
_CHECK_NS = 50_000_000
_STUCK_S = 1.0
_FAILING_S = 1.0


class Pending:
    """One wait: for a point to be complete, or (`recorded`) merely to be recorded.

    It ends as `Point.synchronize` and `Point.wait` end on the host, with the same errors; `timeout` in seconds or None.
    """

    def __init__(
        self, engine: Engine, generation: int, timeout: float | None = None, *, recorded: bool = False
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._timeout = timeout
        self._deadline = deadline_of(timeout)
        self._recorded = recorded
        self._next_check = time.monotonic_ns() + _CHECK_NS

    def has_ended(self) -> bool:
        """Whether the point is complete, or recorded; does not block. Raises the error that ends the wait."""
        if self._is_there():
            return True
        now = time.monotonic_ns()
        if now >= self._next_check:
            self._next_check = now + _CHECK_NS
            self._engine.check_liveness(self._generation)
        if now >= self._deadline:
            is_recorded = self._engine.generation >= self._generation
            self._engine.raise_timeout(self._generation, self._timeout, "complete" if is_recorded else "recorded")
        return False

    def _is_there(self) -> bool:
        if not self._recorded:
            return self._engine.query(self._generation, 0)  # this thread has other waits to look at
        self._engine.check()
        try:
            self._engine.await_recorded(self._generation, 0, self._timeout)
        except WaitTimeout:
            return False
        return True

    def __str__(self) -> str:
        return f"generation {self._generation} of {self._engine.name!r}"

    def pause(self, seconds: float) -> None:
        """Sleep until it may be over, at most `seconds`."""
        try:
            if self._recorded:
                self._engine.await_recorded(self._generation, deadline_of(seconds), seconds)
            else:
                self._engine.await_complete(self._generation, seconds)
        except DriverError:
            time.sleep(seconds)  # the next look may succeed
        except IpcSyncError:
            return  # the next look raises it


class WaitEntry:
    """One wait of `Waits`, and what to call when it is over: with None, or with the error that ended it."""

    __slots__ = ("_failing_since", "error", "is_callback", "notify", "pending")

    def __init__(
        self, pending: Pending, notify: Callable[[Exception | None], object], *, is_callback: bool = False
    ) -> None:
        self.pending: Pending = pending
        self.notify: Callable[[Exception | None], object] = notify
        self.is_callback: bool = is_callback
        self.error: Exception | None = None
        self._failing_since = 0.0

    def has_ended(self) -> bool:
        """Whether it is over; `error` is then None or the error that ended it."""
        try:
            has_ended = self.pending.has_ended()
        except Exception as error:  # noqa: BLE001 - the waiter gets it
            self.error = error
            return not (self.is_callback and self._may_pass(error))
        self.error, self._failing_since = None, 0.0
        return has_ended

    def _may_pass(self, error: Exception) -> bool:
        """Whether a later look may succeed, and the point still be complete.

        A callback is not given the error, and asks the point what happened: by then that may say that nothing did.
        """
        if isinstance(error, IpcSyncError) and not isinstance(error, DriverError):
            return False
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        return now - self._failing_since < _FAILING_S

    def call(self) -> None:
        """Call `notify`. An exception of it is logged, also one that would end a thread (SystemExit)."""
        try:
            self.notify(self.error)
        except BaseException:
            log.exception("a done callback of %s failed", self.pending)


class Waits:
    """The waits of a client. One thread looks at all of them: it starts with the first, and ends when none is left.

    Another thread calls the users' callbacks, in the order in which their waits ended. A callback that does not return
    delays the others for a second: then another thread goes on with them.
    """

    def __init__(self) -> None:
        self._waiting: dict[WaitEntry, None] = {}  # in the order in which they came
        self._due: deque[WaitEntry] = deque()
        self._poller = Worker("ipcsync-waits", lambda: bool(self._waiting or self._due), self._poll)
        self._caller = _Caller(self._due)

    def add(
        self, pending: Pending, notify: Callable[[Exception | None], object], *, is_callback: bool = False
    ) -> WaitEntry:
        """Call `notify(None)` once the point is complete or recorded, or `notify(error)`; on a thread of the client.

        `is_callback`: `notify` is a user's, and may block. Else it returns at once.
        """
        entry = WaitEntry(pending, notify, is_callback=is_callback)
        self._waiting[entry] = None
        self._poller.ensure()
        return entry

    def remove(self, entry: WaitEntry) -> None:
        """Cancel a wait. If it ends at this moment, `notify` may still be called."""
        self._waiting.pop(entry, None)

    @property
    def count(self) -> int:
        """How many waits are not over."""
        return len(self._waiting)

    def _poll(self) -> None:
        waiting = list(self._waiting)
        began = time.monotonic()
        # Asked from the last to the first, reported from the first to the last: of two waits that end at this moment,
        # the one that was added first is first.
        over = [entry for entry in reversed(waiting) if entry.has_ended()]
        for entry in reversed(over):
            self._notify(entry)
        if self._due:
            if self._caller.is_stuck:
                self._caller = _Caller(self._due)
            self._caller.ensure()
        if over:
            return
        # The first is the most likely to end first. With many waits, looking takes half of the time at most.
        took = time.monotonic() - began
        if waiting:
            waiting[0].pending.pause(_ALONE_S if len(waiting) == 1 else max(_AMONG_S, took))
        else:
            self._caller.join(_CHECK_NS / 1e9)

    def _notify(self, entry: WaitEntry) -> None:
        if self._waiting.pop(entry, entry) is entry:
            return  # cancelled meanwhile
        if entry.is_callback:
            self._due.append(entry)
        else:
            entry.call()

    def join(self, timeout: float, closer: int, pause: Callable[[float], object] = time.sleep) -> None:
        """Wait until every callback was called; the client is closed, so each of them is due.

        `closer` is the id of the thread that waits for this: a callback may close its own client.
        """
        deadline = time.monotonic() + timeout
        self._poller.join(timeout, pause)
        if self._caller.thread != closer:
            self._caller.join(max(0.0, deadline - time.monotonic()), pause)


class _Caller:
    """Makes the due calls, in order, until one of them does not return."""

    def __init__(self, due: deque[WaitEntry]) -> None:
        self._due = due
        self._is_replaced = False
        self._since = 0.0  # when the running callback began
        self._worker = Worker("ipcsync-callbacks", lambda: bool(due) and not self._is_replaced, self._call)
        self.thread = 0
        self.ensure = self._worker.ensure
        self.join = self._worker.join

    @property
    def is_stuck(self) -> bool:
        """Whether a callback has not returned for long; then this object calls no other."""
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
