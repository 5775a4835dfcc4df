"""What lies in the fleet's store, and how bridges read it: JSON, which anybody may have written.

A value names its owner by a number of 128 random bits, so that a write whose outcome was not told is known for one's
own when it is read again. Terms order the owners of a name; they decide who may be called by it, and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ipcsync_bridge.transport import Transport, Unavailable

T = TypeVar("T")

TRIES = 20  # of a write that others' writes come before
STORE_S = 5.0  # for a question to the store that no session waits for
_AGAIN_S = 0.1
_TRY_S = 2.5
_AT_ONCE = 32  # questions to the store

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
NodeName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]


class Owner(msgspec.Struct, frozen=True):
    """The value of `nodes.<node>`."""

    owner: Hex
    epoch: Hex
    term: Count
    version: int = 1


class Claim(msgspec.Struct, frozen=True):
    """The value of `names.<name>`."""

    node: NodeName
    owner: Hex
    epoch: Hex
    slot: Count
    incarnation: Count


def decode(value: bytes, kind: type[T]) -> T | None:
    """The value, None if it cannot be read."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, ValueError):
        return None


async def read_all(transport: Transport, prefix: str, left: Callable[[], float]) -> dict[str, tuple[bytes, int]]:
    """The keys that begin with `prefix`; `left` is how long each question to the store may take. Raises Unavailable."""
    found: dict[str, tuple[bytes, int]] = {}

    async def read(key: str) -> None:
        one = await transport.read(key, left())
        if one is not None:
            found[key] = one

    await for_each(await transport.keys(prefix, left()), read)
    return found


async def for_each(items: Collection[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Await `work` for each item, for some at a time. The first error ends it."""
    left = iter(items)

    async def run() -> None:
        for item in left:
            await work(item)

    tasks = [asyncio.ensure_future(run()) for _ in range(min(_AT_ONCE, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def insist(ask: Callable[[], Awaitable[T]], deadline: float) -> T:
    """What `ask` returns, which asks the store again until it answers. Raises Unavailable at the deadline."""
    while True:
        try:
            return await ask()
        except Unavailable:  # noqa: PERF203 - each try is one
            if time.monotonic() + _AGAIN_S >= deadline:
                raise
            await asyncio.sleep(_AGAIN_S)


def left_until(deadline: float) -> float:
    """The seconds to a deadline, but time for one question at least."""
    return max(deadline - time.monotonic(), 0.1)


def one_try(deadline: float) -> float:
    """The same for a question that `insist` repeats: a server without a leader drops some."""
    return min(left_until(deadline), _TRY_S)
