"""Calls in the steady state, each beside the bare driver call that does the work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import ipcsync
from ipcsync import _drivers
from ipcsync._linux.child import Worker
from ipcsync._native.context import call as driver_call
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_bench.rows import Row, Target, at_most_more, below, compare, interleave

Call = Callable[[], object]
BURST = 100
"""A stream takes in about 1,024 operations and then blocks its caller: then the GPU would be measured, not the call."""
ENGINES: tuple[EngineName, ...] = ("event", "timeline")
QUERY = "bare cuEventQuery"


@contextmanager
def connected(count: int) -> Iterator[list[ipcsync.Client]]:
    """So many clients of a coordinator of their own."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        yield [stack.enter_context(ipcsync.connect(coordinator.endpoint)) for _ in range(count)]


def time_call(call: Call, count: int) -> float:
    """Microseconds a call, over `count` calls in turn, less those of a call that does nothing."""
    seconds = []
    for each in (call, lambda: None):
        start = time.perf_counter()
        for _ in range(count):
            each()
        seconds.append(time.perf_counter() - start)
    return (seconds[0] - seconds[1]) / count * 1e6


def in_bursts(call: Call, drain: Call, count: int) -> float:
    """Microseconds a call, the median of bursts, `count` calls in all; `drain` waits until the stream has done them."""
    figures = []
    for _ in range(max(1, count // BURST)):
        figures.append(time_call(call, BURST))
        drain()
    return statistics.median(figures)


def compare_calls(
    row: str, contest: Mapping[str, Call], drain: Call, count: int, rounds: int, targets: Mapping[str, Target]
) -> list[Row]:
    """Each call's microseconds beside the others', in bursts."""
    timed = {name: partial(in_bursts, call, drain, count) for name, call in contest.items()}
    return compare(row, interleave(timed, rounds), "µs", targets)


def recordings() -> Iterator[tuple[ipcsync.SharedEvent, ipcsync.Stream, ipcsync.Event, str, dict[str, Call]]]:
    """On each engine: an event, a stream, the driver's own event, a peer's name, and both records, without a waiter."""
    driver = _drivers.load()
    with connected(1) as (client,):
        stream, native = ipcsync.Stream(), ipcsync.Event(interprocess=True)
        native.record(stream)
        raw, handle, spare = native.cuda_event, stream.cuda_stream, driver_call("cuMemAlloc", 8)
        bare: dict[EngineName, tuple[str, Call]] = {
            "event": ("bare cuEventRecord", lambda: driver.cuEventRecord(raw, handle)),
            "timeline": ("bare cuStreamWriteValue64", lambda: driver.cuStreamWriteValue64(handle, spare, 1, 0)),
        }
        for engine, (peer, theirs) in bare.items():
            event = client.event(f"bench/{engine}", recorder=True, engine=engine)
            yield event, stream, native, peer, {"ipcsync": partial(event.record, stream), peer: theirs}
        driver_call("cuMemFree", spare)


def records(rounds: int, scale: float) -> Iterator[Row]:
    """record on one stream, without a waiter."""
    count = max(5 * BURST, int(20_000 * scale))
    for event, stream, _, peer, contest in recordings():
        target = {peer: at_most_more(0.3, "µs")}
        yield from compare_calls(f"record ({event.engine})", contest, stream.synchronize, count, rounds, target)


def completed(rounds: int, scale: float) -> Iterator[Row]:
    """wait and query on a completed point, of another client's event."""
    count = max(5 * BURST, int(20_000 * scale))
    driver = _drivers.load()
    target = {QUERY: below(0.2, "µs")}
    with connected(2) as (client, other):
        stream, native = ipcsync.Stream(), ipcsync.Event(interprocess=True)
        native.record(stream)
        query: Call = partial(driver.cuEventQuery, native.cuda_event)
        for engine in ENGINES:
            recorder = client.event(f"bench/{engine}", recorder=True, engine=engine)
            point = other.point(bytes(recorder.record(stream)))
            point.synchronize(10)
            calls: dict[str, Call] = {"query": point.query, "wait": partial(point.wait, stream)}
            for what, ours in calls.items():
                row = f"{what} on a completed point ({engine})"
                contest = {"ipcsync": ours, QUERY: query}
                yield from compare_calls(row, contest, stream.synchronize, count, rounds, target)


_held: list[tuple[ipcsync.Client, ipcsync.SharedEvent, StreamGate, ipcsync.Stream]] = []


def _hold_and_record(endpoint: str, engine: EngineName) -> bytes:
    """In a worker: record behind a closed gate; the point."""
    client, stream = ipcsync.connect(endpoint), ipcsync.Stream()
    event = client.event(f"bench/{engine}", recorder=True, engine=engine)
    _held.append((client, event, StreamGate(stream), stream))
    return bytes(event.record(stream))


def _release() -> None:
    client, _, gate, stream = _held.pop()
    gate.open()
    stream.synchronize()
    client.close()


def pending(rounds: int, scale: float) -> Iterator[Row]:  # noqa: ARG001 - a held stream takes in so much and no more
    """wait on a pending point of another process: each queues real work behind a closed gate there."""
    driver = _drivers.load()
    with connected(1) as (client,), Worker() as recorder:
        held, waiting = ipcsync.Stream(), ipcsync.Stream()
        native, spare = ipcsync.Event(interprocess=True), driver_call("cuMemAlloc", 8)
        raw, handle = native.cuda_event, waiting.cuda_stream
        peers: dict[EngineName, tuple[str, Call]] = {
            "event": ("bare cuStreamWaitEvent", lambda: driver.cuStreamWaitEvent(handle, raw, 0)),
            "timeline": ("bare cuStreamWaitValue64", lambda: driver.cuStreamWaitValue64(handle, spare, 1, 0)),
        }
        for engine, (peer, theirs) in peers.items():

            def ours(engine: EngineName = engine) -> float:
                point = client.point(recorder.call(_hold_and_record, client.endpoint, engine))
                point.wait(waiting)
                figure = time_call(lambda: point.wait(waiting), BURST)
                recorder.call(_release)
                waiting.synchronize()
                return figure

            def bare(theirs: Call = theirs) -> float:
                driver_call("cuStreamWriteValue64", held.cuda_stream, spare, 0, 0)
                held.synchronize()
                with StreamGate(held):
                    native.record(held)
                    driver_call("cuStreamWriteValue64", held.cuda_stream, spare, 1, 0)
                    figure = time_call(theirs, BURST)
                waiting.synchronize()
                return figure

            contest: dict[str, Callable[[], float]] = {"ipcsync": ours, peer: bare}
            figures = interleave(contest, 4 * rounds)
            yield from compare(f"wait on a pending point ({engine})", figures, "µs", {peer: at_most_more(0.5, "µs")})
