"""Host wake-up: from the end of the work on a stream until a wait for it, in another process, returns."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.typing import EngineName
from ipcsync_bench.rows import Row, at_most, at_most_more, compare, interleave, percentile
from ipcsync_bench.workers import Worker
from tests.benchmarks.busy import BUSY_THREADS, begin_busy_threads, end_busy_threads

_LONGEST_WORK_S = 0.012
_libc = ctypes.CDLL(None)

# --- in a worker ------------------------------------------------------------------------------------------------------


def _connect(state: dict[str, Any], endpoint: str) -> bytes:
    """A client, a stream, and this process's own CUDA event, as its handle."""
    state["client"] = ipcsync.connect(endpoint)
    state["stream"] = ipcsync.Stream()
    state["raw"] = ipcsync.Event(interprocess=True)
    state["raw"].record(state["stream"])
    semaphore = state["semaphore"] = ctypes.create_string_buffer(64)
    assert _libc.sem_init(semaphore, 0, 0) == 0
    return bytes(state["raw"].ipc_handle())


def _open(state: dict[str, Any], name: str, engine: EngineName) -> None:
    if "event" in state:
        state["event"].close()
    state["event"] = state["client"].event(name, recorder=True, engine=engine)


def _submit(state: dict[str, Any], is_bare: bool) -> bytes:
    """Queue work that lasts until `_finish`, and a record behind it; the point, if it is ipcsync's."""
    stream = state["stream"]
    # The work: the driver's thread waits for a semaphore. No Python runs there.
    wait = ctypes.cast(_libc.sem_wait, ctypes.c_void_p).value
    address = ctypes.addressof(state["semaphore"])
    unwrap(_drivers.load().cuLaunchHostFunc(stream.cuda_stream, wait, address), "cuLaunchHostFunc")
    if is_bare:
        state["raw"].record(stream)
        return b""
    return bytes(state["event"].record(stream))


def _finish(state: dict[str, Any], seconds: float) -> int:
    """End the work after so long; when that was, by CLOCK_MONOTONIC in ns."""
    time.sleep(seconds)
    ended = time.monotonic_ns()
    _libc.sem_post(state["semaphore"])
    return ended


def _import(state: dict[str, Any], endpoint: str, handle: bytes) -> None:
    state["client"] = ipcsync.connect(endpoint)
    state["raw"] = ipcsync.Event.from_ipc_handle(None, handle)


def _wait(state: dict[str, Any], point: bytes) -> int:
    """When the wait for what was submitted returned."""
    if point:
        state["client"].point(point).synchronize(30)
    else:
        unwrap(_drivers.load().cuEventSynchronize(state["raw"].cuda_event), "cuEventSynchronize")
    return time.monotonic_ns()


def _be_busy(_state: dict[str, Any], is_busy: bool) -> None:
    (begin_busy_threads if is_busy else end_busy_threads)()


# --- rows -------------------------------------------------------------------------------------------------------------


def wake_up(rounds: int, scale: float) -> Iterator[Row]:
    """How late a wait on the host is, for work that lasts some milliseconds; alone, and in a loaded process."""
    count = max(20, int(100 * scale))
    chance = random.Random(1)
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        recorder, waiter = (stack.enter_context(closing(Worker())) for _ in range(2))
        handle = recorder.call(_connect, coordinator.endpoint)
        waiter.call(_import, coordinator.endpoint, handle)

        def late(*, is_bare: bool) -> float:
            times = []
            for _ in range(count):
                point = recorder.call(_submit, is_bare)
                waiter.begin(_wait, point)
                ended = recorder.call(_finish, chance.uniform(_LONGEST_WORK_S / 2, _LONGEST_WORK_S))
                times.append((waiter.result() - ended) / 1e3)
            return percentile(times, 50)

        contest = {"ipcsync": lambda: late(is_bare=False), "bare cuEventSynchronize": lambda: late(is_bare=True)}
        for engine in ("event", "timeline"):
            recorder.call(_open, f"bench/{engine}", engine)
            figures = interleave(contest, rounds)
            targets = {"bare cuEventSynchronize": at_most(1.3)}
            yield from compare(f"host wake-up ({engine}), p50", figures, "µs", targets)
            waiter.call(_be_busy, True)
            figures = interleave(contest, rounds)
            waiter.call(_be_busy, False)
            targets = {"bare cuEventSynchronize": at_most_more(30, "µs")}
            yield from compare(f"host wake-up ({engine}), {BUSY_THREADS} busy threads, p50", figures, "µs", targets)
