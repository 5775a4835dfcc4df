"""The asynchronous waits of a session: one thread looks at all of them, as long as the driver answers.

It uses no driver callbacks, in which Python can deadlock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ipcsync._deadline import deadline_of
from ipcsync._engines import Engine
from ipcsync._native import fork
from ipcsync._threads import Worker
from ipcsync.errors import DriverError, IpcSyncError, WaitTimeout

log = logging.getLogger("ipcsync")

_ALONE_S = 0.005
_AMONG_S = 0.001
_CHECK_NS = 50_000_000
_STUCK_S = 1.0
_FAILING_S = 1.0
_WATCH_S = 0.02
_LOOK_S = 0.02
_LOOKERS = 8


class Pending:
    """One wait: for a point to be complete, or (with `check`, called meanwhile) merely recorded.

    It ends as `Point.synchronize` and `Point.wait` end on the host, with the same errors; `timeout` in seconds or None.
    What it is added for is then called with None, or with the error that ended it.
    """

    notify: Callable[[Exception | None], object]
    is_callback: bool

    def __init__(
        self, engine: Engine, generation: int, timeout: float | None = None, check: Callable[[], object] | None = None
    ) -> None:
        self.engine: Engine = engine
        self._generation = generation
        self._timeout = timeout
        self._deadline = deadline_of(timeout)
        self._check = check
        self._since = time.monotonic_ns()  # the call, or when it was found not recorded last
        self._next_check = self._since + _CHECK_NS
        self._error: Exception | None = None
        self._failing_since = 0.0

    def has_ended(self, may_ask: bool = True) -> bool:
        try:
            has_ended = self._look(may_ask)
        except Exception as error:  # noqa: BLE001 - the waiter gets it
            self._error = error
            return not (self.is_callback and self._may_pass(error))
        self._failing_since = 0.0  # the error stays: another thread may have ended this by it just now
        return has_ended

    def _look(self, may_ask: bool) -> bool:
        """Whether it is complete, or recorded: by the board, unless it `may_ask` the driver. Raises what ends it."""
        now = time.monotonic_ns()
        if now >= self._next_check or not may_ask:  # of a dead recorder's work the driver would be asked below
            self._next_check = now + _CHECK_NS
            self.engine.check_liveness(self._generation)
        if self._check is not None:
            self.engine.check()
            self._check()
            with suppress(WaitTimeout):
                self.engine.await_recorded(self._generation, 0, self._timeout)
                return True
        elif (may_ask or self.engine.outcome_of(self._generation)) and self.engine.query(self._generation, False):
            return True
        if now >= self._deadline:
            is_recorded = self.engine.generation >= self._generation
            self.engine.raise_timeout(self._generation, self._timeout, "complete" if is_recorded else "recorded")
        return False

    def _may_pass(self, error: Exception) -> bool:
        """Whether a later look may succeed, and the point still be complete.

        A callback is not given the error, and asks the point what happened: by then that may say that nothing did.
        """
        if isinstance(error, IpcSyncError) and not isinstance(error, DriverError):
            return False
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        return now - self._failing_since < _FAILING_S

    def end(self) -> None:
        """Call `notify`. An exception of it is logged, also one that would end a thread (SystemExit)."""
        notify, error = self.notify, self._error
        del self.notify, self._error  # else an error, the frames of its traceback and this would keep each other
        try:
            notify(error)
        except BaseException:
            log.exception("a done callback of %s failed", self)

    def __str__(self) -> str:
        return f"generation {self._generation} of {self.engine.label}"

    def pause(self, seconds: float) -> None:
        try:
            if self._check is not None:
                self.engine.await_recorded(self._generation, deadline_of(seconds), seconds)
                return
            if self.engine.generation < self._generation:
                self._since = time.monotonic_ns()
            self.engine.await_complete(self._generation, seconds, 0, self._since)
        except DriverError:
            time.sleep(seconds)  # the next look may succeed
        except IpcSyncError:
            return  # the next look raises it


class Waits:
    """The waits of a client. One thread looks at all of them: it starts with the first, and ends when none is left.

    A look that the driver does not answer delays the others by 50 ms at most, a lone wait's end by a beat: then another
    thread looks. One more calls users' callbacks, in the order in which their waits ended; the same if no other starts.
    If one takes more than a second, another thread goes on with the others. Who was replaced ends once it returns.
    """

    def __init__(self) -> None:
        self._waiting: dict[Pending, None] = {}  # in the order in which they came
        self._due: deque[Pending] = deque()
        self._doing: dict[Worker, tuple[float, Engine | None, int]] = {}
        """What may take long: by when it should be over, whose driver call it is, the id of its thread."""
        self._looker = self._new_looker()
        self._watch = Worker("ipcsync-watch", lambda: bool(self._waiting), self._replace_stuck)
        self._caller = self._new_caller()

    def add(self, pending: Pending, notify: Callable[[Exception | None], object], *, is_callback: bool = False) -> None:
        """Call `notify(None)` once the point is complete or recorded, or `notify(error)`; on a thread of the client.

        `is_callback`: `notify` is a user's, and may block. QuotaExceeded, and not added, if no thread can be started.
        """
        pending.notify, pending.is_callback = notify, is_callback
        self._waiting[pending] = None
        try:
            if len(self._waiting) > 1 or self._looker in self._doing:  # which may not return
                self.watch()
            self._looker.ensure()
        except BaseException:
            self.remove(pending)
            raise

    def remove(self, pending: Pending) -> None:
        """Cancel a wait. If it ends at this moment, `notify` may still be called."""
        self._waiting.pop(pending, None)

    def _new_looker(self, old: Worker | None = None) -> Worker:
        def has_work() -> bool:
            nonlocal old
            if old is not None and self._looker is old:
                self._looker, old = looker, None  # on its own thread: if none can start, the old one goes on
            return bool(self._waiting or self._due) and looker is self._looker and not fork.is_in_bad_fork()

        looker = Worker("ipcsync-waits", has_work, lambda: self._poll(looker))
        return looker

    def _new_caller(self) -> Worker:
        def has_work() -> bool:
            return bool(self._due) and caller is self._caller and not fork.is_in_bad_fork()  # by a callback

        caller = Worker("ipcsync-callbacks", has_work, lambda: self._call(caller))
        return caller

    def _begin(self, worker: Worker, seconds: float, engine: Engine | None = None) -> None:
        self._doing[worker] = time.monotonic() + seconds, engine, threading.get_ident()

    def _is_stuck(self, worker: Worker) -> bool:
        return (doing := self._doing.get(worker)) is not None and time.monotonic() > doing[0]

    def _asked_by_others(self) -> set[Engine]:
        """The engines whose looks do not return to threads that were replaced."""
        doing = self._doing.copy().items()
        return {engine for worker, (_, engine, _) in doing if engine and worker is not self._looker}

    def watch(self) -> None:
        """Have looks that do not return replaced while anything waits: for each beat, and for what is not alone."""
        if self._waiting:
            self._watch.ensure()

    def _replace_stuck(self) -> None:
        time.sleep(_WATCH_S)
        looker = self._looker
        if len(self._asked_by_others()) < _LOOKERS and self._is_stuck(looker):
            looker = self._new_looker(looker)
        with suppress(RuntimeError):  # no further thread can start
            looker.ensure()

    def _poll(self, looker: Worker) -> None:
        others, waiting = self._asked_by_others(), list(self._waiting)
        blocked = others if len(others) < _LOOKERS else {pending.engine for pending in waiting}  # the last asks nothing
        free = [pending for pending in waiting if pending.engine not in blocked]
        began = time.monotonic()
        # Asked from the last to the first, reported from the first to the last: of two waits that end at this moment,
        # the one that was added first is first.
        over = []
        for pending in reversed(waiting):
            self._begin(looker, _LOOK_S, pending.engine)
            if pending.has_ended(pending.engine not in blocked):
                over.append(pending)
            del self._doing[looker]
            if looker is not self._looker:
                return  # the next one looks at all of these again
        for pending in reversed(over):
            self._notify(pending)
        if self._due:
            if self._is_stuck(self._caller):
                self._caller = self._new_caller()
            try:
                self._caller.ensure()
            except (IpcSyncError, RuntimeError):  # no further thread can start
                while self._due and not fork.is_in_bad_fork():
                    self._call(self._caller)
        if over:
            return
        # The first is the most likely to end first. With many waits, looking takes half of the time at most.
        took = time.monotonic() - began
        if free:
            seconds = _ALONE_S if len(free) == 1 else max(_AMONG_S, took)
            self._begin(looker, seconds + _LOOK_S, free[0].engine)
            free[0].pause(seconds)
            del self._doing[looker]
        elif self._waiting:
            time.sleep(_WATCH_S)
        else:
            self._caller.join(_CHECK_NS / 1e9)

    def _notify(self, pending: Pending) -> None:
        if self._waiting.pop(pending, pending) is pending:
            return  # cancelled meanwhile
        if pending.is_callback:
            self._due.append(pending)
        else:
            pending.end()

    def _call(self, caller: Worker) -> None:
        self._begin(caller, _STUCK_S)
        try:
            self._due.popleft().end()
        finally:
            del self._doing[caller]

    def join(self, timeout: float, closer: int, pause: Callable[[float], object] = time.sleep) -> None:
        """Wait until every callback was called; the client is closed, so each of them is due.

        `closer` is the id of the thread that waits for this: a callback may close its own client.
        """
        deadline = time.monotonic() + timeout
        self._looker.join(timeout, pause)
        if self._doing.get(self._caller, (0, None, 0))[2] != closer:
            self._caller.join(max(0.0, deadline - time.monotonic()), pause)
