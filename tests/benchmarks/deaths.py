"""Deaths: from the kill of a recorder until a host's wait for its point raises, beside the end of its process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import ipcsync
from ipcsync._linux.process import PidFd
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_bench.rows import Row, compare, percentile
from tests.benchmarks.workers import Worker

_ASLEEP_S = 0.05  # until the wait sleeps


def _hold(state: dict[str, Any], endpoint: str, engine: EngineName) -> bytes:
    """In the recorder: record behind a gate that nobody opens; the point."""
    client = state["client"] = ipcsync.connect(endpoint)
    stream = state["stream"] = ipcsync.Stream()
    state["gate"] = StreamGate(stream).__enter__()
    state["event"] = client.event(f"bench/{os.getpid()}", recorder=True, engine=engine)
    return bytes(state["event"].record(stream))


def _attach(state: dict[str, Any], endpoint: str, point: bytes) -> None:
    """In the waiter."""
    if "client" not in state:
        state["client"] = ipcsync.connect(endpoint)
    state["point"] = state["client"].point(point)


def _wait(state: dict[str, Any]) -> int:
    """In the waiter: when the wait raised."""
    try:
        state["point"].synchronize(30)
    except ipcsync.RecorderLost:
        return time.monotonic_ns()
    raise AssertionError("work that was never done is complete")


def _one(waiter: Worker, endpoint: str, engine: EngineName) -> tuple[float, float]:
    """Milliseconds of one death: until the wait raised, and until the process was gone."""
    with closing(Worker()) as recorder:
        point = recorder.call(_hold, endpoint, engine)
        waiter.call(_attach, endpoint, point)
        waiter.begin(_wait)
        time.sleep(_ASLEEP_S)
        with closing(PidFd(recorder.pid)) as pidfd:
            began = time.monotonic_ns()
            os.kill(recorder.pid, signal.SIGKILL)
            pidfd.has_ended(30)
            gone = time.monotonic_ns()
        raised: int = waiter.result()
    return (raised - began) / 1e6, (gone - began) / 1e6


def deaths(rounds: int, scale: float) -> Iterator[Row]:
    """p50 and the longest, beside the end of the process: each death is that of a process with a held stream."""
    engines: tuple[EngineName, ...] = ("event", "timeline")
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        waiter = stack.enter_context(closing(Worker()))
        for engine in engines:
            seen = [
                [_one(waiter, coordinator.endpoint, engine) for _ in range(max(3, int(10 * scale)))]
                for _ in range(rounds)
            ]
            kinds: dict[str, Callable[[list[float]], float]] = {
                "p50": lambda run: percentile(run, 50),
                "longest": max,
            }
            for name, which in kinds.items():
                ours, gone = ([which([death[side] for death in run]) for run in seen] for side in (0, 1))
                figures = {"ipcsync": ours, "the pidfd": gone}
                yield from compare(f"a recorder's death to RecorderLost ({engine}), {name}", figures, "ms", {})
