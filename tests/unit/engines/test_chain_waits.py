"""The waits of a process, by stream: which are kept, which are good, and which spoil their stream."""

from __future__ import annotations

import pytest

import ipcsync
import ipcsync._drivers
from ipcsync._board import EXPIRED, layout
from ipcsync._drivers import unwrap
from ipcsync._engines import queued
from ipcsync._engines.core import release
from ipcsync._engines.loss import Loss
from ipcsync._linux.futex import OWNER_DIED
from ipcsync.testing import StreamGate
from tests.kit.boards import store_bits
from tests.kit.until import until
from tests.unit.engines.chain_row import BASE, COUNT, KEY, STREAM, Row, unlisted


def test_a_wait_listed_once_its_use_was_released_reads_no_other_uses_words(row: Row) -> None:
    """Nothing was queued for it: that is done under the lock of a use that is open."""
    row.record(0, 1)
    listed = queued.add(KEY, row.theirs[0], 1, STREAM)
    row.theirs[0].is_released = True
    row.board.slot(0).break_at(BASE)
    assert listed.known_outcome() is True


def test_a_stream_keeps_each_wait_that_is_not_known_good_and_its_record_stands_behind_the_last(row: Row) -> None:
    view, other = row.theirs[0], row.theirs[1]
    second = queued.add(KEY, view, 2, STREAM)
    for _ in range(2):
        assert queued.add(KEY, view, 2, STREAM) is second
    first = queued.add(KEY, view, 1, STREAM)
    assert queued.of(KEY) == [first, second]
    assert queued.add(KEY, view, 1, STREAM) is first
    others = queued.add(KEY, other, 1, 8)
    third = queued.add(KEY, view, 3, STREAM)
    assert queued.of(KEY) == [first, second, third, others]
    assert queued.latest(KEY) == [third, others]
    assert queued.of(KEY + 1) == queued.latest(KEY + 1) == []
    queued.drop([third])
    assert queued.latest(KEY) == [second, others]
    queued.drop([third, *queued.of(KEY)])
    assert queued.of(None) == []


def test_what_is_known_good_makes_room_for_later_waits(row: Row) -> None:
    view = row.theirs[0]
    made = [queued.add(KEY, view, generation, STREAM) for generation in (1, 2, 3)]
    row.complete(0, 2)  # on the board: nobody has asked
    fourth = queued.add(KEY, view, 4, STREAM)
    assert queued.of(KEY) == [made[2], fourth]
    assert [wait.outcome for wait in made] == [True, True, None]


def test_each_stream_of_a_list_has_its_own_wait(row: Row) -> None:
    interrupted = queued.add(KEY, row.theirs[0], 2, STREAM)
    other = queued.add(KEY, row.theirs[0], 2, 8)
    other.is_queued = True
    assert (interrupted.is_queued, queued.latest(KEY)) == (False, [interrupted, other])


def test_the_blocking_streams_of_a_device_share_a_list_that_is_no_streams_own() -> None:
    driver = ipcsync._drivers.load()
    own = ipcsync.Stream()  # makes a context current
    assert queued.list_of(own._handle, 0) == unwrap(driver.cuStreamGetId(own._handle), "cuStreamGetId")
    blocking = unwrap(driver.cuStreamCreate(0), "cuStreamCreate")
    try:
        assert queued.list_of(blocking, 0) == queued.list_of(driver.CUstream(0), 0) == -1
    finally:
        unwrap(driver.cuStreamDestroy(blocking), "cuStreamDestroy")


def test_lists_of_streams_that_nobody_records_on_are_swept_once_there_are_many(row: Row) -> None:
    row.complete(0, 1)
    row.record(1, 1)
    for key in range(100):
        queued.add(key, row.theirs[1], 1, STREAM)
    for key in range(100, 5000):
        queued.add(key, row.theirs[0], 1, STREAM)
    row.mine.record(ipcsync.Stream()._handle, 0, 1)
    left = [wait.view for wait in queued.of(None)]
    assert left == [row.theirs[1]] * 100, "what is known good is forgotten"


def test_what_is_lost_of_an_event_that_is_released_still_spoils_its_stream(row: Row) -> None:
    view = row.theirs[0]
    lost, good, open_one = row.wait(0, 3), row.wait(0, 1), row.wait(1)
    row.complete(0, 1)
    for wait, key in ((lost, 1), (good, 2), (open_one, 2)):
        queued.add(key, wait.view, wait.generation, STREAM)
    (kept,) = queued.of(1)
    assert kept.known_outcome() is None
    row.board.slot(0).break_at(BASE + 1)
    assert [wait.generation for wait in queued.of(None) if wait.view is view] == [3, 1]
    view.close()
    assert view.try_release()
    (left,) = queued.of(1)
    assert (left.key, left.stream, left.generation, left.label) == (1, STREAM, 3, "generation 3 of 'e0'")
    assert isinstance(left.outcome, Loss)
    assert left.known_outcome() is left.outcome
    assert left.view is not view
    assert left is not kept
    assert [wait.view for wait in queued.of(2)] == [row.theirs[1]]
    assert all(wait.view is not view for wait in queued.of(None))
    queued.drop([left])
    assert queued.of(1) == []


def test_a_release_that_memory_runs_out_in_forgets_no_lost_wait(row: Row) -> None:
    """Wherever it runs out, the next try goes on with what is left."""
    testing = pytest.importorskip("_testcapi")
    view = row.theirs[0]
    for wait, key in ((row.wait(0, 3), 1), (row.wait(0, 5), 1), (row.wait(0, 3), 2)):
        queued.add(key, wait.view, wait.generation, STREAM).is_queued = True
    row.board.slot(0).break_at(BASE)
    waits = queued.of(None)
    assert all(isinstance(wait.known_outcome(), Loss) for wait in waits)
    for number in range(1000):
        testing.set_nomemory(number, number + 1)
        try:
            release(view)
        except MemoryError:
            pass
        finally:
            testing.remove_mem_hooks()
        assert max(wait.generation for wait in queued.latest(1)) == 5
        if all(wait.view is not view for wait in queued.of(None)):
            break
    left = sorted(queued.of(None), key=lambda wait: (wait.key, wait.generation))
    assert [(wait.key, wait.generation) for wait in left] == [(1, 3), (1, 5), (2, 3)]
    assert all(wait.stream == STREAM and isinstance(wait.outcome, Loss) and wait.is_queued for wait in left)
    queued.drop(left)


def test_a_wait_that_a_waiter_would_accept_is_good_for_its_recorder_too(row: Row) -> None:
    wait, view = row.wait(0, 2), row.theirs[0]
    assert wait.resolved() is None
    assert not view.accepts(2)
    assert not view.accepts(3)
    row.board.slot(0).store_completed(BASE + 2)
    row.board.slot(0).first_dependent = BASE + 1
    store_bits(row.board.slot(0), 1 << 3)
    row.board.slot(0).valid_as_of = COUNT
    row.board.session(3).state = EXPIRED
    assert not view.accepts(2), "what it stands behind is open"
    assert wait.resolved() is None
    row.board.session(3).state = 1
    assert view.accepts(2)
    assert view.known_complete == 2
    assert wait.resolved() is True
    assert not row.mine.accepts(1), "of one's own, one's own judgement tells"


def test_a_dead_recorders_work_is_accepted_by_nobody(row: Row) -> None:
    view = row.theirs[0]
    row.complete(0, 1)
    row.board.slot(0).first_dependent = BASE + 2
    row.record(0, 2)
    row.kill(0)
    assert not view.accepts(2)
    assert view.outcome_of(1) is True
    wait = unlisted(view, 2)
    loss = wait.resolved()
    assert isinstance(loss, Loss)
    assert (loss.cause, loss.session) == ("died", "s0")


@pytest.mark.parametrize("end", ["stopped", "died"])
def test_what_depends_on_a_session_that_lives_counts_until_the_coordinator_is_over(
    row: Row, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Then nobody would say that a session is lost, and those that wait for it go on: its records are made too."""
    view, line = row.theirs[1], row.board.slot(1)
    line.valid_as_of, line.first_dependent = COUNT, BASE + 2
    store_bits(line, 0b1)
    row.complete(1, 2)
    known = view.known_complete
    words = {
        "stopped": (layout.H_STATE, layout.STOPPED),
        "died": (layout.H_OWNER, row.board.words[layout.H_OWNER] | OWNER_DIED),
    }
    at, value = words[end]
    row.board.words[at] = value
    monkeypatch.setattr(row.guard, "coordinator_is_alive", lambda: False)
    outcome = view.outcome_of(2)
    assert isinstance(outcome, Loss)
    assert (outcome.cause, known, view.outcome_of(1)) == ("orphaned", 0, True)


def test_what_a_lost_coordinator_leaves_is_passed_once_every_stream_is_past_it(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is released then although its queued waits are pending."""
    view, held, other = row.theirs[0], ipcsync.Stream(), ipcsync.Stream()
    row.record(0, 1)
    theirs, mine = (queued.list_of(stream._handle, 0) for stream in (held, other))
    with StreamGate(held) as gate:
        for stream, key in ((held, theirs), (other, mine)):
            queued.add(-1, view, 1, key).is_queued = True  # as of blocking streams
            view.wait(1, stream, 1, False)
            queued.drop(queued.of(key))
        monkeypatch.setattr(row.guard, "coordinator_is_alive", lambda: False)
        view.close()
        assert view.try_release()
        lost, _ = queued.of(-1)
        assert lost.stream == theirs
        assert isinstance(lost.known_outcome(), Loss)
        assert not lost.view.has_passed(theirs), "a silent pass"
        gate.open()
        until(lambda: lost.view.has_passed(theirs), "the held stream is past it")
    queued.drop(queued.of(-1))
    assert queued.of(None) == []
