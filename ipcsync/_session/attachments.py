"""What this client is attached to, and when it lets go.

An attachment ends with the last `close` of the objects over it; one that points alone made ends once its event is
finished and no point of it is left here. Letting go is told to the coordinator only when it is true: no thread inside a
call, no queued wait pending, imports destroyed. Until then it drains, and the heartbeat's thread tries again.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ipcsync._board import Board
from ipcsync._engines import Engine, EventEngine, Guard, TimelineEngine, deadline_of
from ipcsync._native import context
from ipcsync._native.device import Device
from ipcsync._session.waits import Pending, WaitEntry, Waits
from ipcsync._wire.messages import Attachment, Break, Close
from ipcsync.errors import (
    ClientClosed,
    ConnectError,
    CoordinatorLost,
    DeviceMismatch,
    DriverError,
    EngineMismatch,
    InvalidDevice,
    IpcSyncError,
    SessionExpired,
    WaitTimeout,
)

if TYPE_CHECKING:
    from ipcsync._engines.traced import Tracing

log = logging.getLogger("ipcsync")

_TELL_S = 0.5
_BREAK_S = 0.05
_ENGINES: dict[str, type[EventEngine | TimelineEngine]] = {"event": EventEngine, "timeline": TimelineEngine}


class AttachmentRef:
    """One attachment, as events and points of this process hold it."""

    __slots__ = ("__weakref__", "_table", "device", "engine")

    def __init__(self, table: AttachmentTable, engine: EventEngine | TimelineEngine) -> None:
        self._table = table
        self.engine = engine
        self.device = Device(engine.ordinal)

    def close(self) -> None:
        """One event object over it was closed; the last one ends the attachment."""
        self._table.close_one((self.engine.slot, self.engine.incarnation))

    def when_over(self, pending: Pending, settle: Callable[[Exception | None], object]) -> WaitEntry:
        """Call `settle(None)` once the wait is over as hoped, or `settle(error)`; on a thread of the session."""
        return self._table.waits.add(pending, settle)

    def forget(self, entry: WaitEntry) -> None:
        """Wait for it no more. If it is over this very moment, `settle` may still be called."""
        self._table.waits.remove(entry)


class AttachmentTable:
    """All attachments of one client, by (slot, incarnation)."""

    def __init__(
        self,
        board: Board,
        guard: Guard,
        send: Callable[[Close | Break, float], object],
        waits: Waits,
        tracing: Tracing | None = None,
    ) -> None:
        self.waits = waits
        self._tracing = tracing
        self._board = board
        self._guard = guard
        self._send = send
        self.changing = threading.RLock()
        """Held across each request that attaches or lets go, and what follows from it here: of a close that was put off
        and a new attachment to the same slot, the coordinator must see the one that is true."""
        self._lock = threading.RLock()
        self._is_closed = False
        self._pending_closes: list[tuple[Close, str]] = []  # closes to tell, and of what: "recorder", "other" or "late"
        self._opened: dict[tuple[int, int], int] = {}  # how many event objects are open over it
        self._engines: dict[tuple[int, int], EventEngine | TimelineEngine] = {}
        self._held: dict[tuple[int, int], weakref.ref[AttachmentRef]] = {}
        self._draining: list[Engine] = []
        self._works_on: set[tuple[str, int]] = set()

    @contextmanager
    def change(self, timeout: float) -> Iterator[None]:
        """Hold `changing`; WaitTimeout if other threads keep it for `timeout` seconds."""
        deadline_of(timeout)  # a wrong one is a ValueError
        if not self.changing.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise WaitTimeout(f"other requests of this client took all of the {timeout} s", timeout=timeout)
        try:
            yield
        finally:
            self.changing.release()

    def find(self, key: tuple[int, int]) -> AttachmentRef | None:
        """The attachment to a slot's use, if there is one."""
        with self._lock:
            engine = self._engines.get(key)
            return None if engine is None else self._hold(key, engine)

    def _hold(self, key: tuple[int, int], engine: EventEngine | TimelineEngine) -> AttachmentRef:
        reference = self._held.get(key)
        held = reference() if reference is not None else None
        if held is None:
            held = AttachmentRef(self, engine)
            self._held[key] = weakref.ref(held)
        return held

    def add(self, reply: Attachment, *, opened: bool) -> AttachmentRef:
        """Take in what the coordinator answered; `opened` for an event object, else for a point.

        Raises DeviceMismatch if this process does not see the event's device, EngineMismatch if its engine does not
        work here; the attachment is given back then.
        """
        key = (reply.slot, reply.incarnation)
        with self._lock:
            if self._is_closed:
                self._pending_closes.append((Close(*key), "late"))
                raise ClientClosed("the client was closed while the event was opened")
            engine = self._engines.get(key)
            if engine is None:
                try:
                    engine = self._make(reply)
                except Exception:
                    self._tell_close(Close(reply.slot, reply.incarnation), is_recorder=reply.recorder)
                    raise
                for old in self._draining:
                    if (old.slot, old.incarnation) == key:
                        engine.chain = old.chain  # its own event, seen anew: one judgement for both
                self._engines[key] = engine
            engine.is_recorder = engine.is_recorder or reply.recorder
            if opened:
                self._opened[key] = self._opened.get(key, 0) + 1
            return self._hold(key, engine)

    def _make(self, reply: Attachment) -> EventEngine | TimelineEngine:
        try:
            ordinal = context.ordinal_of(reply.device)
        except InvalidDevice as error:
            raise DeviceMismatch(f"the event {reply.name!r} is on a device that is not visible here: {error}") from None
        make = _ENGINES[reply.engine] if self._tracing is None else self._tracing.engine
        engine = make(self._board, self._guard, reply, ordinal)
        if (reply.engine, ordinal) not in self._works_on:
            try:
                engine.open_first()
            except DriverError as error:
                raise EngineMismatch(
                    f"the event {reply.name!r} uses the engine {reply.engine!r}, which does not work in this process: "
                    f"{error}"
                ) from error
            self._works_on.add((reply.engine, ordinal))
        return engine

    def close_one(self, key: tuple[int, int]) -> None:
        """One event object over it was closed; the last one ends the attachment."""
        with self._lock:
            left = self._opened.get(key, 0) - 1
            if left > 0:
                self._opened[key] = left
                return
            self._opened.pop(key, None)
            self._held.pop(key, None)
            engine = self._begin_close(key)
        if engine is not None:
            self._end(engine)
            self.flush_closes(_TELL_S, wait=True)

    def _begin_close(self, key: tuple[int, int]) -> Engine | None:
        """Close a use, which drains from then on until it is released. Called with the lock held."""
        engine = self._engines.pop(key, None)
        if engine is not None:
            self._draining.append(engine)
            engine.close()
        return engine

    def _end(self, engine: Engine) -> None:
        """Let go of a use that was taken out, if that can be; what became of it is to be told."""
        if not self._try_release(engine):
            self._pending_closes.append(_close_of(engine, let_go=False, drained=self._is_drained(engine)))
        elif self._forget(engine):
            self._pending_closes.append(_close_of(engine))

    def _try_release(self, engine: Engine) -> bool:
        """`try_release`; with a context that is broken for good nothing is let go of before the process ends.

        The error is then the driver's, or that of a session or coordinator which was found lost for it.
        """
        try:
            return engine.try_release()
        except IpcSyncError as error:
            level = logging.DEBUG if engine.has_failed else logging.WARNING
            log.log(level, "cannot let go of the event %r: %s", engine.name, error)
            engine.has_failed = True
            return False

    def _forget(self, engine: Engine) -> bool:
        """It drains no more; False if another thread saw that at the same time."""
        with self._lock:
            if engine not in self._draining:
                return False
            self._draining.remove(engine)
            return True

    def _is_drained(self, engine: Engine) -> bool:
        """Whether a recorder that still drains has no work left, which is told once: others may wait ahead for more."""
        try:
            if engine.has_told_drained or not engine.is_drained():
                return False
        except IpcSyncError:
            return False  # `_try_release` has said it
        engine.has_told_drained = True
        return True

    def give_back(self, late: Attachment) -> None:
        """Let go of what was attached after its request was given up."""
        with self._lock:
            engine = self._engines.get((late.slot, late.incarnation))
            if engine is not None and late.recorder:
                engine.is_recorder = True  # the session has the role now: it ends with the use that is here already
        self._pending_closes.append((Close(late.slot, late.incarnation), "late"))

    def _tell_close(self, body: Close, *, is_recorder: bool) -> None:
        self._pending_closes.append((body, "recorder" if is_recorder else "other"))
        self.flush_closes(_TELL_S, wait=True)

    def flush_closes(self, timeout: float, *, wait: bool) -> None:
        """Tell the coordinator of closes; what it does not take in `timeout` seconds each is told by a later beat.

        `wait`: as long for another thread's request that attaches or lets go, too.
        """
        if not self._pending_closes or not self.changing.acquire(
            timeout=min(timeout, threading.TIMEOUT_MAX) if wait else 0
        ):
            return
        try:
            while self._pending_closes:
                body, of = self._pending_closes[0]
                if not self._flush_one(body, of, timeout):
                    return
                self._pending_closes.pop(0)
        finally:
            self.changing.release()

    def flush_closes_or_raise(self, timeout: float) -> None:
        """Tell of all closes before anything is attached anew: told after, one would end the new use.

        WaitTimeout if the coordinator does not take one within `timeout` seconds. Called with `changing` held.
        """
        self.flush_closes(timeout, wait=True)
        if self._pending_closes:
            raise WaitTimeout(f"the coordinator did not take an earlier close within {timeout} s", timeout=timeout)

    def _flush_one(self, body: Close, of: str, timeout: float) -> bool:
        key = (body.slot, body.incarnation)
        with self._lock:
            is_draining = any((engine.slot, engine.incarnation) == key for engine in self._draining)
        if of != "recorder" and key in self._engines:
            return True  # attached anew since: the two uses are one to the coordinator
        if of == "late" and is_draining:
            return True  # the use that still drains has not let go yet, and will tell it
        if is_draining or key in self._engines:
            body = replace(body, let_go=False)  # this use is over, but another one here still touches the slot
        try:
            self._send(body, timeout)
        except (WaitTimeout, ConnectError):
            return False  # under a new id then: closing twice is nothing
        except IpcSyncError as error:
            log.debug("closing slot %d: %s", body.slot, error)  # its session or use is over already
        return True

    def beat(self) -> None:
        """From the heartbeat's thread: harvest, and release what has drained or is over with no point of it left."""
        with self._lock:
            engines = list(self._engines.items())
        for key, engine in engines:
            engine.publish_completed()
            if key not in self._opened and engine.state != "open":
                self._drop_if_unused(key)
        self.release_drained()
        with self._lock:
            losing = [engine for engine in [*self._engines.values(), *self._draining] if engine.chain.wants_break]
        for lost in losing:
            self._ask_for_break(lost)

    def _ask_for_break(self, engine: Engine) -> None:
        """Have the coordinator break an event of which part is lost: once, and all before that is settled."""
        if engine.chain.has_asked:
            return
        try:
            self._send(Break(engine.slot, engine.incarnation), _BREAK_S)
        except (WaitTimeout, ConnectError):
            return  # a later beat asks again: twice is nothing
        except IpcSyncError as error:
            log.debug("breaking slot %d: %s", engine.slot, error)  # its session or use is over already
        engine.chain.has_asked = True

    def _drop_if_unused(self, key: tuple[int, int]) -> None:
        with self._lock:
            reference = self._held.get(key)
            if key in self._opened or (reference is not None and reference() is not None):
                return
            self._held.pop(key, None)
            engine = self._begin_close(key)
        if engine is not None:
            self._end(engine)  # told by the beat, which must wait neither for a request under way nor for a reply

    def release_drained(self) -> int:
        """Try again to let go; how many did."""
        with self._lock:
            waiting = list(self._draining)
        count = 0
        for engine in waiting:
            if self._try_release(engine):
                if self._forget(engine):
                    self._pending_closes.append(_close_of(engine))
                    count += 1
            elif self._is_drained(engine):
                self._pending_closes.append(_close_of(engine, let_go=False, drained=True))
        return count

    def collect(self) -> int:
        """For `ipc_collect`: end what nothing uses; how many imports were closed."""
        from ipcsync._engines import imports

        before = imports.count()
        with suppress(CoordinatorLost, SessionExpired):  # which this session's own calls tell
            self.beat()
        return max(before - imports.count(), 0)

    def close_all(self, seconds: float) -> None:
        """End every attachment, and wait up to `seconds` for work still in flight.

        What still is then goes on lingering, and the coordinator is told of the rest: others may wait for just that,
        and what drains here for them. If nothing drains, the goodbye tells it.
        """
        with self._lock:
            self._is_closed = True  # nothing is taken in any more
            for key in list(self._engines):
                self._begin_close(key)
            self._held.clear()
            self._opened.clear()
        deadline = time.monotonic() + seconds
        pause = 0.0005
        done: list[Engine] = []
        while True:
            with self._lock:
                engines = list(self._draining)
            done += [engine for engine in engines if self._try_release(engine) and self._forget(engine)]
            if not self._draining or time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
        with self._lock:
            left = list(self._draining)
        if not left:
            return
        self._pending_closes += [_close_of(engine) for engine in done]
        self._pending_closes += [
            _close_of(engine, let_go=False, drained=True) for engine in left if self._is_drained(engine)
        ]
        self.flush_closes(_TELL_S, wait=True)

    @property
    def is_draining(self) -> bool:
        """Whether anything closed is still to be let go of."""
        return bool(self._draining)

    @property
    def has_pending_closes(self) -> bool:
        """Whether any close is still to be told."""
        return bool(self._pending_closes)

    def drop_pending_closes(self) -> None:
        """The session is over: its end told all. A beat that tells right now finds that out by itself."""
        if self.changing.acquire(timeout=0):
            self._pending_closes.clear()
            self.changing.release()


def _close_of(engine: Engine, *, let_go: bool = True, drained: bool = False) -> tuple[Close, str]:
    """What the coordinator is to be told of a use that was closed, and whose it was."""
    close = Close(engine.slot, engine.incarnation, let_go=let_go, drained=drained)
    return close, "recorder" if engine.is_recorder else "other"
