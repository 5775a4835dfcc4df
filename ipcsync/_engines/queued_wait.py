"""One wait that was queued on a stream: for what, and its verdict.

None of them keeps an engine that was released.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappush
from typing import Any, Protocol

from ipcsync._board import Board, SlotLine
from ipcsync._drivers import SUCCESS
from ipcsync._engines.behind import Behind
from ipcsync._engines.loss import Loss
from ipcsync._native import context
from ipcsync._native.capture import relaxed_call
from ipcsync._shared import items_of
from ipcsync.typing import EngineName

_NONE: frozenset[int] = frozenset()


class View(Protocol):
    """The part of an engine that a wait and a chain need."""

    kind: EngineName
    name: str
    node: str
    is_recorder: bool
    board: Board
    line: SlotLine
    base: int
    behind: Behind
    has_chain: bool

    @property
    def is_released(self) -> bool:
        """Whether its use of the slot is over; each wait that was queued there had its verdict before."""

    @property
    def label(self) -> str:
        """The event's name in texts."""

    @property
    def generation(self) -> int:
        """The last generation recorded, by whichever session."""

    @property
    def recorder(self) -> int:
        """The serial of the session that records, 0 while there is none."""

    def recorder_is_alive(self) -> bool:
        """Whether the recorder's process lives; True while there is no recorder."""

    def fate(self, generation: int) -> Loss | bool | None:
        """The fate of `generation`, by the board and this process's memory: True (good), a Loss, or None (open)."""

    def accepts(self, generation: int) -> bool:
        """Whether a waiter would accept `generation` now; asks the driver."""

    def open_before(self, generation: int, since: int) -> int:
        """The last generation from `since` on and before `generation`, which is lost, that is open; 0 if none is."""

    def has_passed(self, stream: int) -> bool:
        """Whether the stream with that id is past all waits for this slot; asks the driver."""

    def ordinal_of(self, stream: int) -> int:
        """The device of the stream with that id; -1 if nothing that this use queued there is pending."""

    def give_unpassed(self, streams: Iterable[int]) -> dict[int, Any]:
        """Of these streams, those that are not past all waits for this slot, and the markers behind these.

        The caller destroys the markers.
        """


class Holder(Protocol):
    """A holder of waits besides the streams."""

    def waits(self) -> Iterable[Wait]:
        """Its waits, those without a verdict included."""


class Wait:
    """A wait for `generation` of what `view` sees. Its `verdict` is None while open, then True or a Loss, for good.

    `key` is its list, `stream` the id of the stream in whose order it was queued, 0 if that is not known. It is listed
    before the driver's call, and `is_queued` after it: what ended before that was never behind it. `others` are further
    streams of its list, for whose waits for this generation or an earlier one it stands too. `place` is its key within
    its list: one for each view. `waited` is a heap of generations: the first is the earliest that it stands for.
    """

    __slots__ = ("generation", "is_queued", "key", "others", "place", "stream", "verdict", "view", "waited")

    view: View
    verdict: Loss | bool | None
    others: frozenset[int]

    def __init__(self, view: View, generation: int, key: int, stream: int) -> None:
        self.view = view
        self.place: int = id(view)
        self.generation = generation
        self.key = key
        self.stream = stream
        self.is_queued = False
        self.verdict = None
        self.others = _NONE
        self.waited = [generation]

    @property
    def since(self) -> int:
        """The earliest generation that it stands for: if that is open when this one is lost, it is still waited for."""
        return self.waited[0]

    def stand_for(self, generation: int) -> None:
        """Stand for an earlier generation too."""
        if generation < self.waited[0]:
            heappush(self.waited, generation)  # one step, since a signal's handler may do the same within this call

    def is_for(self, view: View) -> bool:
        """Whether it waits for a generation of this view."""
        return self.view is view

    @property
    def label(self) -> str:
        """What it waits for, in a text."""
        return f"generation {self.generation} of {self.view.label}"

    @property
    def name(self) -> str:
        """The event's name."""
        return self.view.name

    def holds_up(self, loss: Loss) -> bool:
        """Whether streams may stand still for ever behind it, lost by `loss`: nobody releases them; asks the driver.

        This session's own record ends, unless it stands behind something lost itself.
        """
        view = self.view
        is_own = view.is_recorder and loss.cause != "behind"
        return view.kind == "event" and self.stream != 0 and not is_own and not self.is_passed(0)

    def is_on(self, ordinal: int) -> bool:
        """Whether its stream is one of the device's, and may not be past it yet."""
        return ordinal == (-1 - self.key if self.key < 0 else self.view.ordinal_of(self.stream))

    def known(self) -> Loss | bool | None:
        """The verdict by the board and this process's memory."""
        if self.verdict is None:
            fate = self.view.fate(self.generation)
            # If the use was released meanwhile, the words just read may be the slot's next use's. The wait has its
            # verdict then, unless it was listed later: for such a one nothing was queued.
            is_released = self.view.is_released
            if self.verdict is None:
                self.verdict = is_released or fate
        return self.verdict

    def behind(self, loss: Loss) -> Loss:
        """The loss of a record that stands behind it."""
        return loss.behind(self.label)

    def is_passed(self, mine: int) -> bool:
        """Whether all streams that it stands for are past it, `mine` aside; asks the driver."""
        return all(self.view.has_passed(stream) for stream in (self.others | {self.stream}) - {mine, 0})

    def open_before(self) -> int:
        """Of a lost one: the last open generation before, for which it stands; 0 if there is none."""
        return self.view.open_before(self.generation, self.since)

    def end(self) -> None:
        """It is not listed any more, for good."""

    def judged(self) -> Loss | bool | None:
        """The verdict that a waiter would get now; asks the driver."""
        fate = self.known()
        if fate is None and self.view.accepts(self.generation) and self.verdict is None:
            self.verdict = True
        return self.verdict


class Lost(Wait):
    """A lost wait whose engine was released: it keeps the verdict and its text, and what shows who is past it.

    If the coordinator is lost, an engine is released although some streams are not.
    """

    __slots__ = ("_is_releasable", "_label", "_name", "_ordinal", "_unpassed")

    def __init__(self, wait: Wait) -> None:
        self.place = id(self)  # a later engine may get the id of the released one
        self.generation = wait.generation
        self.key = wait.key
        self.stream = wait.stream
        self.is_queued = wait.is_queued
        self.others = wait.others
        self.verdict = wait.verdict
        self.waited = wait.waited
        self._label = wait.label
        self._name = wait.name
        self._is_releasable = wait.view.kind == "timeline"
        self._ordinal = wait.view.ordinal_of(wait.stream)
        self._unpassed: dict[int, Any] = wait.view.give_unpassed(wait.others | {wait.stream})

    def is_for(self, view: View) -> bool:  # noqa: ARG002 - of no view any more
        """False."""
        return False

    def open_before(self) -> int:
        """0: a use is released once its earlier generations are judged, or by a lost coordinator, which loses all."""
        return 0

    def is_passed(self, mine: int) -> bool:
        """Whether all streams that it stands for are past it, `mine` aside; asks the driver."""
        query = context.driver().cuEventQuery
        markers = (marker for stream, marker in items_of(self._unpassed) if stream != mine)
        return all(relaxed_call(query, marker)[0] is SUCCESS for marker in markers)

    @property
    def name(self) -> str:
        """The event's name."""
        return self._name

    def holds_up(self, loss: Loss) -> bool:  # noqa: ARG002 - of any
        """Whether streams are not past it, and nobody released them; asks the driver."""
        return not self._is_releasable and not self.is_passed(0)

    def is_on(self, ordinal: int) -> bool:
        """Whether its stream is one of the device's."""
        return ordinal == (-1 - self.key if self.key < 0 else self._ordinal)

    def end(self) -> None:
        """Destroy the markers, complete or not."""
        while self._unpassed:
            context.driver().cuEventDestroy(self._unpassed.popitem()[1])

    @property
    def label(self) -> str:
        """What it waited for, in a text."""
        return self._label
