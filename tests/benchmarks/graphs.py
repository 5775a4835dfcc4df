"""How late the node of a graph begins behind its gate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import ipcsync
from ipcsync.testing import Memory, StreamGate
from ipcsync_bench import graphs as hosts
from ipcsync_bench.graphs import LONGEST_S, call, captured, median
from ipcsync_bench.rows import Row, at_most_more, compare, interleave

_HOP_US = 3.1  # between two streams, by a word of host memory, on an H100


def graphs(rounds: int, scale: float) -> Iterator[Row]:
    """The rows of `ipcsync bench`, and the GPU's time between a record and the node behind its gate."""
    yield from hosts.graphs(rounds, scale)
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        client, other = (stack.enter_context(ipcsync.connect(coordinator.endpoint)) for _ in range(2))
        yield from _delays(client, other, max(20, int(200 * scale)), rounds)


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
            call("cuGraphLaunch", graph, stream._handle)

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
