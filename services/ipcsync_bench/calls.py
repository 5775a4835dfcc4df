"""Calls in the steady state, each beside the bare driver call that does the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from ipcsync_bench.rows import Row, Target, at_most_more, below, compare, interleave
from ipcsync_bench.workers import Worker


def _each(call: Callable[[], object], count: int) -> float:
    """Microseconds a call."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


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
    """record on one stream, nobody waiting."""
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
        target = {"bare cuEventRecord": at_most_more(3, "µs")}
        contest = {name: lambda call=call: _each(call, count) for name, call in peers.items()}
        yield from compare("record (event)", interleave(contest, rounds), "µs", target)
        spare = unwrap(driver.cuMemAlloc(8), "cuMemAlloc")
        values = {
            "ipcsync": lambda: _each(lambda: line.record(stream), count),
            "bare cuStreamWriteValue64": lambda: _each(lambda: driver.cuStreamWriteValue64(handle, spare, 1, 0), count),
        }
        assert word
        yield from compare(
            "record (timeline)", interleave(values, rounds), "µs", {"bare cuStreamWriteValue64": at_most_more(3, "µs")}
        )
        stream.synchronize()
        unwrap(driver.cuMemFree(spare), "cuMemFree")


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
            target = {"bare cuEventQuery": below(0.7, "µs")}
            for what, call in (("query", point.query), ("wait", lambda point=point: point.wait(stream))):
                contest = {
                    "ipcsync": lambda call=call: _each(call, count),  # type: ignore[misc]
                    "bare cuEventQuery": lambda: _each(lambda: driver.cuEventQuery(raw), count),
                }
                yield from compare(f"{what} on a completed point ({engine})", interleave(contest, rounds), "µs", target)


def _hold_and_record(state: dict[str, Any], endpoint: str, engine: EngineName) -> bytes:
    """In a worker: record behind a closed gate; the point."""
    if "client" not in state:
        state["client"] = ipcsync.connect(endpoint)
    stream = state["stream"] = ipcsync.Stream()
    state["gate"] = StreamGate(stream).__enter__()
    event = state["event"] = state["client"].event(f"bench/{engine}", recorder=True, engine=engine)
    return bytes(event.record(stream))


def _let_go(state: dict[str, Any]) -> None:
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
        targets: dict[str, Target] = {"bare cuStreamWaitEvent": at_most_more(2.5, "µs")}
        for engine in ("event", "timeline"):

            def ours(engine: EngineName = engine) -> float:
                point = client.point(recorder.call(_hold_and_record, coordinator.endpoint, engine))
                point.wait(waiting)
                figure = _each(lambda: point.wait(waiting), count)
                recorder.call(_let_go)
                waiting.synchronize()
                return figure

            def bare() -> float:
                with StreamGate(held) as gate:
                    raw.record(held)
                    event, handle = raw.cuda_event, waiting.cuda_stream
                    figure = _each(lambda: driver.cuStreamWaitEvent(handle, event, 0), count)
                    gate.open()
                waiting.synchronize()
                return figure

            contest = {"ipcsync": ours, "bare cuStreamWaitEvent": bare}
            yield from compare(f"wait on a pending point ({engine})", interleave(contest, rounds), "µs", targets)
