"""What calls of the asynchronous client cost beside those of the synchronous one, in µs, for docs/async.md.

python -m tests.benchmarks.async_calls
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import ipcsync

COUNT = 24
ROUNDS = 200


def _median_us(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2] * 1e6


def _timed(call: Callable[[], object]) -> float:
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return _median_us(took)


async def _awaited(call: Callable[[], Awaitable[object]]) -> float:
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await call()
        took.append(time.perf_counter() - began)
    return _median_us(took)


def _all_of(points: list[ipcsync.Point], stream: ipcsync.Stream) -> None:
    for point in points:
        point.wait(stream)


async def _one_by_one(points: list[ipcsync.AsyncPoint], stream: ipcsync.Stream) -> None:
    for point in points:
        await point.wait(stream)


def _print(what: str, plain: float, awaited: float) -> None:
    sys.stdout.write(f"{what:42} {plain:8.1f} {awaited:8.1f}\n")


async def _measure(endpoint: str) -> None:
    stream, waiting = ipcsync.Stream(), ipcsync.Stream()
    with ipcsync.connect(endpoint, name="one") as one, ipcsync.connect(endpoint, name="two") as two:
        sent = [bytes(one.record(stream, engine="timeline")) for _ in range(COUNT)]
        points = [two.point(data) for data in sent]
        async with ipcsync.aconnect(endpoint, name="three") as three:
            theirs = [await three.point(data) for data in sent]
            sys.stdout.write(f"{'':42} {'Client':>8} {'AsyncClient':>8}\n")
            _print("record", _timed(lambda: one.record(stream)), await _awaited(lambda: three.record(waiting)))
            _print("point(data)", _timed(lambda: two.point(sent[0])), await _awaited(lambda: three.point(sent[0])))
            _print("point.query()", _timed(points[0].query), await _awaited(theirs[0].query))
            _print(
                "point.wait(stream)",
                _timed(lambda: points[0].wait(waiting)),
                await _awaited(lambda: theirs[0].wait(waiting)),
            )
            _print(
                f"{COUNT} points, one wait after another",
                _timed(lambda: _all_of(points, waiting)),
                await _awaited(lambda: _one_by_one(theirs, waiting)),
            )
            _print(
                f"{COUNT} points, wait_all",
                _timed(lambda: ipcsync.wait_all(points, waiting)),
                await _awaited(lambda: three.wait_all(theirs, waiting)),
            )


if __name__ == "__main__":
    with ipcsync.launch(log_level="error") as coordinator:
        asyncio.run(_measure(coordinator.endpoint))
