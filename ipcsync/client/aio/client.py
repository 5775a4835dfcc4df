"""The client for asyncio: no call makes the loop wait for a peer, and a cancelled call leaves nothing open.

Each class wraps the one without `Async` in its name. Requests run on threads; one thread of the client looks at all
waits for GPU work. Records and waits on streams are calls of the loop's thread, as kernels' launches are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from threading import get_ident
from types import MappingProxyType
from typing import Any, Literal

from ipcsync._closing import AsyncClosing
from ipcsync._deadline import deadline_of, left_of
from ipcsync._native import fork
from ipcsync._native.context import DEFAULT_STREAMS
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import Stream, resolve
from ipcsync._session.feed import Notice
from ipcsync._session.session import Session
from ipcsync._wire import codec as wire
from ipcsync._wire.messages import AttachmentInfo, BridgeInfo, EventInfo, NodeInfo, SessionInfo
from ipcsync.client._connecting import connect
from ipcsync.client._twins import ClientView, warn_if_dropped
from ipcsync.client.aio._runner import new_pool, request, run, taking, twin
from ipcsync.client.aio.event import (
    AsyncPoint,
    AsyncReplaying,
    AsyncReservation,
    AsyncSharedEvent,
    AsyncUpcoming,
    all_recorded,
    attached,
    checked,
    look_at,
    lost_of,
    record,
)
from ipcsync.client.client import Client
from ipcsync.client.event import SharedEvent, note_depth
from ipcsync.client.graphs import GraphRecord, GraphWait, refuse_per_thread
from ipcsync.client.point import Point, bound, looks, wait_all
from ipcsync.client.unnamed import Reservation, let_go
from ipcsync.errors import QuotaExceeded, WaitTimeout
from ipcsync.typing import DeviceLike, EngineChecks, EngineChoice, Stats, StreamLike

__all__ = ["AsyncClient", "Connecting", "aconnect"]


@taking(connect)
def aconnect(*arguments: Any, **options: Any) -> Connecting:
    """Open a session with a coordinator; as `connect`, and with its errors.

    `client = await aconnect()`, or `async with aconnect() as client:`, which closes it.
    """
    fork.arm()
    return Connecting(partial(connect, *arguments, **options))


class Connecting(Coroutine[Any, Any, "AsyncClient"]):
    """A session that is being opened: a coroutine, and an asynchronous context manager that closes it.

    Made by `aconnect`.
    """

    def __init__(self, open_session: Callable[[], Client]) -> None:
        self._opening = _open(open_session)

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:  # noqa: ANN401 - the base class's signature
        """As of any coroutine."""
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - the base class's signature
        """As of any coroutine."""
        return self._opening.throw(*error)

    def close(self) -> None:
        """As of any coroutine."""
        self._opening.close()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


async def _open(open_session: Callable[[], Client]) -> AsyncClient:
    def open_quietly() -> Client:
        client = open_session()
        client._finalizer.detach()  # of an abandoned loop the collector drops it before the coroutine closes it
        return client

    return AsyncClient(await run(open_quietly, Client.close))


def _while_awaited(session: Session) -> tuple[threading.Event, Callable[[], None]]:
    """What says that nobody awaits a call any more, and what that checks meanwhile, which then ends it."""
    is_over = threading.Event()

    def check() -> None:
        if is_over.is_set():
            raise asyncio.CancelledError
        session.check_liveness()

    return is_over, check


class AsyncClient(ClientView, AsyncClosing):
    """One session with a coordinator, for asyncio; see `Client`. Made by `aconnect`.

    An asynchronous context manager that closes it. It may be used by several tasks, and by loops of several threads. A
    request's `timeout` and its errors are as in `Client`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session, self._prefix = client._session, client.prefix
        warn_if_dropped(client, client._session)

    # --- events -------------------------------------------------------------------------------------------------------

    @twin(Client.event, SharedEvent.close)
    def event(self, event: SharedEvent) -> AsyncSharedEvent:
        """Open a shared event, or create it; as `Client.event`. If it is cancelled, what it opened is closed again."""
        return AsyncSharedEvent(event)

    @twin(Client.events, lambda events: [*map(SharedEvent.close, events)])
    def events(self, events: list[SharedEvent]) -> list[AsyncSharedEvent]:
        """Open many shared events, all or none; as `Client.events`. If it is cancelled, they are closed again."""
        return [AsyncSharedEvent(event) for event in events]

    async def record(
        self,
        stream: StreamLike | None = None,
        *,
        engine: EngineChoice = "auto",
        timeout: float | None = None,
        depth: int | None = None,
        after: Iterable[AsyncPoint] = (),
    ) -> AsyncPoint:
        """Record on this client's unnamed event for `stream`; as `Client.record`, and the task waits for room."""
        self._session.check()
        chosen = resolve(stream)
        address = chosen.stream_id
        key = (address, get_ident() if address in DEFAULT_STREAMS else 0, chosen.device_index, engine)
        unnamed = self._client._unnamed
        if (event := unnamed.held(key)) is None:
            event = await request(self._session, partial(unnamed.hold, key, depth), undo=let_go)
        try:
            note_depth(event, depth)
            return await record(event, chosen, timeout, after)
        finally:
            let_go(event)

    async def record_all(
        self,
        device: DeviceLike | None = None,
        *,
        streams: Iterable[StreamLike | None] | None = None,
        engine: EngineChoice = "auto",
        timeout: float | None = None,
        after: Iterable[AsyncPoint] = (),
    ) -> AsyncPoint:
        """A point behind everything submitted so far to a device, or to `streams`; as `Client.record_all`.

        Device and streams are this thread's current ones by default. A cancelled call goes on by itself.
        """
        self._session.check()
        points, left = bound(*await attached(after, timeout))
        unnamed = self._client._unnamed
        record = partial(unnamed.record_behind, unnamed.join(device, streams), engine, left, points)
        return AsyncPoint(await run(record, surely=True))

    @twin(Client.reserve, Reservation.close)
    def reserve(self, reservation: Reservation) -> AsyncReservation:
        """A point that this session will record later; as `Client.reserve`. If it is cancelled, it is closed again."""
        return AsyncReservation(reservation)

    def replay(
        self,
        waits: Mapping[GraphWait, AsyncPoint],
        records: Mapping[GraphRecord, AsyncSharedEvent] = MappingProxyType({}),
        *,
        stream: StreamLike | None = None,
        timeout: float | None = None,
        ahead: bool = False,
    ) -> AsyncReplaying:
        """A block for the launch of CUDA graphs, entered by `async with`; as `Client.replay`.

        Entering and leaving it run on a thread: only the launch is the loop's. If entering is cancelled, the replay is
        ended again; if leaving is, it goes on by itself.
        """
        self._session.check()
        return AsyncReplaying(self._session, waits, records, stream, timeout, ahead=ahead)

    def next(
        self,
        waits: Mapping[GraphWait, AsyncPoint],
        records: Mapping[GraphRecord, AsyncSharedEvent] = MappingProxyType({}),
        *,
        timeout: float | None = None,
        ahead: bool = False,
    ) -> AsyncUpcoming:
        """A block for what torch replays on this thread, entered by `async with`; as `Client.next`.

        Entering it waits for the points' records. Within the block no other task may replay: do not await there.
        """
        self._session.check()
        return AsyncUpcoming(self._session, waits, records, None, timeout, ahead=ahead)

    async def resume(self, stream: StreamLike | None = None, timeout: float | None = None) -> None:
        """Wait until `stream` is past the waits that were lost, and forget them; as `Client.resume`."""
        chosen = resolve(None) if stream is None else stream  # it lives until then, also if the task is cancelled
        refuse_per_thread(resolve(chosen))
        is_over, check = _while_awaited(self._session)
        try:
            await run(partial(self._client._resume, chosen, timeout, check))
        finally:
            is_over.set()

    async def point(self, data: bytes | bytearray | memoryview, *, timeout: float | None = None) -> AsyncPoint:
        """The point in 48 bytes from any process; as `Client.point`."""
        self._session.check()
        key = wire.unpack(data)
        found = self._session.attachments.find(key)
        if found is None:
            give_up = partial(self._session.owner.post, partial(self._session.attachments.give_up, key))
            found = await request(self._session, partial(self._session.attach, key), timeout, lambda _: give_up())
        return AsyncPoint(Point(found, key.generation))

    async def synchronize_all(
        self, points: Iterable[AsyncPoint], *, timeout: float | None = None, lost: Literal["raise", "skip"] = "raise"
    ) -> list[AsyncPoint]:
        """Wait until every point is complete, at most `timeout` seconds in all; as `ipcsync.synchronize_all`."""
        waiting = checked(points, lost)
        waits = [partial(point.synchronize, timeout) for point in waiting]
        return [waiting[place] for place in await lost_of(waits, lost)]

    async def wait_all(
        self,
        points: Iterable[AsyncPoint],
        stream: StreamLike | None = None,
        *,
        timeout: float | None = None,
        lost: Literal["raise", "skip"] = "raise",
    ) -> list[AsyncPoint]:
        """Have all work submitted to `stream` from now on wait for every point; as `ipcsync.wait_all`."""
        self._session.check()
        refuse_small_number(stream, 0)
        chosen, waiting = resolve(stream), checked(points, lost)
        late = [point for point in waiting if point._point._attached is None or not point.is_recorded]
        deadline = deadline_of(timeout)
        others = [point._point for point in waiting if lost == "raise"]  # one may be lost while another is awaited

        async def be_recorded(point: AsyncPoint) -> None:
            points, left = await attached([point], timeout)
            await all_recorded(points, partial(look_at, others, self._session.check_liveness), left)

        gone = await lost_of([partial(be_recorded, point) for point in late], lost)
        left_out = {id(late[place]._point) for place in gone}
        rest = [point for point in waiting if id(point._point) not in left_out]
        try:
            left_out.update(map(id, wait_all([point._point for point in rest], chosen, timeout=0, lost=lost)))
        except WaitTimeout:  # another thread's call is under way; a wait that is queued twice does no harm
            left = left_of(deadline) if late else timeout
            gone = await lost_of([partial(point.wait, chosen, timeout=left) for point in rest], lost)
            left_out.update(id(rest[place]._point) for place in gone)
        return [point for point in waiting if id(point._point) in left_out]

    async def wait_over(self, point: AsyncPoint, timeout: float | None = None) -> bool:
        """Wait until the GPU work of the lost recorder of `point` has ended; as `Client.wait_over`."""
        self._session.check()
        if not isinstance(point, AsyncPoint):
            raise TypeError(f"wait_over takes a point, but got {type(point).__name__}")
        attached, left = await point._attach(timeout)
        for is_over, pause_s in looks(attached.engine, left):
            if is_over:
                return True
            await asyncio.sleep(pause_s)
        return False

    @twin(Client.stream)
    def stream(self, stream: Stream) -> Stream:
        """A new stream of this process with the named specification; as `Client.stream`."""
        return stream

    # --- lists --------------------------------------------------------------------------------------------------------

    @twin(Client.list_events)
    def list_events(self, events: list[EventInfo]) -> list[EventInfo]:
        """The shared events whose names begin with `prefix`, those in quarantine included; as `Client.list_events`."""
        return events

    @twin(Client.nodes)
    def nodes(self, nodes: list[NodeInfo]) -> list[NodeInfo]:
        """The nodes of the fleet; as `Client.nodes`."""
        return nodes

    @twin(Client.bridge)
    def bridge(self, bridge: BridgeInfo) -> BridgeInfo:
        """The bridge beside this coordinator; as `Client.bridge`."""
        return bridge

    @twin(Client.list_sessions)
    def list_sessions(self, sessions: list[SessionInfo]) -> list[SessionInfo]:
        """The live sessions; as `Client.list_sessions`."""
        return sessions

    @twin(Client.list_attachments)
    def list_attachments(self, attachments: list[AttachmentInfo]) -> list[AttachmentInfo]:
        """Who records and who waits on which events; as `Client.list_attachments`."""
        return attachments

    @twin(Client.stats)
    def stats(self, stats: Stats) -> Stats:
        """The coordinator's counts, and this client's under `client`; as `Client.stats`."""
        return stats

    @twin(Client.check)
    def check(self, checks: EngineChecks) -> EngineChecks:
        """Which engines work between this process and the coordinator on a device; as `Client.check`."""
        return checks

    async def watch(self, prefix: str = "", *, timeout: float | None = None) -> AsyncGenerator[Notice, None]:
        """A snapshot as notices, then every change in order; as `Client.watch`.

        It ends with `aclose`, or when the task that iterates over it is cancelled. It reads only when the next notice
        is asked for: a slow reader costs no memory, and gets a snapshot in place of what it missed.
        """
        fork.check()
        is_over, check = _while_awaited(self._session)
        notices = self._client._notices(prefix, timeout, check)
        own = new_pool("ipcsync-watch")
        try:
            while (notice := await run(partial(next, notices, None), pool=own)) is not None:
                yield notice
        finally:
            is_over.set()
            with suppress(QuotaExceeded):  # without a thread the collector closes it
                own(notices.close)  # after a read that may still be under way, for 50 ms at most

    async def close(self) -> None:
        """Close the session and all that it opened, as `Client.close`. If it is cancelled, the close goes on."""
        if not fork.is_in_bad_fork():
            await run(self._client.close, surely=True, or_here=True)
