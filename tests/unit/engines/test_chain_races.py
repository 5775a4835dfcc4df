"""The lists of waits while several threads, signals' handlers and exceptions meet in their changes.

What meets is called by a trace function, in front of the line that a test names.
"""

from __future__ import annotations

import dis
import linecache
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

import ipcsync
from ipcsync._board import CLOSED
from ipcsync._engines import TimelineEngine, queued
from ipcsync._engines.loss import Loss
from ipcsync._engines.queued_wait import Wait
from ipcsync.errors import RecorderLost, Reentered
from ipcsync.testing import StreamGate
from tests.unit.engines.chain_row import KEY, STREAM, Row
from tests.unit.engines.test_engine_chains import Chain, _serial, chain

__all__ = ["chain"]

_LOST = Loss("died", 0, "s0", 4711)


class _Meeting:
    """Calls functions within others: each in front of a line of a file, in this order."""

    def __init__(self, *steps: tuple[str, Callable[[], object]], file: str = "queued.py", skip: int = 0) -> None:
        self._left, self._file, self._skip = list(steps), file, skip

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        assert self._left == []

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(self._file) or not self._left:
            return None
        line, function = self._left[0]
        if event == "line" and line in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            if self._skip == 0:
                del self._left[0]
                sys.settrace(None)
                function()
                if sys.gettrace() is None:
                    sys.settrace(self._trace)
            else:
                self._skip -= 1
        return self._trace


def _raise() -> None:
    raise KeyboardInterrupt


def _before_the_store(function: Callable[[], object]) -> None:
    """Have `function` called before the next store into a list, between two instructions of one line."""
    code = queued._Table._put.__code__
    stores = {each.offset for each in dis.get_instructions(code) if each.opname == "STORE_SUBSCR"}

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in stores:
            sys.settrace(None)
            function()
            return None
        return trace

    sys.settrace(trace)


def _in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _resume(key: int) -> None:
    """As `Client.resume`, on a stream that is past everything."""
    for _ in range(5):
        lost = [wait for wait in queued.of(key) if isinstance(wait.known(), Loss)]
        if not lost:
            return
        queued.set_aside(lost)
        queued.drop(lost)
    raise AssertionError("what is lost does not leave the list")


def _key(stream: ipcsync.Stream) -> int:
    return queued.list_of(stream._handle, 0)


# --- a wait in whose place another one is listed ----------------------------------------------------------------------


@pytest.mark.parametrize("by", ["record", "record_all"])
def test_what_a_record_has_looked_at_is_judged_though_another_wait_took_its_place(chain: Chain, by: str) -> None:
    """Its recorder dies, and its use is released, between the look and the record."""
    stream, gate = chain.stream, StreamGate(chain.held)
    chain.record(chain.a, chain.held)
    chain.mine.wait(1, stream, 1, False)
    gathered = queued.Gathered()
    gathered.add(None)
    waits = gathered.waits() if by == "record_all" else chain.b.chain.listed(_key(stream))
    chain.record(chain.a, chain.held)
    chain.mine.wait(2, stream, 1, False)
    if by == "record":
        del gathered
    chain.kill(0)
    chain.board.slot(0).break_at(0)
    gate.open()
    chain.held.synchronize()
    chain.release(0)
    stream.synchronize()
    chain.mine.close()
    assert chain.mine.try_release()
    with pytest.raises(RecorderLost):
        chain.b.chain.extend(1, 5, waits)


def _record_behind(chain: Chain, count: int, *waited: int) -> None:
    """Records that stand behind others, so that only their recorder can judge them; the stream waits for some."""
    line = chain.board.slot(0)
    for _ in range(count):
        chain.record(chain.a, chain.held)
    line.store_bits(1 << 5)  # of a session that is over
    line.store_as_of(2)
    line.store_behind(1)
    for generation in waited:
        chain.mine.wait(generation, chain.stream, 1, False)


def test_an_earlier_generation_that_is_open_is_still_waited_for_when_a_later_one_is_forgotten(chain: Chain) -> None:
    """The later record stands behind more than the earlier one, whose own fate is judged later."""
    stream, line = chain.stream, chain.board.slot(0)
    with StreamGate(chain.held):
        _record_behind(chain, 2, 1, 2)
        line.lose(2, _serial(1))
    stream.synchronize()
    _resume(_key(stream))
    assert [(wait.generation, wait.is_queued) for wait in queued.of(_key(stream))] == [(1, True)]
    line.lose(1, _serial(1))
    with pytest.raises(RecorderLost):
        chain.record(chain.b, stream)
    _resume(_key(stream))
    assert chain.record(chain.b, stream) == 1


def test_what_a_stream_did_not_wait_for_is_not_waited_for_when_a_later_one_is_forgotten(chain: Chain) -> None:
    stream, line = chain.stream, chain.board.slot(0)
    with StreamGate(chain.held):
        _record_behind(chain, 5, 5, 3)
        line.lose(4, _serial(1))
    stream.synchronize()
    _resume(_key(stream))
    assert [wait.generation for wait in queued.of(_key(stream))] == [3]
    line.lose(3, _serial(1))
    _resume(_key(stream))
    assert queued.of(_key(stream)) == []
    chain.mine.close()
    assert chain.mine.try_release()


def test_what_is_kept_stands_for_all_that_the_forgotten_one_stood_for(chain: Chain) -> None:
    stream, line = chain.stream, chain.board.slot(0)
    with StreamGate(chain.held):
        _record_behind(chain, 5, 1, 5)
        for lost, kept in ((5, 4), (3, 2), (2, 1)):
            line.lose(lost, _serial(1))
            _resume(_key(stream))
            assert [(wait.generation, wait.since) for wait in queued.of(_key(stream))] == [(kept, 1)]


def test_a_wait_stands_for_an_earlier_one_of_a_handler_that_it_overwrites(row: Row) -> None:
    view = row.theirs[0]
    with _Meeting(("changed.append(wait)", lambda: queued.add(KEY, view, 1, STREAM))):
        queued.add(KEY, view, 5, STREAM)
    assert [(wait.generation, wait.since) for wait in queued.of(KEY)] == [(5, 1)]


def test_a_use_is_released_once_the_earlier_generations_are_judged_too(chain: Chain) -> None:
    stream, line = chain.stream, chain.board.slot(0)
    with StreamGate(chain.held):
        _record_behind(chain, 2, 1, 2)
        line.lose(2, _serial(1))
    stream.synchronize()
    chain.mine.close()
    assert not chain.mine.try_release()
    line.lose(1, _serial(1))
    assert chain.mine.try_release()


def test_no_wait_is_forgotten_by_a_resume_between_its_listing_and_its_queueing(chain: Chain) -> None:
    """A record of another thread had listed a later generation in its place, which is lost."""
    stream, key = chain.stream, _key(chain.stream)
    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)

        def others() -> None:
            queued.add(key, chain.mine, 2, 0)
            chain.b.record(stream._handle, 0, 1)
            chain.board.slot(0).finish(CLOSED)
            _resume(key)

        with _Meeting(("self._queue_wait(handle", partial(_in_a_thread, others)), file="base.py"):
            chain.mine.wait(1, stream, 1, False)
        assert [wait.generation for wait in queued.of(key)] == [1]


# --- a handler's wait that a change has knocked out -------------------------------------------------------------------


@pytest.mark.parametrize("who", ["another thread", "a second handler"])
def test_a_handlers_wait_is_stood_behind_before_it_is_put_back(chain: Chain, who: str) -> None:
    stream, made = chain.stream, list[str]()
    good = queued.add(_key(stream), chain.c, 1, STREAM)
    good.verdict = True
    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)

        def record() -> None:
            waits = chain.b.chain.listed(_key(stream))
            made.extend(f"{wait.generation} of {wait.view.name}" for wait in waits)

        def after() -> None:
            if who == "another thread":
                _in_a_thread(record)
            else:
                record()

        with _Meeting(
            ("lists.pop(wait.key, None)", lambda: chain.mine.wait(1, stream, 1, False)),
            ("while waits := changed", after),
        ):
            queued.drop([good])
    assert made == ["1 of a/out"]


def test_what_an_exception_kept_from_its_list_is_stood_behind(row: Row) -> None:
    view, other = row.theirs[:2]
    good = queued.add(KEY, other, 1, STREAM)
    good.verdict = True

    def wait() -> None:
        queued.add(KEY, view, 3, STREAM)

    steps = (("lists.pop(wait.key, None)", wait), ("while waits := changed", _raise))
    with pytest.raises(KeyboardInterrupt), _Meeting(*steps):
        queued.drop([good])
    assert [each.generation for each in queued.of(KEY)] == [3]
    assert [each.generation for each in queued.waits_on(view)] == [3]
    queued.drop([])
    assert ([each.generation for each in queued.lists[KEY].values()], queued.changed) == ([3], [])


def test_a_wait_that_is_put_back_into_a_list_which_a_handler_empties_is_put_back_again(row: Row) -> None:
    view, other = row.theirs[:2]
    good = queued.add(KEY, other, 1, STREAM)
    good.verdict = True
    emptied: list[Wait] = []

    def empty() -> None:
        emptied.append(queued.add(KEY, other, 1, STREAM))
        emptied[0].verdict = True
        queued.drop(emptied)

    with _Meeting(
        ("lists.pop(wait.key, None)", lambda: queued.add(KEY, view, 3, STREAM)),
        ("while waits := changed", partial(_before_the_store, empty)),
    ):
        queued.drop([good])
    assert emptied
    assert ([each.generation for each in queued.lists[KEY].values()], queued.changed) == ([3], [])


# --- a lost wait ------------------------------------------------------------------------------------------------------


def test_a_lost_wait_leaves_its_list_though_another_one_stands_in_its_place(row: Row) -> None:
    """An exception left it in two places, and another thread listed a later generation in one of them."""
    view = row.theirs[0]
    lost = queued.add(KEY, view, 1, STREAM)
    lost.verdict = _LOST
    with pytest.raises(KeyboardInterrupt), _Meeting(("wait.place = id(wait)", _raise)):
        queued.set_aside([lost])
    queued.add(KEY, view, 5, STREAM).verdict = _LOST
    _resume(KEY)
    assert lost not in queued.of(KEY)


def _good(row: Row) -> list[Wait]:
    wait = queued.add(KEY, row.theirs[0], 1, STREAM)
    wait.verdict = True
    return [wait]


def _lost(row: Row) -> list[Wait]:
    wait = queued.add(KEY, row.theirs[0], 1, STREAM)
    wait.verdict = _LOST
    return [wait]


_CHANGES: dict[str, tuple[Callable[[Row], list[Wait]], Callable[[Row, list[Wait]], object]]] = {
    "drop of a good one": (_good, lambda _row, waits: queued.drop(waits)),
    "drop of a lost one": (_lost, lambda _row, waits: queued.drop(waits)),
    "set_aside": (_lost, lambda _row, waits: queued.set_aside(waits)),
    "release": (_lost, lambda row, _waits: queued.release(row.theirs[0])),
    "add": (lambda _row: [], lambda row, _waits: queued.add(KEY, row.theirs[0], 1, STREAM)),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_handler_may_forget_waits_at_any_line_of_any_change(row: Row, change: str) -> None:
    begin, outer = _CHANGES[change]

    def forget() -> None:
        waits = queued.of(KEY)
        for wait in waits:
            wait.verdict = wait.verdict or True
        queued.set_aside([wait for wait in waits if wait.verdict is not True])
        queued.drop(waits)

    number, is_there = 0, True
    while is_there:
        number += 1
        queued.lists.clear()
        queued.changed.clear()
        waits = begin(row)
        try:
            with _Meeting(("", forget), skip=number):
                outer(row, waits)
        except AssertionError:
            is_there = False
        queued.drop([])
        _resume(KEY)
        assert not queued.changed, number
    assert number > 10


def test_whether_a_stream_is_past_its_waits_cannot_be_asked_within_a_call_for_the_same_event(chain: Chain) -> None:
    """A resume in a handler would wait for a call that waits for the handler."""
    refused: list[str] = []

    def ask() -> None:
        with pytest.raises(Reentered) as caught:
            chain.mine.has_passed(5)
        refused.append(str(caught.value))

    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)
        with _Meeting(("self._queue_wait(handle", ask), file="base.py"):
            chain.mine.wait(1, chain.stream, 1, False)
    assert refused == ["a call for 'a/out' is under way on this thread, which this one interrupts"]


# --- looks that meet a change -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["resume", "release"])
def test_a_loss_that_grows_amid_the_look_for_open_ones_hides_none(chain: Chain, by: str) -> None:
    stream, line = chain.stream, chain.board.slot(0)
    with StreamGate(chain.held):
        _record_behind(chain, 3, 1, 3)
        line.lose(3, _serial(1))
    stream.synchronize()
    with _Meeting(("fate = self.fate(last)", lambda: line.lose(2, _serial(1))), file="slot_view.py"):
        if by == "resume":
            _resume(_key(stream))
        else:
            chain.mine.close()
            assert not chain.mine.try_release()
    _resume(_key(stream))
    assert [wait.generation for wait in queued.of(_key(stream))] == [1]
    line.lose(1, _serial(1))
    with pytest.raises(RecorderLost):
        chain.record(chain.b, stream)


@pytest.mark.parametrize("look", ["_make_record", "_stand_behind"])
def test_a_wait_that_is_put_back_between_two_looks_of_a_record_is_seen(chain: Chain, look: str) -> None:
    """The thread that records learned that the handler's wait had returned, before it was put back."""
    stream, key = chain.stream, _key(chain.stream)
    knocked_out, go_on = threading.Event(), threading.Event()
    good = queued.add(key, chain.c, 1, STREAM)
    good.verdict = True
    if look == "_stand_behind":
        queued.add(key + 1000, chain.c, 1, STREAM)
    code = getattr(TimelineEngine, look).__code__
    names = [each for each in dis.get_instructions(code) if each.argval in ("changed", "lists")]
    second = names[1].offset

    def pause() -> None:
        knocked_out.set()
        assert go_on.wait(30)

    def drop() -> None:
        with _Meeting(
            ("lists.pop(wait.key, None)", lambda: chain.mine.wait(1, stream, 1, False)),
            ("while waits := changed", pause),
        ):
            queued.drop([good])

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == second:
            sys.settrace(None)
            go_on.set()
            thread.join()
            return None
        return trace

    with StreamGate(chain.held):
        chain.record(chain.a, chain.held)
        thread = threading.Thread(target=drop)
        thread.start()
        assert knocked_out.wait(30)
        sys.settrace(trace)
        try:
            chain.record(chain.b, stream)
        finally:
            sys.settrace(None)
            go_on.set()
            thread.join()
        assert [wait.generation for entry in chain.b.chain.entries for wait in entry.waits] == [1]


def test_what_a_handler_releases_within_a_drop_stays_lost(chain: Chain) -> None:
    stream, key, gate = chain.stream, _key(chain.stream), StreamGate(chain.held)
    chain.record(chain.a, chain.held)
    good = queued.add(key, chain.c, 1, STREAM)
    good.verdict = True

    def handler() -> None:
        chain.mine.wait(1, stream, 1, False)
        chain.kill(0)
        chain.board.slot(0).break_at(0)
        gate.open()
        chain.held.synchronize()
        chain.release(0)
        stream.synchronize()
        chain.mine.close()
        assert chain.mine.try_release()

    with _Meeting(("lists.pop(wait.key, None)", handler)):
        queued.drop([good])
    with pytest.raises(RecorderLost):
        chain.record(chain.b, stream)


def test_the_holders_may_become_more_while_another_thread_looks_at_them(row: Row) -> None:
    holders = [queued.Gathered() for _ in range(3)]
    seen = 0

    class Other(queued.Gathered):
        def waits(self) -> list[Wait]:
            nonlocal seen
            seen += 1
            _in_a_thread(lambda: holders.append(queued.Gathered()))
            return super().waits()

    holders.append(Other())
    assert queued.waits_on(row.theirs[0]) == []
    assert seen == 1
    holders.clear()
    gone = [reference for reference in queued.holders.values() if isinstance(reference(), Other)]
    assert gone == []


def test_a_lost_wait_that_is_on_its_way_into_a_list_is_set_aside_too(chain: Chain) -> None:
    """Else it took the place of an earlier one, and both were forgotten with it."""
    stream, line, key = chain.stream, chain.board.slot(0), _key(chain.stream)
    with StreamGate(chain.held):
        _record_behind(chain, 2)
        good = queued.add(key, chain.c, 1, STREAM)
        good.verdict = True

        def handler() -> None:
            for generation in (1, 2):
                chain.mine.wait(generation, stream, 1, False)

        steps = (("lists.pop(wait.key, None)", handler), ("while waits := changed", _raise))
        with pytest.raises(KeyboardInterrupt), _Meeting(*steps):
            queued.drop([good])
        line.lose(2, _serial(1))
    stream.synchronize()
    _resume(key)
    assert [wait.generation for wait in queued.of(key)] == [1]


def test_streams_cannot_be_awaited_within_a_change_of_the_lists(chain: Chain) -> None:
    """A thread that has an event's lock may want that of the lists, and be what is waited for."""
    refused: list[str] = []
    lost = queued.add(_key(chain.stream), chain.mine, 1, STREAM)

    def resume() -> None:
        with pytest.raises(Reentered) as caught:
            queued.await_passed([lost], chain.stream._handle, 0, 0, lambda: None)
        refused.append(str(caught.value))

    with _Meeting(("self._take_out(wait)", resume)):
        queued.drop([lost])
    assert refused == ["waits are listed on this thread by a call that this one interrupts"]


def test_a_wait_that_goes_from_a_list_to_a_record_is_found_on_its_way(chain: Chain) -> None:
    """While its use is released, and another wait takes its place in the list."""
    key, found = _key(chain.stream), list[Wait]()
    chain.b.chain.listed(key)  # a holder from now on
    wait = queued.add(key, chain.mine, 1, STREAM)

    def meet() -> None:
        found.extend(chain.b.chain.listed(key))
        queued.add(key, chain.mine, 2, STREAM)

    class Other(queued.Gathered):
        def waits(self) -> list[Wait]:
            _in_a_thread(meet)
            return []

    other = Other()
    assert wait in queued.waits_on(chain.mine)
    assert found == [wait]
    del other
