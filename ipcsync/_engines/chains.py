"""Chains: the recorder stores what each record stands behind before it is made, and judges its event later.

The recorder is the only writer of these words; `behind` reads them. Every method is called with the engine's lock held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from ipcsync._board import LIVE
from ipcsync._engines import queued
from ipcsync._engines.loss import Loss
from ipcsync._engines.queued_wait import View, Wait

_MANY = 16


class Entry(NamedTuple):
    """Generations `first` to `last`, not settled yet: the waits queued before them, and the bits of these.

    `stream` is the id of the stream whose waits must be over once these are complete, 0 for none.
    """

    first: int
    last: int
    stream: int
    waits: tuple[Wait, ...]
    bits: int


class Chain:
    """The chain of one slot, in its recorder's process."""

    def __init__(self, view: View) -> None:
        # Weak, since the engine holds the chain: a cycle would wait for the garbage collector.
        self._reference = weakref.ref(view)
        self._entries: list[Entry] = []
        self._loss: Loss | None = None
        self.lost_from: int = 0
        self.wants_break: bool = False
        self.has_asked: bool = False
        self.judge_at = _MANY  # with so many entries a record judges first
        self._is_holder = False
        self._is_stored = True  # as far as it was judged
        self._in_hand: list[Wait] = []  # held until the entry with them is there

    @property
    def _view(self) -> View:
        view = self._reference()
        assert view is not None, "the chain is its engine's, and called by it alone"
        return view

    @property
    def entries(self) -> list[Entry]:
        """The entries that are not settled, in order."""
        return self._entries

    @entries.setter
    def entries(self, entries: list[Entry]) -> None:
        # While there are any, the engine takes no shortcut: set before the first one, and cleared after the last.
        if entries:
            self._view.has_chain = True
        self._entries = entries
        if not entries and self._loss is None:
            self._view.has_chain = False

    @property
    def is_open(self) -> bool:
        """Whether there is something to judge, or an exception kept `store` from saying that it was judged."""
        return bool(self._entries) or not self._is_stored

    @property
    def loss(self) -> Loss | None:
        """The first loss, None if there is none."""
        return self._loss

    @loss.setter
    def loss(self, loss: Loss) -> None:
        self._view.has_chain = True
        self._loss = loss

    # --- before a record ----------------------------------------------------------------------------------------------

    def listed(self, key: int | None) -> list[Wait]:
        """The waits in a stream's list (None: in all), of which none loses its use before `extend` is over."""
        self._hold()
        found: list[Wait] = []
        self._in_hand = found
        queued.fill(found, key)
        return found

    def _hold(self) -> None:
        if not self._is_holder:
            queued.hold(self)
            self._is_holder = True

    def extend(self, generation: int, stream: int, waits: Iterable[Wait]) -> None:
        """Store what the record of `generation` will stand behind. RecorderLost if any of it is lost."""
        try:
            self._extend(generation, stream, waits)
        finally:
            self._in_hand = []

    def _extend(self, generation: int, stream: int, waits: Iterable[Wait]) -> None:
        view = self._view
        if self.loss is not None:
            raise self.loss.error(view.name, view.label, generation)
        self.unprove(generation, stream)
        fates = [(wait, self._fate(wait)) for wait in waits if not wait.is_for(view)]
        for wait, fate in fates:
            if isinstance(fate, Loss):
                raise wait.behind(fate).error(view.name, view.label, generation)
        if known := [wait for wait, _ in fates if wait.verdict is True]:
            queued.drop(known)
        pending = tuple(wait for wait, fate in fates if fate is None)
        if not pending:
            return
        newest = view.board.newest  # before the looks that follow
        own = 1 << (view.recorder & 0xFFFF)
        bits = 0
        for wait in pending:
            bits |= self._evidence(wait, own)
        if self.entries and view.behind.good_bits(view.recorder & 0xFFFF) is None:
            bits |= own
        # A wait that another thread is about to queue, or that an exception kept from the driver, is not before it.
        is_in_order = all(wait.is_queued for wait in pending if wait.stream == stream)
        self._add(Entry(generation, generation, stream if is_in_order else 0, pending, bits))
        view.line.store_bits(self._bits())
        view.line.store_as_of(newest)
        if not view.behind.first:
            view.line.store_behind(view.base + generation)

    def unprove(self, generation: int, stream: int = 0) -> None:
        """A record of `generation` failed, and is repeated on `stream`, 0 if that is not known yet.

        If that is another one than before, its end does not prove that the waits there are over.
        """
        last = self.entries[-1] if self.entries else None
        if last is not None and last.last >= generation and last.stream not in (0, stream):
            kept = [last._replace(last=generation - 1)] if last.first < generation else []
            self.entries = [*self.entries[:-1], *kept, last._replace(first=generation, stream=0)]

    def _add(self, entry: Entry) -> None:
        """Add an entry. Each change is one assignment, since an exception may come between any two."""
        self._hold()
        last = self.entries[-1] if self.entries else None
        if last is None or last.last < entry.first:
            if last is not None and last[2:] == entry[2:]:  # behind the same waits as the record before
                self.entries = [*self.entries[:-1], last._replace(last=entry.last)]
            else:
                self.entries = [*self.entries, entry]
        elif last[2:] != entry[2:]:  # a record that failed, and is repeated
            merged = entry._replace(waits=(*last.waits, *entry.waits), bits=last.bits | entry.bits, stream=0)
            kept = [last._replace(last=entry.first - 1)] if last.first < entry.first else []
            self.entries = [*self.entries[:-1], *kept, merged]

    def _fate(self, wait: Wait) -> Loss | bool | None:
        """As `Wait.known`; an event of this session itself counts unless it stands behind something."""
        fate = wait.known()
        if fate is None and self._is_own(wait):
            is_open = wait.view.generation < wait.generation or wait.view.behind.stands(wait.generation)
            return wait.verdict or (None if is_open else True)  # if it has one now, the words may be another use's
        return fate

    def _is_own(self, wait: Wait) -> bool:
        return wait.view.recorder == self._view.recorder and wait.view.board.epoch == self._view.board.epoch

    def _evidence(self, wait: Wait, own: int) -> int:
        """The bits of the sessions that a wait depends on; `own` if only this recorder will be able to judge it."""
        bits = self._bits_of(wait, own)
        return bits if wait.verdict is None else own  # if it has one now, the words may be those of the slot's next use

    def _bits_of(self, wait: Wait, own: int) -> int:
        theirs, generation = wait.view, wait.generation
        serial = theirs.recorder
        if theirs.board.epoch != self._view.board.epoch or not serial or theirs.generation < generation:
            return own
        if theirs.node:
            return own  # the bridge records a mirror here, and outlives the recorder on the other node
        bits = 0
        if serial != self._view.recorder:
            line = theirs.board.session(serial & 0xFFFF)
            if line.state != LIVE or not theirs.recorder_is_alive():
                return own
            bits = 1 << (serial & 0xFFFF)
        if theirs.behind.stands(generation):
            further = theirs.behind.good_bits(serial & 0xFFFF)
            return bits | (own if further is None else further)
        return bits

    # --- the judgement ------------------------------------------------------------------------------------------------

    def judge(self, done: int) -> int:
        """The last generation such that all up to it count; at most `done`, which was found complete before."""
        view = self._view
        before = self._entries
        if self.loss is None and view.behind.good_bits(view.recorder & 0xFFFF) is not None:
            left = self._settle_all(done)
        else:
            left = self._judge_one_by_one(done)
        # A signal's handler may have recorded within this call: its entries stay, for the next judgement. No call comes
        # between the comparison and the store.
        if self._entries is before:
            self._is_stored = False
            self._entries = left
        if not self._entries and self._loss is None:
            view.has_chain = False
        settled = min(done, self.entries[0].first - 1) if self.entries else done
        if self.loss is not None:
            settled = min(settled, self.lost_from - 1)
            self.wants_break = settled == self.lost_from - 1
        return settled

    def _settle_all(self, done: int) -> list[Entry]:
        """Settle all up to `done`: the bits were found good after it was found complete, so its waits were good too."""
        for entry in self.entries:
            if entry.first <= done and entry.stream:
                for wait in entry.waits:
                    if wait.stream == entry.stream and wait.verdict is None:
                        wait.verdict = True
        return _behind(self.entries, done)

    def _judge_one_by_one(self, done: int) -> list[Entry]:
        """The entries that are still open, or lost."""
        entries = list(self.entries)
        while entries and entries[0].first <= done:
            fates = [self._ask(wait) for wait in entries[0].waits]
            self._find_loss(entries[0])
            if any(fate is not True for fate in fates):
                break
            rest = _behind(entries[:1], done)
            entries[:1] = rest
            if rest:
                break
        for entry in entries:
            self._find_loss(entry)  # an entry behind an open one may be lost already
            for wait in entry.waits:
                if self._fate(wait) is None:
                    wait.view.behind.nudge(wait.view.recorder)
        return entries

    def _ask(self, wait: Wait) -> Loss | bool | None:
        """The verdict that a waiter would get now; asks the driver."""
        fate = self._fate(wait)
        return wait.judged() if fate is None else fate

    def _find_loss(self, entry: Entry) -> None:
        """All from the first entry with a lost wait on is lost. A later death may make an earlier entry the first."""
        if self.loss is not None and entry.first >= self.lost_from:
            return
        for wait in entry.waits:
            fate = self._fate(wait)
            if isinstance(fate, Loss):
                loss = wait.behind(fate)
                # On this board the serial of another coordinator's session names none, or another one.
                is_here = wait.view.board.epoch == self._view.board.epoch
                self.loss, self.lost_from = loss if is_here else loss._replace(serial=0), entry.first
                return

    def waits(self) -> Iterable[Wait]:
        """The waits of all entries, and those that one is about to be made of."""
        in_hand = list(self._in_hand)  # first: they go from there to an entry
        return [*in_hand, *(wait for entry in self.entries for wait in entry.waits)]

    def store(self) -> None:
        """Store the judgement on the board; `completed` was stored before."""
        line, base = self._view.line, self._view.base
        stored = None
        while stored is not self._entries:  # a signal's handler may record within this call: its entries are stored too
            stored = self._entries
            first = stored[0].first if stored else 0
            if self._view.behind.first != first:
                line.store_behind(base + first if first else 0)
            line.store_bits(self._bits())
        if self.loss is not None and not self._view.behind.is_lost(self.lost_from):
            line.lose(base + self.lost_from, self.loss.serial)
        self._is_stored = True

    def _bits(self) -> int:
        bits = 0
        for entry in self.entries:
            bits |= entry.bits
        return bits


def _behind(entries: list[Entry], done: int) -> list[Entry]:
    """The entries that remain once all up to `done` is settled."""
    return [entry._replace(first=max(entry.first, done + 1)) for entry in entries if entry.last > done]
