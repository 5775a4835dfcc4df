"""Calls in the steady state that `ipcsync bench` leaves out: now and then, on other streams, behind waits."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_bench import calls
from ipcsync_bench.calls import BURST, Call, compare_calls
from ipcsync_bench.rows import Row, at_most_more, below, compare, interleave
from tests.benchmarks.workers import Worker

_APART_S = 100e-6


def _apart(call: Call, drain: Call, count: int) -> float:
    """Microseconds of a call, the median of `count`, one each 100 µs: nothing is warm, as in a server."""
    figures = []
    for number in range(count):
        begin = time.perf_counter() + _APART_S
        while time.perf_counter() < begin:
            pass
        start = time.perf_counter()
        call()
        figures.append((time.perf_counter() - start) * 1e6)
        if number % BURST == BURST - 1:
            drain()
    drain()
    return statistics.median(figures)


def records(rounds: int, scale: float) -> Iterator[Row]:
    """The rows of `ipcsync bench`; record one each 100 µs, on another library's stream, and on two streams in turn."""
    yield from calls.records(rounds, scale)
    count = max(5 * BURST, int(20_000 * scale))
    for event, stream, native, peer, contest in calls.recordings():
        timed = {name: partial(_apart, each, stream.synchronize, count // 20) for name, each in contest.items()}
        row = f"record ({event.engine}), one each 100 µs"
        yield from compare(row, interleave(timed, rounds), "µs", {peer: at_most_more(0.5, "µs")})
        foreign = _Foreign(stream)
        held: dict[str, Call] = {**contest, "ipcsync": partial(event.record, foreign)}
        row = f"record on a foreign stream ({event.engine})"
        yield from compare_calls(row, held, stream.synchronize, count, rounds, {peer: at_most_more(0.3, "µs")})
        if event.engine == "event":
            yield from _two_streams(event, stream, native, count, rounds)


def completed(rounds: int, scale: float) -> Iterator[Row]:
    """The rows of `ipcsync bench`, and the first wait on one's own point."""
    yield from calls.completed(rounds, scale)
    with calls.connected(1) as (client,):
        stream, native = ipcsync.Stream(), ipcsync.Event(interprocess=True)
        native.record(stream)
        query = partial(_drivers.load().cuEventQuery, native.cuda_event)
        for engine in calls.ENGINES:
            mine = client.event(f"bench/mine/{engine}", recorder=True, engine=engine, depth=BURST)

            def wait_once(mine: ipcsync.SharedEvent = mine) -> float:
                points = iter([mine.record(stream) for _ in range(BURST)])
                stream.synchronize()  # each is complete, which nobody knows yet
                return calls.time_call(lambda: next(points).wait(stream), BURST)

            contest: dict[str, Callable[[], float]] = {
                "ipcsync": wait_once,
                calls.QUERY: partial(calls.time_call, query, BURST),
            }
            row = f"wait on one's own completed point, the first ({engine})"
            yield from compare(row, interleave(contest, 4 * rounds), "µs", {calls.QUERY: below(0.2, "µs")})


class _Foreign:
    """A stream of another library's, by the protocol that they share."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self._answer = 0, stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._answer


def _two_streams(
    event: ipcsync.SharedEvent, stream: ipcsync.Stream, native: ipcsync.Event, count: int, rounds: int
) -> Iterator[Row]:
    """record on two streams in turn."""
    driver = _drivers.load()
    raw, second = native.cuda_event, ipcsync.Stream()
    event.record(second)

    def drain() -> None:
        stream.synchronize()
        second.synchronize()

    turns = itertools.cycle((stream, second))

    def bare() -> None:
        other = next(turns).cuda_stream
        driver.cuStreamWaitEvent(other, raw, 0)
        driver.cuEventRecord(raw, other)

    contest: dict[str, Call] = {"ipcsync": lambda: event.record(next(turns)), "bare wait and record": bare}
    target = {"bare wait and record": at_most_more(0.6, "µs")}
    yield from compare_calls("record on two streams in turn (event)", contest, drain, count, rounds, target)


_IN_FLIGHT = 32  # fewer than the ring's depth


def _hold_and_record_many(state: dict[str, Any], endpoint: str, engine: EngineName) -> list[bytes]:
    """In a worker: record behind a closed gate, always on the same event; the points."""
    if "client" not in state:
        state["client"] = ipcsync.connect(endpoint)
    if engine not in state:
        state[engine] = state["client"].event(f"bench/above/{engine}", recorder=True, engine=engine, depth=64)
    stream = state["stream"] = ipcsync.Stream()
    state["gate"] = StreamGate(stream).__enter__()
    return [bytes(state[engine].record(stream)) for _ in range(_IN_FLIGHT)]


def _let_all_go(state: dict[str, Any]) -> None:
    state["gate"].open()
    state["stream"].synchronize()
    state.pop("gate").__exit__(None, None, None)


def chained(rounds: int, scale: float) -> Iterator[Row]:
    """wait on another process's pending point and record on the same stream, as a worker of a pipeline does."""
    driver = _drivers.load()
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        above = stack.enter_context(closing(Worker()))
        first, second, held = (ipcsync.Stream() for _ in range(3))
        before, behind = ipcsync.Event(interprocess=True), ipcsync.Event(interprocess=True)
        behind.record(first)
        words = int(unwrap(driver.cuMemAlloc(16), "cuMemAlloc"))
        engines: tuple[EngineName, ...] = ("event", "timeline")
        for engine, streams in itertools.product(engines, ((first,), (first, second))):
            where = f"behind it ({engine})" if len(streams) == 1 else f"behind it, on two streams in turn ({engine})"
            event = client.event(f"bench/{where}", recorder=True, engine=engine, depth=64)

            def ours(
                engine: EngineName = engine,
                event: ipcsync.SharedEvent = event,
                streams: tuple[ipcsync.Stream, ...] = streams,
            ) -> float:
                data = above.call(_hold_and_record_many, coordinator.endpoint, engine)
                points = iter([client.point(each) for each in data])
                turns = itertools.cycle(streams)

                def work() -> ipcsync.Point:
                    stream = next(turns)
                    next(points).wait(stream)
                    return event.record(stream)

                for _ in streams:
                    work()  # the first one on each tells whom the event stands behind
                figure = calls.time_call(work, _IN_FLIGHT - 1 - len(streams))
                last = work()
                above.call(_let_all_go)
                last.synchronize(10)
                return figure

            def bare(engine: EngineName = engine, streams: tuple[ipcsync.Stream, ...] = streams) -> float:
                turns, number = itertools.cycle(streams), itertools.count(1)
                theirs, mine = before.cuda_event, behind.cuda_event

                def by_events() -> None:
                    handle = next(turns).cuda_stream
                    driver.cuStreamWaitEvent(handle, theirs, 0)
                    if len(streams) > 1:  # in the order of its records
                        driver.cuStreamWaitEvent(handle, mine, 0)
                    driver.cuEventRecord(mine, handle)

                def by_words() -> None:
                    handle, last = next(turns).cuda_stream, next(number)
                    driver.cuStreamWaitValue64(handle, words, 1, 0)
                    if len(streams) > 1:
                        driver.cuStreamWaitValue64(handle, words + 8, last - 1, 0)
                    driver.cuStreamWriteValue64(handle, words + 8, last, 0)

                for offset in (0, 8):
                    unwrap(driver.cuStreamWriteValue64(held.cuda_stream, words + offset, 0, 0), "cuStreamWriteValue64")
                held.synchronize()
                with StreamGate(held) as gate:
                    before.record(held)
                    unwrap(driver.cuStreamWriteValue64(held.cuda_stream, words, 1, 0), "cuStreamWriteValue64")
                    figure = calls.time_call(by_events if engine == "event" else by_words, _IN_FLIGHT - 2)
                    gate.open()
                for stream in streams:
                    stream.synchronize()
                return figure

            for _ in range(64 // _IN_FLIGHT):
                ours()  # opens both rings
            contest: dict[str, Callable[[], float]] = {"ipcsync": ours, "bare wait and record": bare}
            target = {"bare wait and record": at_most_more(1, "µs")}
            yield from compare(f"wait and record {where}", interleave(contest, 4 * rounds), "µs", target)
        unwrap(driver.cuMemFree(words), "cuMemFree")
