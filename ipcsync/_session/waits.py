"""The waits of a session that need no thread each: one thread looks at all of them.

Never inside a driver's callback, where Python has deadlocked others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ipcsync._engines import Engine, deadline_of
from ipcsync.errors import IpcSyncError, WaitTimeout

log = logging.getLogger("ipcsync")

_ALONE_S = 0.005
_AMONG_S = 0.001
_LOOK_NS = 50_000_000


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

    __slots__ = ("error", "pending", "settle")

    def __init__(self, pending: Pending, settle: Callable[[Exception | None], object]) -> None:
        self.pending = pending
        self.settle = settle
        self.error: Exception | None = None

    def is_over(self) -> bool:
        """Whether it is over; then `error` is what ended it, if not what was hoped for."""
        try:
            return self.pending.is_over()
        except Exception as error:  # noqa: BLE001 - whoever waits is told, whatever it is
            self.error = error
            return True


class Waits:
    """The waits of a client, looked at by one thread that is started with the first and ends when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[WaitEntry, None] = {}  # in the order in which they came
        self._thread: threading.Thread | None = None

    def add(self, pending: Pending, settle: Callable[[Exception | None], object]) -> WaitEntry:
        """Call `settle(None)` once it is over as hoped, or `settle(error)`; on the client's thread."""
        entry = WaitEntry(pending, settle)
        with self._lock:
            self._waiting[entry] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ipcsync-callbacks", daemon=True)
                self._thread.start()
        return entry

    def remove(self, entry: WaitEntry) -> None:
        """Wait for it no more. If it is over this very moment, `settle` may still be called."""
        with self._lock:
            self._waiting.pop(entry, None)

    @property
    def count(self) -> int:
        """How many waits are not over."""
        return len(self._waiting)

    def _run(self) -> None:
        while True:
            with self._lock:
                waiting = list(self._waiting)
                if not waiting:
                    self._thread = None
                    return
            began = time.monotonic()
            # Asked from the last on and told from the first on: of two that end in this moment, the one that was added
            # first is told first.
            over = [entry for entry in reversed(waiting) if entry.is_over()]
            for entry in reversed(over):
                self._settle(entry)
            if over:
                continue
            # The first is the likeliest to come first. With many, half of the time at most is spent on looking.
            took = time.monotonic() - began
            waiting[0].pending.pause(_ALONE_S if len(waiting) == 1 else max(_AMONG_S, took))

    def _settle(self, entry: WaitEntry) -> None:
        with self._lock:
            if entry not in self._waiting:
                return  # taken back meanwhile
            del self._waiting[entry]
        try:
            entry.settle(entry.error)
        except Exception:
            log.exception("a done callback of %s failed", entry.pending)

    def join(self, timeout: float) -> None:
        """Wait until every callback was called; the client is closed, so each of them is due."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
