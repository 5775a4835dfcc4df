"""What a recorder notes of what its records stand behind, and how it judges that: on a board, with no work on a GPU.

Five sessions, each of which records one event. The last one is this test's; as it sees the events of the others, it
waits for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

import ipcsync
from ipcsync._board import BROKEN, CLOSED, EXPIRED, Board, layout
from ipcsync._engines import EventEngine, TimelineEngine, queued
from ipcsync._engines.chains import Entry
from ipcsync._engines.loss import Loss
from ipcsync._engines.queued import Wait
from ipcsync._engines.slot_view import FOREVER, deadline_of
from ipcsync._linux.robust import OWNER_DIED
from ipcsync._native import context
from ipcsync._wire import messages
from ipcsync._wire.messages import Attachment
from ipcsync.errors import NodeLost, RecorderLost, WaitTimeout
from tests.unit.test_attachments import Lease

COUNT, ME, BASE, KEY, STREAM = 5, 4, 100, 5, 7
OWN = 1 << ME


def serial_of(line: int) -> int:
    return (line + 1) << 16 | line


class Row:
    """The sessions and their events, counted from a base as in a slot's later use."""

    def __init__(self, board: Board) -> None:
        self.board, self.guard = board, Lease()
        for line in range(COUNT):
            board.session(line).assign(serial_of(line), 4711 + line, 0, 0, time.monotonic_ns(), f"s{line}")
            board.words[self._owner(line)] = 1
            slot = board.slot(line)
            slot.open(1)
            slot.set_recorder(serial_of(line))
            slot.publish(BASE)
            slot.store_completed(BASE)
        board.set_newest(COUNT)
        self.line = board.slot(ME)
        self.mine = self.view(ME, recorder=True)
        self.chain = self.mine.chain
        self.theirs = [self.view(line) for line in range(ME)]

    def _owner(self, line: int) -> int:
        return layout.session_offset(line) // 8 + layout.S_OWNER

    def view(self, slot: int, *, recorder: bool = False, node: str = "") -> TimelineEngine:
        reply = self.reply(slot, recorder=recorder)
        if node:
            reply = replace(reply, origin=messages.Origin(b"e" * 16, 3, 2, node))
        return TimelineEngine(self.board, self.guard, reply, 0)

    def other_recorder(self, slot: int) -> TimelineEngine:
        """That event, as its recorder sees it: another one of this process."""
        return self.view(slot, recorder=True)

    def event_engine(self, *, recorder: bool = False) -> EventEngine:
        """This test's event with a ring of three, of which none is opened."""
        reply = self.reply(ME, recorder=recorder)
        handles = [digit * 64 for digit in (b"0", b"1", b"2")]
        ring = replace(reply, engine="event", depth=3, handles=handles, serials=[11, 12, 13])
        return EventEngine(self.board, self.guard, ring, 0)

    def reply(self, slot: int, *, recorder: bool) -> Attachment:
        return Attachment(
            name=f"e{slot}",
            slot=slot,
            incarnation=1,
            base=BASE,
            device=context.uuid_of(0),
            engine="timeline",
            depth=1,
            recorder=recorder,
            handles=[],
            serials=[],
        )

    def record(self, slot: int, generation: int) -> None:
        self.board.slot(slot).publish(BASE + generation)

    def complete(self, slot: int, generation: int) -> None:
        self.record(slot, generation)
        self.board.slot(slot).store_completed(BASE + generation)

    def kill(self, line: int) -> None:
        """As the kernel marks it."""
        self.board.words[self._owner(line)] |= OWNER_DIED

    def wait(self, slot: int, generation: int = 1, stream: int = STREAM) -> Wait:
        """One that this process has queued for what is recorded by then."""
        self.record(slot, max(generation, self.theirs[slot].generation))
        return Wait(self.theirs[slot], generation, KEY, stream)

    def extend(self, generation: int, *waits: Wait, stream: int = STREAM) -> None:
        """As a record on `stream` does before the driver's call; it is made then."""
        self.chain.extend(generation, stream, waits)
        self.line.publish(BASE + generation)

    @property
    def told(self) -> tuple[int, int]:
        """(first generation that stands behind something, bits)."""
        return self.mine.behind.first, self.line.bits

    @property
    def open_ones(self) -> list[tuple[int, int, int]]:
        return [(entry.first, entry.last, entry.bits) for entry in self.chain.entries]


@pytest.fixture
def row(board: Board) -> Iterator[Row]:
    queued.lists.clear()
    yield Row(board)
    queued.lists.clear()


# --- before a record --------------------------------------------------------------------------------------------------


def test_a_record_tells_the_board_whom_it_stands_behind_and_as_of_when(row: Row) -> None:
    waits = row.wait(0), row.wait(2)
    row.board.set_newest(9)
    row.extend(1, *waits)
    assert row.chain.entries == [Entry(1, 1, STREAM, waits, 0b101)]
    assert row.told == (1, 0b101)
    assert row.line.as_of == 9
    assert row.mine.has_chain
    assert list(row.chain.waits()) == list(waits)
    assert row.mine.behind.stands(1)
    assert row.mine.behind.stands(2)
    assert not row.theirs[0].behind.stands(1)


def test_records_behind_the_same_are_one_entry_and_further_waits_another(row: Row) -> None:
    waits = row.wait(0), row.wait(1)
    row.extend(3, *waits)
    row.extend(4, *waits)
    row.extend(5, *waits)
    assert row.open_ones == [(3, 5, 0b11)]
    row.extend(6, *waits, row.wait(2))
    row.extend(7, *waits, stream=8)
    assert row.open_ones == [(3, 5, 0b11), (6, 6, 0b111), (7, 7, 0b11)]
    assert row.told == (3, 0b111)
    assert len(list(row.chain.waits())) == 7
    assert row.chain in queued.holders


def test_what_is_good_already_is_stood_behind_by_nothing_and_leaves_its_list(row: Row) -> None:
    row.complete(0, 2)
    queued.add(KEY, row.theirs[0], 2, STREAM)
    queued.add(KEY, row.theirs[1], 1, STREAM)
    row.record(1, 1)
    good, pending = queued.of(KEY)
    row.extend(1, row.wait(0, 1))
    assert (row.told, row.chain.entries, row.mine.has_chain) == ((0, 0), [], False)
    row.extend(2, good, pending)
    assert row.chain.entries == [Entry(2, 2, STREAM, (pending,), 0b10)]
    assert queued.of(KEY) == [pending]


def test_a_wait_for_the_very_event_is_nothing_to_stand_behind(row: Row) -> None:
    row.line.publish(BASE + 1)
    row.extend(2, Wait(row.mine, 1, KEY, STREAM))
    assert (row.told, row.chain.entries) == ((0, 0), [])
    row.extend(3, row.wait(0))
    row.extend(4, Wait(row.mine, 3, KEY, STREAM))
    assert row.open_ones == [(3, 3, 1)], "what its own record stands behind, it stands behind already"


def test_no_record_is_begun_behind_what_is_lost(row: Row) -> None:
    lost = row.wait(1, 3)
    row.kill(1)
    with pytest.raises(RecorderLost) as caught:
        row.extend(6, row.wait(0), lost)
    error = caught.value
    assert (error.event, error.generation, error.cause, error.session, error.pid) == ("e4", 6, "behind", "s1", 4712)
    assert str(error) == (
        "generation 6 of 'e4' is lost: it stands behind generation 3 of 'e1', whose recorder 's1' (pid 4712) died; "
        "repeat the work on a new event and on a stream that waited for nothing lost"
    )
    assert (row.told, row.chain.entries) == ((0, 0), [])


def test_a_record_that_failed_and_is_made_again_stands_behind_what_either_did(row: Row) -> None:
    first, second, third = row.wait(0), row.wait(1), row.wait(2)
    row.extend(1, first)
    row.extend(2, first)
    row.extend(2, first)
    assert row.chain.entries == [Entry(1, 2, STREAM, (first,), 0b1)]
    row.extend(2, second)
    assert row.chain.entries == [Entry(1, 1, STREAM, (first,), 0b1), Entry(2, 2, 0, (first, second), 0b11)]
    row.extend(3, third)
    row.extend(3, first, stream=8)
    assert row.chain.entries[2:] == [Entry(3, 3, 0, (third, first), 0b101)]
    assert row.told == (1, 0b111)


def test_what_was_good_of_others_and_is_not_any_more_only_the_recorder_can_tell(row: Row) -> None:
    row.extend(1, row.wait(0))
    row.board.session(0).set_state(EXPIRED)
    row.extend(2, row.wait(1))
    assert row.open_ones == [(1, 1, 0b1), (2, 2, 0b10 | OWN)]
    assert row.mine.behind.good_bits(ME) is None


def test_a_session_that_came_later_is_good_only_for_who_looked_since(row: Row) -> None:
    row.extend(1, row.wait(0))
    assert row.mine.behind.good_bits(ME) == 0b1
    row.board.session(0).assign(9 << 16, 1, 0, 0, 1, "new")
    row.board.words[row._owner(0)] = 1
    assert row.mine.behind.good_bits(ME) is None
    row.line.store_as_of(9)
    assert row.mine.behind.good_bits(ME) == 0b1
    assert row.mine.behind.good_bits(0) is None


# --- whom a wait depends on -------------------------------------------------------------------------------------------


def test_a_wait_depends_on_who_records_and_on_all_that_one_stands_behind(row: Row) -> None:
    wait = row.wait(1, 2)
    assert row.chain._evidence(wait, OWN) == 0b10
    row.board.slot(1).store_bits(0b1101)
    assert row.chain._evidence(wait, OWN) == 0b10
    row.board.slot(1).store_as_of(COUNT)
    row.board.slot(1).store_behind(BASE + 3)
    assert row.chain._evidence(wait, OWN) == 0b10, "what it waits for is of before"
    row.board.slot(1).store_behind(BASE + 2)
    assert row.chain._evidence(wait, OWN) == 0b1111
    row.kill(3)
    assert row.chain._evidence(wait, OWN) == 0b10 | OWN


@pytest.mark.parametrize("what", ["not recorded", "nobody's", "expired", "dead", "a mirror", "another board's"])
def test_where_the_board_says_too_little_only_the_recorder_can_tell(row: Row, what: str, board: Board) -> None:
    wait = row.wait(0)
    if what == "not recorded":
        row.record(0, 0)
    elif what == "nobody's":
        board.slot(0).set_recorder(0)
    elif what == "expired":
        board.session(0).set_state(EXPIRED)
    elif what == "dead":
        row.kill(0)
    elif what == "a mirror":
        wait = Wait(row.view(0, node="two"), 1, KEY, STREAM)
    else:
        wait.view.board = type("Elsewhere", (), {"epoch": b"another"})()
    assert row.chain._evidence(wait, OWN) == OWN


def test_another_event_of_the_same_session_counts_unless_it_stands_behind_something(row: Row) -> None:
    slot = row.board.slot(0)
    slot.set_recorder(serial_of(ME))
    wait = row.wait(0)
    row.extend(1, wait)
    assert (row.told, row.chain.entries) == ((0, 0), [])
    slot.store_bits(0b110)
    slot.store_as_of(COUNT)
    slot.store_behind(BASE + 1)
    row.extend(2, wait)
    assert row.open_ones == [(2, 2, 0b110)]
    ahead = Wait(row.theirs[0], 2, KEY, STREAM)
    slot.store_behind(0)
    row.extend(3, ahead)
    assert row.open_ones[1:] == [(3, 3, OWN)]


# --- the judgement ----------------------------------------------------------------------------------------------------


def test_what_is_complete_while_all_live_counts_with_what_it_waited_for_on_its_stream(row: Row) -> None:
    mine, others, later = row.wait(0), row.wait(1, stream=8), row.wait(2)
    row.extend(1, mine, others)
    row.extend(2, mine, others)
    row.extend(3, mine, others, later)
    row.extend(4, mine, others, later, stream=0)
    assert row.chain.judge(0) == 0
    assert row.chain.judge(1) == 1
    assert [wait.verdict for wait in (mine, others, later)] == [True, None, None]
    row.chain.tell()
    assert row.open_ones == [(2, 2, 0b11), (3, 3, 0b111), (4, 4, 0b111)]
    assert row.told == (2, 0b111)
    assert row.chain.judge(3) == 3
    assert (others.verdict, later.verdict) == (None, True)
    row.chain.tell()
    assert row.told == (4, 0b111)
    assert row.chain.judge(4) == 4
    row.chain.tell()
    assert row.told == (0, 0)
    assert row.line.behind == 0
    assert not row.mine.has_chain
    assert row.line.lost == 0


def test_what_is_complete_beyond_the_open_ones_counts_up_to_them(row: Row) -> None:
    row.extend(3, row.wait(0))
    row.board.session(0).set_state(EXPIRED)
    assert row.chain.judge(1) == 1
    assert row.chain.judge(7) == 2
    assert row.open_ones == [(3, 3, 0b1)]


def test_one_whose_witness_left_is_judged_by_what_it_waited_for(row: Row) -> None:
    first, second = row.wait(0), row.wait(1)
    row.extend(1, first)
    row.extend(2, first)
    row.extend(3, first, second)
    row.board.session(0).set_state(EXPIRED)
    row.board.session(1).set_state(EXPIRED)
    assert row.chain.judge(3) == 0
    assert row.open_ones == [(1, 2, 0b1), (3, 3, 0b11)]
    asked = [view.behind.slice_ns for view in row.theirs]
    assert asked == [1_000_000, 1_000_000, 50_000_000, 50_000_000], "the recorders of what is open are woken"
    row.complete(0, 1)
    assert row.chain.judge(1) == 1
    assert row.open_ones == [(2, 2, 0b1), (3, 3, 0b11)]
    assert row.chain.judge(3) == 2
    assert row.open_ones == [(3, 3, 0b11)]
    row.complete(1, 1)
    assert row.chain.judge(2) == 2
    assert row.open_ones == [(3, 3, 0b11)]
    assert row.chain.judge(3) == 3
    assert (row.chain.loss, row.chain.lost_from, row.chain.wants_break) == (None, 0, False)


def test_a_loss_is_told_with_whose_end_it_was_and_asked_for_once_all_before_it_is_settled(row: Row) -> None:
    first, second = row.wait(0), row.wait(1)
    row.extend(2, first)
    row.extend(3, second)
    row.extend(4, first, second)
    row.kill(1)
    assert row.chain.judge(1) == 1
    assert row.chain.loss == Loss("behind", serial_of(1), "s1", 4712, row.chain.loss.root if row.chain.loss else "")
    assert (row.chain.lost_from, row.chain.wants_break) == (3, False)
    row.chain.tell()
    assert (row.line.lost, row.line.culprit, row.mine.behind.lost_from) == (BASE + 3, serial_of(1), 3)
    assert [row.mine.behind.is_lost(generation) for generation in (2, 3, 4)] == [False, True, True]
    row.complete(0, 1)
    assert row.chain.judge(4) == 2
    assert row.chain.wants_break
    assert row.mine.has_chain
    row.chain.tell()
    assert row.told[0] == 3
    with pytest.raises(RecorderLost, match="whose recorder 's1'"):
        row.extend(5)


def test_a_later_death_may_lose_an_earlier_record_and_never_takes_a_loss_back(row: Row) -> None:
    first, second = row.wait(0), row.wait(1)
    row.extend(2, first)
    row.extend(3, second)
    row.kill(1)
    row.chain.judge(1)
    row.chain.tell()
    assert (row.line.lost, row.line.culprit) == (BASE + 3, serial_of(1))
    row.kill(0)
    assert row.chain.judge(1) == 1
    row.chain.tell()
    assert (row.chain.lost_from, row.chain.wants_break) == (2, True)
    assert (row.line.lost, row.line.culprit) == (BASE + 2, serial_of(0))


def test_a_loss_behind_a_loss_names_the_first_one(row: Row) -> None:
    root, line = "generation 1 of 'x', whose recorder 'x' (pid 1) died", row.board.slot(0)
    line.store_bits(0b100)
    line.store_as_of(COUNT)
    line.store_behind(BASE + 1)
    row.extend(1, row.wait(0))
    assert row.told == (1, 0b101)
    row.kill(2)
    line.lose(BASE + 1, serial_of(2))
    row.chain.judge(0)
    assert row.chain.loss == Loss("behind", serial_of(2), "s2", 4713, "generation 1 of 'e0'")
    assert Loss("behind", 1, "x", 1, root).behind("generation 7 of 'e9'").root == root


class Told:
    """What a wait is told of its event."""

    def __init__(self, fate: Loss | bool | None, *, is_accepted: bool) -> None:
        self._fate, self._is_accepted = fate, is_accepted
        self.asked: list[int] = []

    def fate(self, _generation: int) -> Loss | bool | None:
        return self._fate

    def accepts(self, generation: int) -> bool:
        self.asked.append(generation)
        return self._is_accepted


@pytest.mark.parametrize("fate", [True, None, Loss("died", 1, "x", 2)])
@pytest.mark.parametrize("is_accepted", [True, False])
def test_of_an_open_wait_the_driver_is_asked_and_what_is_known_stays(
    row: Row, fate: Loss | bool | None, is_accepted: bool
) -> None:
    told = Told(fate, is_accepted=is_accepted)
    wait = Wait(told, 3, KEY, STREAM)  # type: ignore[arg-type]
    expected = True if fate is None and is_accepted else fate
    assert wait.judged() == expected
    assert wait.verdict == expected
    assert told.asked == ([3] if fate is None else [])
    wait = Wait(told, 3, KEY, STREAM)  # type: ignore[arg-type]
    assert row.chain._evidence(row.wait(0), OWN) == 1
    row.theirs[1].accepts = told.accepts  # type: ignore[method-assign]
    row.extend(1, row.wait(1))
    row.board.session(1).set_state(EXPIRED)
    row.chain.judge(1)
    assert told.asked[-1:] == [1]
    assert row.chain.entries == [] if is_accepted else row.open_ones == [(1, 1, 0b10)]


def test_each_of_those_that_are_named_must_live(row: Row) -> None:
    row.line.store_as_of(COUNT)
    for bits in (0b1, 0b11, 0b101, 0b1111):
        row.line.store_bits(bits)
        assert row.mine.behind.good_bits(ME) == bits
        assert row.mine.behind.is_clear(serial_of(ME))
        assert not row.mine.behind.is_clear(serial_of(0)), "of its own it tells nothing"
        assert row.mine.behind.good_bits(0) is None
    row.kill(0)
    for bits in (0b1, 0b11, 0b101, 0b1111):
        row.line.store_bits(bits)
        assert row.mine.behind.good_bits(ME) is None
    row.line.store_bits(0b1110)
    assert row.mine.behind.good_bits(ME) == 0b1110


def test_a_recorder_that_was_asked_a_moment_ago_is_left_in_peace(row: Row) -> None:
    behind = row.theirs[0].behind
    for _ in range(14):
        behind._next_ns = 0
        behind.nudge(serial_of(0))
    before = time.monotonic_ns()
    behind._next_ns = 0
    behind.nudge(serial_of(0))
    due = behind._next_ns
    assert due >= before + 50_000_000
    behind.nudge(serial_of(0))
    assert behind._next_ns == due or time.monotonic_ns() >= due


# --- the waits of the process -----------------------------------------------------------------------------------------


def test_of_one_event_a_stream_keeps_the_latest_wait_that_is_not_known_good(row: Row) -> None:
    view, other = row.theirs[0], row.theirs[1]
    queued.add(KEY, view, 2, STREAM)
    (kept,) = queued.of(KEY)
    for generation in (1, 2):
        queued.add(KEY, view, generation, STREAM)
        assert queued.of(KEY) == [kept]
    queued.add(KEY, other, 1, 8)
    queued.add(KEY, view, 3, STREAM)
    assert [(wait.view, wait.generation, wait.stream, wait.key) for wait in queued.of(KEY)] == [
        (view, 3, STREAM, KEY),
        (other, 1, 8, KEY),
    ]
    latest = queued.of(KEY)[0]
    latest.verdict = True
    queued.add(KEY, view, 1, STREAM)
    assert queued.of(KEY)[0].generation == 1
    assert queued.of(KEY + 1) == []
    queued.drop([kept, latest])
    assert len(queued.of(KEY)) == 2, "these had left it before"
    queued.drop(queued.of(KEY))
    assert queued.lists == {}


def test_lists_of_streams_that_nobody_records_on_are_swept_once_there_are_many(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued._table, "_sweep_at", 64)
    row.complete(0, 1)
    row.record(1, 1)
    for key in range(40):
        queued.add(key, row.theirs[0], 1, STREAM)
    for key in range(40, 66):
        queued.add(key, row.theirs[1], 1, STREAM)
    assert len(queued.lists) == 26
    for key in range(66, 200):
        queued.add(key, row.theirs[1], 1, STREAM)
    assert len(queued.lists) == 160
    assert {wait.view for wait in queued.everything()} == {row.theirs[1]}


def test_what_is_lost_of_an_event_that_is_let_go_of_still_spoils_its_stream(row: Row) -> None:
    view = row.theirs[0]
    lost, good, open_one = row.wait(0, 3), row.wait(0, 1), row.wait(1)
    row.complete(0, 1)
    for wait, key in ((lost, 1), (good, 2), (open_one, 2)):
        queued.add(key, wait.view, wait.generation, STREAM)
    (kept,) = queued.of(1)
    assert kept.known() is None
    row.board.slot(0).break_at(BASE + 1)
    assert [wait.generation for wait in queued.waits_on(view)] == [3, 1]
    view.close()
    assert view.try_release()
    (left,) = queued.of(1)
    assert (left.key, left.stream, left.generation, left.label) == (1, STREAM, 3, "generation 3 of 'e0'")
    assert isinstance(left.verdict, Loss)
    assert left.known() is left.verdict
    assert not left.is_for(view)
    assert [wait.view for wait in queued.of(2)] == [row.theirs[1]]
    assert queued.waits_on(view) == []
    queued.drop([left])
    assert queued.of(1) == []


def test_a_wait_that_a_waiter_would_accept_is_good_for_its_recorder_too(row: Row) -> None:
    wait, view = row.wait(0, 2), row.theirs[0]
    assert wait.judged() is None
    assert not view.accepts(2)
    assert not view.accepts(3)
    row.board.slot(0).store_completed(BASE + 2)
    row.board.slot(0).store_behind(BASE + 1)
    row.board.slot(0).store_bits(1 << 3)
    row.board.slot(0).store_as_of(COUNT)
    row.board.session(3).set_state(EXPIRED)
    assert not view.accepts(2), "what it stands behind is open"
    assert wait.judged() is None
    row.board.session(3).set_state(1)
    assert view.accepts(2)
    assert view.known_complete == 2
    assert wait.judged() is True
    assert not row.mine.accepts(1), "of one's own, one's own judgement tells"


def test_a_dead_recorders_work_is_accepted_by_nobody(row: Row) -> None:
    view = row.theirs[0]
    row.complete(0, 1)
    row.board.slot(0).store_behind(BASE + 2)
    row.record(0, 2)
    row.kill(0)
    assert not view.accepts(2)
    assert view.fate(1) is True
    wait = Wait(view, 2, KEY, STREAM)
    loss = wait.judged()
    assert isinstance(loss, Loss)
    assert (loss.cause, loss.session) == ("died", "s0")


# --- what a view says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "cause", "reason", "lost_from"),
    [
        ("died", "died", None, 2),
        ("expired", "expired", None, 2),
        ("closed", "closed", None, 4),
        ("killed", "died", "bridge", 2),
        ("restarted", "died", "restarted", 2),
    ],
)
@pytest.mark.parametrize("node", ["", "two"])
def test_how_an_event_ended_is_how_its_open_generations_are_lost(
    row: Row, ends: str, cause: str, reason: str | None, lost_from: int, node: str
) -> None:
    view, line = row.view(0, node=node), row.board.slot(0)
    row.complete(0, 1)
    row.record(0, 3)
    assert [view.fate(generation) for generation in (1, 2, 3, 4)] == [True, None, None, None]
    if ends == "closed":
        line.finish(CLOSED)
    elif ends == "killed":
        row.kill(0)
    else:
        line.break_at(BASE + 1, has_expired=ends == "expired", reason="restarted" if ends == "restarted" else "")
    said = (node, reason) if node else ("", None)
    who = ("", 0) if node else ("s0", 4711)
    for generation in range(1, 5):
        fate = view.fate(generation)
        if generation < lost_from:
            assert fate is (True if generation == 1 else None)
            continue
        assert fate == Loss(cause, serial_of(0), *who, node=said[0], reason=said[1])  # type: ignore[arg-type]
        with pytest.raises(RecorderLost) as caught:
            view.synchronize(generation, 0)
        error = caught.value
        assert error.generation == generation
        assert error.event == "e0"
        if node and reason:
            assert isinstance(error, NodeLost)
            assert (error.node, error.reason) == ("two", reason)
            assert str(error).startswith(f"generation {generation} of 'e0' will never be complete: its node 'two' ")
        else:
            assert (error.cause, error.session, error.pid, error.over) == (cause, *who, None)
        assert str(error).endswith("; its data counts as never written: repeat the work on a new event")
    assert view.state == {"closed": "closed", "killed": "open"}.get(ends, "broken")


def test_what_was_found_lost_once_is_lost_whatever_the_board_says_later(row: Row) -> None:
    view = row.view(0)
    row.record(0, 3)
    row.kill(0)
    with pytest.raises(RecorderLost):
        view.synchronize(2, 0)
    row.complete(0, 3)
    row.board.words[row._owner(0)] = 1
    assert view.fate(1) is True
    assert isinstance(view.fate(2), Loss)
    assert view.completed == 1
    assert view.query(1)
    with pytest.raises(RecorderLost):
        view.query(2)


def test_a_view_knows_who_records_now(row: Row) -> None:
    view = row.view(0)
    assert view.recorder_is_alive()
    row.board.slot(0).set_recorder(0)
    assert view.recorder_is_alive()
    assert view._recorder() == ("", 0)
    with pytest.raises(
        WaitTimeout,
        match=r"^generation 1 of 'e0' was not recorded within 0 s: nobody has opened the event as its recorder "
        r"\(recorder=True\)$",
    ) as caught:
        view.synchronize(1, 0)
    assert (caught.value.event, caught.value.generation, caught.value.timeout) == ("e0", 1, 0)
    row.board.slot(0).set_recorder(serial_of(2))
    row.kill(0)
    assert view.recorder_is_alive()
    assert view._recorder() == ("s2", 4713)
    assert view.recorder == serial_of(2)
    with pytest.raises(WaitTimeout, match=r"^generation 1 of 'e0' was not recorded within 0.01 s$"):
        view.synchronize(1, 0.01)


def test_who_does_not_record_says_who_does(row: Row) -> None:
    stream = ipcsync.Stream()
    view = row.theirs[1]
    why = r"^this session did not open 'e1' with recorder=True; the session 's1' \(pid 4712\) records on it$"
    with pytest.raises(ipcsync.NotRecorder, match=why) as caught:
        view.record(stream._handle, 0, 1)
    assert (caught.value.event, caught.value.recorder, caught.value.pid) == ("e1", "s1", 4712)
    row.board.slot(1).set_recorder(0)
    with pytest.raises(ipcsync.NotRecorder, match=r"recorder=True; no session has so far$") as caught:
        view.record(stream._handle, 0, 1)
    assert (caught.value.event, caught.value.recorder, caught.value.pid) == ("e1", "", 0)


def test_a_nudge_goes_to_who_records_now_if_this_board_knows_it(row: Row) -> None:
    view = row.theirs[2]
    assert view._nudge_address() == row.board.session(2).nudge_address
    for serial in (0, 1 << 16 | row.board.sessions, 1 << 16 | 0xFFFF):
        row.board.slot(2).set_recorder(serial)
        assert view._nudge_address() == 0
    row.board.slot(2).set_recorder(1 << 16 | (row.board.sessions - 1))
    assert view._nudge_address() == row.board.session(row.board.sessions - 1).nudge_address


def test_a_deadline_is_counted_from_when_the_wait_began() -> None:
    assert deadline_of(None) == deadline_of(None, 5) == FOREVER
    assert deadline_of(0, 5) == 5
    assert deadline_of(1.5, 10**9) == 2_500_000_000
    assert deadline_of(1e9, 7) == deadline_of(1e30, 7) == deadline_of(math.inf, 7) == 7 + 10**18
    before = time.monotonic_ns()
    assert before + 10**9 <= deadline_of(1) <= time.monotonic_ns() + 10**9
    for wrong in (-1, -0.001, math.nan):
        with pytest.raises(ValueError, match=rf"^timeout is a number of seconds from 0 up, or None, not {wrong!r}$"):
            deadline_of(wrong)


def test_what_a_gpu_wrote_after_its_event_broke_is_not_on_the_board(row: Row) -> None:
    view, line = row.view(0), row.board.slot(0)
    row.complete(0, 2)
    line.break_at(BASE + 1)
    line.store_completed(layout.INT64_MAX)
    assert line.state == BROKEN
    assert [view._is_on_board(generation) for generation in (1, 2)] == [True, False]
    assert view.completed == 1


@pytest.mark.parametrize("is_over", [True, False, None])
def test_a_lost_recorders_error_says_whether_it_can_touch_anything_any_more(
    row: Row, monkeypatch: pytest.MonkeyPatch, is_over: bool | None
) -> None:
    view = row.view(0)
    row.record(0, 1)
    monkeypatch.setattr("ipcsync._board.liveness.Peer.is_over", lambda _: is_over)
    assert view.recorder_is_over() == is_over
    row.kill(0)
    with pytest.raises(RecorderLost) as caught:
        view.raise_if_over(1)
    assert caught.value.over is (True if is_over else None)
    assert row.view(0, node="two").recorder_is_over() is None
    assert row.mine.recorder_is_over() is None
    row.board.slot(1).set_recorder(0)
    assert row.theirs[1].recorder_is_over() is False
    row.extend(1, row.wait(2))
    row.kill(2)
    row.mine.publish_completed()
    with pytest.raises(RecorderLost) as caught:
        row.view(ME).query(1)
    assert (caught.value.cause, caught.value.over) == ("behind", None), "its recorder is not the one that ended"


def test_a_wait_for_a_record_looks_whether_the_recorder_lives(row: Row) -> None:
    view = row.theirs[0]
    row.kill(0)
    with pytest.raises(RecorderLost, match=r"^generation 2 of 'e0' will never be complete: its recorder 's0'"):
        view.await_recorded(2, time.monotonic_ns() + 30 * 10**9, 30)
    for call in (view.raise_if_over, view.check_liveness):
        with pytest.raises(RecorderLost) as caught:
            call(2)
        assert caught.value.generation == 2
    row.complete(1, 1)
    row.theirs[1].raise_if_over(2)
    row.board.slot(1).finish(CLOSED)
    row.theirs[1].raise_if_over(1)
    with pytest.raises(RecorderLost, match="closed the event before"):
        row.theirs[1].raise_if_over(2)
