"""Records on events without a name: a stream's own, one behind many streams, or one that is sent before its record."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import ClassVar, NoReturn, TypeAlias

from ipcsync._closing import Closing
from ipcsync._deadline import bounded, deadline_of, left_of
from ipcsync._drivers import DriverObject
from ipcsync._engines import Engine, queued
from ipcsync._engines.core import Wait
from ipcsync._engines.loss import Loss
from ipcsync._native import fork
from ipcsync._native.context import OnDevice, call
from ipcsync._native.device import parse
from ipcsync._native.event import wait_for_all, wait_for_each
from ipcsync._native.stream import Stream, resolve
from ipcsync._session.attachments import AttachmentRef
from ipcsync._session.session import Session
from ipcsync._threads import CallLock, attempt, check_may_wait, is_mine, under_within
from ipcsync.client._twins import several
from ipcsync.client.event import SharedEvent, note_depth, open_events
from ipcsync.client.point import Point
from ipcsync.errors import DriverError, EventClosed, QuotaExceeded, Reentered, WaitTimeout
from ipcsync.typing import DeviceLike, EngineChoice, StreamLike

StreamKey: TypeAlias = tuple[int, int, int, EngineChoice]
"""A stream's address; the thread's id if the address means another stream on each, else 0; device; engine."""
Joined: TypeAlias = tuple[Stream, deque[Stream], list[Wait]]
"""A stream behind many, where it is kept, and the waits before their work."""

_MANY = 32
_LOOKS = 16  # of so many, or half of them, none serves before another one is made: at most twice what is in use
_KEPT = 8  # streams of a context

# One record, and room to repeat one that the driver refused: see `record_on` in the core's record.pxi.
RING = 2


class UnnamedEvents:
    """The events behind `Client.record`, `events`, by stream; and the streams that `Client.record_all` records on."""

    # By context, for all clients of the process, which see each other's waits; those that no record uses now.
    _kept: ClassVar[dict[int, deque[Stream]]] = {}

    def __init__(self, session: Session) -> None:
        self._session = session
        self.events: dict[StreamKey, SharedEvent] = {}
        self._look_from, self._serves = 0, True
        self._lock = CallLock()

    def take(self, key: StreamKey, depth: int | None, timeout: float | None = None) -> SharedEvent:
        """The event of a stream: its own, another's whose work is complete, or a new one.

        `depth` and `timeout`, which is that of a request, are the session's by default.
        """
        if is_mine(self._lock):
            raise Reentered("this client's first record on a stream is under way, and this first record interrupts it")
        check_may_wait()
        seconds = bounded(self._session.timeout if timeout is None else timeout, ", or None")
        openings, deadline = [AttachmentRef()], deadline_of(seconds)
        depth = self._session.depth if depth is None else depth
        try:
            event = under_within(self._lock, seconds, self._take, key, depth, openings, deadline)
            if event is None:
                text = f"other threads' first records on streams took all of the {seconds} s"
                raise WaitTimeout(text, timeout=seconds)
            return event
        except BaseException:
            if key not in self.events:
                self._session.abandon(openings)
            raise

    def _take(self, key: StreamKey, depth: int, openings: list[AttachmentRef], deadline: int) -> SharedEvent:
        event = self.events.get(key)
        if event is not None and event.is_lost:
            event.close()  # first: an exception in between must leave it to be found again
            self.events.pop(key, None)
            event = None
        if event is None and len(self.events) >= _MANY:
            event = self._take_over(key, depth, max(_LOOKS, self._serves and len(self.events) // 2))
            self._serves = event is not None  # else 16 the next time: half each time would be the square of the streams
        if event is not None:
            return event
        try:
            (event,) = open_events(self._session, [""], openings, *key[2:], depth, left_of(deadline), recorder=True)
        except QuotaExceeded:
            if (event := self._take_over(key, depth, len(self.events))) is None:
                raise
        self.events[key] = event
        return event

    def _take_over(self, key: StreamKey, depth: int, looks: int) -> SharedEvent | None:
        """An event of the same kind whose work is complete, taken from its stream; None if there is none.

        Its points stay valid: a generation is complete once all before it are, on whichever stream it was recorded. The
        other stream's next record gets an event as a new stream does. Lost events are closed.
        """
        others = list(self.events)
        # From another place each time, so that busy ones are not looked at again at once.
        self._look_from = (self._look_from + looks) % max(len(others), 1)
        for other in others[self._look_from :] + others[: self._look_from]:
            event = self.events[other]
            if event.is_lost:
                self._session.abandon([event._attached])  # first, as in `_take`
                self.events.pop(other, None)
                continue
            if not looks:
                break
            looks -= 1
            if other[2:] == key[2:] and (event.depth == depth or event.engine == "timeline") and _is_idle(event):
                owner = other
                del self.events[other]  # before the look that counts: `held` looks the other way round
                try:
                    if _is_idle(event):
                        owner = key
                finally:
                    self.events[owner] = event
                if owner is key:
                    return event
        return None

    def record(
        self,
        key: StreamKey,
        depth: int | None,
        handle: DriverObject,
        timeout: float | None,
        after: Sequence[tuple[Engine, int]],
        behind: Sequence[Wait] = (),
    ) -> Point:
        """Record on a stream's event."""
        event = self.hold(key, depth)
        try:
            note_depth(event, depth)
            return Point(event._attached, event._engine.record(handle, key[2], timeout, after, behind))
        finally:
            let_go(event)

    def held(self, key: StreamKey, *, was_taken: bool = False) -> SharedEvent | None:
        """A stream's event, which no other stream takes over until it is let go of; None if it is to be taken first."""
        event = self.events.get(key)
        if event is None or (event.is_lost and not was_taken):
            return None
        event._engine.waiting_records.append(0)
        if self.events.get(key) is event:
            return event
        let_go(event)
        return None

    def hold(self, key: StreamKey, depth: int | None, timeout: float | None = None) -> SharedEvent:
        """`held`, of an event that is taken as by `take` if need be."""
        event = self.held(key)
        while event is None:
            self.take(key, depth, timeout)
            event = self.held(key, was_taken=True)
        return event

    # --- behind many streams ------------------------------------------------------------------------------------------

    def record_behind(
        self, joined: Joined, engine: EngineChoice, timeout: float | None, after: Sequence[tuple[Engine, int]]
    ) -> Point:
        """Record on the stream that `join` returned, behind the waits that it returned, and keep it at its home."""
        stream, home, waits = joined
        try:
            key = (stream.stream_id, 0, stream.device_index, engine)
            return self.record(key, None, stream._handle, timeout, after, waits)
        finally:
            if after or len(home) < _KEPT:  # what it waits for may be lost, and is to be forgotten then
                home.append(stream)

    def join(self, device: DeviceLike | None, streams: Iterable[StreamLike | None] | None) -> Joined:
        """A stream that waits for all work submitted to `streams` so far, its home, and the waits before that work.

        None means all streams of a context of the device. The stream is used for nothing else, and for one record at a
        time: what another thread makes it wait for may never be complete. ValueError for an empty list.
        """
        named = None if streams is None else [resolve(stream) for stream in several(streams, "streams", "streams")]
        if named == []:
            raise ValueError("streams is empty: a point behind nothing would be complete at once; None means all")
        self.forget_lost()
        ordinal = named[0]._index if named and device is None else parse(device)  # no other device is to wait for them
        joined, home = self._take_stream(ordinal, must_be_idle=named is not None)
        try:
            # The waits are read after the driver's calls: each is listed before it is queued, so none is missing.
            if named is None:
                wait_for_all(joined)
                return joined, home, queued.latest(None)
            wait_for_each(joined, named)
            keys = {queued.list_of(stream._handle, stream._index, "record") for stream in named}
            return joined, home, [wait for key in keys for wait in queued.latest(key)]
        except BaseException:
            home.append(joined)
            raise

    def forget_lost(self) -> None:
        """Forget the lost waits of kept streams that are past them, behind which nobody's work ran."""
        if not any(isinstance(wait.known_outcome(), Loss) for wait in queued.latest(None)):
            return
        for kept in list(self._kept.values()):
            for _ in kept.copy():
                with suppress(IndexError, DriverError):  # another thread has it; its context was destroyed
                    stream = kept.popleft()
                    if stream.query():
                        queued.drop(queued.lost_on(stream._handle, stream._index))
                    kept.append(stream)

    def _take_stream(self, ordinal: int, *, must_be_idle: bool) -> tuple[Stream, deque[Stream]]:
        """An idle stream if there is one, else a new one, and those that are kept beside it.

        For a record of everything one that still waits, perhaps for ever, serves as well: that is behind all of these.
        """
        with OnDevice(ordinal) as inside, inside:
            here = int(call("cuCtxGetCurrent"))
            kept = self._kept.setdefault(here, deque())
            try:
                for _ in kept.copy():
                    stream = kept.popleft()  # until it is given back, no other call gets it
                    if stream.query() or not must_be_idle:
                        return stream, kept
                    kept.append(stream)
            except IndexError:  # other threads have the others
                pass
            except DriverError:  # their context was destroyed, and another one has its address
                kept.clear()
            return Stream(ordinal), kept


def let_go(event: SharedEvent) -> None:
    """Undo `held`, once."""
    event._engine.waiting_records.pop()


def _is_idle(event: SharedEvent) -> bool:
    """Whether all its records are complete, none is under way, and more are possible."""
    try:
        # First the records that are under way: one may end meanwhile.
        is_unused = not event._engine.waiting_records and not event.is_lost and event.state == "open"
        return is_unused and event.completed == event.generation == event._engine._begun
    except EventClosed:
        return False


# --- a point that is sent before its record: for programs that name the end of work before it is submitted ------------


class Reservation(Closing):
    """One record that this session will make, on a stream that is not known yet. Made by `Client.reserve`.

    Its point may be sent at once. A wait for it blocks until the record is made, or goes `ahead` of it; it never ends
    because nothing was recorded. If it is closed, or its process dies, before the record, others get RecorderLost.
    A context manager that closes it; close it once the record is made. Dropping it closes it with a ResourceWarning.
    """

    def __init__(self, event: SharedEvent) -> None:
        self._event = event
        self._point = event.at(1)
        self._lock = CallLock()
        self._finalizer = weakref.finalize(self, _drop, event)
        self._finalizer.atexit = False

    @property
    def point(self) -> Point:
        """The point of the record, made already or not."""
        return self._point

    def record(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, after: Iterable[Point] = ()
    ) -> Point:
        """Record after all work submitted to `stream` so far, and after the points `after`; the reserved point.

        Only once: another record, also of another thread while one is under way, raises EventClosed, and so does a
        closed reservation. Raises as `SharedEvent.record`; if nothing was recorded, it can be called again. On the
        timeline engine a record that an exception ended may have been made: a further one raises EventClosed.
        """
        self._event._check()
        points = several(after, "after", "points")  # before the lock: what gives them may call anything
        point = attempt(self._lock, self._record, stream, timeout, points)
        if point is None:
            raise EventClosed(f"a record of {self._event._engine.label} is under way: a reservation is for one record")
        return point

    def _record(self, stream: StreamLike | None, timeout: float | None, after: Sequence[Point]) -> Point:
        engine = self._event._engine
        if engine._recorded:
            raise EventClosed(f"this reservation ({engine.label}) is recorded, and for one record: reserve another")
        if engine._begun and engine.kind == "timeline":  # it was refused: the GPU may write its number yet
            raise EventClosed(
                f"an exception ended the record of this reservation ({engine.label}), and the GPU may have it: "
                "its point then covers what was submitted before that; close it, and reserve a further one"
            )
        self._event.record(stream, timeout=timeout, after=after)
        return self._point

    def close(self) -> None:
        """End it: if it was not recorded, waiters for its point get RecorderLost. A second call does nothing.

        Its place with the coordinator is free once what was recorded is complete and no process is attached any more.
        """
        self._event.close()
        self._finalizer.detach()  # behind it: an exception in between leaves the rest to the finalizer

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reservation does not travel: send bytes(reservation.point)")

    def __repr__(self) -> str:
        engine = self._event._engine
        is_closed = engine.is_closed or fork.is_in_bad_fork()
        state = "closed" if is_closed else "recorded" if engine._recorded else "not recorded"
        return f"<ipcsync.Reservation slot {engine.slot} {state}>"


def _drop(event: SharedEvent) -> None:
    """The finalizer of a reservation that was not closed."""
    if fork.is_in_bad_fork() or event._engine.is_closed:
        return
    event._session.abandon([event._attached])  # the session's owner tells the coordinator
    text = f"a reservation ({event._engine.label}) was dropped before it was closed"
    warnings.warn(text, ResourceWarning, stacklevel=2)
