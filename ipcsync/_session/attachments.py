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
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from msgspec.structs import replace

from ipcsync._board import Board
from ipcsync._engines import Engine, EventEngine, Guard, TimelineEngine, deadline_of
from ipcsync._locks import CallLock, holding, trying
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
    EventClosed,
    InvalidDevice,
    IpcSyncError,
    Reentered,
    SessionExpired,
    WaitTimeout,
)

if TYPE_CHECKING:
    from ipcsync._engines.traced import Tracing

log = logging.getLogger("ipcsync")

T = TypeVar("T")
_Key: TypeAlias = tuple[int, int]

_TELL_S = 0.5
_BREAK_S = 0.05
_MANY_POINTS = 64  # attachments for points, most of which may be over by now and hold slots of others
_ENGINES: dict[str, type[EventEngine | TimelineEngine]] = {"event": EventEngine, "timeline": TimelineEngine}


class AttachmentRef:
    """One attachment, as events and points of this process hold it."""

    __slots__ = ("__weakref__", "_table", "device", "engine")

    def __init__(self, table: AttachmentTable, engine: EventEngine | TimelineEngine) -> None:
        self._table = table
        self.engine: EventEngine | TimelineEngine = engine
        self.device: Device = Device(engine.ordinal)

    def when_over(
        self, pending: Pending, settle: Callable[[Exception | None], object], *, is_callback: bool = False
    ) -> WaitEntry:
        """Call `settle(None)` once the wait is over as hoped, or `settle(error)`; on a thread of the session.

        `is_callback`: it is a user's, and may do anything. Else it returns at once.
        """
        return self._table.waits.add(pending, settle, is_callback=is_callback)

    def forget(self, entry: WaitEntry) -> None:
        """Wait for it no more. If it is over this very moment, `settle` may still be called."""
        self._table.waits.remove(entry)


class Opening:
    """One event object's share in an attachment, from before the coordinator is asked until it is closed.

    Whoever asks makes it, so that an exception at any later moment finds it there, to be closed.
    """

    __slots__ = ("_table", "attached", "key")

    def __init__(self) -> None:
        self._table: AttachmentTable | None = None
        self.key: _Key = (-1, -1)
        self.attached: AttachmentRef | None = None

    def bind(self, table: AttachmentTable, key: _Key, attached: AttachmentRef) -> None:
        """The coordinator has granted it."""
        self.attached = attached
        self.key = key
        self._table = table

    def share(self, another: Opening) -> None:
        """Have `another` be one of the same use, for a copy of the event object. EventClosed if this one is closed."""
        if self._table is None:
            raise EventClosed("the event was closed in this process")
        self._table.share(self, another)

    def close(self, *, wait: bool = True) -> None:
        """End it; the last one ends the attachment. Twice does nothing, and finishes what was begun.

        `wait`: until the coordinator was told.
        """
        if self._table is not None:
            self._table.close_one(self, wait=wait)


class AttachmentTable:
    """All attachments of one client, by (slot, incarnation).

    Each step leaves what the next one needs where the heartbeat's thread finds it: whatever an exception leaves undone,
    that thread does.
    """

    def __init__(
        self,
        board: Board,
        guard: Guard,
        send: Callable[[Close | Break, float], object],
        waits: Waits,
        tracing: Tracing | None = None,
        shown: Callable[[str], str] = str,
    ) -> None:
        self.waits = waits
        self._since_beat = 0  # attachments made for points since the last one
        self._tracing = tracing
        self._shown = shown
        self._board = board
        self._guard = guard
        self._send = send
        self.changing: CallLock = CallLock()
        """Held across each request that attaches or lets go, and what follows from it here: of a close that was put off
        and a new attachment to the same slot, the coordinator must see the one that is true."""
        self._lock = CallLock()  # around changes of what follows; the heartbeat's thread never waits for a driver here
        self._is_closed = False
        self._pending_closes: list[tuple[Close, str]] = []  # closes to tell, and of what: "recorder", "other" or "late"
        self._opened: dict[_Key, set[Opening]] = {}  # by event objects; an empty set: the use is to be ended
        self._engines: dict[_Key, EventEngine | TimelineEngine] = {}
        self._mirrors: dict[tuple[bytes, int, int], _Key] = {}  # by what they mirror
        self._held: dict[_Key, weakref.ref[AttachmentRef]] = {}
        self._abandoned: set[_Key] = set()  # uses that a request may have made for nobody
        self._draining: list[Engine] = []
        self._works_on: set[tuple[str, int]] = set()

    def change(self, timeout: float, fn: Callable[[], T]) -> T:
        """`fn()` with `changing` held, after what is closed was told.

        WaitTimeout if other threads keep it for `timeout` seconds, or if the coordinator does not take an earlier
        close: told after a new attachment, it would end that. Reentered within another change of this thread.
        """
        deadline_of(timeout)  # a wrong one is a ValueError
        lock = self.changing
        if lock.is_mine() and lock.is_held_below():
            raise Reentered("an event is opened or closed on this thread, which an opening here interrupts")
        try:
            if not lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
                raise WaitTimeout(f"other requests of this client took all of the {timeout} s", timeout=timeout)
            self._flush(timeout)
            if self._pending_closes:
                raise WaitTimeout(f"the coordinator did not take an earlier close within {timeout} s", timeout=timeout)
            result = fn()
            lock.release()
        except BaseException:
            lock.unwind()
            raise
        return result

    def end(self) -> None:
        """The session is over: forget what it was asked through, which would keep the session for the collector."""
        self._send = _nobody_to_tell

    @holding("_lock")
    def share(self, opening: Opening, another: Opening) -> None:
        """Have `another` be a further opening of the same use. EventClosed if `opening` is closed."""
        if opening.attached is None or opening not in self._opened.get(opening.key, ()):
            raise EventClosed("the event was closed in this process")
        another.bind(self, opening.key, opening.attached)
        self._opened[opening.key].add(another)

    @property
    def is_in_use_below(self) -> bool:
        """Whether a call of this thread, which this one interrupts, changes what is attached."""
        changing, lock = self.changing, self._lock
        return (changing.is_mine() and changing.is_held_below()) or (lock.is_mine() and lock.is_held_below())

    @holding("_lock")
    def find(self, key: _Key) -> AttachmentRef | None:
        """The attachment to a slot's use, if there is one."""
        engine = self._engines.get(key)
        return None if engine is None or engine.is_closed else self._hold(key, engine)

    def find_mirror(self, origin: tuple[bytes, int, int]) -> AttachmentRef | None:
        """The attachment to what mirrors (epoch, slot, incarnation) of another node, if there is one."""
        key = self._mirrors.get(origin)
        found = None if key is None else self.find(key)
        return found if found is not None and found.engine.origin == origin else None

    def _hold(self, key: _Key, engine: EventEngine | TimelineEngine) -> AttachmentRef:
        reference = self._held.get(key)
        held = reference() if reference is not None else None
        if held is None or held.engine is not engine:
            held = AttachmentRef(self, engine)
            self._held[key] = weakref.ref(held)
        return held

    def add(self, reply: Attachment, opening: Opening | None = None) -> AttachmentRef:
        """Take in what the coordinator answered, for an event object's `opening` or for a point. In a `change`.

        Raises DeviceMismatch if this process does not see the event's device, EngineMismatch if its engine does not
        work here.
        """
        key = (reply.slot, reply.incarnation)
        while True:
            engine = self._engines.get(key)
            if engine is None or engine.is_closed:
                engine = self._make_anew(key, reply)  # not under the lock: a driver's call may block
            try:
                attached = self._put(key, engine, reply, opening)
            except BaseException:
                if self._engines.get(key) is not engine:
                    engine.close()
                    self._draining.append(engine)
                raise
            if attached is not None:
                return attached

    def _make_anew(self, key: _Key, reply: Attachment) -> EventEngine | TimelineEngine:
        engine = self._make(reply)
        for old in list(self._draining):
            if (old.slot, old.incarnation) == key:
                engine.chain = old.chain  # its own event, seen anew: one judgement for both
        return engine

    @holding("_lock")
    def _put(
        self, key: _Key, engine: EventEngine | TimelineEngine, reply: Attachment, opening: Opening | None
    ) -> AttachmentRef | None:
        """None if another thread's close, the last over it until now, has ended the use meanwhile."""
        if self._is_closed:
            raise ClientClosed("the client was closed while the event was opened")
        if engine.is_closed:
            return None
        known = self._engines.get(key)
        if known is not None and known is not engine:  # one whose end was begun and not finished
            self._begin_close(key)
        engine.is_recorder = engine.is_recorder or reply.recorder
        attached = self._hold(key, engine)
        if opening is not None:
            opening.bind(self, key, attached)
            self._opened.setdefault(key, set()).add(opening)
        else:
            self._since_beat += 1
        if engine.node:
            self._mirrors[engine.origin] = key
        self._engines[key] = engine
        return attached

    def _make(self, reply: Attachment) -> EventEngine | TimelineEngine:
        try:
            # A mirror is of no GPU: its word works on every device of this process.
            ordinal = context.current_ordinal() if reply.origin is not None else context.ordinal_of(reply.device)
        except InvalidDevice as error:
            raise DeviceMismatch(f"the event {reply.name!r} is on a device that is not visible here: {error}") from None
        make = _ENGINES[reply.engine] if self._tracing is None else self._tracing.engine
        engine = make(self._board, self._guard, reply, ordinal)
        engine.name = self._shown(reply.name)
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

    def close_one(self, opening: Opening, *, wait: bool) -> None:
        """One event object was closed; the last one over an attachment ends that."""
        self._remove(opening)
        attached = opening.attached
        if attached is not None and attached.engine in self._draining:
            self._end(attached.engine)
        if wait:
            self.flush_closes(_TELL_S, wait=True)

    @holding("_lock")
    def _remove(self, opening: Opening) -> None:
        openings = self._opened.get(opening.key)
        if openings is None:
            return
        openings.discard(opening)
        if not openings:
            self._begin_close(opening.key)
            self._opened.pop(opening.key, None)

    @holding("_lock")
    def _begin_close(self, key: _Key) -> None:
        """Close a use, which drains from then on until it is released."""
        engine = self._engines.get(key)
        if engine is not None:
            if engine not in self._draining:
                self._draining.append(engine)
            engine.close()
            self._mirrors.pop(engine.origin, None)
            self._held.pop(key, None)
            del self._engines[key]

    def _end(self, engine: Engine) -> None:
        """Release a use that drains, if that can be; what became of it is to be told."""
        if self._try_release(engine):
            self._tell_released(engine)
        else:
            self._tell_draining(engine, drained=self._is_drained(engine))

    @holding("_lock")
    def _tell_released(self, engine: Engine) -> bool:
        """It drains no more; False if another thread has told that."""
        if engine not in self._draining:
            return False
        self._pending_closes.append(_close_of(engine))  # first: rather told twice than never
        self._draining.remove(engine)
        return True

    @holding("_lock")
    def _tell_draining(self, engine: Engine, *, drained: bool) -> None:
        """The use is over, though not let go of; and whether its recorder has no work left: others may wait for it."""
        if engine in self._draining and (not engine.has_told_closed or (drained and not engine.has_told_drained)):
            self._pending_closes.append(_close_of(engine, let_go=False, drained=drained))
            engine.has_told_closed = True
            engine.has_told_drained = engine.has_told_drained or drained

    def _try_release(self, engine: Engine) -> bool:
        """`try_release`; with a context that is broken for good nothing is let go of before the process ends.

        The error is then the driver's, or that of a session or coordinator which was found lost for it.
        """
        try:
            return engine.try_release()
        except IpcSyncError as error:
            self._note_failure(engine, "let go", error)
            return False

    def _note_failure(self, engine: Engine, what: str, error: IpcSyncError) -> None:
        """Warn of the first failure of each attachment: the next beat meets the same."""
        level = logging.DEBUG if engine.has_failed else logging.WARNING
        log.log(level, "cannot %s of the event %r: %s", what, engine.name, error)
        engine.has_failed = True

    def _is_drained(self, engine: Engine) -> bool:
        """Whether a recorder that still drains has no work left."""
        try:
            return engine.has_told_drained or engine.is_drained()
        except IpcSyncError:
            return False  # `_try_release` has said it

    def give_back(self, late: Attachment) -> None:
        """Let go of what was attached by a request that was given up, or whose call an exception ended."""
        engine = self._engines.get((late.slot, late.incarnation))
        if engine is not None:
            self._abandoned.add((late.slot, late.incarnation))
            engine.is_recorder = engine.is_recorder or late.recorder  # a role ends with the use that is here already
        self._pending_closes.append((Close(late.slot, late.incarnation), "late"))

    def flush_closes(self, timeout: float, *, wait: bool) -> None:
        """Tell the coordinator of closes; what it does not take in `timeout` seconds each is told by a later beat.

        `wait`: as long for another thread's request that attaches or lets go, too. Within a change of this thread, the
        heartbeat's thread tells it.
        """
        lock = self.changing
        if not self._pending_closes or (lock.is_mine() and lock.is_held_below()):
            return
        try:
            if lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX) if wait else 0):
                self._flush(timeout)
                lock.release()
        except BaseException:
            lock.unwind()
            raise

    def _flush(self, timeout: float) -> None:
        while pending := self._pending_closes[:1]:
            if not self._flush_one(*pending[0], timeout):
                return
            with suppress(ValueError):  # the goodbye, on the session's thread, has told it meanwhile
                self._pending_closes.remove(pending[0])

    def _flush_one(self, body: Close, of: str, timeout: float) -> bool:
        key = (body.slot, body.incarnation)
        is_draining = any((engine.slot, engine.incarnation) == key for engine in list(self._draining))
        engine = self._engines.get(key)
        if engine is not None and (of != "recorder" or engine.is_recorder):
            return True  # attached anew since: the two uses are one to the coordinator
        if of == "late" and is_draining:
            return True  # the use that still drains has not let go yet, and will tell it
        if is_draining or engine is not None:
            body = replace(body, let_go=False)  # this use is over, but another one here still touches the slot
        try:
            self._send(body, timeout)
        except (WaitTimeout, ConnectError, Reentered):
            return False  # under a new id then: closing twice is nothing
        except IpcSyncError as error:
            log.debug("closing slot %d: %s", body.slot, error)  # its session or use is over already
        return True

    def beat(self) -> None:
        """From the heartbeat's thread: publish, end what is over or was left undone, and release what has drained."""
        self._since_beat = 0
        for key, engine in list(self._engines.items()):
            self._publish_completed(engine)
            engine.park_pending()
            openings = self._opened.get(key)
            is_over = engine.state != "open" or key in self._abandoned
            if engine.is_closed or (not openings if openings is not None else is_over):
                self._drop_if_unused(key)
        self.release_drained()
        for closed in list(self._draining):
            closed.park_pending()
        for lost in [*self._engines.values(), *self._draining]:
            if lost.chain.wants_break:
                self._ask_for_break(lost)

    def _publish_completed(self, engine: Engine) -> None:
        """A context that is broken costs its own events what they would tell, and no others anything."""
        try:
            engine.publish_completed()
        except DriverError as error:
            self._note_failure(engine, "tell what is complete", error)

    def _ask_for_break(self, engine: Engine) -> None:
        """Have the coordinator break an event of which part is lost: once, and all before that is settled."""
        if engine.chain.has_asked:
            return
        try:
            self._send(Break(engine.slot, engine.incarnation), _BREAK_S)
        except (WaitTimeout, ConnectError, Reentered):
            return  # a later beat asks again: twice is nothing
        except IpcSyncError as error:
            log.debug("breaking slot %d: %s", engine.slot, error)  # its session or use is over already
        engine.chain.has_asked = True

    @trying("_lock")
    def _drop_if_unused(self, key: _Key) -> None:
        reference = self._held.get(key)
        engine = self._engines.get(key)
        if engine is None or self._opened.get(key):
            return
        is_over = engine.is_closed or key in self._opened
        if is_over or reference is None or reference() is None:
            self._begin_close(key)
            self._opened.pop(key, None)
        self._abandoned.discard(key)

    def release_drained(self) -> int:
        """Try again to release; how many were. To be told by the caller, who may not wait for a request's reply."""
        count = 0
        for engine in list(self._draining):
            if self._try_release(engine):
                count += self._tell_released(engine)
            else:
                self._tell_draining(engine, drained=self._is_drained(engine))
        return count

    def relieve(self) -> None:
        """Before a further attachment for a point: end what nothing uses, if many were made since the last beat.

        Here, since a thread that attaches and attaches may leave the heartbeat's little time; and others wait for these
        slots, however long this lease's TTL is.
        """
        if self._since_beat >= _MANY_POINTS:
            self._since_beat = 0
            with suppress(IpcSyncError):  # which the heartbeat meets, too
                self.beat()

    def collect(self) -> int:
        """For `ipc_collect`: end what nothing uses; how many imports were closed."""
        from ipcsync._engines import imports

        before = imports.count()
        with suppress(CoordinatorLost, SessionExpired):  # which this session's own calls tell
            self.beat()
        return max(before - imports.count(), 0)

    def close_all(self, seconds: float, pause: Callable[[float], object] = time.sleep) -> None:
        """End every attachment, and wait up to `seconds` for work still in flight.

        What still is then goes on draining, and the coordinator is told of the rest: others may wait for just that,
        and what drains here for them. If nothing drains, the goodbye tells it.
        """
        self._begin_close_all()
        deadline = time.monotonic() + seconds
        length = 0.0005
        while True:
            for engine in list(self._draining):
                if self._try_release(engine):
                    self._tell_released(engine)
            if not self._draining or time.monotonic() >= deadline:
                break
            pause(length)
            length = min(length * 2, 0.02)
        if self._draining:
            for engine in list(self._draining):
                if self._is_drained(engine):
                    self._tell_draining(engine, drained=True)
            self.flush_closes(_TELL_S, wait=True)

    @holding("_lock")
    def _begin_close_all(self) -> None:
        self._is_closed = True  # nothing is taken in any more
        for key in list(self._engines):
            self._begin_close(key)
        for engine in self._draining:
            engine.has_told_closed = True  # the goodbye does
        self._held.clear()
        self._opened.clear()

    @property
    def is_draining(self) -> bool:
        """Whether anything closed is still to be let go of."""
        return bool(self._draining)

    @property
    def has_pending_closes(self) -> bool:
        """Whether any close is still to be told."""
        return bool(self._pending_closes)

    def drop_pending_closes(self) -> None:
        """The session is over: its end told all."""
        self._pending_closes.clear()


def _nobody_to_tell(body: Close | Break, _timeout: float) -> object:
    raise ClientClosed(f"the session is over; the close of slot {body.slot} went with it")


def _close_of(engine: Engine, *, let_go: bool = True, drained: bool = False) -> tuple[Close, str]:
    """What the coordinator is to be told of a use that was closed, and whose it was."""
    close = Close(engine.slot, engine.incarnation, let_go=let_go, drained=drained)
    return close, "recorder" if engine.is_recorder else "other"
