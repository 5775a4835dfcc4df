"""What a recorder notes of what its records stand behind, and whom a wait depends on."""

from __future__ import annotations

from typing import Any

import pytest

from ipcsync._board import EXPIRED, Board
from ipcsync._engines import queued
from ipcsync.errors import RecorderLost
from tests.kit.boards import store_bits
from tests.unit.engines.chain_row import BASE, COUNT, KEY, ME, OWN, STREAM, Row, serial_of, unlisted


def _entries(row: Row) -> list[tuple[object, ...]]:
    return [(entry.wait, entry.first, entry.last, entry.proof, entry.bits) for entry in row.chain.entries.values()]


# --- before a record --------------------------------------------------------------------------------------------------


def test_a_record_tells_the_board_whom_it_stands_behind_and_as_of_when(row: Row) -> None:
    waits = row.wait(0), row.wait(2)
    row.board.newest = 9
    row.extend(1, *waits)
    assert _entries(row) == [(waits[0], 1, 1, 1, 0b001), (waits[1], 1, 1, 1, 0b100)]
    assert row.told == (1, 0b101)
    assert row.line.valid_as_of == 9
    assert row.mine.chain.is_needed
    assert row.mine.first_unsettled() == 1
    assert not row.theirs[0].first_unsettled()


def test_each_wait_is_one_entry_for_all_records_behind_it(row: Row) -> None:
    waits = row.wait(0), row.wait(1)
    row.extend(3, *waits)
    row.extend(4, *waits)
    row.extend(5, *waits)
    assert row.open_ones == [(3, 5, 0b1), (3, 5, 0b10)]
    row.extend(6, *waits, row.wait(2))
    row.extend(7, *waits, stream=8)
    assert row.open_ones == [(3, 7, 0b1), (3, 7, 0b10), (6, 6, 0b100)]
    assert row.told == (3, 0b111)


def test_a_record_that_failed_and_is_repeated_on_another_stream_proves_no_wait_of_the_first(row: Row) -> None:
    wait, later = row.wait(0), row.wait(1)
    row.extend(1, wait)
    row.extend(2, wait, later)
    assert [entry.proof for entry in row.chain.entries.values()] == [1, 2]
    for again in ((), (later,)):
        row.extend(2, *again, stream=STREAM if again else 8)
        first, second = row.chain.entries.values()
        assert (first.first, first.last, first.proof) == (1, 2, 1)
        assert (second.first, second.last, second.proof > 1000) == (2, 2, True)
    row.extend(3, stream=8)
    assert len(row.chain.entries) == 2
    row.extend(4, later)
    third = row.chain.entries[later]
    assert (second.last, third.first, third.last, third.proof) == (2, 4, 4, 4)


def test_what_is_good_already_is_stood_behind_by_nothing_and_leaves_its_list(row: Row) -> None:
    row.complete(0, 2)
    queued.add(KEY, row.theirs[0], 2, STREAM)
    queued.add(KEY, row.theirs[1], 1, STREAM).is_queued = True
    row.record(1, 1)
    good, pending = queued.of(KEY)
    row.extend(1, row.wait(0, 1))
    assert (row.told, row.chain.entries, row.mine.chain.is_needed) == ((0, 0), {}, False)
    row.extend(2, good, pending)
    assert _entries(row) == [(pending, 2, 2, 2, 0b10)]
    assert queued.of(KEY) == [pending]


def test_a_wait_for_the_very_event_is_nothing_to_stand_behind(row: Row) -> None:
    row.line.publish(BASE + 1)
    row.extend(2, unlisted(row.mine, 1))
    assert (row.told, row.chain.entries) == ((0, 0), {})
    row.extend(3, row.wait(0))
    row.extend(4, unlisted(row.mine, 3))
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
    assert (row.told, row.chain.entries) == ((0, 0), {})


def test_a_record_that_failed_and_is_made_again_stands_behind_what_either_did(row: Row) -> None:
    first, second, third = row.wait(0), row.wait(1), row.wait(2)
    row.extend(1, first)
    row.extend(2, first)
    row.extend(2, second)
    assert row.open_ones == [(1, 2, 0b1), (2, 2, 0b10)]
    row.extend(3, third)
    row.extend(3, first, stream=8)
    assert row.open_ones == [(1, 3, 0b1), (2, 2, 0b10), (3, 3, 0b100)]
    assert row.told == (1, 0b111)


def test_what_was_good_of_others_and_is_not_any_more_only_the_recorder_can_tell(row: Row) -> None:
    row.extend(1, row.wait(0))
    row.board.session(0).state = EXPIRED
    row.extend(2, row.wait(1))
    assert row.open_ones == [(1, 1, 0b1 | OWN), (2, 2, 0b10)]
    assert row.good_bits(ME) is None
    row.complete(1, 1)
    row.chain.resolve(row.mine, 2)
    assert row.open_ones == [(1, 1, 0b1 | OWN)], "the second one is settled first: who is meant stays the recorder's"


def test_behind_what_only_the_recorder_can_tell_it_has_to_tell_of_all_that_follows(row: Row) -> None:
    row.extend(1, unlisted(row.view(0, node="two"), 1))
    row.extend(2, row.wait(1))
    assert row.open_ones == [(1, 1, OWN), (2, 2, 0b10)]


def test_a_session_that_came_later_is_good_only_for_who_looked_since(row: Row) -> None:
    row.extend(1, row.wait(0))
    assert row.good_bits(ME) == 0b1
    row.board.session(0).assign(9 << 16, 1, 0, 0, 1, "new")
    row.board.words[row._owner(0)] = 1
    assert row.good_bits(ME) is None
    row.line.valid_as_of = 9
    assert row.good_bits(ME) == 0b1
    assert row.good_bits(0) is None


# --- whom a wait depends on -------------------------------------------------------------------------------------------


def test_a_wait_depends_on_who_records_and_on_all_that_one_stands_behind(row: Row) -> None:
    wait = row.wait(1, 2)
    assert row.evidence(wait) == 0b10
    store_bits(row.board.slot(1), 0b1101)
    assert row.evidence(wait) == 0b10
    row.board.slot(1).valid_as_of = COUNT
    row.board.slot(1).first_dependent = BASE + 3
    assert row.evidence(wait) == 0b10, "what it waits for is of before"
    row.board.slot(1).first_dependent = BASE + 2
    assert row.evidence(wait) == 0b1111
    store_bits(row.board.slot(1), 0b0011)
    assert row.evidence(wait) == OWN, "it says itself that only it can tell"
    store_bits(row.board.slot(1), 0b1101)
    row.kill(3)
    assert row.evidence(wait) == OWN


@pytest.mark.parametrize("what", ["not recorded", "nobody's", "expired", "a mirror", "another board's"])
def test_where_the_board_says_too_little_only_the_recorder_can_tell(row: Row, what: str, board: Board) -> None:
    wait = row.wait(0)
    if what == "not recorded":
        row.record(0, 0)
    elif what == "nobody's":
        board.slot(0).recorder = 0
    elif what == "expired":
        board.session(0).state = EXPIRED
    elif what == "a mirror":
        wait = unlisted(row.view(0, node="two"), 1)
    else:

        class Elsewhere:
            epoch = b"another"

            def __getattr__(self, name: str) -> Any:
                return getattr(board, name)

        wait.view.board = Elsewhere()
    assert row.evidence(wait) == OWN


def test_another_event_of_the_same_session_counts_unless_it_stands_behind_something(row: Row) -> None:
    slot = row.board.slot(0)
    slot.recorder = serial_of(ME)
    wait = row.wait(0)
    row.extend(1, wait)
    assert (row.told, row.chain.entries) == ((0, 0), {})
    store_bits(slot, 0b110)
    slot.valid_as_of = COUNT
    slot.first_dependent = BASE + 1
    row.extend(2, wait)
    assert row.open_ones == [(2, 2, 0b110)]
    ahead = unlisted(row.theirs[0], 2)
    slot.first_dependent = 0
    row.extend(3, ahead)
    assert row.open_ones[1:] == [(3, 3, OWN)]
