"""The waits that this process has queued: for each stream those that its next record stands behind.

The lists are the process's, whichever client queued the wait. A wait leaves its list once it is known good; one that is
lost stays, and spoils the stream for every record, until `drop`. Neither keeps an engine that was let go of.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from ipcsync import _drivers
from ipcsync._board import Board, SlotLine
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._engines.behind import Behind
from ipcsync._engines.compiled import CallLock
from ipcsync._engines.loss import Loss
from ipcsync._locks import holding
from ipcsync._native import context
from ipcsync._native.capture import relaxed_call
from ipcsync._native.context import OnDevice

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DISABLE_TIMING = 2
_SLICE_NS = 50_000_000
_MANY = 64

holders: weakref.WeakSet[Holder] = weakref.WeakSet()
"""What else has waits: the chains of this process's recorders."""
lists: dict[int, dict[int, Wait]] = {}
"""By stream, then by slot. Empty while nothing is pending, which is all that a record looks at."""


lists_lock = CallLock()
"""Held while they change."""


class View(Protocol):
    """What a wait, and a recorder's chain, need of an engine."""

    name: str
    node: str
    board: Board
    line: SlotLine
    base: int
    behind: Behind
    has_chain: bool

    @property
    def label(self) -> str:
        """What to call the event in a text."""

    @property
    def generation(self) -> int:
        """The last generation recorded, by whichever session."""

    @property
    def recorder(self) -> int:
        """The serial of the session that records, 0 while none has come."""

    def recorder_is_alive(self) -> bool:
        """Whether the recorder's process lives; True while none has come."""

    def fate(self, generation: int) -> Loss | bool | None:
        """What the board and this process's memory say of `generation`: True for good, a Loss, None if open."""

    def accepts(self, generation: int) -> bool:
        """Whether a waiter would accept `generation` now, with a look at the driver."""


class Holder(Protocol):
    """Who has waits besides the streams."""

    def waits(self) -> Iterable[Wait]:
        """Those on which there is no verdict yet, and others."""


class Wait:
    """A wait for `generation` of what `view` sees. Its `verdict` is None while open, then True or a Loss, for good.

    `key` is its list, `stream` the id of the stream in whose order it was queued, 0 if that is not known.
    """

    __slots__ = ("generation", "key", "stream", "verdict", "view")

    view: View
    verdict: Loss | bool | None

    def __init__(self, view: View, generation: int, key: int, stream: int) -> None:
        self.view = view
        self.generation = generation
        self.key = key
        self.stream = stream
        self.verdict = None

    @property
    def place(self) -> int:
        """Where in its list it stands: one for each view."""
        return id(self.view)

    def is_for(self, view: View) -> bool:
        """Whether this is what it waits for."""
        return self.view is view

    @property
    def label(self) -> str:
        """What it waits for, in a text."""
        return f"generation {self.generation} of {self.view.label}"

    def known(self) -> Loss | bool | None:
        """What the board and this process's memory say of it."""
        if self.verdict is None:
            fate = self.view.fate(self.generation)
            # One that was released meanwhile has its verdict, and what was just read may be of the slot's next use.
            if self.verdict is None:
                self.verdict = fate
        return self.verdict

    def behind(self, loss: Loss) -> Loss:
        """What its loss is to a record that stands behind it."""
        return loss.behind(self.label)

    def judged(self) -> Loss | bool | None:
        """What a waiter would learn now, with a look at the driver."""
        fate = self.known()
        if fate is None and self.view.accepts(self.generation) and self.verdict is None:
            self.verdict = True
        return self.verdict


class Lost(Wait):
    """What is left of a lost wait once nothing is asked of its event any more, and its engine is let go of."""

    __slots__ = ("_label",)

    def __init__(self, wait: Wait) -> None:
        self.generation = wait.generation
        self.key = wait.key
        self.stream = wait.stream
        self.verdict = wait.verdict
        self._label = wait.label

    @property
    def place(self) -> int:
        """Its own: another engine may come to stand where its own was."""
        return id(self)

    def is_for(self, view: View) -> bool:  # noqa: ARG002 - nobody's any more
        """False."""
        return False

    @property
    def label(self) -> str:
        """What it waited for, in a text."""
        return self._label


def key_of(driver: DriverObject, handle: DriverObject, stream_id: int, ordinal: int) -> int:
    """Which list a stream has. The legacy default stream waits for all blocking streams of its device, and they for it:
    what is queued in between, by anybody, joins them, so they share one."""
    flags = unwrap(driver.cuStreamGetFlags(handle), "cuStreamGetFlags")
    return stream_id if int(flags) & _NON_BLOCKING else -1 - ordinal


class _Table:
    """What changes `lists`."""

    def __init__(self) -> None:
        self._lock = lists_lock
        self._sweep_at = _MANY

    @holding("_lock")
    def add(self, key: int, view: View, generation: int, stream: int) -> None:
        """The next record on that stream stands behind `generation`; told before the wait is queued."""
        last = lists.get(key, {}).get(id(view))
        if last is None or last.generation < generation or last.verdict is True:
            wait = Wait(view, generation, key, stream)
            lists.setdefault(key, {})[id(view)] = wait
        if len(lists) > self._sweep_at:  # also of streams that nobody records on any more
            self.drop([wait for wait in self.everything() if wait.known() is True])
            self._sweep_at = max(_MANY, 2 * len(lists))

    @holding("_lock")
    def drop(self, waits: Iterable[Wait]) -> None:
        """Take these out: they are known good, or to be forgotten."""
        for wait in waits:
            self._take_out(wait)

    def _take_out(self, wait: Wait) -> None:
        held = lists.get(wait.key, {})
        if held.get(wait.place) is wait:
            del held[wait.place]
            if not held:
                lists.pop(wait.key, None)

    @holding("_lock")
    def let_go(self, view: View) -> None:
        """Keep nothing of what was waited for there, on which the verdicts are given, but what is lost of it."""
        for wait in self.everything():
            if not wait.is_for(view):
                continue
            if wait.verdict is not True:
                lost = Lost(wait)
                lists[wait.key][lost.place] = lost  # before the other goes: the stream is spoilt at any moment
            self._take_out(wait)

    @holding("_lock")
    def everything(self) -> list[Wait]:
        """What the streams of this process stand behind, all together."""
        return [wait for waits in list(lists.values()) for wait in list(waits.values())]


_table = _Table()
add, drop, let_go, everything = _table.add, _table.drop, _table.let_go, _table.everything


def waits_on(view: View) -> list[Wait]:
    """All waits for a slot that anything here stands behind."""
    held = [wait for holder in list(holders) for wait in holder.waits()]
    return [wait for wait in (*everything(), *held) if wait.is_for(view)]


def of(key: int) -> list[Wait]:
    """What the next record on that stream stands behind."""
    return list(lists.get(key, {}).values())


def lost_on(handle: DriverObject, ordinal: int) -> list[Wait]:
    """The lost waits that a stream of device `ordinal` is, or was, held by."""
    return [wait for wait in on_stream(handle, ordinal) if isinstance(wait.known(), Loss)]


def on_stream(handle: DriverObject, ordinal: int) -> list[Wait]:
    """The waits that a stream of device `ordinal` is, or was, held by."""
    with OnDevice(ordinal):
        driver = context.driver()
        stream_id = int(unwrap(driver.cuStreamGetId(handle), "cuStreamGetId"))
        return of(key_of(driver, handle, stream_id, ordinal))


def await_passed(handle: DriverObject, ordinal: int, deadline_ns: int, check: Callable[[], None]) -> bool:
    """Block until a stream is past all that is queued there now; False if it is not by `deadline_ns`."""
    driver = context.driver()
    with OnDevice(ordinal):
        event = unwrap(driver.cuEventCreate(_DISABLE_TIMING), "cuEventCreate")
    try:
        unwrap(driver.cuEventRecord(event, handle), "cuEventRecord")
        while True:
            now = time.monotonic_ns()
            if relaxed_call(_drivers.wait_event, event, min(deadline_ns, now + _SLICE_NS)):
                return True
            check()
            if now >= deadline_ns:
                return False
    finally:
        unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
