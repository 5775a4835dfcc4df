"""record in a process whose other threads compute: a thread that gives up the GIL may wait long for it.

Each row is measured over many switch intervals. One thread keeps the GIL for such an interval, 5 ms, in which thousands
of records are made: a shorter burst says only whether it was interrupted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync_bench.rows import Row, compare, interleave
from tests.benchmarks.workers import Worker

_PAUSE_S = 100e-6
_TAKEN_IN = 900  # by a stream, before it blocks its caller
BUSY_THREADS = 4
_stop = threading.Event()


def begin_busy_threads() -> None:
    """In a worker: from now on so many threads compute."""
    _stop.clear()

    def compute() -> None:
        while not _stop.is_set():
            sum(range(500))

    for _ in range(BUSY_THREADS):
        threading.Thread(target=compute, daemon=True).start()


def end_busy_threads() -> None:
    """In a worker: no more."""
    _stop.set()


# --- in a worker ------------------------------------------------------------------------------------------------------


def _open_recorder(state: dict[str, Any], endpoint: str) -> None:
    state["client"] = ipcsync.connect(endpoint)
    stream = state["stream"] = ipcsync.Stream()
    event = state["client"].event(f"bench/{os.getpid()}", recorder=True, engine="event")
    for _ in range(10):
        event.record(stream).synchronize(10)
    raw = state["raw"] = ipcsync.Event(interprocess=True)
    raw.record(stream)
    driver, bare, handle = _drivers.load(), raw.cuda_event, stream.cuda_stream
    state["record"] = lambda: event.record(stream)
    state["bare"] = lambda: driver.cuEventRecord(bare, handle)


def _record(state: dict[str, Any], which: str, seconds: float) -> float:
    """Microseconds a call, of calls one after the other."""
    call: Callable[[], object] = state[which]
    count, spent = 0, 0.0
    begin_busy_threads()
    while spent < seconds:
        start = time.perf_counter()
        for _ in range(_TAKEN_IN):
            call()
        spent += time.perf_counter() - start
        count += _TAKEN_IN
        state["stream"].synchronize()
    end_busy_threads()
    return spent / count * 1e6


def _record_now_and_then(state: dict[str, Any], which: str, seconds: float) -> float:
    """Microseconds a call, of calls with a tenth of a millisecond of Python between them."""
    call: Callable[[], object] = state[which]
    count, spent = 0, 0.0
    begin_busy_threads()
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        while time.perf_counter() < began + _PAUSE_S:
            pass
        before = time.perf_counter()
        call()
        spent += time.perf_counter() - before
        count += 1
    end_busy_threads()
    return spent / count * 1e6


# --- rows -------------------------------------------------------------------------------------------------------------


def loaded(rounds: int, scale: float) -> Iterator[Row]:
    """record while other Python threads of the process compute."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        worker = stack.enter_context(closing(Worker()))
        worker.call(_open_recorder, coordinator.endpoint)
        for row, function in (
            (f"record (event), {BUSY_THREADS} busy threads, mean", _record),
            (f"record (event) now and then, {BUSY_THREADS} busy threads, mean", _record_now_and_then),
        ):

            def take(which: str, function: Callable[..., float] = function) -> Callable[[], float]:
                # Each has the machine for itself while it is measured.
                return lambda: float(worker.call(function, which, max(0.3, 2 * scale)))

            contest = {"ipcsync": take("record"), "bare cuEventRecord": take("bare")}
            yield from compare(row, interleave(contest, rounds), "µs", {})
