"""How a recorder judges what its records stand behind: what counts, what is lost, and whose end caused it."""

from __future__ import annotations

import time

import pytest

from ipcsync._board import EXPIRED
from ipcsync._engines.loss import Loss
from ipcsync.errors import RecorderLost
from tests.kit.boards import store_bits
from tests.kit.until import until
from tests.unit.engines.chain_row import BASE, COUNT, ME, Row, serial_of


def test_what_is_complete_while_all_live_counts_with_what_it_waited_for_on_its_stream(row: Row) -> None:
    mine, others, later = row.wait(0), row.wait(1, stream=8), row.wait(2)
    row.extend(1, mine, others)
    row.extend(2, mine, others)
    row.extend(3, mine, others, later)
    row.extend(4, mine, others, later, stream=0)
    assert row.chain.resolve(row.mine, 0) == 0
    assert row.chain.resolve(row.mine, 1) == 1
    assert [wait.outcome for wait in (mine, others, later)] == [True, None, None]
    row.chain.store(row.mine)
    assert row.open_ones == [(2, 4, 0b1), (2, 4, 0b10), (3, 4, 0b100)]
    assert row.told == (2, 0b111)
    assert row.chain.resolve(row.mine, 3) == 3
    assert (others.outcome, later.outcome) == (None, True)
    row.chain.store(row.mine)
    assert row.told == (4, 0b111)
    assert row.chain.resolve(row.mine, 4) == 4
    row.chain.store(row.mine)
    assert row.told == (0, 0)
    assert row.line.first_dependent == 0
    assert not row.mine.chain.is_needed
    assert row.line.lost == 0


def test_what_was_resolved_and_not_stored_is_stored_by_the_next_look(row: Row) -> None:
    row.extend(1, row.wait(0))
    row.mine._recorded = 1
    row.line.store_completed(BASE + 1)
    assert row.chain.resolve(row.mine, 1) == 1
    assert (row.open_ones, row.told) == ([], (1, 0b1)), "as an exception leaves it that comes before the store"
    row.mine.publish_completed()
    assert row.told == (0, 0)


def test_what_is_complete_beyond_the_open_ones_counts_up_to_them(row: Row) -> None:
    row.extend(3, row.wait(0))
    row.board.session(0).state = EXPIRED
    assert row.chain.resolve(row.mine, 1) == 1
    assert row.chain.resolve(row.mine, 7) == 2
    assert row.open_ones == [(3, 3, 0b1)]


def test_only_complete_records_that_others_have_to_judge_first_are_looked_at_again_soon(row: Row) -> None:
    """Whoever judges what they stand behind tells nobody."""
    row.extend(1, row.wait(0))
    row.board.session(0).state = EXPIRED
    assert row.chain.resolve(row.mine, 0) == 0
    assert not row.chain.is_due, "it is not complete"
    assert row.chain.resolve(row.mine, 1) == 0
    assert row.chain.is_due
    row.complete(0, 1)
    assert row.chain.resolve(row.mine, 1) == 1
    assert not row.chain.is_due
    row.extend(2, row.wait(1))
    row.kill(1)
    assert row.chain.resolve(row.mine, 2) == 1
    assert row.chain.loss is not None
    assert not row.chain.is_due, "nobody has to judge any more"


def test_one_whose_witness_left_is_judged_by_what_it_waited_for(row: Row) -> None:
    first, second = row.wait(0), row.wait(1)
    row.extend(1, first)
    row.extend(2, first)
    row.extend(3, first, second)
    row.board.session(0).state = EXPIRED
    row.board.session(1).state = EXPIRED
    assert row.chain.resolve(row.mine, 3) == 0
    assert row.open_ones == [(1, 3, 0b1), (3, 3, 0b10)]
    asked = [view.slice_ns for view in row.theirs]
    assert asked == [1_000_000, 1_000_000, 50_000_000, 50_000_000], "the recorders of what is open are woken"
    row.complete(0, 1)
    assert row.chain.resolve(row.mine, 1) == 1
    assert row.open_ones == [(2, 3, 0b1), (3, 3, 0b10)]
    assert row.chain.resolve(row.mine, 3) == 2
    assert row.open_ones == [(3, 3, 0b10)]
    row.complete(1, 1)
    assert row.chain.resolve(row.mine, 2) == 2
    assert row.open_ones == [(3, 3, 0b10)]
    assert row.chain.resolve(row.mine, 3) == 3
    assert (row.chain.loss, row.chain.lost_from, row.chain.wants_break) == (None, 0, False)


def test_a_loss_is_told_with_whose_end_it_was_and_asked_for_once_all_before_it_is_settled(row: Row) -> None:
    first, second = row.wait(0), row.wait(1)
    row.extend(2, first)
    row.extend(3, second)
    row.extend(4, first, second)
    row.kill(1)
    assert row.chain.resolve(row.mine, 1) == 1
    assert row.chain.loss == Loss("behind", serial_of(1), "s1", 4712, row.chain.loss.root if row.chain.loss else "")
    assert (row.chain.lost_from, row.chain.wants_break) == (3, False)
    row.chain.store(row.mine)
    assert (row.line.lost, row.line.root_cause) == (BASE + 3, serial_of(1))
    assert [row.mine.is_lost(generation) for generation in (2, 3, 4)] == [False, True, True]
    row.complete(0, 1)
    assert row.chain.resolve(row.mine, 4) == 2
    assert row.chain.wants_break
    assert row.mine.chain.is_needed
    row.chain.store(row.mine)
    assert row.told[0] == 3
    with pytest.raises(RecorderLost, match="whose recorder 's1'"):
        row.extend(5)


def test_a_later_death_may_lose_an_earlier_record_and_never_takes_a_loss_back(row: Row) -> None:
    first, second = row.wait(0), row.wait(1)
    row.extend(2, first)
    row.extend(3, second)
    row.kill(1)
    row.chain.resolve(row.mine, 1)
    row.chain.store(row.mine)
    assert (row.line.lost, row.line.root_cause) == (BASE + 3, serial_of(1))
    row.kill(0)
    assert row.chain.resolve(row.mine, 1) == 1
    row.chain.store(row.mine)
    assert (row.chain.lost_from, row.chain.wants_break) == (2, True)
    assert (row.line.lost, row.line.root_cause) == (BASE + 2, serial_of(0))


def test_a_loss_behind_a_loss_names_the_first_one(row: Row) -> None:
    root, line = "generation 1 of 'x', whose recorder 'x' (pid 1) died", row.board.slot(0)
    store_bits(line, 0b100)
    line.valid_as_of = COUNT
    line.first_dependent = BASE + 1
    row.extend(1, row.wait(0))
    assert row.told == (1, 0b101)
    row.kill(2)
    line.lose(BASE + 1, serial_of(2))
    row.chain.resolve(row.mine, 0)
    assert row.chain.loss == Loss("behind", serial_of(2), "s2", 4713, "generation 1 of 'e0'")
    assert Loss("behind", 1, "x", 1, root).behind("generation 7 of 'e9'").root == root


@pytest.mark.parametrize("known", ["good", "open", "lost"])
@pytest.mark.parametrize("is_accepted", [True, False])
def test_of_an_open_wait_the_driver_is_asked_and_what_is_known_stays(row: Row, known: str, is_accepted: bool) -> None:
    asked: list[int] = []

    def accepts(generation: int) -> bool:
        asked.append(generation)
        return is_accepted

    wait = row.wait(2, 3)
    row.theirs[2].accepts = row.theirs[1].accepts = accepts
    if known == "good":
        row.complete(2, 3)
    elif known == "lost":
        row.kill(2)
    before = wait.known_outcome()
    assert (before is True, isinstance(before, Loss)) == (known == "good", known == "lost")
    expected = True if before is None and is_accepted else before
    assert wait.resolved() is wait.outcome is expected
    assert asked == ([3] if known == "open" else [])
    row.extend(1, row.wait(1))
    row.board.session(1).state = EXPIRED
    row.chain.resolve(row.mine, 1)
    assert asked[-1:] == [1]
    assert row.chain.entries == {} if is_accepted else row.open_ones == [(1, 1, 0b10)]


def test_each_of_those_that_are_named_must_live(row: Row) -> None:
    row.line.valid_as_of = COUNT
    for bits in (0b1, 0b11, 0b101, 0b1111):
        store_bits(row.line, bits)
        assert row.good_bits(ME) == bits
        assert row.good_bits(0) is None, "of its own it tells nothing"
    row.kill(0)
    for bits in (0b1, 0b11, 0b101, 0b1111):
        store_bits(row.line, bits)
        assert row.good_bits(ME) is None
    store_bits(row.line, 0b1110)
    assert row.good_bits(ME) == 0b1110


def test_a_recorder_is_asked_more_and_more_seldom_and_often_again_later(row: Row) -> None:
    slices, longest = list[int](), 50_000_000
    row.extend(1, row.wait(0))
    row.kill(0)

    def has_slept_longest() -> bool:
        assert not row.mine.is_clear(1)
        slices.append(row.mine.slice_ns)
        return slices[-1] == longest

    until(has_slept_longest, "seldom")
    assert slices[0] == 1_000_000, "never shorter, though the first look is due sooner"
    allowed = [1_000_000, 1_600_000, 3_200_000, 6_400_000, 12_800_000, 25_600_000, longest]
    assert set(slices) <= set(allowed)
    last = time.monotonic_ns()
    assert not row.mine.is_clear(1)
    assert row.mine.slice_ns == longest or time.monotonic_ns() > last + longest, "left in peace for so long"
    until(lambda: time.monotonic_ns() > last + 3 * longest, "it was asked long ago")
    assert not row.mine.is_clear(1)
    assert row.mine.slice_ns == 1_000_000
    store_bits(row.line, 0)
    assert row.mine.is_clear(1)
    assert row.mine.slice_ns == longest


def test_what_ends_proves_no_wait_that_was_not_queued_before_it(row: Row) -> None:
    """Of another thread that is about to queue it, or of one that an exception kept from the driver."""
    late, early = row.wait(0), row.wait(1)
    late.is_queued = False
    row.extend(1, late, early)
    late.is_queued = True
    row.extend(2, late, early)
    row.chain.resolve(row.mine, 1)
    assert (late.outcome, early.outcome) == (None, True)
    assert row.open_ones == [(2, 2, 0b1), (2, 2, 0b10)]
    row.kill(0)
    row.chain.resolve(row.mine, 2)
    assert row.chain.lost_from == 2
