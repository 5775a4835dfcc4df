"""The client for asyncio: no call blocks the loop, and a cancelled call leaves nothing open.

Each class wraps the one without `Async` in its name. Requests and driver calls run on threads; one thread of the client
looks at all waits for GPU work. One exception: the per-thread default stream, whose handle means another stream on each
thread, is used on the loop's thread, by calls that do not wait.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from functools import partial
from threading import get_ident
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ipcsync._native import fork
from ipcsync._native.context import LEGACY
from ipcsync._native.device import parse
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import Stream, resolve
from ipcsync._session.feed import Notice
from ipcsync._wire.messages import AttachmentInfo, BridgeInfo, EventInfo, NodeInfo, SessionInfo
from ipcsync.client import _wait_over
from ipcsync.client._connecting import connect
from ipcsync.client._former import positional_timeout
from ipcsync.client._opening import DEFAULT_DEPTH, note_depth
from ipcsync.client._record_all import chosen
from ipcsync.client.aio import _fan_in
from ipcsync.client.aio._runner import OwnThread, Runner, Threads, is_of_this_thread, run, run_alone, with_owner
from ipcsync.client.aio.event import AsyncPoint, AsyncSharedEvent, attached
from ipcsync.client.aio.replay import AsyncReplay, AsyncReplaying, AsyncUpcoming
from ipcsync.client.aio.reservation import AsyncReservation
from ipcsync.client.client import Client, warn_if_dropped
from ipcsync.client.event import SharedEvent
from ipcsync.client.graphs.captured import GraphRecord, GraphWait
from ipcsync.client.point import Point, bound
from ipcsync.client.reservation import Reservation
from ipcsync.typing import Chains, DeviceLike, EngineChecks, EngineChoice, Stats, StreamLike

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AsyncClient",
    "AsyncPoint",
    "AsyncReplay",
    "AsyncReplaying",
    "AsyncReservation",
    "AsyncSharedEvent",
    "AsyncUpcoming",
    "Connecting",
    "aconnect",
]

T = TypeVar("T")


def aconnect(
    endpoint: str | None = None,
    *,
    name: str | None = None,
    timeout: float = 5.0,
    lease_ttl: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    chains: Chains = "stream",
    prefix: str = "",
    engine: EngineChoice = "auto",
) -> Connecting:
    """Open a session with a coordinator; as `connect`, and with its errors.

    `client = await aconnect()`, or `async with aconnect() as client:`, which closes it.
    """
    fork.arm()
    options: dict[str, Any] = {"name": name, "timeout": timeout, "lease_ttl": lease_ttl, "trace": trace}
    return connecting(partial(connect, endpoint, **options, chains=chains, prefix=prefix, engine=engine))


def connecting(open_session: Callable[[], Client]) -> Connecting:
    """The session that `open_session` opens, on a thread, once it is awaited or entered."""
    return Connecting(_open(open_session))


class Connecting(Coroutine[Any, Any, "AsyncClient"]):
    """A session that is being opened: a coroutine, and an asynchronous context manager that closes it.

    Made by `aconnect`.
    """

    def __init__(self, opening: Coroutine[Any, Any, AsyncClient]) -> None:
        self._opening = opening
        self._client: AsyncClient | None = None

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()


async def _open(open_session: Callable[[], Client]) -> AsyncClient:
    threads = Threads()

    def open_quietly() -> Client:
        client = open_session()
        client._finalizer.detach()  # of an abandoned loop the collector drops it before the coroutine closes it
        return client

    try:
        return AsyncClient(await threads.request(open_quietly, Client.close), threads)
    except BaseException:
        threads.shutdown()
        raise


class AsyncClient:
    """One session with a coordinator, for asyncio; see `Client`. Made by `aconnect`.

    An asynchronous context manager that closes it. It may be used by several tasks, and by loops of several threads. A
    request's `timeout` and its errors are as in `Client`.
    """

    def __init__(self, client: Client, threads: Threads) -> None:
        self._client = client
        self._runner = Runner(client._session, threads)
        warn_if_dropped(self, client._session)

    @property
    def endpoint(self) -> str:
        """The coordinator's endpoint."""
        return self._client.endpoint

    @property
    def epoch(self) -> bytes:
        """The 16 bytes that name one life of the keeper, or of a coordinator without one."""
        return self._client.epoch

    @property
    def name(self) -> str:
        """The session's name for others."""
        return self._client.name

    @property
    def prefix(self) -> str:
        """The prefix before this client's names of events and streams; "" by default."""
        return self._client.prefix

    @property
    def session_id(self) -> str:
        """The session's public id."""
        return self._client.session_id

    @property
    def lease_ttl(self) -> float:
        """The lease's TTL in seconds, as granted."""
        return self._client.lease_ttl

    @property
    def is_connected(self) -> bool:
        """Whether the session lives, as far as this process knows; sends nothing."""
        return self._client.is_connected

    @property
    def timeout(self) -> float:
        """The default timeout of requests to the coordinator, in seconds; 5 at first, and may be set."""
        return self._client.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._client.timeout = seconds

    @property
    def messages_sent(self) -> int:
        """How many requests this client has sent to the coordinator."""
        return self._client.messages_sent

    # --- events -------------------------------------------------------------------------------------------------------

    async def event(
        self,
        name: str,
        *,
        recorder: bool = False,
        device: DeviceLike | None = None,
        engine: EngineChoice = "auto",
        depth: int = DEFAULT_DEPTH,
        timeout: float | None = None,
        node: str | None = None,
        fleet: bool = False,
    ) -> AsyncSharedEvent:
        """Open a shared event, or create it; as `Client.event`. If it is cancelled, what it opened is closed again."""
        options: dict[str, Any] = {"recorder": recorder, "device": device, "engine": engine, "depth": depth}
        options.update(node=node, fleet=fleet)
        opened = await self._runner.request(
            partial(self._client.event, name, **options), timeout, SharedEvent.close, alone=fleet
        )
        return AsyncSharedEvent(opened, self._runner)

    async def events(
        self,
        names: Iterable[str],
        *,
        recorder: bool = False,
        device: DeviceLike | None = None,
        engine: EngineChoice = "auto",
        depth: int = DEFAULT_DEPTH,
        timeout: float | None = None,
        node: str | None = None,
    ) -> list[AsyncSharedEvent]:
        """Open many shared events, all or none; as `Client.events`. If it is cancelled, they are closed again."""
        options: dict[str, Any] = {"recorder": recorder, "device": device, "engine": engine, "depth": depth}
        options["node"] = node
        opened = await self._runner.request(partial(self._client.events, list(names), **options), timeout, _close_all)
        return [AsyncSharedEvent(event, self._runner) for event in opened]

    async def record(
        self,
        stream: StreamLike | None = None,
        *,
        engine: EngineChoice = "auto",
        timeout: float | None = None,
        depth: int = DEFAULT_DEPTH,
        after: Iterable[AsyncPoint] = (),
    ) -> AsyncPoint:
        """Record on this client's unnamed event for `stream`; as `Client.record`, and the task waits for room."""
        self._client._session.check()
        chosen = resolve(stream)
        address = chosen.stream_id
        key = (address, get_ident() if address in LEGACY else 0, chosen.device_index, engine)
        event = self._client._unnamed.events.get(key)
        if event is None or event.is_lost:
            event = await self._runner.request(partial(self._client._unnamed.take, key, depth))
        if depth != DEFAULT_DEPTH:
            note_depth(event, depth)
        points = await attached(after)
        return AsyncPoint(await self._runner.record(event, chosen, stream, timeout, points), self._runner)

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
        self._client._session.check()
        points = bound(await attached(after))
        owners = None if streams is None else list(streams)
        ordinal, named = parse(device), chosen(owners)
        everything = self._client._everything
        is_ours = any(is_of_this_thread(stream) for stream in named or ())
        made = everything.join(ordinal, named) if is_ours else None

        def record() -> Point:
            joined, gathered = made or everything.join(ordinal, named)
            return everything.record(joined, gathered, engine, timeout, points)

        return AsyncPoint(await run_alone(partial(with_owner, owners, record), surely=True), self._runner)

    async def reserve(
        self, *, device: DeviceLike | None = None, engine: EngineChoice = "auto", timeout: float | None = None
    ) -> AsyncReservation:
        """A point that this session will record later; as `Client.reserve`. If it is cancelled, it is closed again."""
        reserve = partial(self._client.reserve, device=device, engine=engine)
        return AsyncReservation(await self._runner.request(reserve, timeout, Reservation.close), self._runner)

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
        self._client._session.check()
        return AsyncReplaying(self._runner, waits, records, stream, timeout, ahead=ahead)

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
        self._client._session.check()
        return AsyncUpcoming(self._runner, waits, records, timeout, ahead=ahead)

    async def resume(self, stream: StreamLike | None = None, timeout: float | None = None) -> None:
        """Wait until `stream` is past the waits that were lost, and forget them; as `Client.resume`."""
        chosen = resolve(stream)
        await run_alone(partial(with_owner, stream, partial(self._client.resume, chosen, timeout)))

    async def point(self, data: bytes | bytearray | memoryview, *, timeout: float | None = None) -> AsyncPoint:
        """The point in 48 bytes from any process; as `Client.point`."""
        return AsyncPoint(await self._runner.request(partial(self._client.point, data), timeout), self._runner)

    async def synchronize_all(
        self, points: Iterable[AsyncPoint], *, timeout: float | None = None, lost: Literal["raise", "skip"] = "raise"
    ) -> list[AsyncPoint]:
        """Wait until every point is complete, at most `timeout` seconds in all; as `ipcsync.synchronize_all`."""
        return await _fan_in.synchronize_all(points, timeout, lost)

    async def wait_all(
        self,
        points: Iterable[AsyncPoint],
        stream: StreamLike | None = None,
        *,
        timeout: float | None = None,
        lost: Literal["raise", "skip"] = "raise",
    ) -> list[AsyncPoint]:
        """Have all work submitted to `stream` from now on wait for every point; as `ipcsync.wait_all`.

        All waits are queued by one call on a thread, so it costs little more than a wait for one point.
        """
        self._client._session.check()
        refuse_small_number(stream, 0)
        return await _fan_in.wait_all(self._runner, points, resolve(stream), stream, timeout, lost)

    async def wait_over(self, point: AsyncPoint, timeout: float | None = None) -> bool:
        """Wait until the GPU work of the lost recorder of `point` has ended; as `Client.wait_over`."""
        self._client._session.check()
        if not isinstance(point, AsyncPoint):
            raise TypeError(f"wait_over takes a point, but got {type(point).__name__}")
        _, plain, left = await point._bound(timeout)
        polling = _wait_over.Polling(plain._bound().engine, left)
        while not polling.has_ended():
            await asyncio.sleep(polling.pause_s)
        return polling.is_over

    async def stream(
        self, name: str, *, device: DeviceLike | None = None, priority: int = 0, timeout: float | None = None
    ) -> Stream:
        """A new stream of this process with the named specification; as `Client.stream`."""
        return await self._runner.request(partial(self._client.stream, name, device=device, priority=priority), timeout)

    # --- lists --------------------------------------------------------------------------------------------------------

    async def list_events(
        self, prefix: str = "", *, node: str | None = None, timeout: float | None = None
    ) -> list[EventInfo]:
        """The shared events whose names begin with `prefix`, those in quarantine included; as `Client.list_events`."""
        return await self._runner.request(partial(self._client.list_events, prefix, node=node), timeout)

    async def nodes(self, *, timeout: float | None = None) -> list[NodeInfo]:
        """The nodes of the fleet; as `Client.nodes`."""
        return await self._runner.request(self._client.nodes, timeout)

    async def bridge(self, *, timeout: float | None = None) -> BridgeInfo:
        """The bridge beside this coordinator; as `Client.bridge`."""
        return await self._runner.request(self._client.bridge, timeout)

    async def list_sessions(self, *, timeout: float | None = None) -> list[SessionInfo]:
        """The live sessions; as `Client.list_sessions`."""
        return await self._runner.request(self._client.list_sessions, timeout)

    async def list_attachments(
        self, prefix: str = "", *, limit: int = 100_000, timeout: float | None = None
    ) -> list[AttachmentInfo]:
        """Who records and who waits on which events; as `Client.list_attachments`."""
        return await self._runner.request(partial(self._client.list_attachments, prefix, limit=limit), timeout)

    @positional_timeout
    async def stats(self, *, timeout: float | None = None) -> Stats:
        """The coordinator's counts, and this client's under `client`; as `Client.stats`."""
        return await self._runner.request(self._client.stats, timeout)

    async def check(self, device: DeviceLike | None = None, *, timeout: float | None = None) -> EngineChecks:
        """Which engines work between this process and the coordinator on a device; as `Client.check`."""
        return await self._runner.request(partial(self._client.check, device), timeout)

    async def watch(self, prefix: str = "", *, timeout: float | None = None) -> AsyncGenerator[Notice, None]:
        """A snapshot as notices, then every change in order; as `Client.watch`.

        It ends with `aclose`, or when the task that iterates over it is cancelled. It reads only when the next notice
        is asked for: a slow reader costs no memory, and gets a snapshot in place of what it missed.
        """
        fork.check()
        is_over = threading.Event()

        def check() -> None:
            if is_over.is_set():
                raise _WatchOver
            self._client._session.check_liveness()

        notices = self._client._notices(prefix, timeout, check)
        own = OwnThread("ipcsync-watch")
        try:
            while (notice := await run(own, partial(_next, notices))) is not None:
                yield notice
        finally:
            is_over.set()
            own.submit(_close, notices)  # after a read that may still be under way, for 50 ms at most
            own.shutdown(wait=False)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the session and all that it opened, as `Client.close`. If it is cancelled, the close goes on."""
        if fork.is_in_bad_fork():
            return
        await run_alone(self._close, surely=True)

    def _close(self) -> None:
        self._client.close()
        self._runner.threads.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self._client).replace("Client", "AsyncClient", 1)


class _WatchOver(Exception):  # noqa: N818 - no error: the end of a watch without a reader
    """Raised inside a watch's thread to end it."""


def _next(notices: Iterator[Notice]) -> Notice | None:
    try:
        return next(notices, None)
    except _WatchOver:
        return None


def _close_all(events: list[SharedEvent]) -> None:
    for event in events:
        event.close()


def _close(notices: Any) -> None:  # noqa: ANN401 - a generator, said to be an iterator
    notices.close()
