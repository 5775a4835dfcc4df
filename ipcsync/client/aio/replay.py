"""Replays for asyncio. They wrap the ones without `Async` in their names: see `aio.client`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from ipcsync._native import fork
from ipcsync.client.aio._runner import run
from ipcsync.client.aio.event import AsyncPoint, AsyncSharedEvent, all_recorded, attached, plain
from ipcsync.client.graphs.captured import GraphRecord, GraphWait
from ipcsync.client.graphs.replay import Replay, Replaying, Upcoming
from ipcsync.typing import StreamLike

if TYPE_CHECKING:
    from ipcsync._session.session import Session


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


class _Block:
    """A replay, and the points that are recorded before its block begins."""

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
        if not (isinstance(waits, Mapping) and isinstance(records, Mapping)):
            raise TypeError(
                "replay takes waits, a mapping from GraphWait to AsyncPoint, and records, one from GraphRecord to "
                f"AsyncSharedEvent, but got {type(waits).__name__} and {type(records).__name__}"
            )
        points = {wait: plain(point) for wait, point in waits.items()}
        events = {record: event._event for record, event in records.items()}
        self._replaying = Replaying(session, points, events, stream, timeout, ahead)
        self._awaited = list(waits.values())
        self._timeout = timeout
        self._ahead = ahead

    async def _await_points(self) -> None:
        points = await attached(self._awaited)
        if not self._ahead:
            await all_recorded(points, self._timeout)


class AsyncReplaying(_Block):
    """A block within which graphs are launched, for asyncio; see `Replaying`. Made by `AsyncClient.replay`."""

    async def __aenter__(self) -> AsyncReplay:
        await self._await_points()
        self._replaying._locate()
        await run(self._replaying._enter, lambda _: self._replaying._end_from_outside())
        return AsyncReplay(self._replaying._replay)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fork.check()
        elsewhere = self._replaying._elsewhere()  # by this thread's current stream
        await run(partial(self._replaying._leave, error, elsewhere), surely=True)


class AsyncUpcoming(_Block):
    """A block for what torch replays within it, for asyncio; see `Upcoming`. Made by `AsyncClient.next`."""

    async def __aenter__(self) -> AsyncReplay:
        await self._await_points()
        upcoming = Upcoming(self._replaying)
        replay = upcoming.__enter__()
        self._upcoming = upcoming  # the one that is entered
        return AsyncReplay(replay)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._upcoming.__exit__(kind, error, traceback)
