"""A graph of layers: each waits, copies its cell of the source to its cell of the target, and records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync._drivers import load, unwrap
from ipcsync.testing import Memory
from tests.kit.until import DEADLINE_S

RELAXED = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def call(function: str, *arguments: Any) -> Any:
    """What the driver's function returns, which must succeed."""
    return unwrap(getattr(load(), function)(*arguments), function)


@contextmanager
def capturing(stream: ipcsync.Stream, graphs: list[Any]) -> Iterator[None]:
    """Capture what the block puts on the stream; the graph, instantiated, is added to `graphs`."""
    call("cuStreamBeginCapture", stream._handle, RELAXED)
    yield
    graph = call("cuStreamEndCapture", stream._handle)
    graphs.append(call("cuGraphInstantiate", graph, 0))
    call("cuGraphDestroy", graph)


def begin_capture(stream: ipcsync.Stream) -> None:
    """Begin one that `end_empty` ends."""
    call("cuStreamBeginCapture", stream._handle, RELAXED)


def end_empty(stream: ipcsync.Stream) -> None:
    """End the capture, which must be valid, and have nothing in it."""
    graph = call("cuStreamEndCapture", stream._handle)
    assert call("cuGraphGetNodes", graph)[1] == 0
    call("cuGraphDestroy", graph)


def captured(stream: ipcsync.Stream, *puts: Callable[[], object]) -> Any:
    """The graph of what these put on the stream."""
    graphs: list[Any] = []
    with capturing(stream, graphs):
        for put in puts:
            put()
    return graphs[0]


class Layers:
    """The graph, its stream and its memory."""

    def __init__(self, count: int, source: Sequence[Memory] | None = None) -> None:
        self.stream = ipcsync.Stream()
        self.source = source or [Memory(8) for _ in range(count)]
        self.target = [Memory(8) for _ in range(count)]
        self.waits = [ipcsync.GraphWait() for _ in range(count)]
        self.records = [ipcsync.GraphRecord() for _ in range(count)]
        self.graph = self.capture(*range(count))

    def capture(self, *layers: int, records: bool = True, waits: bool = True) -> Any:
        """A graph of some of the layers."""

        def put() -> None:
            for layer in layers:
                if waits:
                    self.waits[layer].capture(self.stream)
                self.target[layer].copy_from(self.source[layer], self.stream)
                if records:
                    self.records[layer].capture(self.stream)

        return captured(self.stream, put)

    def launch(self, graph: Any = None, on: ipcsync.Stream | None = None) -> None:
        """Launch the graph of all layers, or another one."""
        call("cuGraphLaunch", graph or self.graph, (on or self.stream)._handle)

    def found(self) -> list[int]:
        """The byte that each layer has copied last; -1 if they are different ones. Its stream has nothing to do."""
        cells = [memory.read() for memory in self.target]
        return [cell[0] if cell == cell[:1] * 8 else -1 for cell in cells]


class Sender:
    """A client that fills the layers' sources on a stream of its own, and records each on one event."""

    def __init__(self, client: ipcsync.Client, layers: Layers, name: str = "layers") -> None:
        self.stream = ipcsync.Stream()
        self.event = client.event(name, recorder=True, engine="timeline")
        self._layers = layers

    def send(self, value: int, layers: Sequence[int] | None = None) -> list[ipcsync.Point]:
        """The point of each layer; its cell is then `value`."""
        points = []
        for layer in range(len(self._layers.source)) if layers is None else layers:
            self._layers.source[layer].fill(value, self.stream)
            points.append(self.event.record(self.stream))
        return points


def finish(stream: ipcsync.Stream) -> None:
    """Wait until the stream has nothing left to do."""
    stream.synchronize(DEADLINE_S)
