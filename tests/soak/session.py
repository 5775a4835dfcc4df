"""What a soak's worker has in its hands: its plan, a session, events, points."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ipcsync
from ipcsync.typing import EngineName

if TYPE_CHECKING:
    from tests.soak.lanes import RecordLane

NOBODY = -1  # the cell of what no recorder has come for

_POINT = struct.Struct("<4sI16sQQ")


@dataclass(frozen=True)
class Plan:
    """What all workers of a soak are told."""

    directory: Path
    endpoint: str
    processes: int
    names: int
    engine: str  # "event", "timeline", or "both": by the name's number
    seed: int
    pace_s: float  # the mean pause between two things

    def engine_of(self, name: int) -> EngineName:
        """The engine of the event number `name`."""
        if self.engine == "both":
            return "timeline" if name % 2 else "event"
        return "timeline" if self.engine == "timeline" else "event"


@dataclass(eq=False)
class Known:
    """A point that is looked at, for as long as this object lives.

    `key` is its (slot, incarnation, generation); `held` a number that no other object of this process has.
    """

    point: ipcsync.Point
    name: int
    held: int
    engine: int  # 1: timeline
    must_come: bool
    tag: int = 0
    cell: int = NOBODY
    key: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        self.key = key_of(bytes(self.point))


@dataclass(eq=False)
class Channel:
    """An event that is open here; `where` is its (slot, incarnation). With a tag, this worker records on it."""

    event: ipcsync.SharedEvent | None  # None: a client's unnamed one
    name: int
    engine: int
    where: tuple[int, int] = (0, 0)
    tag: int = 0
    cell: int = NOBODY
    recorded: int = 0
    lane: RecordLane | None = None  # an unnamed event's only one


@dataclass
class Session:
    """A client, and all that ends with it."""

    client: ipcsync.Client
    recorders: list[Channel] = field(default_factory=list)
    waiters: list[Channel] = field(default_factory=list)
    known: deque[Known] = field(default_factory=lambda: deque(maxlen=48))
    own: dict[tuple[int, int], Channel] = field(default_factory=dict)  # by `where`: what it ever recorded on
    unnamed: Channel | None = None


def key_of(data: bytes) -> tuple[int, int, int]:
    """(slot, incarnation, generation) in the bytes of a point."""
    _, slot, _, incarnation, generation = _POINT.unpack_from(data)
    return slot, incarnation, generation
