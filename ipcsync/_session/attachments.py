"""The attachments of one client.

An attachment ends with the last `close` of its event objects. One that only points made ends once its event is finished
and no point of it is left in this process. It then drains: see `draining`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ipcsync._board import Board
from ipcsync._deadline import deadline_of, left_of
from ipcsync._engines import Engine, Guard
from ipcsync._locks import CallLock, holding, trying
from ipcsync._session.closes import PendingCloses
from ipcsync._session.draining import Draining, note_failure
from ipcsync._session.making import EngineMaker
from ipcsync._session.references import AttachmentRef, Key, Opening
from ipcsync._session.waits import Waits
from ipcsync._shared import items_of
from ipcsync._wire.messages import Attachment, Break, Close
from ipcsync.errors import (
    ClientClosed,
    CoordinatorLost,
    DriverError,
    EventClosed,
    IpcSyncError,
    SessionExpired,
)

if TYPE_CHECKING:
    from ipcsync._engines.traced import Tracing

_MANY_POINTS = 64  # attachments for points, most of which may be over by now and hold slots of others
_CALL_S = 1.0  # for another thread's call, when its event is closed
_SLICE_S = 0.05  # between beats


class ClosedMeanwhile(Exception):  # noqa: N818 - not an error: the request is made anew
    """A reply is of a use that its recorder, this session, has closed since, and the coordinator did not know."""


class AttachmentTable:
    """All attachments of one client, by (slot, incarnation).

    Each step leaves what the next one needs where the heartbeat's thread finds it: that thread completes what an
    exception interrupts.
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
        self._waits = waits
        self._guard = guard
        self._since_beat = 0  # attachments made for points since the last one
        self._lock = CallLock()  # around changes of the fields below; never held during a driver call that may block
        self._engines: dict[Key, Engine] = {}
        self.draining: Draining = Draining(self._lock, PendingCloses(send, self._engines))
        self.closes: PendingCloses = self.draining.closes
        self._maker = EngineMaker(board, guard, tracing, shown)
        self._is_closed = False
        self._opened: dict[Key, set[Opening]] = {}  # by event objects; an empty set: the use is to be ended
        self._mirrors: dict[tuple[bytes, int, int], Key] = {}  # by what they mirror
        self._held: dict[Key, weakref.ref[AttachmentRef]] = {}
        self._abandoned: set[Key] = set()  # uses that an interrupted request may have made

    @holding("_lock")
    def share(self, opening: Opening, another: Opening) -> None:
        """Have `another` be a further opening of the same use. EventClosed if `opening` is closed."""
        openings = self._opened.get(opening.key, set())
        if opening.attached is None or opening not in openings:
            raise EventClosed("the event was closed in this process")
        another.bind(self, opening.key, opening.attached)
        openings.add(another)

    @property
    def is_in_use_below(self) -> bool:
        """Whether a call of this thread, which this one interrupts, changes what is attached."""
        lock = self._lock
        return self.closes.is_in_use_below or (lock.is_mine() and lock.is_held_below())

    @holding("_lock")
    def find(self, key: Key) -> AttachmentRef | None:
        """The attachment to a slot's use, if there is one."""
        engine = self._engines.get(key)
        return None if engine is None or engine.is_closed else self._hold(key, engine)

    def find_mirror(self, origin: tuple[bytes, int, int]) -> AttachmentRef | None:
        """The attachment to what mirrors (epoch, slot, incarnation) of another node, if there is one."""
        key = self._mirrors.get(origin)
        found = None if key is None else self.find(key)
        return found if found is not None and found.engine.origin == origin else None

    def _hold(self, key: Key, engine: Engine) -> AttachmentRef:
        reference = self._held.get(key)
        held = reference() if reference is not None else None
        if held is None or held.engine is not engine:
            held = AttachmentRef(self._waits, engine)
            self._held[key] = weakref.ref(held)
        return held

    def add(self, reply: Attachment, opening: Opening | None = None) -> AttachmentRef:
        """Add the coordinator's reply, for an event object's `opening` or for a point. Called in a `change`.

        Raises ClosedMeanwhile: the caller calls `finish_close`, and asks anew; and as `EngineMaker.make` and `.test`.
        """
        key = (reply.slot, reply.incarnation)
        with self.draining.making():
            while True:
                self._raise_if_closed()
                engine = self._engines.get(key)
                if engine is None or engine.is_closed:
                    # Two recorder's uses of one slot would undo each other's words, and the close would never be told.
                    if reply.recorder and self._is_being_closed(key):
                        raise ClosedMeanwhile
                    engine = self._make_anew(key, reply)
                try:
                    self._maker.test(engine, reply)  # not under the lock: a driver's call may block
                    attached = self._put(key, engine, reply, opening)
                except BaseException:
                    if self._engines.get(key) is not engine:
                        engine.close()
                        self.draining.add(engine)
                    raise
                if attached is not None:
                    return attached

    def _is_being_closed(self, key: Key) -> bool:
        """Whether a recorder's close of that use has begun, and the coordinator was not told."""
        for old in list(self.draining.engines):  # first: from there it goes to the pending closes
            if (old.slot, old.incarnation) == key and old.is_recorder and old.is_closed and not old.has_told_closed:
                return True
        return self.closes.has_recorders(key)

    def finish_close(self, key: Key, timeout: float, deadline: int) -> None:
        """Tell the coordinator of the close of that use. Called in a `change`; WaitTimeout as `PendingCloses.tell`."""
        self._complete_close(key)
        for old in list(self.draining.engines):
            if (old.slot, old.incarnation) == key:
                self.draining.end(old)
        self.closes.tell(timeout, deadline, key)  # of no other: another reply may be of a use that is closed too

    @holding("_lock")
    def _complete_close(self, key: Key) -> None:
        """Do what an exception, or a handler within `_put`, left of it."""
        known = self._engines.get(key)
        if known is None or known.is_closed:
            self._begin_close(key)
            self._opened.pop(key, None)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise ClientClosed("the client was closed while the event was opened")

    def _make_anew(self, key: Key, reply: Attachment) -> Engine:
        engine = self._maker.make(reply)
        for old in list(self.draining.engines):
            # What this session recorded there, attached to again: both share the chain. Of a use that only waited, the
            # chain ends with it, and this one may record.
            if (old.slot, old.incarnation) == key and old.is_recorder:
                engine.chain, engine.earlier = old.chain, old
        return engine

    @holding("_lock")
    def _put(self, key: Key, engine: Engine, reply: Attachment, opening: Opening | None) -> AttachmentRef | None:
        """None if another close, the last one of the use, has ended it meanwhile."""
        self._raise_if_closed()
        if engine.is_closed:
            return None
        known = self._engines.get(key)
        if known is not None and known is not engine:  # its close was interrupted
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
        return None if engine.is_closed else attached  # by a call within this one

    def close_one(self, opening: Opening, *, wait: bool) -> None:
        """Close the share of one event object; the last one ends the attachment."""
        attached = opening.attached
        try:
            if wait and attached is not None and self._opened.get(opening.key) == {opening}:
                attached.engine.await_calls(_CALL_S)
        finally:  # an exception that ends the wait must not leave it open
            self._remove(opening)
        if attached is not None and attached.engine in self.draining.engines:
            self.draining.end(attached.engine)
        if wait:
            self.closes.flush(wait=True)

    @holding("_lock")
    def _remove(self, opening: Opening) -> None:
        openings = self._opened.get(opening.key)
        if openings is None:
            return
        openings.discard(opening)
        if not openings:
            self._begin_close(opening.key)
            self._forget_openings(opening.key)

    def _forget_openings(self, key: Key) -> None:
        left = self._opened.pop(key, None)
        if left:  # a call within this one has opened the event again
            self._opened.setdefault(key, set()).update(left)

    @holding("_lock")
    def _begin_close(self, key: Key) -> None:
        """Close a use, which then drains until it is released."""
        engine = self._engines.get(key)
        if engine is None:
            return
        self.draining.add(engine)
        engine.close()
        reference = self._held.get(key)
        held = None if reference is None else reference()
        # A finalizer or a signal's handler may have done all this meanwhile, and attached to the same use again.
        if held is None or held.engine is engine:
            self._held.pop(key, None)
        known = self._engines.pop(key, engine)
        if known is not engine:
            self._engines.setdefault(key, known)
        elif self._mirrors.get(engine.origin) == key:
            self._mirrors.pop(engine.origin, None)

    def give_back(self, late: Attachment) -> None:
        """Close an attachment whose request was given up, or whose call an exception ended."""
        engine = self._engines.get((late.slot, late.incarnation))
        if engine is not None:
            self._abandoned.add((late.slot, late.incarnation))
            engine.is_recorder = engine.is_recorder or late.recorder  # the role ends with the use that is open here
        self.closes.add_late(late)

    def beat(self) -> bool:
        """At each beat, on the heartbeat's thread: publish, close uses that are over, and release drained ones.

        Returns whether complete records wait for another recorder's judgement, which nobody tells of.
        """
        self._since_beat = 0
        # After the coordinator's death the driver must not be asked about its events, and nobody waits for the answer.
        is_alive = self._guard.coordinator_is_alive()
        for key, engine in items_of(self._engines):
            if is_alive:
                self._publish_completed(engine)
                self._park_pending(engine)
            else:
                engine.free_streams()
            openings = self._opened.get(key)
            is_unusable = engine.state != "open" or key in self._abandoned
            if engine.is_closed or (not openings if openings is not None else is_unusable):
                self._drop_if_unused(key)
        self.draining.release_all()
        for closed in list(self.draining.engines) if is_alive else ():
            self._park_pending(closed)
        engines = [*self._engines.values(), *self.draining.engines]
        for lost in engines:
            if lost.chain.wants_break:
                self.closes.ask_for_break(lost)
        return is_alive and any(engine.chain.is_due for engine in engines)

    def _publish_completed(self, engine: Engine) -> None:
        """Publish; a broken CUDA context must not keep other events from it."""
        try:
            engine.publish_completed()
        except DriverError as error:
            note_failure(engine, "publish what is complete of", error)

    def _park_pending(self, engine: Engine) -> None:
        """Have a thread wait for what is pending; an event that cannot be opened here must not end the session."""
        try:
            engine.park_pending()
        except DriverError as error:
            note_failure(engine, "wait for what is pending of", error)

    @trying("_lock")
    def _drop_if_unused(self, key: Key) -> None:
        reference = self._held.get(key)
        engine = self._engines.get(key)
        if engine is None or self._opened.get(key):
            return
        was_opened = key in self._opened
        if engine.is_closed or was_opened or reference is None or reference() is None:
            self._begin_close(key)
            self._forget_openings(key)
        self._abandoned.discard(key)

    def relieve(self) -> None:
        """Close unused attachments, if many were made for points since the last beat.

        Called before each further one: a thread that attaches in a loop may leave the heartbeat's thread little time,
        and beats are rare with a long TTL, while others wait for the slots.
        """
        if self._since_beat >= _MANY_POINTS:
            self._since_beat = 0
            with suppress(IpcSyncError):  # the heartbeat's thread meets it, too
                self.beat()

    def collect(self) -> int:
        """For `ipc_collect`: close unused attachments; returns how many imports were closed."""
        from ipcsync._engines import imports

        before = imports.count()
        with suppress(CoordinatorLost, SessionExpired):  # this session's own calls raise it
            self.beat()
        return max(before - imports.count(), 0)

    def close_all(self, seconds: float, pause: Callable[[float], object] = time.sleep) -> None:
        """End every attachment, and wait up to `seconds` for work still in flight.

        Uses that still have work then go on draining, and the coordinator is told which recorders are drained: other
        processes may wait for those, and the draining ones here for them. If nothing drains, the goodbye tells it all.
        """
        deadline = deadline_of(_CALL_S)
        for engine in list(self._engines.values()):
            while not engine.await_calls(min(_SLICE_S, left_of(deadline))) and left_of(deadline):
                pause(0)
        self._begin_close_all(pause)
        self.draining.await_released(seconds, pause)

    @holding("_lock")
    def _begin_close_all(self, pause: Callable[[float], object]) -> None:
        self._is_closed = True  # nothing is added any more
        for key in list(self._engines):
            self._begin_close(key)
            pause(0)
        for engine in self.draining.engines:
            engine.has_told_closed = True  # the goodbye does
        self._held.clear()
        self._opened.clear()
