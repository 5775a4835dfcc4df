"""Host wake-up: from the end of the work on a stream until a wait for it, in another process, returns."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.typing import EngineName
from ipcsync_bench.rows import Figures, Row, at_most, at_most_more, below, compare, interleave, percentile
from tests.benchmarks.busy import BUSY_THREADS, begin_busy_threads, end_busy_threads
from tests.benchmarks.workers import Worker

_REGULAR_S = (0.001, 0.02)
_LONGEST_WORK_S = 0.012
_OURS, _ASKED = "ipcsync", "cuEventQuery without a pause"
_BARE = "bare cuEventSynchronize"  # of an import: on a GPU it burns a core, whatever the event's flags
_BLOCKING = "blocking cuEventSynchronize in the recorder's process"  # of a plain event: it sleeps
_IDLE_S = 0.002
_libc = ctypes.CDLL(None)

# --- in a worker ------------------------------------------------------------------------------------------------------


def _connect(state: dict[str, Any], endpoint: str) -> bytes:
    """A client, a stream, and this process's own CUDA event, as its handle."""
    state["client"] = ipcsync.connect(endpoint)
    state["stream"] = ipcsync.Stream()
    state["raw"] = ipcsync.Event(blocking=True, interprocess=True)
    state["raw"].record(state["stream"])
    state["plain"] = ipcsync.Event(blocking=True)
    semaphore = state["semaphore"] = ctypes.create_string_buffer(64)
    assert _libc.sem_init(semaphore, 0, 0) == 0
    return bytes(state["raw"].ipc_handle())


def _open(state: dict[str, Any], name: str, engine: EngineName, is_recorder: bool) -> None:
    if "event" in state:
        state["event"].close()
    state["event"] = state["client"].event(name, recorder=is_recorder, engine=engine)


def _submit(state: dict[str, Any], how: str) -> int:
    """Queue work that lasts until `_finish`, and a record behind it; its generation, 0 if it is not ipcsync's."""
    stream = state["stream"]
    # The work: the driver's thread waits for a semaphore. No Python runs there.
    wait = ctypes.cast(_libc.sem_wait, ctypes.c_void_p).value
    address = ctypes.addressof(state["semaphore"])
    unwrap(_drivers.load().cuLaunchHostFunc(stream.cuda_stream, wait, address), "cuLaunchHostFunc")
    if how == _BLOCKING:
        state["plain"].record(stream)
        state["thread"] = threading.Thread(target=_block, args=(state,))
        state["thread"].start()
        return 0
    if how != _OURS:
        state["raw"].record(stream)
        return 0
    generation: int = state["event"].record(stream).generation
    return generation


def _block(state: dict[str, Any]) -> None:
    driver, began = _drivers.load(), time.thread_time_ns()
    unwrap(driver.cuEventSynchronize(state["plain"].cuda_event), "cuEventSynchronize")
    state["blocked"] = time.monotonic_ns(), time.thread_time_ns() - began


def _blocked(state: dict[str, Any]) -> tuple[int, int]:
    """What `_wait` returns, of the thread that `_submit` began."""
    state["thread"].join()
    blocked: tuple[int, int] = state["blocked"]
    return blocked


def _finish(state: dict[str, Any], seconds: float) -> int:
    """End the work after so long; when that was, by CLOCK_MONOTONIC in ns."""
    time.sleep(seconds)
    ended = time.monotonic_ns()
    _libc.sem_post(state["semaphore"])
    time.sleep(_IDLE_S)  # leaves the core to the stream's thread: of two, the one that waits may have the other
    return ended


def _import(state: dict[str, Any], endpoint: str, handle: bytes) -> None:
    state["client"] = ipcsync.connect(endpoint)
    state["raw"] = ipcsync.Event.from_ipc_handle(None, handle)


def _wait(state: dict[str, Any], generation: int, how: str) -> tuple[int, int]:
    """When the wait for what was submitted returned, and how much processor time it took, in ns."""
    driver, began = _drivers.load(), time.thread_time_ns()
    if how == _OURS:
        state["event"].at(generation).synchronize(30)
    elif how == _BARE:
        unwrap(driver.cuEventSynchronize(state["raw"].cuda_event), "cuEventSynchronize")
    else:
        raw = driver.CUevent(state["raw"].cuda_event)
        while driver.cuEventQuery(raw)[0]:
            pass
    return time.monotonic_ns(), time.thread_time_ns() - began


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
        shares: dict[str, list[float]] = {}  # of a core, in %, one a round
        handle = recorder.call(_connect, coordinator.endpoint)
        waiter.call(_import, coordinator.endpoint, handle)

        def late(shortest: float, longest: float, how: str) -> float:
            times, waited, used = [], 0.0, 0.0
            for _ in range(count):
                generation = recorder.call(_submit, how)
                if how != _BLOCKING:
                    waiter.begin(_wait, generation, how)
                lasts = chance.uniform(shortest, longest)
                ended = recorder.call(_finish, lasts)
                returned, took = recorder.call(_blocked) if how == _BLOCKING else waiter.result()
                times.append((returned - ended) / 1e3)
                waited, used = waited + lasts, used + took / 1e9
            shares[how].append(100 * used / waited)
            return percentile(times, 50)

        def figures(shortest: float, longest: float, peer: str) -> Figures:
            shares.update({_OURS: [], peer: []})
            return interleave({how: partial(late, shortest, longest, how) for how in (_OURS, peer)}, rounds)

        for engine in ("event", "timeline"):
            recorder.call(_open, f"bench/{engine}", engine, True)
            waiter.call(_open, f"bench/{engine}", engine, False)
            for mean in _REGULAR_S:
                row = f"host wake-up after {mean * 1e3:g} ms ± 5 % ({engine})"
                held = figures(0.95 * mean, 1.05 * mean, _ASKED)
                yield from compare(f"{row}, p50", held, "µs", {_ASKED: at_most_more(15, "µs")})
                yield from compare(f"{row}, processor", dict(shares), "% of a core", {_ASKED: below(10, "%")})
                shares.clear()
            held = figures(_LONGEST_WORK_S / 2, _LONGEST_WORK_S, _BLOCKING)
            yield from compare(f"host wake-up ({engine}), p50", held, "µs", {_BLOCKING: at_most(1.1)})
            row = f"host wake-up ({engine}), processor"
            yield from compare(row, dict(shares), "% of a core", {_BLOCKING: below(10, "%")})
            shares.clear()
            waiter.call(_be_busy, True)
            held = figures(_LONGEST_WORK_S / 2, _LONGEST_WORK_S, _BARE)
            waiter.call(_be_busy, False)
            row = f"host wake-up ({engine}), {BUSY_THREADS} busy threads, p50"
            yield from compare(row, held, "µs", {_BARE: at_most_more(30, "µs")})
            shares.clear()
