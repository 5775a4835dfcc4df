"""How late the node of a graph begins behind its gate; what a replay costs the host, by count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ctypes import c_uint64
from functools import partial

import ipcsync
from ipcsync._board.layout import L_COMPLETED
from ipcsync._native.context import call as driver_call
from ipcsync.client.graphs import lane_of
from ipcsync.testing import Memory, StreamGate
from ipcsync_bench import graphs as hosts
from ipcsync_bench.graphs import LONGEST_S, captured, median
from ipcsync_bench.rows import Row, at_most_more, below, compare, interleave
from tests.benchmarks.report import alone
from tests.kit.driver_functions import Call, doing_nothing, replaced

_HOP_US = 3.1  # between two streams, by a word of host memory, on an H100
_BATCH_US, _ENTRY_US, _MARKER_US = (
    0.854,
    0.041,
    0.136,
)  # the driver's calls, on an H100: with one entry, each further one
_CALLS = ("cuStreamBatchMemOp", "cuEventRecord", "cuStreamWriteValue64")


def graphs(rounds: int, scale: float) -> Iterator[Row]:
    """The rows of `ipcsync bench`, and the GPU's time between a record and the node behind its gate."""
    yield from hosts.graphs(rounds, scale)
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client, other = (stack.enter_context(ipcsync.connect(coordinator.endpoint)) for _ in range(2))
        yield from _delays(client, other, max(20, int(200 * scale)), rounds)
        yield from _by_count({layers: _Counted(client, other, layers) for layers in hosts.MORE_US}, 20 * rounds)


def _by_count(counted: dict[int, _Counted], count: int) -> Iterator[Row]:
    """What a block costs beside its launch: the library's own time here, and the driver's by its calls."""
    driver = {layers: each.driver() for layers, each in counted.items()}
    own = dict.fromkeys(counted, float("inf"))
    with doing_nothing(*_CALLS):
        for _ in range(count):  # in turns: a virtual machine may be slow for a second, and other load only adds
            own |= {layers: min(own[layers], median(each.own, 100)) for layers, each in counted.items()}
    for layers in counted:
        row = f"a replay with {hosts.text_of(layers)}, host, by count"
        yield alone(f"{row}: the library", [own[layers]], "µs")
        yield alone(f"{row}: the driver", [driver[layers]], "µs")
        yield alone(row, [driver[layers] + own[layers]], "µs", below(hosts.MORE_US[layers], "µs"))


class _Counted:
    """Replays on a driver that does nothing: what it would write, the host writes behind each."""

    def __init__(self, client: ipcsync.Client, other: ipcsync.Client, layers: int) -> None:
        self._replays = hosts.Replays(client, other, layers)
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
