"""Shared events and points for asyncio. They wrap the ones without `Async` in their names: see `aio.client`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar

from ipcsync._closing import AsyncClosing
from ipcsync._deadline import deadline_of, left_of
from ipcsync._engines import Engine
from ipcsync._inbox import LoopCalls
from ipcsync._native import fork
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import resolve
from ipcsync._session import sessions
from ipcsync._session.waits import Pending
from ipcsync.client._twins import EventView, PointView
from ipcsync.client.aio._runner import Runner, run_alone, runners
from ipcsync.client.event import SharedEvent
from ipcsync.client.point import Point, attach
from ipcsync.errors import ConnectError, IpcSyncError
from ipcsync.typing import StreamLike

if TYPE_CHECKING:
    from ipcsync._session.attachments import AttachmentRef

T = TypeVar("T")


class AsyncSharedEvent(EventView["AsyncPoint"], AsyncClosing):
    """A named channel of GPU work, for asyncio; see `SharedEvent`. An asynchronous context manager that closes it."""

    def __init__(self, event: SharedEvent, runner: Runner) -> None:
        self._event = event
        self._engine, self._attached = event._engine, event._attached
        self._runner = runner

    @property
    def _is_open(self) -> bool:  # type: ignore[override] # nothing here sets it
        return self._event._is_open

    def _point(self, generation: int) -> AsyncPoint:
        return AsyncPoint(Point(self._attached, generation), self._runner)

    async def record(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, after: Iterable[AsyncPoint] = ()
    ) -> AsyncPoint:
        """Record the next generation; as `SharedEvent.record`.

        If the ring is full, the task waits for the oldest record. If it is cancelled then, nothing is recorded.
        """
        self._check()
        chosen = resolve(stream, self.device.index)
        point = await self._runner.record(self._event, chosen, timeout, await attached(after))
        return AsyncPoint(point, self._runner)

    async def close(self) -> None:
        """Close this object, as `SharedEvent.close`. If it is cancelled, the close goes on."""
        if self._event._is_open and not fork.is_in_bad_fork():
            await run_alone(self._event.close, surely=True)


class AsyncPoint(PointView):
    """A record of a shared event, made already or not, for asyncio; see `Point`. Immutable, hashable, and pickles.

    `bytes(point)` are the same 48 bytes as of `Point`. An unpickled one belongs to the process's asynchronous client of
    its coordinator; it must be awaited once before `event_name`, `device` and `is_recorded` are known.
    """

    __slots__ = ("__weakref__", "_generation", "_point", "_runner")

    def __init__(self, point: Point, runner: Runner | None) -> None:
        self._point = point
        self._generation = point.generation
        self._runner = runner

    async def _bound(self, timeout: float | None = None) -> tuple[Runner, Point, float | None]:
        """The runner, the point, attached now if it was not, and what that leaves of a wait's timeout."""
        if self._runner is not None:
            return self._runner, self._point, timeout
        deadline = deadline_of(timeout)
        key = self._point._key
        runner = _runner_of(key.epoch)

        def left() -> float | None:
            return None if timeout is None else left_of(deadline)

        # `left` is asked once it is a thread's turn.
        attachment = runner.session.find(key)
        if attachment is None:
            attachment = await runner.request(lambda timeout: attach(runner.session, key, left()))  # noqa: ARG005
        self._point = Point(attachment, key.generation)
        self._runner = runner
        return runner, self._point, left()

    def _known(self) -> AttachmentRef:
        if self._runner is None:
            raise ConnectError("this point was unpickled and not used yet: await one of its methods first")
        return self._point._bound()

    async def wait(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, ahead: bool = False
    ) -> None:
        """Have all work submitted to `stream` from now on wait for this point; as `Point.wait`."""
        fork.check()
        refuse_small_number(stream, 0)
        chosen = resolve(stream)
        runner, point, left = await self._bound(timeout)
        await runner.wait(point, chosen, left, ahead=ahead)

    async def query(self) -> bool:
        """Whether it is complete; as `Point.query`."""
        _, point, _ = await self._bound()
        return await _asked(point, point.query)

    async def synchronize(self, timeout: float | None = None) -> None:
        """Wait until it is complete; as `Point.synchronize`."""
        runner, point, left = await self._bound(timeout)
        attached, began, is_complete = point._bound(), monotonic_ns(), False
        try:
            await runner.over(attached, Pending(attached.engine, point.generation, left))
            is_complete = True
        finally:
            attached.engine.synchronized(point.generation, began, is_complete=is_complete)

    def add_done_callback(self, fn: Callable[[AsyncPoint], object]) -> None:
        """Have `fn(point)` called once by the running loop, when the point is complete or can never be."""
        if not callable(fn):
            raise TypeError(f"a callback is callable, but got {type(fn).__name__}")
        self._known()
        calls = LoopCalls()
        self._point.add_done_callback(lambda _: calls.soon(fn, self))

    async def exception(self) -> IpcSyncError | None:
        """Why the point can never be complete; None if it is, or still can be."""
        _, point, _ = await self._bound()
        return await _asked(point, point.exception)

    def __bytes__(self) -> bytes:
        return bytes(self._point)

    def __eq__(self, other: object) -> bool:
        return self._point == other._point if isinstance(other, AsyncPoint) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._point)

    def __repr__(self) -> str:
        return repr(self._point).replace("Point", "AsyncPoint", 1)

    def __reduce__(self) -> tuple[Any, tuple[Point]]:
        return _unpickle, (self._point,)


async def attached(points: Iterable[AsyncPoint]) -> list[Point]:
    """The points without `Async`, each attached now if it was not. TypeError for anything else."""
    plain = []
    for point in points:
        if not isinstance(point, AsyncPoint):
            raise TypeError(f"an asynchronous client's points are AsyncPoints, but got {type(point).__name__}")
        plain.append((await point._bound())[1])
    return plain


def _unpickle(point: Point) -> AsyncPoint:
    return AsyncPoint(point, None)


def _runner_of(epoch: bytes) -> Runner:
    fork.check()
    living = [reference() for reference in list(runners)]
    by_session = {runner.session: runner for runner in living if runner is not None}
    session = sessions.first_of(epoch, by_session)
    if session is None:
        raise ConnectError("this point needs an asynchronous client of its coordinator here: await ipcsync.aconnect()")
    return by_session[session]


async def _asked(point: Point, ask: Callable[[], T]) -> T:
    """`ask()`: on a thread where it asks the driver, which another thread's call may keep from an answer."""
    engine = point._bound().engine
    if isinstance(engine, Engine) and engine.kind == "event" and point.generation > engine.known_complete:
        return await run_alone(ask)
    answer = ask()
    if not answer:
        await asyncio.sleep(0)  # who asks until it is complete must not keep the loop from what completes it
    return answer
