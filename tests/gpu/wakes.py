"""How late a host wakes for work of some milliseconds, and what of a core that takes: by the driver, and by ipcsync.

    IPCSYNC_DRIVER=cuda python -m tests.gpu.wakes

From what ends the work, in another process, until the wait returns: median, 90th percentile, and what the waiting
thread used of a core.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import ipcsync
from ipcsync._drivers import handle_bytes, handle_from_bytes, load
from tests.benchmarks import wake_up as bench
from tests.benchmarks.workers import Worker
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, ok

_WAITS, _SHARED = 50, kit.SHAREABLE | kit.BLOCKING_SYNC
_KINDS = {
    "own, plain": kit.DISABLE_TIMING,
    "own, blocking": kit.DISABLE_TIMING | kit.BLOCKING_SYNC,
    "own, interprocess, blocking": _SHARED,
    "imported, blocking": _SHARED,
}
_SET_TIMERSLACK = 29  # of prctl; in ns, for this thread
_chance = random.Random(1)


def say(name: str, late: list[float], used: float, waited: float) -> None:
    """One row."""
    figures = f"p50 {statistics.median(late):8.1f}  p90 {sorted(late)[len(late) * 9 // 10]:8.1f} µs"
    sys.stdout.write(f"{name:52s} {figures}  {100 * used / waited:6.1f} % of a core\n")
    sys.stdout.flush()


def make(state: dict[str, Any], path: str) -> bytes:
    """In a worker: map the page; an interprocess event's handle."""
    kit.use_device(0)
    state["page"], state["shared"] = kit.Page(path), ok(load().cuEventCreate(_SHARED))
    return handle_bytes(ok(load().cuIpcGetEventHandle(state["shared"])))


def end(state: dict[str, Any], value: int, seconds: float) -> int:
    """In a worker: end the work after so long, by a store; when that was."""
    time.sleep(seconds)
    ended = time.monotonic_ns()
    state["page"].words[0] = value
    return ended


def bare(worker: Worker, path: str) -> None:
    """The driver's waits, and looks with pauses."""
    drv, page, numbers = load(), kit.Page(path), iter(range(1, 1 << 30))
    stream, word = ok(drv.cuStreamCreate(kit.NON_BLOCKING)), drv.CUdeviceptr(page.register())
    imported = ok(drv.cuIpcOpenEventHandle(handle_from_bytes(drv.CUipcEventHandle, worker.call(make, path))))

    def row(name: str, event: Any, wait: Callable[[Any], object]) -> None:
        late, used, waited = [], 0.0, 0.0
        for _ in range(_WAITS):
            value = next(numbers)
            ok(drv.cuStreamWaitValue64(stream, word, value, kit.GEQ))
            ok(drv.cuEventRecord(event, stream))
            worker.begin(end, value, _chance.uniform(0.003, 0.012))
            began, ran = time.monotonic_ns(), time.thread_time()
            wait(event)
            returned, ran = time.monotonic_ns(), time.thread_time() - ran
            late.append((returned - worker.result()) / 1e3)
            used, waited = used + ran, waited + (returned - began) / 1e9
        say(name, late, used, waited)

    ctypes.CDLL(None).prctl(_SET_TIMERSLACK, 1, 0, 0, 0)

    def look(seconds: float, event: Any) -> None:
        while code(drv.cuEventQuery(event)):
            time.sleep(seconds)

    for kind, flags in _KINDS.items():
        event = imported if kind.startswith("imported") else ok(drv.cuEventCreate(flags))
        row(f"cuEventSynchronize, {kind}", event, lambda event: ok(drv.cuEventSynchronize(event)))
    for pause in (0, 50e-6, 100e-6):
        row(f"cuEventQuery, sleeps of {pause * 1e6:g} µs, imported", imported, partial(look, pause))


def product(endpoint: str) -> None:
    """Each engine: waits of one length after the other, since what was learned of one is there for the next."""
    for engine in ("timeline", "event"):
        with closing(Worker()) as recorder, closing(Worker()) as waiter:
            waiter.call(bench._import, endpoint, recorder.call(bench._connect, endpoint))
            recorder.call(bench._open, f"wakes/{engine}", engine, True)
            waiter.call(bench._open, f"wakes/{engine}", engine, False)
            for least, most in ((3, 9), (19, 21), (3, 12), (40, 80)):
                late, used, waited = [], 0.0, 0.0
                for _ in range(_WAITS if most < 40 else _WAITS // 3):
                    seconds = _chance.uniform(least, most) / 1e3
                    waiter.begin(bench._wait, recorder.call(bench._submit, bench._OURS), bench._OURS)
                    ended = recorder.call(bench._finish, seconds)
                    returned, took = waiter.result()
                    late.append((returned - ended) / 1e3)
                    used, waited = used + took / 1e9, waited + seconds
                say(f"ipcsync, {engine}, {least} to {most} ms", late, used, waited)


def main() -> None:
    """All rows."""
    kit.use_device(0)
    with ipcsync.launch(log_level="error") as coordinator:
        product(coordinator.endpoint)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="ipcsync-wakes-") as file, closing(Worker()) as worker:
        file.truncate(4096)
        bare(worker, file.name)


if __name__ == "__main__":  # the workers import what they call by its own name
    importlib.import_module("tests.gpu.wakes").main()
