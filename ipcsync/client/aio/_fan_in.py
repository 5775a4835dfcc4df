"""One wait for many points, for asyncio; see `ipcsync.client._fan_in`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Literal

from ipcsync._native.stream import Stream
from ipcsync._session.waits import Pending
from ipcsync.client._fan_in import wait_all as wait_for_all
from ipcsync.client.aio._runner import over
from ipcsync.client.aio.event import AsyncPoint, attached
from ipcsync.errors import RecorderLost

Lost = Literal["raise", "skip"]


async def synchronize_all(points: Iterable[AsyncPoint], timeout: float | None, lost: Lost) -> list[AsyncPoint]:
    """As the synchronous one; returns the points that were left out."""
    waiting = _checked(points, lost)
    await attached(waiting)
    return [waiting[place] for place in await _all([point.synchronize(timeout) for point in waiting], lost)]


async def wait_all(points: Iterable[AsyncPoint], stream: Stream, timeout: float | None, lost: Lost) -> list[AsyncPoint]:
    """As the synchronous one: once all records are made, one call queues all waits."""
    waiting = _checked(points, lost)
    plain = await attached(waiting)
    unmade = [place for place, point in enumerate(plain) if not point.is_recorded]
    waits = []
    for place in unmade:
        reference = plain[place]._bound()
        pending = Pending(reference.engine, plain[place].generation, timeout, recorded=True)
        waits.append(over(reference, pending))
    skipped = {unmade[place] for place in await _all(waits, lost)}
    left = [point for place, point in enumerate(plain) if place not in skipped]
    lost_now = {id(point) for point in wait_for_all(left, stream, timeout=0, lost=lost)}
    return [point for place, point in enumerate(waiting) if place in skipped or id(plain[place]) in lost_now]


def _checked(points: Iterable[AsyncPoint], lost: str) -> list[AsyncPoint]:
    if lost not in ("raise", "skip"):
        raise ValueError(f"lost is 'raise' or 'skip', but got {lost!r}")
    return list(points)


async def _all(waits: Sequence[Coroutine[Any, Any, None]], lost: Lost) -> list[int]:
    """Await all; the places of those that are lost, if they may be.

    Raises as soon as one is lost that may not be; else the error of the first in order, once all have ended.
    """
    tasks = [asyncio.ensure_future(_error_of(wait, lost)) for wait in waits]
    try:
        errors = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for error in errors:
        if error is not None and not isinstance(error, RecorderLost):
            raise error
    return [place for place, error in enumerate(errors) if error is not None]


async def _error_of(wait: Coroutine[Any, Any, None], lost: Lost) -> Exception | None:
    """What the wait raised; a loss is raised unless it may be skipped."""
    try:
        await wait
    except Exception as error:
        if lost == "raise" and isinstance(error, RecorderLost):
            raise
        return error
    return None
