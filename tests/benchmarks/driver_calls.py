"""The driver's calls by `cuda.bindings._v2` beside the old ones: `python -m tests.benchmarks.driver_calls`.

With IPCSYNC_DRIVER=cuda. Two processes in pure Python, of which one has NumPy and so the cheaper calls, measure each
row in turn. A figure is the least of all bursts, in µs a call. The last rows say what a process pays once.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync.typing import EngineName
from ipcsync_bench.calls import _hold_and_record, _release
from ipcsync_bench.workers import Worker

_ROUNDS, _BURSTS, _CALLS = 10, 30, 20
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024
_ENGINES: tuple[EngineName, ...] = ("event", "timeline")


def _memory_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_KB


def _begin(state: dict[str, Any], endpoint: str, modules: list[str]) -> list[tuple[float, float]]:
    """What each import costs, in ms and MB; then everything is opened."""
    importlib.import_module("cuda.bindings.driver")
    costs = []
    for module in modules:
        start, memory = time.perf_counter(), _memory_kb()
        importlib.import_module(module)
        costs.append(((time.perf_counter() - start) * 1e3, (_memory_kb() - memory) / 1e3))
    assert (_drivers.load().cuEventRecord.__module__ == "ipcsync._drivers.cuda_v2") == bool(modules)
    client = state["client"] = ipcsync.connect(endpoint)
    stream, event = ipcsync.Stream(), ipcsync.Event()
    calls: dict[str, Callable[[], Any]] = {
        f"record ({kind})": partial(client.event(f"{os.getpid()}/{kind}", recorder=True, engine=kind).record, stream)
        for kind in _ENGINES
    }
    state["calls"] = {**calls, "Event.record": partial(event.record, stream), "Event.wait": partial(event.wait, stream)}
    state["waiting"] = ipcsync.Stream()
    return costs


def _least(state: dict[str, Any], name: str, bursts: int = _BURSTS) -> float:
    call, least = state["calls"][name], float("inf")
    call()
    gc.disable()
    for _ in range(bursts):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        least = min(least, (time.perf_counter() - start) / _CALLS * 1e6)
    gc.enable()
    return least


def _least_wait(state: dict[str, Any], point: bytes) -> float:
    state["calls"]["wait"] = partial(state["client"].point(point).wait, state["waiting"])
    return _least(state, "wait", _BURSTS // 3)  # a stream that is held back takes about 1,000 operations


def main() -> None:
    """Measure, and print a table."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        pure = {"IPCSYNC_COMPILED": "0"}
        recorder, old, new = (stack.enter_context(closing(Worker(env=pure))) for _ in range(3))
        old.call(_begin, coordinator.endpoint, [])
        costs = new.call(_begin, coordinator.endpoint, ["numpy", "cuda.bindings._v2.driver"])
        figures: dict[str, list[list[float]]] = {}
        for _ in range(_ROUNDS):
            for name in ("record (event)", "record (timeline)", "Event.record", "Event.wait"):
                figures.setdefault(name, []).append([worker.call(_least, name) for worker in (old, new)])
            for engine in _ENGINES:
                point = recorder.call(_hold_and_record, coordinator.endpoint, engine)
                row = figures.setdefault(f"wait on a pending point ({engine})", [])
                row.append([worker.call(_least_wait, point) for worker in (old, new)])
                recorder.call(_release)
    lines = ["| row | cuda.bindings.driver | _v2 |", "|---|---|---|"]
    for name, rounds in figures.items():
        theirs, ours = (min(column) for column in zip(*rounds, strict=True))
        lines.append(f"| {name} | {theirs:.2f} | {ours:.2f} |")
    for name, (duration, memory) in zip(("NumPy", "_v2, with NumPy there"), costs, strict=True):
        lines.append(f"| import {name} | | {duration:.0f} ms, {memory:.1f} MB |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":  # the workers import what they call by its own name
    importlib.import_module("tests.benchmarks.driver_calls").main()
