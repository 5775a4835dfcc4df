"""Bare nats-py, in a worker: what the bridges' figures are measured beside."""

from __future__ import annotations

import asyncio
import time
from typing import Any

_WAIT_S = 30.0


def send(_state: dict[str, Any], url: str, subject: str, count: int, pace_s: float) -> list[int]:
    """Publish so many messages, `pace_s` apart or flat out: when each was begun, and when the server had all, in ns."""

    async def run() -> list[int]:
        import nats

        client = await nats.connect(url)
        await asyncio.sleep(0.3)
        times = []
        for _ in range(count):
            times.append(time.monotonic_ns())
            await client.publish(subject, b"x" * 64)
            if pace_s:
                await client._flush_pending()
                await asyncio.sleep(pace_s)
        await client.flush(timeout=60)
        times.append(time.monotonic_ns())
        await client.close()
        return times

    return asyncio.run(run())


def hear(_state: dict[str, Any], url: str, subject: str, count: int) -> list[int]:
    """When each of so many messages was seen by a subscriber's callback, in ns."""

    async def run() -> list[int]:
        import nats

        client = await nats.connect(url)
        times: list[int] = []
        done = asyncio.Event()

        async def hear(_message: object) -> None:
            times.append(time.monotonic_ns())
            if len(times) == count:
                done.set()

        await client.subscribe(subject, cb=hear)
        await client.flush()
        await asyncio.wait_for(done.wait(), _WAIT_S)
        await client.close()
        return times

    return asyncio.run(run())


def answer(_state: dict[str, Any], url: str, subject: str, count: int) -> None:
    """Answer so many requests."""

    async def run() -> None:
        import nats

        client = await nats.connect(url)
        seen = 0
        done = asyncio.Event()

        async def answer(message: Any) -> None:
            nonlocal seen
            await message.respond(b"y" * 64)
            seen += 1
            if seen == count:
                done.set()

        await client.subscribe(subject, cb=answer)
        await client.flush()
        await asyncio.wait_for(done.wait(), _WAIT_S)
        await client.flush()
        await client.close()

    asyncio.run(run())


def ask(_state: dict[str, Any], url: str, subject: str, count: int) -> list[float]:
    """Seconds that each of so many requests took."""

    async def run() -> list[float]:
        import nats

        client = await nats.connect(url)
        await asyncio.sleep(0.3)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            await client.request(subject, b"x" * 64, timeout=10)
            times.append(time.perf_counter() - began)
        await client.close()
        return times

    return asyncio.run(run())
