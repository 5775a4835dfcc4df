"""A coordinator that dies at any step, and the next one: what was asked for is done once, and nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ipcsync._board import Board, SlotLine
from ipcsync_coordinator import journal
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.journal import Journal, JournalError, Transactions
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.state import SessionTable, Slot
from ipcsync_keeper import resources
from tests.kit.examples import LONG
from tests.models.restart_world import MISTAKES
from tests.unit.coordinator import coordinator_world
from tests.unit.coordinator.recovery_scene import STATES, Steps, count_and_state, die_at_each


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(journal, "_LEAST_ROOM", 4096)  # to clear 256 KiB at each compaction takes most of the time
    return Steps(monkeypatch)


@pytest.mark.parametrize("is_compacted", [False, True], ids=["appended", "compacted"])
def test_a_death_at_any_step_is_not_noticed(steps: Steps, monkeypatch: pytest.MonkeyPatch, is_compacted: bool) -> None:
    monkeypatch.setattr(journal, "_LEAST_LIMIT", 0 if is_compacted else 1 << 30)
    monkeypatch.setattr(journal, "_GROWTH", 0)  # compacted at each step, or never
    total, undisturbed = count_and_state(steps)
    assert total > 100
    every = 1 if LONG else 3
    die_at_each(steps, range(random.randint(1, every), total + 1, every), undisturbed)


# Each of the model's mistakes (restart_world.MISTAKES) that can be made in this code, made in it.


def _reply_before_the_record(patch: pytest.MonkeyPatch) -> None:
    commit = Transactions.commit

    def commit_later(self: Transactions, reply: Any = None, *, is_refusal: bool = False) -> None:
        if self.__dict__.pop("put_off", False) or reply is None:
            commit(self, reply, is_refusal=is_refusal)
        else:
            self.__dict__["put_off"] = True

    patch.setattr(Transactions, "commit", commit_later)


def _read_the_watermark_when_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    store = Effects.store_slot

    def store_anew(self: Effects, slot: Slot) -> None:
        good = slot.good
        if slot.state == "broken":
            slot.good = self.line(slot.index).recorded - slot.base
        store(self, slot)
        slot.good = good

    patch.setattr(Effects, "store_slot", store_anew)


def _redo_what_was_carried_out(patch: pytest.MonkeyPatch) -> None:
    read = Journal.read
    patch.setattr(Journal, "read", lambda self: (read(self)[0], False))


def _take_the_base_from_the_board(patch: pytest.MonkeyPatch) -> None:
    def take(slot: Slot, line: SlotLine) -> None:
        slot.base = line.recorded

    _change_each_slot(patch, take)


def _believe_the_board(patch: pytest.MonkeyPatch) -> None:
    names = {number: name for name, number in STATES.items()}

    def believe(slot: Slot, line: SlotLine) -> None:
        slot.state = names[line.state]  # type: ignore[assignment] # one of its values

    _change_each_slot(patch, believe)


def _change_each_slot(patch: pytest.MonkeyPatch, change: Callable[[Slot, SlotLine], None]) -> None:
    restore = journal._restore

    def changed(registry: Any, board: Board, left: journal.Record) -> None:
        for slot in left.slots:
            change(slot, board.slot(slot.index))
        restore(registry, board, left)

    patch.setattr(journal, "_restore", changed)


def _forget_what_is_held(patch: pytest.MonkeyPatch) -> None:
    recover = journal.recover

    def forgetful(transactions: Transactions, now_ns: int) -> list[Slot]:
        differing = recover(transactions, now_ns)
        transactions.effects.releaser._held.clear()
        return differing

    patch.setattr(coordinator_world, "recover", forgetful)


def _sweep_what_is_in_quarantine(patch: pytest.MonkeyPatch) -> None:
    sweep = Pool.sweep
    patch.setattr(Pool, "sweep", lambda self, _: sweep(self, ()))


def _swap_logs_later(patch: pytest.MonkeyPatch) -> None:
    compact = Journal._compact

    def compact_unseen(self: Journal) -> None:
        current = self._words[resources.CURRENT]
        compact(self)
        self._words[resources.CURRENT] = current  # the other one's turn is told by a message that never comes

    patch.setattr(Journal, "_compact", compact_unseen)


def _skip_redo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Effects, "redo", lambda *_: None)


def _keep_replies_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    record_of = journal.record_of
    patch.setattr(journal, "record_of", lambda registry, touched, _, new: record_of(registry, touched, [], new))


def _leave_what_no_slot_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "sweep", lambda *_: None)


def _mark_before_it_is_done(patch: pytest.MonkeyPatch) -> None:
    append = Journal.append

    def append_and_mark(self: Journal, record: journal.Record) -> None:
        append(self, record)
        self._words[resources.CARRIED_OUT + self._which] = self._end

    patch.setattr(Journal, "append", append_and_mark)


def _keep_the_reply_last(patch: pytest.MonkeyPatch) -> None:
    commit = Transactions.commit

    def commit_and_keep(self: Transactions, reply: journal.Reply | None = None, *, is_refusal: bool = False) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(SessionTable, "keep", lambda *_: None)
            commit(self, reply, is_refusal=is_refusal)
        if reply is not None:
            self.sessions.keep(reply.token, reply.id, reply.kept)

    patch.setattr(Transactions, "commit", commit_and_keep)


def _append_last(patch: pytest.MonkeyPatch) -> None:
    carry_out = Effects.carry_out
    append = Journal.append
    pending: list[tuple[Journal, journal.Record]] = []
    patch.setattr(Journal, "append", lambda *both: pending.append(both))

    def carry_out_and_append(self: Effects, touched: Any) -> None:
        carry_out(self, touched)
        for each, record in pending:
            append(each, record)
        pending.clear()

    patch.setattr(Effects, "carry_out", carry_out_and_append)


_PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "reply before append": _reply_before_the_record,
    "effect before append": _append_last,
    "watermark at the effect": _read_the_watermark_when_it_is_stored,
    "no carried-out mark": _redo_what_was_carried_out,
    "base at a redo": _take_the_base_from_the_board,
    "redo skipped": _skip_redo,
    "held not rebuilt": _forget_what_is_held,
    "reply not appended": _keep_replies_in_memory_only,
    "no sweep": _leave_what_no_slot_has,
    "sweep takes quarantined rings": _sweep_what_is_in_quarantine,
    "swap by message": _swap_logs_later,
    "journal from the board": _believe_the_board,
    "marked before it is done": _mark_before_it_is_done,
    "compacted before the reply is kept": _keep_the_reply_last,
}
_ONLY_HERE = {"marked before it is done", "compacted before the reply is kept"}
_OF_A_COMPACTION = {"swap by message", "compacted before the reply is kept"}

_FOUND_ELSEWHERE = {
    "ring decided at the effect": "a redo touches no ring: what no slot's record has is swept",
    "expiry not appended": "tests/faults/test_restart_order.py, by the order of a death's steps",
    "old one still writing": "tests/unit/coordinator/test_journal.py: no two coordinators have one",
    "given up for good": "tests/faults/test_keeper.py, row 55, by a client that never asks",
    "late before kept": "tests/unit/coordinator/test_journal.py: a reply that is kept is given also past the deadline",
}


def test_every_mistake_of_the_model_is_looked_for_in_the_code() -> None:
    assert MISTAKES.keys() == (_PLANTED.keys() | _FOUND_ELSEWHERE.keys()) - _ONLY_HERE


@pytest.mark.planted
@pytest.mark.parametrize("mistake", _PLANTED)
def test_a_planted_mistake_is_found(steps: Steps, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(journal, "_LEAST_LIMIT", 0 if mistake in _OF_A_COMPACTION else 1 << 30)
    monkeypatch.setattr(journal, "_GROWTH", 0)
    total, undisturbed = count_and_state(steps)
    _PLANTED[mistake](monkeypatch)
    with pytest.raises((AssertionError, JournalError, KeyError, RuntimeError)):
        die_at_each(steps, sorted(range(1, total + 1), key=lambda at: at % 7), undisturbed)
