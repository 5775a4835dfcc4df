"""Opening events of this node, with names or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipcsync._native import device as devices
from ipcsync._native.context import current_ordinal, uuid_of
from ipcsync._session.references import Opening
from ipcsync._session.session import Session
from ipcsync._wire import messages
from ipcsync.client.event import SharedEvent
from ipcsync.typing import DeviceLike, EngineChoice


@dataclass(frozen=True)
class Wanted:
    """The events that a client asks for, by their full names; "" is one without a name."""

    names: Sequence[str]
    is_recorder: bool
    device: DeviceLike | None
    engine: EngineChoice
    depth: int
    timeout: float | None = None  # in seconds, for all together; the session's own by default

    def check(self) -> None:
        """Raise ValueError or TypeError for an invalid depth or engine."""
        if isinstance(self.depth, bool) or not isinstance(self.depth, int):
            raise TypeError(f"depth is an int, but got {type(self.depth).__name__}")
        if not 1 <= self.depth <= 1024:
            raise ValueError(f"depth is from 1 to 1024, but got {self.depth}")
        if self.engine not in ("auto", "event", "timeline"):
            raise ValueError(f"engine is 'auto', 'event' or 'timeline', but got {self.engine!r}")


def open_events(session: Session, wanted: Wanted, openings: Sequence[Opening]) -> list[SharedEvent]:
    """Open events for `openings`, which the caller abandons if an exception comes before it has the events."""
    session.check()
    wanted.check()
    depth, engine = wanted.depth, wanted.engine
    device = "" if wanted.device is None else uuid_of(devices.parse(wanted.device))
    default = uuid_of(current_ordinal())
    bodies = [messages.Open(name, wanted.is_recorder, device, default, engine, depth) for name in wanted.names]
    session.open(bodies, openings, wanted.timeout)
    return [SharedEvent(opening, is_recorder=wanted.is_recorder) for opening in openings]
