"""The waits of a process, by stream: which are kept, which are good, and which spoil their stream."""

from __future__ import annotations

import pytest

import ipcsync
import ipcsync._drivers
from ipcsync._board import EXPIRED
from ipcsync._drivers import unwrap
from ipcsync._engines import queued
from ipcsync._engines.compiled import Wait
from ipcsync._engines.loss import Loss
from ipcsync.testing import StreamGate
from tests.kit.boards import store_bits
from tests.kit.until import until
from tests.unit.engines.chain_row import BASE, COUNT, KEY, STREAM, Row


def test_a_wait_listed_once_its_use_was_released_reads_no_other_uses_words(row: Row) -> None:
    """Nothing was queued for it: that is done under the lock of a use that is open."""
    row.record(0, 1)
    listed = queued.add(KEY, row.theirs[0], 1, STREAM)
    row.theirs[0].is_released = True
    row.board.slot(0).break_at(BASE)
    assert listed.known() is True


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
    assert queued.everything() == []


def test_a_wait_that_another_stream_of_the_list_did_not_get_does_not_stand_for_this_ones(row: Row) -> None:
    interrupted = queued.add(KEY, row.theirs[0], 2, STREAM)
    assert queued.add(KEY, row.theirs[0], 1, 8) is interrupted
    other = queued.add(KEY, row.theirs[0], 2, 8)
    assert (other is not interrupted, other.stream, queued.of(KEY)) == (True, 8, [other])
    other.is_queued = True
    assert queued.add(KEY, row.theirs[0], 2, STREAM) is other


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
    left = [wait.view for wait in queued.everything()]
    assert left.count(row.theirs[1]) == 100
    assert len(left) < 4000, "what is known good is forgotten"


def test_what_is_lost_of_an_event_that_is_released_still_spoils_its_stream(row: Row) -> None:
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
    row.board.slot(0).behind = BASE + 1
    store_bits(row.board.slot(0), 1 << 3)
    row.board.slot(0).as_of = COUNT
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
    row.board.slot(0).behind = BASE + 2
    row.record(0, 2)
    row.kill(0)
    assert not view.accepts(2)
    assert view.fate(1) is True
    wait = Wait(view, 2, KEY, STREAM)
    loss = wait.judged()
    assert isinstance(loss, Loss)
    assert (loss.cause, loss.session) == ("died", "s0")


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
        (lost,) = queued.of(-1)
        assert isinstance(lost.known(), Loss)
        assert not other.query() or lost.is_passed(theirs)
        assert not lost.is_passed(mine), "a silent pass"
        gate.open()
        until(lambda: lost.is_passed(mine), "the held stream is past it")
    queued.drop([lost])
    assert queued.everything() == []


def test_a_listed_wait_stands_for_that_of_another_stream_of_its_list_too(row: Row) -> None:
    view = row.theirs[0]
    queued.add(KEY, view, 1, 8)
    queued.add(KEY, view, 2, STREAM)
    (listed,) = queued.of(KEY)
    assert (listed.generation, listed.since, listed.stream, set(listed.others)) == (2, 1, STREAM, {8})


def test_a_lost_wait_that_is_set_aside_leaves_the_others_of_its_place(row: Row) -> None:
    view = row.theirs[0]
    lost = queued.add(KEY, view, 1, STREAM)
    lost.verdict = Loss("died", 0, "s0", 4711)
    queued.set_aside([lost])
    queued.add(KEY, view, 5, STREAM)
    queued.drop([lost])
    assert [wait.generation for wait in queued.of(KEY)] == [5]
