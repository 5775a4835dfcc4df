"""A recorder and a waiter, with new events for each case, for tests of what one call does."""

from __future__ import annotations

from collections.abc import Callable

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName

NewClient = Callable[..., ipcsync.Client]


class Stage:
    """A recorder and who waits for it, with new events for each case."""

    def __init__(self, new_client: NewClient, engine: EngineName) -> None:
        self.engine = engine
        self.recording, self.waiting = new_client("recording"), new_client("waiting")
        self._count = 0
        self._events: list[ipcsync.SharedEvent] = []

    def open(self, depth: int = 4) -> tuple[ipcsync.SharedEvent, ipcsync.SharedEvent]:
        self._count += 1
        name = f"e{self._count}"
        made = self.recording.event(name, recorder=True, engine=self.engine, depth=depth)
        seen = self.waiting.event(name)
        self._events += [made, seen]
        return made, seen

    def pending(self) -> tuple[ipcsync.Point, StreamGate]:
        """A waiter's point whose record is not complete, and the gate that keeps it so."""
        made, seen = self.open()
        stream = ipcsync.Stream()
        gate = StreamGate(stream)
        made.record(stream)
        point = seen.latest
        assert point is not None
        return point, gate

    def close(self) -> None:
        while self._events:
            self._events.pop().close()
