"""Replays for asyncio. They wrap the ones without `Async` in their names: see `aio.client`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from ipcsync._native import fork
from ipcsync.client.aio._runner import run
from ipcsync.client.aio.event import AsyncPoint, AsyncSharedEvent, all_recorded, attached
from ipcsync.client.graphs.captured import GraphRecord, GraphWait
from ipcsync.client.graphs.replay import Replay, Replaying, Upcoming
from ipcsync.errors import CaptureError
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
    """What a block of replays is made of, and its points once they are recorded."""

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
        self._session = session
        self._waits = dict(waits)
        self._records = dict(records)
        self._stream = stream
        self._timeout = timeout
        self._ahead = ahead
        self._replaying: Replaying | None = None

    async def _made(self) -> Replaying:
        points = await attached(self._waits.values())
        if not self._ahead:
            await all_recorded(points, self._timeout)
        events = {record: event._event for record, event in self._records.items()}
        waits = dict(zip(self._waits, points, strict=True))
        if self._replaying is not None:
            raise CaptureError("a replay is used once: ask the client for another one")
        self._replaying = Replaying(self._session, waits, events, self._stream, self._timeout, self._ahead)
        return self._replaying


class AsyncReplaying(_Block):
    """A block within which graphs are launched, for asyncio; see `Replaying`. Made by `AsyncClient.replay`."""

    async def __aenter__(self) -> AsyncReplay:
        replaying = await self._made()
        replaying._locate()
        await run(replaying._enter, lambda _: replaying._end_from_outside())
        return AsyncReplay(replaying._replay)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fork.check()
        assert self._replaying is not None
        elsewhere = self._replaying._elsewhere()  # by this thread's current stream
        await run(partial(self._replaying._leave, error, elsewhere), surely=True)


class AsyncUpcoming(_Block):
    """A block for what torch replays within it, for asyncio; see `Upcoming`. Made by `AsyncClient.next`."""

    _upcoming: Upcoming | None = None

    async def __aenter__(self) -> AsyncReplay:
        self._upcoming = Upcoming(await self._made())
        return AsyncReplay(self._upcoming.__enter__())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._upcoming is not None
        self._upcoming.__exit__(kind, error, traceback)
