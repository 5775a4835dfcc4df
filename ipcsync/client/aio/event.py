"""Shared events, points, reservations and replays for asyncio. They wrap the ones without `Async` in their names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import Any, Literal, TypeVar

from ipcsync._closing import AsyncClosing
from ipcsync._deadline import FULL_NS, deadline_of, left_of, pauses
from ipcsync._engines import Engine
from ipcsync._engines.engine import steps
from ipcsync._engines.loss import Loss
from ipcsync._inbox import LoopCalls
from ipcsync._native import fork
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import Stream, resolve
from ipcsync._session.attachments import AttachmentRef
from ipcsync._session.session import Session, session_of
from ipcsync._session.waits import Pending
from ipcsync.client._twins import EventView, PointView, several
from ipcsync.client.aio._runner import over, request, run
from ipcsync.client.event import SharedEvent
from ipcsync.client.graphs import GraphRecord, GraphWait, Replay, Replaying, Upcoming
from ipcsync.client.point import LEAST_S, OVER, Point
from ipcsync.client.unnamed import Reservation
from ipcsync.errors import ClientClosed, ConnectError, EventClosed, RecorderLost, SessionLost, WaitTimeout
from ipcsync.typing import StreamLike

__all__ = ["AsyncPoint", "AsyncReplay", "AsyncReplaying", "AsyncReservation", "AsyncSharedEvent", "AsyncUpcoming"]

T = TypeVar("T")


class AsyncSharedEvent(EventView["AsyncPoint"], AsyncClosing):
    """A named channel of GPU work, for asyncio; see `SharedEvent`. An asynchronous context manager that closes it."""

    def __init__(self, event: SharedEvent) -> None:
        self._event = event
        self._engine, self._attached = event._engine, event._attached

    @property
    def _is_open(self) -> bool:  # type: ignore[override] # nothing here sets it
        return self._event._is_open

    def _point(self, generation: int) -> AsyncPoint:
        return AsyncPoint(Point(self._attached, generation))

    async def record(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, after: Iterable[AsyncPoint] = ()
    ) -> AsyncPoint:
        """Record the next generation; as `SharedEvent.record`.

        If the ring is full, the task waits for the oldest record. If it is cancelled then, nothing is recorded.
        """
        self._check()
        return await record(self._event, resolve(stream, self.device.index), timeout, after)

    async def close(self) -> None:
        """Close this object, as `SharedEvent.close`. If it is cancelled, the close goes on."""
        if self._event._is_open and not fork.is_in_bad_fork():
            await run(self._event.close, surely=True, or_here=True)


async def record(
    event: SharedEvent,
    stream: Stream,
    timeout: float | None,
    after: Iterable[AsyncPoint],
    reservation: Reservation | None = None,
) -> AsyncPoint:
    """Record as soon as there is room in the ring, and no other thread's call is under way."""
    deadline, engine = deadline_of(timeout), event._engine
    engine.waiting_records.append(deadline)
    try:
        # What the record itself raises for is not waited for: its own later points, or any without the role.
        named = after if event._is_recorder and not (reservation and engine._recorded) else ()
        points, left = await attached(named, timeout)
        with suppress(RecorderLost):  # the record says what that means
            await all_recorded(points, partial(engine.check_liveness, 1), left, {engine.origin})
    finally:
        engine.waiting_records.pop()
    engines = [engine, *(each for point in points if isinstance(each := point._bound().engine, Engine))]
    for pause_s in pauses(left_of(deadline), 0.001, 0.02):
        try:
            return AsyncPoint((reservation or event).record(stream, timeout=0, after=points))
        except WaitTimeout:
            oldest = engine.oldest_in_the_way
        if not oldest:  # one of those below, which may end at any moment
            await asyncio.sleep(pause_s)
            # Each try may queue the waits for `after` again.
            while left_of(deadline) and not all(each.await_calls(0) for each in engines):
                engine.check_liveness(1)
                await asyncio.sleep(0.02)
            continue
        told = asyncio.get_running_loop().call_later(FULL_NS / 1e9, engine.note_full, oldest)
        try:
            await over(event._attached, Pending(engine, oldest, left_of(deadline)))
        except WaitTimeout:
            engine.raise_full(oldest, timeout)
        finally:
            told.cancel()
    what = "recorded (another thread's record or another process's wait is under way)"
    return engine.raise_timeout(engine._recorded + 1, timeout, what)


class AsyncReservation(AsyncClosing):
    """One record that this session will make, for asyncio; see `Reservation`. Made by `AsyncClient.reserve`.

    An asynchronous context manager that closes it.
    """

    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation

    @property
    def point(self) -> AsyncPoint:
        """The point of the record, made already or not."""
        return AsyncPoint(self._reservation.point)

    async def record(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, after: Iterable[AsyncPoint] = ()
    ) -> AsyncPoint:
        """Record after all work submitted to `stream` so far, once; as `Reservation.record`."""
        chosen = resolve(stream, self._reservation.point.device.index)
        return await record(self._reservation._event, chosen, timeout, after, self._reservation)

    async def close(self) -> None:
        """Close it, as `Reservation.close`. If it is cancelled, the close goes on."""
        if not fork.is_in_bad_fork():
            await run(self._reservation.close, surely=True, or_here=True)

    def __repr__(self) -> str:
        return repr(self._reservation).replace("Reservation", "AsyncReservation", 1)


class AsyncPoint(PointView):
    """A record of a shared event, made already or not, for asyncio; see `Point`. Immutable, hashable, and pickles.

    `bytes(point)` are the same 48 bytes as of `Point`. An unpickled one belongs to the process's client of its
    coordinator; await it once before `event_name`, `node`, `device`, `is_recorded` and `add_done_callback`.
    """

    __slots__ = ("__weakref__", "_generation", "_point")

    def __init__(self, point: Point) -> None:
        self._point = point
        self._generation = point.generation

    async def _attach(self, timeout: float | None = None) -> tuple[AttachmentRef, float | None]:
        """The attachment, asked for now if it is not known, and what that leaves of a wait's timeout."""
        deadline, attached = deadline_of(timeout), self._point._attached
        if attached is not None:
            return attached, timeout
        session = session_of(self._point._key.epoch)
        turn = None if timeout is None else max(timeout, LEAST_S)
        # What is left is asked once it is a thread's turn.
        attached = await request(session, lambda timeout: self._point._bound(left_of(deadline)), turn)  # noqa: ARG005
        return attached, left_of(deadline)

    def _bound(self) -> AttachmentRef:
        if self._point._attached is None:
            raise ConnectError("this point was unpickled and not used yet: await one of its methods first")
        return self._point._attached

    async def wait(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, ahead: bool = False
    ) -> None:
        """Have all work submitted to `stream` from now on wait for this point; as `Point.wait`."""
        fork.check()
        refuse_small_number(stream, 0)
        chosen = resolve(stream)
        attached, left = await self._attach(timeout)
        since = monotonic_ns()
        for pause_s in pauses(left_of(deadline_of(left)), 0.001, 0.02):
            try:
                steps.since = since
                with suppress(WaitTimeout):
                    self._point.wait(chosen, timeout=0, ahead=ahead)
                    return
            finally:
                steps.since = 0
            if ahead or attached.engine.generation >= self._generation:  # another thread's call is under way
                await asyncio.sleep(pause_s)
            else:
                await recorded(self._point, left)
        attached.engine.raise_timeout(self._generation, timeout, "waited for (another thread's wait or record blocks)")

    async def query(self) -> bool:
        """Whether it is complete; as `Point.query`."""
        return await self._asked(self._point.query)

    async def synchronize(self, timeout: float | None = None) -> None:
        """Wait until it is complete; as `Point.synchronize`."""
        attached, left = await self._attach(timeout)
        began, is_complete = monotonic_ns(), False
        try:
            await over(attached, Pending(attached.engine, self._generation, left))
            is_complete = True
        finally:
            attached.engine.synchronized(self._generation, began, is_complete=is_complete)

    def add_done_callback(self, fn: Callable[[AsyncPoint], object]) -> None:
        """Have `fn(point)` called once by the running loop, when the point is complete or can never be."""
        if not callable(fn):
            raise TypeError(f"a callback is callable, but got {type(fn).__name__}")
        self._bound()
        calls = LoopCalls()
        self._point.add_done_callback(lambda _: calls.soon(fn, self))

    async def exception(self) -> RecorderLost | SessionLost | ClientClosed | EventClosed | None:
        """Why the point can never be complete, or not be used here any more; as `Point.exception`."""
        try:
            return await self._asked(self._point.exception)
        except OVER as error:  # of its first use
            return error

    async def _asked(self, ask: Callable[[], T]) -> T:
        """`ask()`: on a thread where it asks the driver, which another thread's call may keep from an answer."""
        engine = (await self._attach())[0].engine
        if isinstance(engine, Engine) and engine.kind == "event" and self._generation > engine.known_complete:
            return await run(ask)
        answer = ask()
        if not answer:
            await asyncio.sleep(0)  # who asks until it is complete must not keep the loop from what completes it
        return answer

    def __bytes__(self) -> bytes:
        return bytes(self._point)

    def __eq__(self, other: object) -> bool:
        return self._point == other._point if isinstance(other, AsyncPoint) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._point)

    def __repr__(self) -> str:
        return repr(self._point).replace("Point", "AsyncPoint", 1)

    def __reduce__(self) -> tuple[type[AsyncPoint], tuple[Point]]:
        return AsyncPoint, (self._point,)


def plain(point: AsyncPoint) -> Point:
    """The point without `Async`. TypeError for anything else."""
    if not isinstance(point, AsyncPoint):
        raise TypeError(f"an asynchronous client's points are AsyncPoints, but got {type(point).__name__}")
    return point._point


async def attached(points: Iterable[AsyncPoint], timeout: float | None) -> tuple[list[Point], float | None]:
    """The points without `Async`, each attached by now, and what is left of a timeout. TypeError for anything else."""
    found = []
    for point in several(points, "after", "AsyncPoints"):
        found.append(plain(point))
        _, timeout = await point._attach(timeout)
    return found, timeout


async def all_recorded(
    points: Sequence[Point], check: Callable[[], object], timeout: float | None, own: Container[object] = ()
) -> None:
    """Wait until all but those of the events `own` are recorded. Raises as `check`, and for one that is lost."""
    deadline, left = deadline_of(timeout), timeout
    for point in points:
        engine = point._bound().engine
        if engine.generation < point.generation and engine.origin not in own:
            await recorded(point, left, partial(look_at, points, check))
            left = left_of(deadline)


def look_at(points: Iterable[Point], check: Callable[[], object]) -> None:
    """`check`, and raise for a point that is lost: by the board, since a driver may keep its answer from all waits."""
    check()
    for point, engine in [(each, each._attached.engine) for each in points if each._attached is not None]:
        outcome = engine.outcome_of(point.generation)
        engine.check()  # after the words were read
        if outcome is None:
            engine.is_clear(point.generation)  # or its recorder is asked to resolve it
        elif isinstance(outcome, Loss):
            engine.check_liveness(point.generation)
            point.query()


async def recorded(point: Point, timeout: float | None, check: Callable[[], object] = fork.check) -> None:
    """Wait until a point is recorded, at most `timeout` seconds."""
    attached = point._bound()
    await over(attached, Pending(attached.engine, point.generation, timeout, check))


# --- replays ----------------------------------------------------------------------------------------------------------


class AsyncReplay:
    """What a block of `AsyncClient.replay` gives: behind it, `replay[record]` is the point of each GraphRecord."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def __getitem__(self, record: GraphRecord) -> AsyncPoint:
        return AsyncPoint(self._replay[record])

    @property
    def is_used(self) -> bool:
        """Whether something was queued for it; as `Replay.is_used`."""
        return self._replay.is_used


class AsyncReplaying:
    """A block within which graphs are launched, for asyncio; see `Replaying`. Made by `AsyncClient.replay`."""

    def __init__(
        self,
        session: Session,
        waits: Mapping[GraphWait, AsyncPoint],
        records: Mapping[GraphRecord, AsyncSharedEvent],
        stream: StreamLike | None,
        timeout: float | None,
        *,
        ahead: bool,
    ) -> None:
        wrong: list[object] = [waits, records]
        if isinstance(waits, Mapping) and isinstance(records, Mapping):
            wrong = [event for event in records.values() if not isinstance(event, AsyncSharedEvent)]
        if wrong:
            raise TypeError(
                "replay takes waits, a mapping from GraphWait to AsyncPoint, and records, one from GraphRecord to "
                f"AsyncSharedEvent, but got {' and '.join(type(one).__name__ for one in wrong)}"
            )
        points = {wait: plain(point) for wait, point in waits.items()}
        events = {record: event._event for record, event in records.items()}
        self._replaying = Replaying(session, points, events, stream, timeout, ahead)
        self._awaited, self._own = list(waits.values()), {event._engine.origin for event in events.values()}

    async def _await_points(self) -> None:
        session, timeout = self._replaying._session, self._replaying._timeout
        points, left = await attached(self._awaited, timeout)
        if not self._replaying._replay._is_ahead:
            await all_recorded(points, session.check_liveness, left, self._own)

    async def __aenter__(self) -> AsyncReplay:
        began = monotonic_ns()
        await self._await_points()
        self._replaying._locate()
        try:
            await run(partial(self._replaying._enter, began), lambda _: self._replaying._end_from_outside())
        except BaseException:
            self._replaying._replay._is_over = True  # what still waits for room begins nothing
            raise
        return AsyncReplay(self._replaying._replay)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            fork.check()
        elif fork.is_in_bad_fork():
            return
        elsewhere = self._replaying._elsewhere()  # by this thread's current stream
        await run(partial(self._replaying._leave, error, elsewhere), surely=True, or_here=True)


class AsyncUpcoming(AsyncReplaying):
    """A block for what torch replays within it, for asyncio; see `Upcoming`. Made by `AsyncClient.next`."""

    async def __aenter__(self) -> AsyncReplay:
        upcoming = Upcoming(self._replaying)
        await self._await_points()
        replay = upcoming.__enter__()
        self._upcoming = upcoming  # the one that is entered
        return AsyncReplay(replay)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._upcoming.__exit__(kind, error, traceback)


# --- one wait for many points -----------------------------------------------------------------------------------------

Lost = Literal["raise", "skip"]


def checked(points: Iterable[AsyncPoint], lost: Lost) -> list[AsyncPoint]:
    """The points as a list. ValueError for another `lost`."""
    if lost not in ("raise", "skip"):
        raise ValueError(f"lost is 'raise' or 'skip', but got {lost!r}")
    return [point for point in several(points, "points", "AsyncPoints") if plain(point)]


async def lost_of(waits: Sequence[Callable[[], Coroutine[Any, Any, object]]], lost: Lost) -> list[int]:
    """Await all; the places of those that are lost, if they may be.

    Raises as soon as one is lost that may not be, or cannot be waited for; else, once all have ended, WaitTimeout for
    the first in order that was late.
    """
    tasks = [asyncio.ensure_future(_error_of(wait, lost)) for wait in waits]
    errors: list[Exception | None] = []
    try:
        errors = await asyncio.gather(*tasks)
        if others := [error for error in errors if error is not None and not isinstance(error, RecorderLost)]:
            raise others.pop(0)
        return [place for place, error in enumerate(errors) if error is not None]
    finally:
        for place in range(len(tasks)):  # by no name, which this frame would keep
            tasks[place].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks, errors  # else an error, its traceback and this frame would keep each other


async def _error_of(wait: Callable[[], Coroutine[Any, Any, object]], lost: Lost) -> Exception | None:
    """What the wait raised; a loss is raised unless it may be skipped."""
    ends = (WaitTimeout,) if lost == "raise" else (WaitTimeout, RecorderLost)
    try:
        await wait()
    except ends as error:
        return error
    return None
