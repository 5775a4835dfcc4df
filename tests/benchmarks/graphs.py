"""Replays of graphs that wait and record: what the host pays, and how late a node begins behind its gate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ctypes import c_uint64
from functools import partial
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._board.layout import L_COMPLETED
from ipcsync.client.graphs import lane_of
from ipcsync.testing import Memory, StreamGate
from ipcsync_bench.calls import connected, driver_call
from ipcsync_bench.rows import Row, Target, at_most_more, below, compare, interleave
from tests.benchmarks.report import alone
from tests.kit.driver_functions import Call, doing_nothing, replaced

_HOP_US = 3.1  # between two streams, by a word of host memory, on an H100
_BATCH_US, _ENTRY_US, _MARKER_US = (
    0.854,
    0.041,
    0.136,
)  # the driver's calls, on an H100: with one entry, each further one
_CALLS = ("cuStreamBatchMemOp", "cuEventRecord", "cuStreamWriteValue64")
_COUNTS = (1, 8, 80)
MORE_US = {1: 8.0, 80: 30.0}
LONGEST_S = 10.0


def captured(stream: ipcsync.Stream, put: Callable[[], object]) -> Any:
    """A graph of what `put` queues."""
    mode = _drivers.load().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver_call("cuStreamBeginCapture", stream._handle, mode)
    put()
    graph = driver_call("cuStreamEndCapture", stream._handle)
    made = driver_call("cuGraphInstantiate", graph, 0)
    driver_call("cuGraphDestroy", graph)
    return made


class Replays:
    """Graphs of `count` layers, each a copy: one with waits and records, one without."""

    def __init__(self, client: ipcsync.Client, other: ipcsync.Client, count: int) -> None:
        self.stream, self.sending = ipcsync.Stream(), ipcsync.Stream()
        self.client = client
        source, target = Memory(8), Memory(8)
        self.waits = [ipcsync.GraphWait() for _ in range(count)]
        self.records = [ipcsync.GraphRecord() for _ in range(count)]

        def put(*, with_points: bool) -> None:
            for wait, record in zip(self.waits, self.records, strict=True):
                if with_points:
                    wait.capture(self.stream)
                target.copy_from(source, self.stream)
                if with_points:
                    record.capture(self.stream)

        self.graph = captured(self.stream, partial(put, with_points=True))
        self.bare = captured(self.stream, partial(put, with_points=False))
        self.sent = other.event(f"bench/sent/{count}", recorder=True, engine="timeline")
        self.seen = client.event(f"bench/sent/{count}")
        self.done = client.event(f"bench/done/{count}", recorder=True, engine="timeline")

    def send(self) -> dict[ipcsync.GraphWait, ipcsync.Point]:
        """A point that is recorded for each wait."""
        return {wait: self.seen.at(self.sent.record(self.sending).generation) for wait in self.waits}

    def replay(self) -> float:
        """Microseconds of a block with its launch: all its points are recorded, and none is complete."""
        with StreamGate(self.sending) as gate:
            points, records = self.send(), dict.fromkeys(self.records, self.done)
            start = time.perf_counter()
            with self.client.replay(points, records, stream=self.stream, timeout=LONGEST_S) as made:
                driver_call("cuGraphLaunch", self.graph, self.stream._handle)
            took = time.perf_counter() - start
            gate.open()
        made[self.records[-1]].synchronize(LONGEST_S)
        return took * 1e6

    def launch(self) -> float:
        """Microseconds of a launch of the other graph."""
        start = time.perf_counter()
        driver_call("cuGraphLaunch", self.bare, self.stream._handle)
        took = time.perf_counter() - start
        self.stream.synchronize()
        return took * 1e6


def text_of(layers: int) -> str:
    """What the graph of so many layers has."""
    return "1 wait and 1 record" if layers == 1 else f"{layers} waits and {layers} records"


def median(measure: Callable[[], float], count: int) -> float:
    """Of so many figures, after one that warms up."""
    measure()
    return statistics.median(measure() for _ in range(count))


def _hosts(rounds: int, scale: float) -> Iterator[Row]:
    """The host's time of a replay."""
    count = max(20, int(200 * scale))
    peer = "bare cuGraphLaunch without them"
    with connected(2) as (client, other):
        for layers in _COUNTS:
            replays = Replays(client, other, layers)
            contest = {"ipcsync": partial(median, replays.replay, count), peer: partial(median, replays.launch, count)}
            targets: dict[str, Target] = {peer: at_most_more(MORE_US[layers], "µs")} if layers in MORE_US else {}
            yield from compare(f"a replay with {text_of(layers)}, host", interleave(contest, rounds), "µs", targets)


def graphs(rounds: int, scale: float) -> Iterator[Row]:
    """The host's time of a replay, and the GPU's between a record and the node behind its gate."""
    yield from _hosts(rounds, scale)
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client, other = (stack.enter_context(ipcsync.connect(coordinator.endpoint)) for _ in range(2))
        yield from _delays(client, other, max(20, int(200 * scale)), rounds)
        yield from _by_count({layers: _Counted(client, other, layers) for layers in MORE_US}, 20 * rounds)


def _by_count(counted: dict[int, _Counted], count: int) -> Iterator[Row]:
    """What a block costs beside its launch: the library's own time here, and the driver's by its calls."""
    driver = {layers: each.driver() for layers, each in counted.items()}
    own = dict.fromkeys(counted, float("inf"))
    with doing_nothing(*_CALLS):
        for _ in range(count):  # in turns: a virtual machine may be slow for a second, and other load only adds
            own |= {layers: min(own[layers], median(each.own, 100)) for layers, each in counted.items()}
    for layers in counted:
        row = f"a replay with {text_of(layers)}, host, by count"
        yield alone(f"{row}: the library", [own[layers]], "µs")
        yield alone(f"{row}: the driver", [driver[layers]], "µs")
        yield alone(row, [driver[layers] + own[layers]], "µs", below(MORE_US[layers], "µs"))


class _Counted:
    """Replays on a driver that does nothing: what it would write, the host writes behind each."""

    def __init__(self, client: ipcsync.Client, other: ipcsync.Client, layers: int) -> None:
        self._replays = Replays(client, other, layers)
        lane, _ = lane_of(self._replays.stream._handle, 0)
        for name in ("over", "drained"):  # no bracket is ever in flight
            c_uint64.from_address(lane.words[name][0]).value = 1 << 40

    def own(self) -> float:
        """Microseconds of a block, all of whose points are recorded, and none is complete."""
        replays = self._replays
        points, records = replays.send(), dict.fromkeys(replays.records, replays.done)
        start = time.perf_counter()
        with replays.client.replay(points, records, stream=replays.stream, timeout=LONGEST_S):
            pass
        took = time.perf_counter() - start
        for engine in (replays.sent._engine, replays.done._engine):
            c_uint64.from_address(engine.line.address + 8 * L_COMPLETED).value = engine.base + engine.generation
        return took * 1e6

    def driver(self) -> float:
        """Microseconds of the calls that a block makes, on an H100."""
        calls: list[tuple[str, int]] = []

        def noting(name: str, _: Call, *arguments: int) -> int:
            calls.append((name, arguments[1]))
            return 0

        with replaced({name: partial(noting, name) for name in _CALLS}):
            self.own()
        block = calls[2 * len(self._replays.waits) :]  # behind the points' own, each a write and a marker
        return sum(_BATCH_US + _ENTRY_US * (count - 1) if name == _CALLS[0] else _MARKER_US for name, count in block)


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

    graph, value = captured(stream, put), 0

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
        with client.replay({wait: point}, stream=stream, timeout=LONGEST_S):
            driver_call("cuGraphLaunch", graph, stream._handle)

    def by_stream(point: ipcsync.Point) -> None:
        point.wait(stream)
        seen.copy_from(source, stream)

    peer = "Point.wait and the copy, without a graph"
    contest = {
        "ipcsync": partial(median, partial(through, by_graph), count),
        peer: partial(median, partial(through, by_stream), count),
    }
    row = "a record until the node behind its gate, GPU"
    yield from compare(row, interleave(contest, rounds), "µs", {peer: at_most_more(1.5 * _HOP_US, "µs")})
