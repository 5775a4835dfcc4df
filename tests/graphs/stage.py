"""A sender, a graph that replays what it sends, and the event that each replay records; what a stream stands behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.graphs.layers import Layers, Sender
from tests.kit.until import DEADLINE_S

NewClient = Callable[..., ipcsync.Client]


class Stage:
    """A sender of layers, a graph that replays them, and an event that it records."""

    def __init__(self, new_client: NewClient, engine: EngineName, count: int = 1) -> None:
        self.client, other = new_client("replays"), new_client("sends")
        self.layers = Layers(count)
        self.sender = Sender(other, self.layers)
        self.done = self.client.event("done", recorder=True, engine=engine)

    def replay(self, points: list[ipcsync.Point], **options: Any) -> ipcsync.client.Replaying:
        """A replay of all layers, each recorded on the one event."""
        waits = dict(zip(self.layers.waits, points, strict=False))
        return self.client.replay(
            waits, dict.fromkeys(self.layers.records, self.done), stream=self.layers.stream, timeout=20, **options
        )

    def run(self, value: int) -> list[ipcsync.Point]:
        """Send a value to all layers and replay; the points of its records."""
        with self.replay(self.sender.send(value)) as replay:
            self.layers.launch()
        return [replay[record] for record in self.layers.records]

    def expect(self, value: int) -> None:
        """A replay finds this value in each layer, and its records are complete behind that."""
        points = self.run(value)
        ipcsync.synchronize_all(points, timeout=DEADLINE_S)
        assert self.layers.found() == [value] * len(points)


class Standing:
    """A point of the engine `event` that is pending, and is lost on demand: as if its recorder had died, no stream gets
    past it before the gate opens."""

    def __init__(self, new_client: NewClient, name: str = "standing") -> None:
        between, stream = new_client(), ipcsync.Stream()
        self._root = new_client().event(f"{name}/root", recorder=True, engine="timeline")
        seen = between.event(f"{name}/root")
        seen._engine.wait(1, stream, None, True)  # as one that waited ahead before the other was its recorder
        self.gate = StreamGate(stream)
        self.data = bytes(between.event(name, recorder=True, engine="event").record(stream))

    def lose(self, seen: ipcsync.Point) -> None:
        """Have it be lost, and this point of it be known to be."""
        self._root.close()
        with pytest.raises(ipcsync.RecorderLost):
            seen.synchronize(DEADLINE_S)

    def complete(self) -> None:
        """Have it be complete soon."""
        self._root.record(ipcsync.Stream())
        self.gate.open()
