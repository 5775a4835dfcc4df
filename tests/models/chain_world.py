"""The chain model's world: sessions in a row, their slots and streams, who waits for the last, what it means.

Words are as on the board: a generation stands for itself (the base is 0), and bit *i* of `bits` for session *i*'s line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

OPEN, BROKEN, CLOSED = "OPEN", "BROKEN", "CLOSED"
LIVE, EXPIRED, FREE = "LIVE", "EXPIRED", "FREE"
MAX = 99  # stands for INT64_MAX

Point = tuple[int, int]  # slot, generation
Op = tuple[Any, ...]
"""One of ("rec",), ("wait", slot, generation), ("ahead", slot, generation), ("interrupt", slot, generation),
("close",), ("stream",), ("other",), ("fail",), ("beats",).

"interrupt": a wait that an exception ends before the driver has it. "fail": such a record, whose number the next one
gets. "stream": another stream, which has waited for nothing. "other": the other one of two, and back. "beats": here the
heartbeat's thread judges as often as it likes, and not only once the program is over.
"""


MISTAKES = {
    "liveness first": "a waiter looks whether those it stands behind live, then whether it is complete",
    "no closure": "a record takes over the session it waited for, not those that one stands behind",
    "publish unjudged": "the recorder stores `completed` on the driver's word",
    "publish first": "`recorded` is published before `behind` and the bits",
    "no valid_as_of": "a waiter looks whether a line is alive, not whose it is",
    "valid_as_of late": "the newest session is read after the lines were checked, not before",
    "valid_as_of by force": "a record stores a new `valid_as_of` without checking the older bits again",
    "mark only": "a waiter looks at the kernel's mark, not at the session's state",
    "release first": "the coordinator releases the words before it stores that the session is over",
    "ahead unmarked": "a record behind a wait whose record is not made yet takes over the session's line only",
    "word at break": "a timeline's watermark is its word, whatever it stands behind",
    "word of the broken": "a waiter that finds the event broken, once its word was complete, goes by the word",
    "break at once": "a recorder asks for the break before what is not lost is complete",
    "cleared at loss": "the recorder clears the bits when it stores `lost`",
    "cleared too soon": "a judgement that settles part clears the bits of the rest",
    "no judge": "the recorder looks at what it stands behind at its next call only",
    "lost by death": "a dead recorder makes its waiters lost, whatever the board says is complete",
    "evidence unchecked": "a record takes over another slot's bits without checking them",
    "all at once": "a lost wait loses every generation not settled, not from the first one behind it",
    "repeat proves": "a record that failed is repeated on another stream, and proves the waits of the first one",
    "proves all": "a record that stands behind the waits of every stream proves those of the others too",
    "listed is queued": "a record that ends proves the waits listed before it, also those that the driver never had",
}


class Slot(NamedTuple):
    """One slot's words, and what is true of it."""

    recorded: int = 0
    completed: int = 0  # the recorder's on `event`, the GPU's on `timeline`
    behind: int = 0  # first generation that stands behind something not known good; 0: none
    bits: int = 0
    valid_as_of: int = 0
    lost: int = 0
    state: str = OPEN
    watermark: int = 0
    physical: int = 0  # bit g: the GPU has done g
    truth: int = 0  # bit g: and all that it stood behind was satisfied
    lies: bool = False  # the driver calls complete what its dead recorder left
    sent: int = 0  # bit g: handed to the driver
    known: int = 0  # bit g: the board said that it was good while everybody lived


class Line(NamedTuple):
    """A session's line: who has it, and whether the kernel marked it."""

    serial: int
    state: str = LIVE
    mark: bool = False


class Entry(NamedTuple):
    """A generation that is not settled: what it stands behind, whose work that is, and what it proves by its end.

    It proves waits of the stream on which it was recorded, `is_other` or not.
    """

    generation: int
    waits: tuple[Point, ...]
    bits: int
    proves: tuple[Point, ...] = ()
    is_other: bool = False


class Stream(NamedTuple):
    """The one of a session's two streams that is not recorded on now; its words are as those of `Stage`."""

    queue: tuple[tuple[str, int, int], ...] = ()
    is_torn: bool = False
    waits: tuple[Point, ...] = ()
    unqueued: tuple[Point, ...] = ()


class Stage(NamedTuple):
    """A session's process: where it stands in its program, its stream, and what it keeps for itself."""

    op: int = 0
    step: str = "next"
    registers: tuple[Any, ...] = ()
    queue: tuple[tuple[str, int, int], ...] = ()  # the stream: ("wait" or "record", slot, generation)
    is_torn: bool = False  # the stream went past a wait that was not satisfied
    waits: tuple[Point, ...] = ()  # listed for the stream, and not known good
    unqueued: tuple[Point, ...] = ()  # of these, what the driver does not have
    entries: tuple[Entry, ...] = ()
    made: int = 0
    is_other: bool = False  # which of the two streams it is
    made_on: bool = False  # and on which the last record was made
    other: Stream = Stream()
    is_alive: bool = True
    has_expired: bool = False
    was_told: bool = False  # RecorderLost was raised to its user
    asks: bool = False  # for a break of its slot
    closes: bool = False


class Waiter(NamedTuple):
    """Who looks at one generation of the last slot until it knows; ends in "good" or "lost"."""

    step: str = "look"
    registers: tuple[Any, ...] = ()
    began: tuple[bool, bool] = (False, False)  # the board said good, lost, when this look began


class World(NamedTuple):
    """All of it; `wrong` is what must not be."""

    slots: tuple[Slot, ...]
    lines: tuple[Line, ...]
    stages: tuple[Stage, ...]
    waiter: Waiter = Waiter()
    coordinator: tuple[Any, ...] = ()  # what it does, to which session, its next step
    newest: int = 0
    kills: int = 0
    stops: int = 0
    reuses: int = 0
    wrong: str = ""

    def slot(self, i: int, **values: Any) -> World:
        """The world with these values of a slot."""
        return self._replace(slots=(*self.slots[:i], self.slots[i]._replace(**values), *self.slots[i + 1 :]))

    def stage(self, i: int, **values: Any) -> World:
        """The world with these values of a session's process."""
        return self._replace(stages=(*self.stages[:i], self.stages[i]._replace(**values), *self.stages[i + 1 :]))

    def line(self, i: int, **values: Any) -> World:
        """The world with these values of a session's line."""
        return self._replace(lines=(*self.lines[:i], self.lines[i]._replace(**values), *self.lines[i + 1 :]))


@dataclass(frozen=True)
class Scenario:
    """What takes part: a program for each session, its engine, the generation of the last that is wanted, faults."""

    programs: tuple[tuple[Op, ...], ...]
    engines: tuple[str, ...]
    wanted: int
    kills: int = 1
    killable: tuple[int, ...] = ()
    stops: int = 0
    stoppable: tuple[int, ...] = (0, 1)
    reuses: int = 0
    is_today: bool = False  # as if nobody told whom it stands behind
    behind_all: bool = False  # records stand behind the waits of both streams
    lies: bool = True  # the driver may call dead work complete; else it never does
    mistakes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        assert self.mistakes <= MISTAKES.keys()


class Looks:
    """What anybody can read from the board and the driver."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.last = len(scenario.programs) - 1

    def has(self, mistake: str) -> bool:
        """Whether that mistake is planted."""
        return mistake in self.scenario.mistakes

    def is_timeline(self, i: int) -> bool:
        """Whether slot `i` is a timeline."""
        return self.scenario.engines[i] == "timeline"

    def is_alive(self, world: World, i: int) -> bool:
        """Whether the session that records on slot `i` lives: its own serial, and no mark."""
        return world.lines[i].serial == i + 1 and not world.lines[i].mark

    def driver_says(self, world: World, i: int, generation: int) -> bool:
        """Whether the driver, or the word, calls it complete."""
        slot = world.slots[i]
        if self.is_timeline(i):
            return slot.completed >= generation
        return bool(slot.physical >> generation & 1) or (slot.lies and bool(slot.sent >> generation & 1))

    def on_board(self, world: World, i: int, generation: int) -> bool:
        """Good by the board's words alone, whoever lives."""
        slot = world.slots[i]
        if slot.state == BROKEN or slot.completed == MAX:
            return slot.watermark >= generation
        if slot.lost and slot.lost <= generation:
            return False
        is_done = min(slot.completed, slot.recorded) >= generation
        return is_done and (not self.is_timeline(i) or not slot.behind or generation < slot.behind)

    def is_lost(self, world: World, i: int, generation: int) -> bool:
        """What a waiter concludes: it will never count. None of this needs anybody's answer."""
        slot = world.slots[i]
        if self.has("lost by death") and not self.is_alive(world, i):
            return True
        if self.on_board(world, i, generation):
            return False
        if slot.lost and slot.lost <= generation:
            return True
        if slot.state == BROKEN or (slot.state == CLOSED and slot.recorded < generation):
            return True
        return not self.is_alive(world, i)

    def line_is_good(self, world: World, j: int, valid_as_of: int) -> bool:
        """Whether the session of a line lives, and had it when `valid_as_of` sessions were counted."""
        line = world.lines[j]
        if line.mark or (line.state != LIVE and not self.has("mark only")):
            return False
        return line.serial <= valid_as_of or self.has("no valid_as_of")

    def bits_are_good(self, world: World, i: int, bits: int, valid_as_of: int) -> bool:
        """Whether all sessions live that slot `i` stands behind; its own bit: only its recorder can tell."""
        if bits >> i & 1:
            return False
        return all(self.line_is_good(world, j, valid_as_of) for j in range(len(world.lines)) if bits >> j & 1)

    def note(self, world: World) -> World:
        """Remember what the board says is good while its session lives."""
        for i, slot in enumerate(world.slots):
            known = slot.known
            for generation in range(1, slot.recorded + 1):
                is_live = self.is_alive(world, i) and world.lines[i].state == LIVE
                if is_live and self.on_board(world, i, generation):
                    known |= 1 << generation
            if known != slot.known:
                world = world.slot(i, known=known)
        return world
