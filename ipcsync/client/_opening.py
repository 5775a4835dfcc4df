"""Opening events of this node, with names or without."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ipcsync._native import device as devices
from ipcsync._native.context import current_ordinal, uuid_of
from ipcsync._session.references import Opening
from ipcsync._session.session import Session
from ipcsync._wire import messages
from ipcsync.client.event import SharedEvent
from ipcsync.typing import DeviceLike, EngineChoice

DEFAULT_DEPTH = 16
"""How many records of an event may be in flight on the `event` engine, unless its creator says otherwise."""

log = logging.getLogger("ipcsync")


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


def chosen_engine(engine: EngineChoice) -> EngineChoice:
    """The engine of `connect`: $IPCSYNC_ENGINE in place of "auto". ValueError for another one."""
    of_environment = engine == "auto"
    found = os.environ.get("IPCSYNC_ENGINE", "") or "auto" if of_environment else engine
    if found not in ("auto", "event", "timeline"):
        where = "IPCSYNC_ENGINE" if of_environment else "engine"
        raise ValueError(f"{where} is 'auto', 'event' or 'timeline', but got {found!r}")
    return cast("EngineChoice", found)


def open_events(session: Session, wanted: Wanted, openings: Sequence[Opening]) -> list[SharedEvent]:
    """Open events for `openings`, which the caller abandons if an exception comes before it has the events."""
    session.check()
    wanted.check()
    depth, engine = wanted.depth, wanted.engine
    device = "" if wanted.device is None else uuid_of(devices.parse(wanted.device))
    default = uuid_of(current_ordinal())
    bodies = [
        messages.Open(name, wanted.is_recorder, device, default, engine, depth, session.engine) for name in wanted.names
    ]
    session.open(bodies, openings, wanted.timeout)
    opened = [SharedEvent(opening, is_recorder=wanted.is_recorder) for opening in openings]
    for event in opened:
        note_depth(event, depth)
    return opened


def note_depth(event: SharedEvent, wanted: int) -> None:
    """Log, once for an event, that another depth than its own was asked for."""
    engine = event._engine
    if wanted in (DEFAULT_DEPTH, engine.depth) or engine.kind == "timeline" or engine.has_told_depth:
        return
    engine.has_told_depth = True
    log.warning(
        "depth=%d is ignored: %s is open, with the depth %d of who opened it first", wanted, engine.label, engine.depth
    )
