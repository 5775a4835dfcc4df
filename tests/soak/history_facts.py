"""What a reader of histories gathers: what was done to each life, who recorded where, and which promises are broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.soak.history import Op, Record, Result

FOREVER = 1 << 63


class Violation(NamedTuple):
    """One broken promise: its short name, whose history shows it, and how."""

    rule: str
    life: int
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: life {self.life}: {self.text}"


@dataclass
class Life:
    """What was done to one life of a worker. Times are 0 for never."""

    killed_at: int = 0
    exited_at: int = 0
    status: int = 0
    stops: list[tuple[int, int]] = field(default_factory=list)
    lates: list[tuple[int, int]] = field(default_factory=list)  # when its threads were kept waiting for a processor
    goodbyes: list[tuple[int, int]] = field(default_factory=list)  # and the calls that said that a session expired

    def was_stopped(self, start: int, end: int) -> bool:
        """Whether a stop overlaps `start` to `end`."""
        return any(stop <= end and start <= go_on for stop, go_on in self.stops)

    def has_left(self, opened: int, until: int) -> bool:
        """Whether a session that it had at `opened` may have ended before `until`; later ones are others."""
        return any(start < until and opened < end for start, end in self.goodbyes)


@dataclass
class Use:
    """One use of one event, by its tag: who recorded, and when what is known of it."""

    life: int
    name: int
    opened_at: int  # the end of the call
    recorded: int = 0
    last_record: int = 0  # the start of the last call that recorded
    closed_at: int = FOREVER


@dataclass
class Place:
    """One incarnation of one slot, as the calls that worked on it show it."""

    first_end: int = FOREVER
    last_start: int = 0
    last: tuple[int, Record] | None = None
    gone_at: int = FOREVER  # the end of the first call to which it was gone


@dataclass
class Report:
    """What the histories show."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def count(self, *ops: Op, result: Result | None = None) -> int:
        """How many calls of these kinds ended, with one result or any."""
        return sum(
            n for (op, how), n in self.counts.items() if op in ops and how != Result.BEGUN and result in (None, how)
        )
