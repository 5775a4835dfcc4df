"""Replays of graphs that wait and record: what the host pays, and how late the node behind a gate begins."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.testing import Memory, StreamGate
from ipcsync_bench.rows import Row, Target, at_most_more, compare, interleave

_COUNTS = (1, 8, 80)
_MORE_US = {1: 8.0, 80: 30.0}
_HOP_US = 3.1  # between two streams, by a word of host memory, on an H100
_LONGEST_S = 10.0


def _call(function: str, *arguments: Any) -> Any:
    return unwrap(getattr(_drivers.load(), function)(*arguments), function)


def _captured(stream: ipcsync.Stream, put: Callable[[], object]) -> Any:
    mode = _drivers.load().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _call("cuStreamBeginCapture", stream._handle, mode)
    put()
    graph = _call("cuStreamEndCapture", stream._handle)
    made = _call("cuGraphInstantiate", graph, 0)
    _call("cuGraphDestroy", graph)
    return made


class _Replays:
    """Graphs of `count` layers, each a copy: one with waits and records, one without."""

    def __init__(self, client: ipcsync.Client, other: ipcsync.Client, count: int) -> None:
        self.stream, self.sending = ipcsync.Stream(), ipcsync.Stream()
        self._client = client
        source, target = Memory(8), Memory(8)
        self.waits = [ipcsync.GraphWait() for _ in range(count)]
        self.records = [ipcsync.GraphRecord() for _ in range(count)]

        def put(*, is_bare: bool) -> None:
            for wait, record in zip(self.waits, self.records, strict=True):
                if not is_bare:
                    wait.capture(self.stream)
                target.copy_from(source, self.stream)
                if not is_bare:
                    record.capture(self.stream)

        self.graph = _captured(self.stream, partial(put, is_bare=False))
        self.bare = _captured(self.stream, partial(put, is_bare=True))
        self.sent = other.event(f"bench/sent/{count}", recorder=True, engine="timeline")
        self.seen = client.event(f"bench/sent/{count}")
        self.done = client.event(f"bench/done/{count}", recorder=True, engine="timeline")

    def replay(self) -> float:
        """Microseconds of a block with its launch: all its points are recorded, and none is complete."""
        with StreamGate(self.sending) as gate:
            points = {wait: self.seen.at(self.sent.record(self.sending).generation) for wait in self.waits}
            records = dict.fromkeys(self.records, self.done)
            start = time.perf_counter()
            with self._client.replay(points, records, stream=self.stream, timeout=_LONGEST_S) as made:
                _call("cuGraphLaunch", self.graph, self.stream._handle)
            took = time.perf_counter() - start
            gate.open()
        made[self.records[-1]].synchronize(_LONGEST_S)
        return took * 1e6

    def launch(self) -> float:
        """Microseconds of a launch of the other graph."""
        start = time.perf_counter()
        _call("cuGraphLaunch", self.bare, self.stream._handle)
        took = time.perf_counter() - start
        self.stream.synchronize()
        return took * 1e6


def graphs(rounds: int, scale: float) -> Iterator[Row]:
    """The host's time of a replay, and the GPU's between a record and the node behind its gate."""
    count = max(20, int(200 * scale))
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client, other = (stack.enter_context(ipcsync.connect(coordinator.endpoint)) for _ in range(2))
        for layers in _COUNTS:
            replays = _Replays(client, other, layers)
            peer = "bare cuGraphLaunch without them"
            contest = {
                "ipcsync": partial(_median, replays.replay, count),
                peer: partial(_median, replays.launch, count),
            }
            targets: dict[str, Target] = {peer: at_most_more(_MORE_US[layers], "µs")} if layers in _MORE_US else {}
            what = "1 wait and 1 record" if layers == 1 else f"{layers} waits and {layers} records"
            yield from compare(f"a replay with {what}, host", interleave(contest, rounds), "µs", targets)
        yield from _delays(client, other, count, rounds)


def _median(measure: Callable[[], float], count: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(count))


def _delays(client: ipcsync.Client, other: ipcsync.Client, count: int, rounds: int) -> Iterator[Row]:
    """From the moment at which a recorder's stream goes on, until the host sees the work behind the wait."""
    stream, sending = ipcsync.Stream(), ipcsync.Stream()
    source, seen = Memory(8), Memory(8, pinned=True)
    sent = other.event("bench/delay", recorder=True, engine="timeline")
    known = client.event("bench/delay")
    wait = ipcsync.GraphWait()

    def put() -> None:
        wait.capture(stream)
        seen.copy_from(source, stream)

    graph, value = _captured(stream, put), 0

    def through(queue: Callable[[ipcsync.Point], None]) -> float:
        nonlocal value
        value = value % 255 + 1
        with StreamGate(sending) as gate:
            source.fill(value, sending)
            point = known.at(sent.record(sending).generation)
            queue(point)
            time.sleep(0.0005)  # until all streams wait
            start = time.perf_counter()
            gate.open()
        while seen.read()[0] != value:
            pass
        took = time.perf_counter() - start
        stream.synchronize()
        return took * 1e6

    def by_graph(point: ipcsync.Point) -> None:
        with client.replay({wait: point}, stream=stream, timeout=_LONGEST_S):
            _call("cuGraphLaunch", graph, stream._handle)

    def by_stream(point: ipcsync.Point) -> None:
        point.wait(stream)
        seen.copy_from(source, stream)

    peer = "Point.wait and the copy, without a graph"
    contest = {
        "ipcsync": partial(_median, partial(through, by_graph), count),
        peer: partial(_median, partial(through, by_stream), count),
    }
    row = "a record until the node behind its gate, GPU"
    yield from compare(row, interleave(contest, rounds), "µs", {peer: at_most_more(1.5 * _HOP_US, "µs")})
