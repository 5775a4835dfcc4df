"""The waits of a process, by stream: which are kept, which are good, and which spoil their stream."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

import ipcsync
import ipcsync._drivers
from ipcsync._board import EXPIRED
from ipcsync._drivers import unwrap
from ipcsync._engines import queued
from ipcsync._engines.loss import Loss
from ipcsync._engines.queued_wait import Wait
from ipcsync.testing import StreamGate
from tests.kit.until import until
from tests.unit.engines.chain_row import BASE, COUNT, KEY, STREAM, Row


def test_a_wait_listed_once_its_use_was_released_reads_no_other_uses_words(row: Row) -> None:
    """Nothing was queued for it: that is done under the lock of a use that is open."""
    row.record(0, 1)
    listed = queued.add(KEY, row.theirs[0], 1, STREAM)
    row.theirs[0]._is_released = True
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
    assert queued.lists == {}


def test_a_wait_that_another_stream_of_the_list_did_not_get_does_not_stand_for_this_ones(row: Row) -> None:
    interrupted = queued.add(KEY, row.theirs[0], 2, STREAM)
    assert queued.add(KEY, row.theirs[0], 1, 8) is interrupted
    other = queued.add(KEY, row.theirs[0], 2, 8)
    assert (other is not interrupted, other.stream, queued.of(KEY)) == (True, 8, [other])
    other.is_queued = True
    assert queued.add(KEY, row.theirs[0], 2, STREAM) is other


def test_the_blocking_streams_of_a_device_share_a_list_that_is_no_streams_own() -> None:
    driver = ipcsync._drivers.load()
    ipcsync.Stream()  # makes a context current
    blocking = unwrap(driver.cuStreamCreate(0), "cuStreamCreate")
    try:
        flags = unwrap(driver.cuStreamGetFlags(blocking), "cuStreamGetFlags")
        assert [queued.key_of(flags, STREAM, ordinal) for ordinal in (0, 1)] == [-1, -2]
    finally:
        unwrap(driver.cuStreamDestroy(blocking), "cuStreamDestroy")
    own = ipcsync.Stream()
    flags = unwrap(driver.cuStreamGetFlags(own._handle), "cuStreamGetFlags")
    assert queued.key_of(flags, STREAM, 0) == STREAM


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


def test_what_a_lost_coordinator_leaves_is_passed_once_every_stream_is_past_it(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is released then although its queued waits are pending."""
    view, held, other = row.theirs[0], ipcsync.Stream(), ipcsync.Stream()
    row.record(0, 1)
    mine, theirs = (view._id_of(stream._handle) for stream in (other, held))
    with StreamGate(held) as gate:
        for stream in (held, other):
            queued.add(-1, view, 1, view._id_of(stream._handle)).is_queued = True
            view._markers.add(stream._handle, view._id_of(stream._handle), 0)
        monkeypatch.setattr(row.guard, "coordinator_is_alive", lambda: False)
        monkeypatch.setattr(type(view), "_is_orphaned", True)
        view.close()
        assert view.try_release()
        (lost,) = queued.of(-1)
        assert isinstance(lost.known(), Loss)
        assert lost.is_passed(theirs) or not other.query()
        assert not lost.is_passed(mine), "a silent pass"
        gate.open()
        until(lambda: lost.is_passed(mine), "the held stream is past it")
    queued.drop([lost])
    assert queued.lists == {}


def _with_a_call_at(number: int, outer: Callable[[], object], inner: Callable[[], object]) -> bool:
    """Call `outer`, and `inner` within it at that line of `queued`, as a handler does; whether there is such a line."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != queued.__file__:
            return None
        count += event == "line"
        if count == number and event == "line":
            sys.settrace(None)
            inner()
        return trace

    before = sys.gettrace()
    gc.disable()  # an earlier test's chain ends in `queued` too, where no caller would get the exception
    sys.settrace(trace)
    try:
        outer()
    finally:
        sys.settrace(before)
        gc.enable()
    return count >= number


@pytest.mark.parametrize("first", ["nothing", "an earlier wait", "one of another stream"])
@pytest.mark.parametrize("call", ["wait", "drop", "release"])
def test_a_wait_within_any_change_of_the_lists_is_stood_behind(row: Row, call: str, first: str) -> None:
    """A signal's handler, or a finalizer, has the same stream wait while the lists are changed."""
    view, other = row.theirs[:2]
    row.record(0, 9)
    number = 0
    is_there = True
    while is_there:
        number += 1
        queued.lists.clear()
        queued.changed.clear()  # a wait within the last line of a change stays there until the next one
        if first != "nothing":
            queued.add(KEY, view, 1, STREAM if first == "an earlier wait" else 8).verdict = call == "drop" or None
        queued.add(KEY, other, 1, STREAM).verdict = True
        waits = queued.of(KEY)
        calls: dict[str, Callable[[], object]] = {
            "wait": partial(queued.add, KEY, view, 2, STREAM),
            "drop": partial(queued.drop, waits),
            "release": partial(queued.release, other),
        }
        is_there = _with_a_call_at(number, calls[call], partial(queued.add, KEY, view, 3, STREAM))
        if is_there:
            (kept,) = [wait for wait in queued.of(KEY) if wait.view is view]
            assert kept.generation == 3, number
            assert first != "one of another stream" or call == "drop" or 8 in (kept.stream, *kept.others)
    assert number > 10
    assert not queued.changed


def test_an_exception_at_any_line_while_lost_waits_are_set_aside_leaves_each_in_one_place(row: Row) -> None:
    """Else one of the two would stay, and its stream would be unusable for good."""
    view = row.theirs[0]
    number = 0
    is_there = True
    while is_there:
        number += 1
        queued.add(KEY, view, 1, STREAM).verdict = Loss("died", 0, "s0", 4711)
        try:
            is_there = _with_a_call_at(number, partial(queued.set_aside, queued.of(KEY)), _raise)
        except KeyboardInterrupt:
            is_there = True
        queued.release(view)
        (left,) = queued.of(KEY)
        queued.drop([left])
        assert queued.lists == {}, number
    assert number > 10


def _raise() -> None:
    raise KeyboardInterrupt
