"""The attachments of one client, and what the coordinator is told of them.

An attachment ends with the last `close` of its event objects. One that only points made ends once its event is finished
and no point of it is left in this process. It then drains until nothing here touches the slot: see `driving`.

If a slot was closed and attached to again, the coordinator must see the close first: closes go before what attaches.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, cast
from weakref import WeakMethod, WeakValueDictionary

from ipcsync._board import Board, peer_of
from ipcsync._deadline import deadline_of
from ipcsync._engines import Engine
from ipcsync._engines.loss import Loss
from ipcsync._native import context
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import stream_handle
from ipcsync._session.connection import Connection, Request
from ipcsync._session.owner import SessionLease
from ipcsync._session.waits import Waits
from ipcsync._wire.codec import PointKey
from ipcsync._wire.messages import Attachment, Break, Close, Message, Remains
from ipcsync.errors import (
    ClientClosed,
    DeviceMismatch,
    EventClosed,
    InvalidDevice,
    IpcSyncError,
    QuotaExceeded,
    SessionLost,
    WaitTimeout,
)
from ipcsync.typing import StreamLike

log = logging.getLogger("ipcsync")

Key: TypeAlias = tuple[int, int]
"""One use of a slot: its number and its incarnation."""
NewEngine: TypeAlias = Callable[[Board, SessionLease, Attachment, int], Engine]  # as the class is called

MANY_POINTS = 64  # attachments for points, most of which may be over by now and hold slots of others
_BEAT_S = 0.05  # for a close that no call waits for
_AT_ONCE = 64  # closes: to make many more takes longer than a beat


class AttachmentRef:
    """One attachment, as an event object with its points holds it, or all points that came from elsewhere.

    An event object's is an *opening*: it is made before the coordinator is asked, so that an exception at any later
    moment finds it there, to be closed. It has no `use` until it is granted.
    """

    engine: Engine
    waits: Waits  # those of its session
    use: Use | None = None

    def bind(self, engine: Engine, waits: Waits, use: Use | None = None) -> None:
        """The coordinator has granted it; without a `use` if that is over."""
        self.engine, self.waits, self.use = engine, waits, use


class Life(enum.IntEnum):
    """How far an attachment has come; it only grows."""

    OPEN = 0
    CLOSED = 1  # in this process
    DRAINING = 2  # and work of it was found that goes on, or a beat has come since
    DRAINED = 3  # and its records were found complete
    RELEASED = 4  # nothing of this process touches the slot


class Use:
    """One attachment's use of one slot. The session's owner alone changes it."""

    __slots__ = ("attached", "engine", "has_failed", "is_given_up", "key", "life", "openings", "told")

    def __init__(self, engine: Engine, waits: Waits) -> None:
        self.engine: Engine = engine
        self.key: Key = engine.slot, engine.incarnation
        self.life: Life = Life.OPEN
        self.told: Life = Life.OPEN  # what the coordinator knows of that
        self.openings: set[AttachmentRef] = set()  # those of event objects
        self.attached: AttachmentRef | None = AttachmentRef()  # for points; None once it ends
        self.attached.bind(engine, waits, self)
        self.is_given_up: bool = False  # its request was: it ends, unless it is used all the same
        self.has_failed: bool = False  # the driver has, for it, which was logged


class Finished:
    """What an attachment's engine is to a point, for a use that was over before this process saw a point of it.

    It has no attachment, and nothing to ask a driver about: the coordinator told how it ended. Thread-safe.
    """

    node = ""

    def __init__(self, board: Board, guard: SessionLease, remains: Remains, ordinal: int, name: str) -> None:
        self._board = board
        self._remains = remains
        self.guard = guard
        self.is_closed: bool = False
        self.ordinal = ordinal
        self.name = name
        self.label: str = repr(name) if name else f"an unnamed event (slot {remains.slot})"
        self.origin: tuple[bytes, int, int] = (board.epoch, remains.slot, remains.incarnation)
        self.generation: int = remains.recorded

    def check(self) -> None:
        self.guard.check()
        if self.is_closed:
            raise EventClosed(f"the event {self.label} was closed in this process", event=self.name)

    def check_liveness(self, _generation: int) -> None:
        self.guard.check_liveness()

    def close(self) -> None:
        """The client is closed: its points cannot be used again."""
        self.is_closed = True

    def outcome_of(self, generation: int) -> Loss | bool:
        """True if `generation` was known complete, else why it is lost."""
        left = self._remains
        return generation <= left.good or Loss(left.cause, left.serial, left.session, left.pid)

    def query(self, generation: int, *_: object) -> bool:
        self.check()
        outcome = self.outcome_of(generation)
        if isinstance(outcome, Loss):
            is_over = outcome.cause != "behind" and self.recorder_is_over()
            raise outcome.error(self.name, self.label, generation, over=is_over or None)
        return True

    def wait(self, generation: int, stream: StreamLike | None, timeout: float | None, _ahead: bool) -> None:
        """There is nothing to wait for. Raises for a stream that no wait may be queued on, as any wait does."""
        deadline_of(timeout)
        refuse_small_number(stream, 0)
        handle, ordinal = stream_handle(stream)
        with context.OnDevice(ordinal) as inside, inside:
            context.refuse_capturing(handle, "wait")
        self.query(generation)

    wait_on: Callable[..., bool] = query
    await_complete: Callable[..., bool] = query
    await_recorded: Callable[..., bool] = query

    def synchronize(self, generation: int, timeout: float | None, _began: int = 0) -> None:
        deadline_of(timeout)
        self.query(generation)

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None: ...  # no trace shows it

    def recorder_is_over(self) -> bool | None:
        """Whether the recorder's process and its GPU work have ended for good; None if that is never known."""
        serial = self._remains.serial
        is_over = peer_of(self._board, serial).is_over() if serial else None
        return is_over and self.guard.coordinator_is_alive()  # in this order


class AttachmentTable:
    """All attachments of one client. The session's owner calls its methods; any thread may call `find`.

    `shown(name)` is the user's name for a name of the coordinator's. `check_caller` is called in each slice of a
    request, and raises once nobody waits for the owner's job.
    """

    def __init__(
        self,
        lease: SessionLease,
        connection: Connection,
        waits: Waits,
        new_engine: NewEngine = Engine,
        shown: Callable[[str], str] = str,
        check_caller: Callable[[], object] | None = None,
    ) -> None:
        self._board = lease.board
        self._lease = lease
        self._connection = connection
        self._waits = waits
        self._new_engine = new_engine
        self._shown = shown
        self._check_caller = check_caller and WeakMethod(check_caller)  # of the session, which has this
        self.uses: dict[Key, Use] = {}
        self.ending: list[Use] = []  # closed here, until the coordinator knows that they are released
        self._late: list[Key] = []  # what requests that were given up have attached to, and nothing here uses
        self._mirrors: dict[tuple[bytes, int, int], Key] = {}  # by what they mirror
        self._finished: WeakValueDictionary[Key, AttachmentRef] = WeakValueDictionary()  # uses that others had finished
        self.since_beat: int = 0  # attachments made for points since the last one
        self.is_due: bool = False  # there may be something to tell that was not tried yet

    # --- attaching ----------------------------------------------------------------------------------------------------

    def find(self, key: PointKey) -> AttachmentRef | None:
        if (use := self._use_of(key)) is not None:
            return use.attached
        return self._finished.get((key.slot, key.incarnation)) if key.epoch == self._board.epoch else None

    def _use_of(self, key: PointKey) -> Use | None:
        is_here = key.epoch == self._board.epoch
        slot = (key.slot, key.incarnation) if is_here else self._mirrors.get((key.epoch, key.slot, key.incarnation))
        return None if slot is None else self.uses.get(slot)

    def add(self, reply: Message, here: int, opening: AttachmentRef | None = None) -> AttachmentRef:
        """Add what the coordinator has granted for an opening, or for a point.

        `here` is the caller's device. Raises DeviceMismatch if this process does not see the event's.
        """
        if isinstance(reply, Remains):
            return self._finish(reply, here)
        assert isinstance(reply, Attachment)
        use = self.uses.get((reply.slot, reply.incarnation))
        if use is None:
            use = Use(self._make(reply, here), self._waits)
            self.uses[use.key] = use
            if use.engine.node:
                self._mirrors[use.engine.origin] = use.key
        use.engine.is_recorder = use.engine.is_recorder or reply.recorder
        if opening is not None:
            opening.bind(use.engine, self._waits, use)
            use.openings.add(opening)
            return opening
        self.since_beat += 1
        assert use.attached is not None
        return use.attached

    def _make(self, reply: Attachment, here: int) -> Engine:
        try:
            # A mirror has no GPU: its word works on every device of this process.
            ordinal = here if reply.origin is not None else context.ordinal_of(reply.device)
        except InvalidDevice as error:
            raise DeviceMismatch(f"the event {reply.name!r} is on a device that is not visible here: {error}") from None
        engine = self._new_engine(self._board, self._lease, reply, ordinal)
        engine.name = self._shown(reply.name)
        for old in self.ending:
            # What this session recorded there, attached to again: both share the chain. Of a use that only waited, the
            # chain ends with it, and this one may record.
            if old.key == (reply.slot, reply.incarnation) and old.engine.is_recorder and old.life < Life.RELEASED:
                engine.continue_from(old.engine)
        return engine

    def _finish(self, remains: Remains, here: int) -> AttachmentRef:
        try:
            ordinal = context.ordinal_of(remains.device)
        except InvalidDevice:
            ordinal = here  # nothing of it is used
        finished = Finished(self._board, self._lease, remains, ordinal, self._shown(remains.name))
        found = AttachmentRef()
        found.bind(cast("Engine", finished), self._waits)  # it has what a point asks of an engine
        self._finished[remains.slot, remains.incarnation] = found
        return found

    # --- closing ------------------------------------------------------------------------------------------------------

    def close(self, openings: Sequence[AttachmentRef]) -> list[Use]:
        """Close the shares of event objects; the uses of which they were the last, which now drain."""
        ended = []
        for opening in openings:
            use = opening.use
            if use is not None and opening in use.openings:
                use.openings.remove(opening)
                if not use.openings:
                    self._end(use)
                    ended.append(use)
        return ended

    def _end(self, use: Use) -> None:
        use.attached = None
        self.ending.append(use)
        del self.uses[use.key]
        if self._mirrors.get(use.engine.origin) == use.key:
            del self._mirrors[use.engine.origin]
        use.engine.close()
        use.life = Life.CLOSED  # only now: another thread may release it at once

    def give_up(self, key: PointKey) -> None:
        if (use := self._use_of(key)) is not None:
            use.is_given_up = True

    def give_back(self, late: Message) -> None:
        if not isinstance(late, Attachment):
            return
        key = late.slot, late.incarnation
        if (use := self.uses.get(key)) is not None:
            use.is_given_up = True
            use.engine.is_recorder = use.engine.is_recorder or late.recorder  # the role ends with the use that is open
        elif ending := [old for old in self.ending if old.key == key]:
            # Told again now: a stream of it may wait for a record that nobody could make while this session is there.
            if not any(old.engine.is_recorder for old in ending):
                ending[0].engine.is_recorder = late.recorder
            ending[0].told, self.is_due = Life.OPEN, True
        else:
            self._late.append(key)
            self.is_due = True

    def end_unused(self) -> None:
        """End the uses that only points made, once their events are over and no point is left."""
        self.since_beat = 0
        for use in list(self.uses.values()):
            if use.openings or not (use.is_given_up or use.engine.state != "open"):
                continue
            assert use.attached is not None
            reference, use.attached = weakref.ref(use.attached), None  # so that `find` gives it to nobody meanwhile
            use.attached, use.is_given_up = reference(), False
            if use.attached is None:
                self._end(use)

    def advance(self, use: Use, life: Life) -> None:
        if life > use.life:
            use.life, self.is_due = life, True

    def close_all(self, pause: Callable[[], object] = lambda: None) -> None:
        """End every attachment; the goodbye tells it. `pause` is called behind each."""
        for use in list(self.uses.values()):
            use.openings.clear()
            self._end(use)
            pause()
        for finished in list(self._finished.values()):
            finished.engine.close()
        for use in self.ending:
            use.told = max(use.told, Life.DRAINING)

    # --- what the coordinator is told ---------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return any(use.life < Life.RELEASED for use in self.ending)

    @property
    def has_closes(self) -> bool:
        return bool(self._late) or any(use.told < use.life for use in self.ending)

    def tell(self, seconds: float = _BEAT_S) -> None:
        """Tell the closes, as far as the coordinator takes them within `seconds`; a later beat tells the others."""
        self.is_due = False
        with suppress(QuotaExceeded):  # which is logged
            # Of one that was just closed it will be known soon what is left of it.
            self._tell([use for use in self.ending if use.told < use.life > Life.CLOSED], deadline_of(seconds))

    def tell_all(self, timeout: float, deadline: int) -> None:
        """Tell all closes before something is attached.

        WaitTimeout if the coordinator does not take one by `deadline`, that of a call of `timeout` seconds: told later,
        it would end the new attachment. QuotaExceeded if it has no memory for it.
        """
        if not self._tell([use for use in self.ending if use.told < max(use.life, Life.DRAINING)], deadline):
            text = f"the coordinator did not take an earlier close within {timeout} s"
            raise WaitTimeout(text, timeout=timeout)

    def _tell(self, uses: Sequence[Use], deadline: int) -> bool:
        """Tell the closes of `uses`, and of late attachments, many at once; whether the coordinator took them all."""
        for first in range(0, len(uses) or 1, _AT_ONCE):
            lives = [(use, max(use.life, Life.DRAINING)) for use in uses[first : first + _AT_ONCE]]
            closes = [self._close_of(use, life) for use, life in lives]
            outcomes = self._sent([*closes, *(Close(*key) for key in self._late)], deadline)
            is_told = [outcome is True for outcome in outcomes]
            for (use, life), told in zip(lives, is_told, strict=False):
                use.told = life if told else use.told
            self.ending = [use for use in self.ending if use.told < Life.RELEASED]
            self._late = [key for key, told in zip(self._late, is_told[len(lives) :], strict=True) if not told]
            refused = [outcome for outcome in outcomes if isinstance(outcome, IpcSyncError)]
            del outcomes  # else an error, its traceback and this frame would keep each other
            if refused:
                raise refused.pop()
            if not all(is_told):
                return False
        return True

    def _close_of(self, use: Use, life: Life) -> Close | None:
        """What to tell; None for nothing, since to the coordinator the uses of one slot by this session are one."""
        again = self.uses.get(use.key)
        if again is not None and (again.engine.is_recorder or not use.engine.is_recorder):
            return None
        others = [old for old in self.ending if old is not use and old.key == use.key]
        is_released = again is None and life is Life.RELEASED and all(old.life is Life.RELEASED for old in others)
        least = min([life, *(old.life for old in others if old.engine.is_recorder)])  # a record there may be under way
        is_drained = use.engine.is_recorder and least > Life.DRAINING and not is_released
        return Close(*use.key, released=is_released, drained=is_drained)

    def _sent(self, bodies: Sequence[Close | Break | None], deadline: int) -> list[bool | IpcSyncError]:
        """Of each whether the coordinator took it, or never will; QuotaExceeded if it lacks memory, or ClientClosed."""
        requests = [None if body is None else Request(body) for body in bodies]
        if asked := [request for request in requests if request is not None]:
            try:
                self._check()
                self._connection.exchange(asked, self._lease.welcome.token, deadline, self._check)
            except IpcSyncError as error:  # `_outcome` says what it means for each
                log.debug("closes were not all told: %s", error)
        return [request is None or self._outcome(request) for request in requests]

    def _outcome(self, request: Request) -> bool | IpcSyncError:
        try:
            if request.reply is None:
                self._check()
            self._connection.result_of(request, 0)
        except WaitTimeout:
            return False  # sent again later, under a new id: twice does nothing
        except (QuotaExceeded, ClientClosed) as error:
            log.debug("%r waits: %s", request.body, error)
            return error
        except (SessionLost, EventClosed) as error:
            log.debug("%r: %s", request.body, error)  # its session or use is over already
        except IpcSyncError as error:
            log.warning("%r: its slot may stay open until this client is closed: %s", request.body, error)
        return True

    def _check(self) -> None:
        """In each slice: what the coordinator should know it is told whatever became of the lease."""
        if self._check_caller is not None and (check := self._check_caller()) is not None:
            check()
        self._lease.beat()
        self._lease.check_coordinator()

    def forget_closes(self) -> None:
        self.ending = [use for use in self.ending if use.life < Life.RELEASED]
        self._late.clear()

    def beat(self) -> None:
        """At each beat: end what nobody uses, ask for what is due, and tell what was not taken."""
        for use in self.ending:  # closed before this beat: the driver may keep the look at what is left of it for long
            self.advance(use, Life.DRAINING)
        self.end_unused()
        for use in [*self.uses.values(), *self.ending]:
            chain = use.engine.chain
            if chain.wants_break and not chain.has_asked:
                # Part of it is lost, and all before that is settled: the coordinator is asked once to break the event.
                chain.has_asked = self._sent([Break(*use.key)], deadline_of(_BEAT_S)) == [True]
                if not chain.has_asked:
                    break  # nor would the next one be taken, and calls wait for the owner
        self.tell()
