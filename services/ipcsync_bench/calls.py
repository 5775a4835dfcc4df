"""Calls in the steady state, each beside the bare driver call that does the work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_bench.rows import Row, Target, at_most_more, below, compare, interleave, of_the_core
from ipcsync_bench.workers import Worker


def time_call(call: Callable[[], object], count: int) -> float:
    """Microseconds a call, over `count` calls, less those of a call that does nothing."""
    seconds = []
    for each in (call, lambda: None):
        start = time.perf_counter()
        for _ in range(count):
            each()
        seconds.append(time.perf_counter() - start)
    return (seconds[0] - seconds[1]) / count * 1e6


def _other_records(stream: ipcsync.Stream) -> dict[str, Callable[[], object]]:
    """cuda.core's and torch's own record, where they are and work on this driver."""
    found: dict[str, Callable[[], object]] = {}
    if ipcsync.driver_name() != "cuda":
        return found
    try:
        from cuda.core import Device

        device = Device(0)
        device.set_current()
        theirs = device.create_stream()
        event = theirs.record()
        found["cuda.core record"] = lambda: theirs.record(event)
    except Exception:  # noqa: BLE001 - not there, or not on this driver: then it is no peer
        found.pop("cuda.core record", None)
    try:
        import torch

        if torch.cuda.is_available():
            torch_event = torch.cuda.Event()
            torch_stream = torch.cuda.ExternalStream(stream.cuda_stream)
            found["torch record"] = lambda: torch_event.record(torch_stream)
    except ImportError:
        return found
    return found


def records(rounds: int, scale: float) -> Iterator[Row]:
    """record on one stream, without a waiter."""
    count = max(500, int(20_000 * scale))
    driver = _drivers.load()
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        stream = ipcsync.Stream()
        event = client.event("bench/event", recorder=True, engine="event")
        line = client.event("bench/timeline", recorder=True, engine="timeline")
        native = ipcsync.Event(interprocess=True)
        native.record(stream)
        raw, handle = native.cuda_event, stream.cuda_stream
        word = line._engine._pointer()  # type: ignore[union-attr] # the timeline's word
        peers: dict[str, Callable[[], object]] = {
            "ipcsync": lambda: event.record(stream),
            "bare cuEventRecord": lambda: driver.cuEventRecord(raw, handle),
            **_other_records(stream),
        }
        target = {"bare cuEventRecord": at_most_more(0.5, "µs")}
        yield from _compare("record (event)", peers, count, rounds, target)
        spare = unwrap(driver.cuMemAlloc(8), "cuMemAlloc")
        values: dict[str, Callable[[], object]] = {
            "ipcsync": lambda: line.record(stream),
            "bare cuStreamWriteValue64": lambda: driver.cuStreamWriteValue64(handle, spare, 1, 0),
        }
        assert word
        target = {"bare cuStreamWriteValue64": at_most_more(0.5, "µs")}
        yield from _compare("record (timeline)", values, count, rounds, target)
        yield from _other_streams(event, stream, native, count, rounds)
        stream.synchronize()
        unwrap(driver.cuMemFree(spare), "cuMemFree")


def _compare(
    row: str, contest: Mapping[str, Callable[[], object]], count: int, rounds: int, targets: Mapping[str, Target]
) -> list[Row]:
    """Each call's microseconds beside the others'."""
    timed = {name: lambda call=call: time_call(call, count) for name, call in contest.items()}
    return compare(row, interleave(timed, rounds), "µs", of_the_core(targets))


class _Foreign:
    """A stream of another library's, by the protocol that they share."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self._answer = 0, stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._answer


def _other_streams(
    event: ipcsync.SharedEvent, stream: ipcsync.Stream, native: ipcsync.Event, count: int, rounds: int
) -> Iterator[Row]:
    """record on a stream of another library's, and on two streams in turn."""
    driver = _drivers.load()
    raw, handle = native.cuda_event, stream.cuda_stream
    foreign, second = _Foreign(stream), ipcsync.Stream()
    event.record(second)
    contest: dict[str, Callable[[], object]] = {
        "ipcsync": lambda: event.record(foreign),
        "bare cuEventRecord": lambda: driver.cuEventRecord(raw, handle),
    }
    target = {"bare cuEventRecord": at_most_more(0.6, "µs")}
    yield from _compare("record on a foreign stream (event)", contest, count, rounds, target)
    turns = itertools.cycle((stream, second))

    def bare() -> None:
        other = next(turns).cuda_stream
        driver.cuStreamWaitEvent(other, raw, 0)
        driver.cuEventRecord(raw, other)

    contest = {"ipcsync": lambda: event.record(next(turns)), "bare wait and record": bare}
    target = {"bare wait and record": at_most_more(0.6, "µs")}
    yield from _compare("record on two streams in turn (event)", contest, count, rounds, target)
    second.synchronize()


def completed(rounds: int, scale: float) -> Iterator[Row]:
    """wait and query on a completed point, of another client's event."""
    count = max(500, int(20_000 * scale))
    driver = _drivers.load()
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        other = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        stream = ipcsync.Stream()
        native = ipcsync.Event(interprocess=True)
        native.record(stream)
        raw = native.cuda_event
        for engine in ("event", "timeline"):
            recorder = client.event(f"bench/{engine}", recorder=True, engine=engine)
            point = other.point(bytes(recorder.record(stream)))
            point.synchronize(10)
            target = {"bare cuEventQuery": below(0.15, "µs")}
            calls: dict[str, Callable[[], object]] = {
                "query": lambda point=point: point.query(),  # type: ignore[misc]
                "wait": lambda point=point: point.wait(stream),  # type: ignore[misc]
            }
            for what, call in calls.items():
                contest: dict[str, Callable[[], object]] = {
                    "ipcsync": call,
                    "bare cuEventQuery": lambda: driver.cuEventQuery(raw),
                }
                yield from _compare(f"{what} on a completed point ({engine})", contest, count, rounds, target)


def _hold_and_record(state: dict[str, Any], endpoint: str, engine: EngineName) -> bytes:
    """In a worker: record behind a closed gate; the point."""
    if "client" not in state:
        state["client"] = ipcsync.connect(endpoint)
    stream = state["stream"] = ipcsync.Stream()
    state["gate"] = StreamGate(stream).__enter__()
    event = state["event"] = state["client"].event(f"bench/{engine}", recorder=True, engine=engine)
    return bytes(event.record(stream))


def _release(state: dict[str, Any]) -> None:
    state["gate"].open()
    state["stream"].synchronize()
    state.pop("gate").__exit__(None, None, None)
    state.pop("event").close()


def pending(rounds: int, scale: float) -> Iterator[Row]:
    """wait on a pending point of another process: each queues real work behind a closed gate there."""
    count = max(100, int(500 * scale))
    driver = _drivers.load()
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        recorder = stack.enter_context(closing(Worker()))
        held, waiting = ipcsync.Stream(), ipcsync.Stream()
        raw = ipcsync.Event(interprocess=True)
        spare = unwrap(driver.cuMemAlloc(8), "cuMemAlloc")
        for engine in ("event", "timeline"):
            is_event = engine == "event"
            peer = "bare cuStreamWaitEvent" if is_event else "bare cuStreamWaitValue64"
            targets: dict[str, Target] = {peer: at_most_more(0.5, "µs")}

            def ours(engine: EngineName = engine) -> float:
                point = client.point(recorder.call(_hold_and_record, coordinator.endpoint, engine))
                point.wait(waiting)
                figure = time_call(lambda: point.wait(waiting), count)
                recorder.call(_release)
                waiting.synchronize()
                return figure

            def bare(*, is_event: bool = is_event) -> float:
                handle = waiting.cuda_stream
                if is_event:
                    with StreamGate(held) as gate:
                        raw.record(held)
                        event = raw.cuda_event
                        figure = time_call(lambda: driver.cuStreamWaitEvent(handle, event, 0), count)
                        gate.open()
                else:
                    unwrap(driver.cuStreamWriteValue64(held.cuda_stream, spare, 0, 0), "cuStreamWriteValue64")
                    held.synchronize()
                    figure = time_call(lambda: driver.cuStreamWaitValue64(handle, spare, 1, 0), count)
                    unwrap(driver.cuStreamWriteValue64(held.cuda_stream, spare, 1, 0), "cuStreamWriteValue64")
                waiting.synchronize()
                return figure

            contest: dict[str, Callable[[], float]] = {"ipcsync": ours, peer: bare}
            figures = interleave(contest, rounds)
            yield from compare(f"wait on a pending point ({engine})", figures, "µs", of_the_core(targets))


# --- records behind waits ---------------------------------------------------------------------------------------------

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


def chained(rounds: int, scale: float) -> Iterator[Row]:  # noqa: ARG001 - a ring holds so many and no more
    """wait on another process's pending point and record on the same stream, as a worker of a pipeline does."""
    driver = _drivers.load()
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        above = stack.enter_context(closing(Worker()))
        first, second, held = (ipcsync.Stream() for _ in range(3))
        before, behind = ipcsync.Event(interprocess=True), ipcsync.Event(interprocess=True)
        behind.record(first)
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
                figure = time_call(work, _IN_FLIGHT - 1 - len(streams))
                last = work()
                above.call(_let_all_go)
                last.synchronize(10)
                return figure

            def bare(streams: tuple[ipcsync.Stream, ...] = streams) -> float:
                turns = itertools.cycle(streams)
                with StreamGate(held) as gate:
                    before.record(held)
                    theirs, mine = before.cuda_event, behind.cuda_event

                    def work() -> None:
                        handle = next(turns).cuda_stream
                        driver.cuStreamWaitEvent(handle, theirs, 0)
                        if len(streams) > 1:  # in the order of its records
                            driver.cuStreamWaitEvent(handle, mine, 0)
                        driver.cuEventRecord(mine, handle)

                    figure = time_call(work, _IN_FLIGHT - 2)
                    gate.open()
                for stream in streams:
                    stream.synchronize()
                return figure

            for _ in range(64 // _IN_FLIGHT):
                ours()  # opens both rings
            contest: dict[str, Callable[[], float]] = {"ipcsync": ours, "bare wait and record": bare}
            yield from compare(f"wait and record {where}", interleave(contest, 4 * rounds), "µs", {})
