"""Replays of graphs that wait and record: what the host pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._native.context import call as driver_call
from ipcsync.testing import Memory, StreamGate
from ipcsync_bench.calls import connected
from ipcsync_bench.rows import Row, Target, at_most_more, compare, interleave

_COUNTS = (1, 8, 80)
MORE_US = {1: 8.0, 80: 30.0}
LONGEST_S = 10.0


def captured(stream: ipcsync.Stream, put: Callable[[], object]) -> Any:
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
        start = time.perf_counter()
        driver_call("cuGraphLaunch", self.bare, self.stream._handle)
        took = time.perf_counter() - start
        self.stream.synchronize()
        return took * 1e6


def graphs(rounds: int, scale: float) -> Iterator[Row]:
    """The host's time of a replay."""
    count = max(20, int(200 * scale))
    peer = "bare cuGraphLaunch without them"
    with connected(2) as (client, other):
        for layers in _COUNTS:
            replays = Replays(client, other, layers)
            contest = {"ipcsync": partial(median, replays.replay, count), peer: partial(median, replays.launch, count)}
            targets: dict[str, Target] = {peer: at_most_more(MORE_US[layers], "µs")} if layers in MORE_US else {}
            yield from compare(f"a replay with {text_of(layers)}, host", interleave(contest, rounds), "µs", targets)


def text_of(layers: int) -> str:
    return "1 wait and 1 record" if layers == 1 else f"{layers} waits and {layers} records"


def median(measure: Callable[[], float], count: int) -> float:
    """Of so many figures, after one that warms up."""
    measure()
    return statistics.median(measure() for _ in range(count))
