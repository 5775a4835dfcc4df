"""One engine's own account: what it queued and where, what it still holds, and what it tells of that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync._board import CLOSED, INT64_MAX
from ipcsync._drivers import EVENT_DISABLE_TIMING, STREAM_WAIT_VALUE_FLUSH, STREAM_WAIT_VALUE_GEQ, DriverObject
from ipcsync._engines import queued
from ipcsync._engines.core import Wait, import_count
from ipcsync._engines.engine import Engine
from ipcsync._native import context
from ipcsync.errors import DeviceMismatch, DriverError, EventClosed, RecorderLost, WaitTimeout
from ipcsync.testing import StreamGate
from tests.kit import driver_functions
from tests.kit.boards import store_bits
from tests.kit.steps import at_step
from tests.kit.until import until
from tests.unit.engines.chain_row import BASE, COUNT, KEY, ME, OWN, STREAM, Row, serial_of


def _record(engine: Engine, stream: ipcsync.Stream) -> int:
    return engine.record(stream._handle, 0, 1)


def _record_behind(row: Row, stream: ipcsync.Stream, *points: tuple[Engine, int]) -> None:
    """A record behind waits of the stream for these, of which the driver has none."""
    for view, generation in points:
        queued.add(queued.list_of(stream._handle, 0), view, generation, 0)
    _record(row.mine, stream)


# --- what is queued and where -----------------------------------------------------------------------------------------


def test_a_record_is_of_the_events_own_device(row: Row) -> None:
    stream = ipcsync.Stream()
    with pytest.raises(DeviceMismatch, match=r"^Event device 0 does not match recording stream's device 3\.$"):
        row.mine.record(stream._handle, 3, 1)
    assert row.mine.generation == 0


def test_streams_that_come_and_go_leave_no_more_than_a_few_markers(row: Row) -> None:
    for _ in range(40):
        stream = ipcsync.Stream()
        _record(row.mine, stream)
        stream.synchronize()
    assert 0 < row.mine.marker_count <= 16
    held = [ipcsync.Stream() for _ in range(20)]
    gates = [StreamGate(stream) for stream in held]
    for stream in held:
        _record(row.mine, stream)
    assert row.mine.marker_count >= 20, "behind each of these is work that is pending"
    row.mine.close()
    assert not row.mine.try_release()
    for gate in gates:
        gate.open()
    until(row.mine.try_release, "all is over")
    assert row.mine.marker_count == 0
    assert row.mine.try_release()


@pytest.mark.parametrize("what", ["record", "wait"])
def test_a_use_that_is_released_while_a_call_is_begun_gets_no_marker(row: Row, what: str) -> None:
    stream, view = ipcsync.Stream(), row.mine if what == "record" else row.theirs[0]
    row.record(0, 1)

    def ends() -> None:
        view.close()
        assert view.try_release()

    # A record that finds no marker gives its turn back, and takes it again to make one.
    with at_step("lock", ends, behind=what == "record"), pytest.raises(EventClosed):
        _record(view, stream) if what == "record" else view.wait(1, stream, 1, False)
    assert view.marker_count == 0, "nobody would destroy it"


def test_a_use_that_is_closed_while_its_word_is_registered_is_released_behind_that(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the page of a closed client's board would be registered, and the board be there, until the process ends."""
    view, open_word, released = row.theirs[0], row.theirs[0].open_word, list[bool]()
    row.record(0, 1)

    def ends() -> int:
        view.close()
        released.append(view.try_release())
        return int(open_word())

    monkeypatch.setattr(view, "open_word", ends)
    with pytest.raises(EventClosed):
        view.wait(1, ipcsync.Stream(), 1, False)
    assert (released, view.try_release()) == ([False], True)


@pytest.mark.parametrize(("can", "flag"), [(0, 0), (1, STREAM_WAIT_VALUE_FLUSH)])
def test_waits_for_a_mirror_see_what_a_network_card_wrote_where_the_device_can(
    row: Row, monkeypatch: pytest.MonkeyPatch, can: int, flag: int
) -> None:
    driver, asked = context.driver(), list[tuple[Any, ...]]()
    ok, device = driver.cuDeviceGet(0)

    def attribute(*args: Any) -> tuple[Any, ...]:
        asked.append(args)
        return ok, can

    waits: list[tuple[int, ...]] = []
    with monkeypatch.context() as patch:
        patch.setattr(driver, "cuDeviceGetAttribute", attribute)
        mirror = row.view(0, node="two")
    assert ok == 0
    ((which, where),) = asked
    assert (which.name, int(where)) == ("CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES", int(device))

    def watch(real: driver_functions.Call, *args: int) -> int:
        waits.append(args)
        return real(*args[:3], STREAM_WAIT_VALUE_GEQ)

    row.record(0, 2)
    stream = ipcsync.Stream()
    with driver_functions.replaced({"cuStreamWaitValue64": watch}):
        for view in (mirror, row.theirs[0]):
            view.wait(2, stream, 1, False)
    assert [(args[0], args[2], args[3]) for args in waits] == [
        (stream.cuda_stream, BASE + 2, STREAM_WAIT_VALUE_GEQ | flag),
        (stream.cuda_stream, BASE + 2, STREAM_WAIT_VALUE_GEQ),
    ]
    row.complete(0, 2)
    stream.synchronize()


# --- how far it is ----------------------------------------------------------------------------------------------------


def test_a_word_is_waited_for_until_it_is_reached_or_the_time_is_over(row: Row) -> None:
    view = row.theirs[0]
    row.record(0, 2)
    began = time.monotonic_ns()
    for timeout in (0, 0.02):
        with pytest.raises(WaitTimeout):
            view.synchronize(1, timeout)
    assert time.monotonic_ns() - began >= 20_000_000
    row.complete(0, 1)
    view.synchronize(1, 0)
    with pytest.raises(WaitTimeout):
        view.synchronize(2, 0)
    thread = threading.Timer(0.02, row.complete, (0, 2))
    thread.start()
    view.synchronize(2, 30)
    thread.join()


def test_what_a_word_says_counts_up_to_the_first_that_stands_behind_what_nobody_can_tell(row: Row) -> None:
    view, line = row.theirs[0], row.board.slot(0)
    row.complete(0, 4)
    row.record(0, 5)
    store_bits(line, 1 << 3)
    line.first_dependent = BASE + 3
    assert view.completed == 2
    assert [view.query(generation) for generation in (2, 3, 5)] == [True, False, False]
    line.valid_as_of = COUNT
    assert [view.query(generation) for generation in (3, 4, 5)] == [True, True, False]
    assert (view.completed, view.generation) == (4, 5)


def test_the_recorder_tells_of_its_words_end_what_it_found(row: Row) -> None:
    wait = row.wait(0)
    row.extend(1, wait)
    row.mine._recorded = 1
    row.line.store_completed(BASE + 1)
    row.mine.publish_completed()
    assert row.told == (0, 0)
    row.extend(2, row.wait(1))
    row.line.store_completed(INT64_MAX)
    row.mine.publish_completed()
    assert row.told == (2, 0b10), "a word that was released says nothing"


def test_a_recorder_has_drained_once_all_that_it_recorded_is_complete(row: Row) -> None:
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(other):  # behind which the event is waited for
        with StreamGate(stream):
            _record(row.mine, stream)
            row.mine.wait(1, other, 1, False)
            row.mine.close()
            assert not row.mine.try_release()
            assert not row.mine.has_drained
        stream.synchronize()
        assert not row.mine.try_release()
        assert row.mine.has_drained
        row.line.finish(CLOSED)
        assert not row.mine.try_release()
        assert row.mine.has_drained
    until(row.mine.try_release, "all is over")
    row.theirs[0].close()
    assert row.theirs[0].try_release()
    assert not row.theirs[0].has_drained


def test_a_recorder_has_drained_though_a_thread_is_still_about_to_ask_for_its_last_record(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, stream = row.event_engine(recorder=True), ipcsync.Stream()
    monkeypatch.setattr(recorder, "open_event", _events(1).__getitem__)
    asks, go_on = threading.Event(), threading.Event()

    def ask(real: driver_functions.Call, *args: object) -> int:
        if threading.current_thread() is asking:
            asks.set()
            go_on.wait(30)
        return int(real(*args))

    def query() -> None:
        with pytest.raises(EventClosed):
            recorder.query(1)

    asking = threading.Thread(target=query)
    assert recorder.record(stream._handle, 0, 1) == 1
    stream.synchronize()
    with driver_functions.replaced({"cuEventQuery": ask}):
        asking.start()
        assert asks.wait(30)
        recorder.close()
        assert not recorder.try_release()
        assert recorder.has_drained
        assert row.line.completed == BASE + 1, "and that is told"
        go_on.set()
        asking.join()
    assert recorder.try_release()


def test_a_recorder_has_not_drained_while_what_it_stands_behind_is_open(row: Row) -> None:
    stream = ipcsync.Stream()
    _record_behind(row, stream, (row.theirs[0], 1))
    stream.synchronize()
    assert row.open_ones == [(1, 1, OWN)]
    row.mine.close()
    assert not row.mine.try_release()
    assert not row.mine.has_drained
    row.complete(0, 1)
    until(row.mine.try_release, "all is over")
    assert row.mine.has_drained
    assert row.told == (0, 0)
    assert row.line.completed == BASE + 1


def test_a_record_behind_further_points_names_those_too_and_none_that_is_good_or_lost(row: Row) -> None:
    stream = ipcsync.Stream()
    row.complete(1, 1)
    row.record(2, 4)
    _record_behind(row, stream, (row.theirs[1], 1), (row.theirs[2], 3))
    assert row.open_ones == [(1, 1, 1 << 2)]
    (wait,) = row.chain.entries
    assert (wait.view, wait.generation, wait.stream) == (row.theirs[2], 3, 0)
    row.kill(3)
    with pytest.raises(RecorderLost, match=r"^generation 2 of 'e4' is lost: it stands behind generation 9 of 'e3', "):
        row.mine.record(stream._handle, 0, 1, [(row.theirs[3], 9)])
    assert row.mine.generation == 1


def test_a_record_is_not_made_behind_itself_or_a_later_one(row: Row) -> None:
    stream = ipcsync.Stream()
    _record(row.mine, stream)
    for later in (2, 7):
        text = rf"^generation 2 of 'e4' cannot depend on its generation {later}$"
        with pytest.raises(ValueError, match=text):
            row.mine.record(stream._handle, 0, 1, [(row.mine, later)])
    assert row.mine.generation == 1
    row.mine.record(stream._handle, 0, 1, [(row.mine, 1)])
    assert row.mine.generation == 2


def test_a_record_on_another_stream_stands_behind_the_one_before_it_while_that_is_open(row: Row) -> None:
    first, second = ipcsync.Stream(), ipcsync.Stream()
    row.record(0, 1)
    with StreamGate(first):
        _record_behind(row, first, (row.theirs[0], 1))
        _record(row.mine, second)
        assert row.open_ones == [(1, 1, 1)]
        other = row.other_recorder(3)
        _record(other, second)
        ((wait, entry),) = other.chain.entries.items()
        assert (wait.generation, wait.view, wait.stream) == (1, row.mine, row.mine.last_stream)
        assert (entry.bits, entry.proof) == (OWN | 1, 1)
        assert other.first_unsettled() == 1
    second.synchronize()


def test_with_many_entries_a_record_judges_first(row: Row) -> None:
    streams = [ipcsync.Stream() for _ in range(2)]
    for generation in range(1, 60):
        row.record(0, generation)
        _record_behind(row, streams[generation % 2], (row.theirs[0], generation))
        streams[generation % 2].synchronize()
        row.complete(0, generation)
    assert len(row.chain.entries) <= 32
    assert row.mine.completed == 59


# --- the event engine's ring ------------------------------------------------------------------------------------------


def test_a_recorder_that_comes_again_goes_on_where_it_left(row: Row) -> None:
    row.line.publish(BASE + 5)
    row.line.store_completed(BASE + 3)
    again, waiter = row.event_engine(recorder=True), row.event_engine()
    assert (again._recorded, waiter._recorded) == (5, 0)
    assert (again._begun, again._completed, waiter._completed) == (5, 3, 0)
    assert again.handles == (b"0" * 64, b"1" * 64, b"2" * 64)
    row.line.store_completed(BASE + 9)
    assert row.event_engine(recorder=True)._completed == 5
    row.line.store_completed(0)
    row.line.publish(0)
    fresh = row.event_engine(recorder=True)
    assert (fresh._completed, fresh._recorded) == (0, 0)


def test_an_event_that_is_closed_or_used_anew_says_so(row: Row) -> None:
    view: Engine = row.theirs[0]
    stream = ipcsync.Stream()
    row.record(0, 1)
    row.board.slot(0).open(2)
    for call in (lambda: view.query(1), lambda: view.wait(1, stream, 0, False), lambda: view.synchronize(1, 0)):
        with pytest.raises(EventClosed, match=r"^the event 'e0' is gone: another event has its slot$") as caught:
            call()
        assert caught.value.event == "e0"
    assert view.state == "closed"
    row.mine.close()
    with pytest.raises(EventClosed, match=r"^the event 'e4' was closed in this process$") as caught:
        _record(row.mine, stream)
    assert caught.value.event == "e4"
    assert serial_of(ME) == row.mine.line.recorder


def test_a_wait_that_is_listed_once_all_others_are_decided_is_not_lost(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a record on another thread, which finds the event closed next; its recorder lives."""
    row.record(0, 1)
    view = row.theirs[0]
    listed: list[Wait] = []

    monkeypatch.setattr(view, "free_streams", lambda: listed.append(queued.add(KEY, view, 1, STREAM)))
    view.close()
    until(view.try_release, "it to be released")
    assert [wait.outcome for wait in listed] == [True]
    assert queued.of(KEY) == []


@pytest.mark.parametrize("refused_before", [False, True])
def test_a_use_is_not_released_before_a_stream_is_past_a_wait_that_the_driver_may_have_refused(
    row: Row, refused_before: bool
) -> None:
    """By which a record on another stream follows the last one, also if that was refused itself."""
    first, second = ipcsync.Stream(), ipcsync.Stream()
    _record(row.mine, first)
    if refused_before:
        refused = driver_functions.refused_once("cuStreamWriteValue64", is_made=False)
        with driver_functions.replaced(refused), pytest.raises(DriverError):
            _record(row.mine, first)
    refused = driver_functions.refused_once(driver_functions.WAIT["timeline"], is_made=True)
    with StreamGate(second):
        with driver_functions.replaced(refused), pytest.raises(DriverError):
            _record(row.mine, second)
        until(first.query, "what was recorded is complete")
        row.mine.close()
        assert not row.mine.try_release()
    until(row.mine.try_release, "the stream is past it")


def test_a_look_that_may_not_block_opens_nothing_while_another_thread_does(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    (event, late), stream = _events(2), ipcsync.Stream()
    recorder, opening, asking = row.event_engine(recorder=True), row.event_engine(), row.event_engine()
    monkeypatch.setattr(recorder, "open_event", lambda _: event)
    asked: list[int] = []

    def open_late(_: int) -> DriverObject:
        assert not asking.query(1, may_block=False)
        assert asked == []
        return late

    monkeypatch.setattr(asking, "open_event", asked.append)
    monkeypatch.setattr(opening, "open_event", open_late)
    with StreamGate(stream):
        assert _record(recorder, stream) == 1
        opening.open_first()
    stream.synchronize()


def _events(count: int) -> list[DriverObject]:
    """What stands for imports."""
    ipcsync.Stream()  # makes a context current
    return [context.call("cuEventCreate", EVENT_DISABLE_TIMING) for _ in range(count)]


def _noting(name: str, asked: list[str]) -> dict[str, driver_functions.Call]:
    """For `driver_functions`: a call is noted, and made."""

    def call(real: Callable[..., int], *args: object) -> int:
        asked.append(name)
        return int(real(*args))

    return {name: call}


def test_an_import_that_is_destroyed_is_not_asked_about_though_another_one_is_not_yet(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, events = ipcsync.Stream(), _events(2)
    recorder = row.event_engine(recorder=True)
    monkeypatch.setattr(recorder, "open_event", events.__getitem__)
    with StreamGate(stream):
        assert [_record(recorder, stream) for _ in events] == [1, 2]
        row.line.break_at(BASE)
    stream.synchronize()
    count = import_count()
    recorder.close()
    refused = driver_functions.refused_once("cuEventDestroy", is_made=True)
    with driver_functions.replaced(refused), pytest.raises(DriverError, match="cuEventDestroy"):
        recorder.try_release()
    assert (recorder.is_released, import_count()) == (False, count - 1)
    asked: list[str] = []
    with driver_functions.replaced(_noting("cuEventQuery", asked) | _noting("cuEventRecord", asked)):
        for _ in range(2):
            recorder.publish_completed()
            assert recorder.has_passed(STREAM)
            assert recorder.try_release()
    assert (asked, import_count()) == ([], count - 2)


def test_a_second_use_that_has_opened_fewer_imports_lowers_no_count(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    events, stream = _events(6), ipcsync.Stream()
    first = row.event_engine(recorder=True)
    monkeypatch.setattr(first, "open_event", events[:3].__getitem__)
    with StreamGate(stream) as gate:
        assert [_record(first, stream) for _ in range(2)] == [1, 2]
        with StreamGate(stream):
            _record(first, stream)
            second = row.event_engine(recorder=True)
            monkeypatch.setattr(second, "open_event", events.__getitem__)
            assert not second.query(1)
            gate.open()
            until(lambda: first.publish_completed() or row.line.completed == BASE + 2, "two are complete")
            second.wait(3, ipcsync.Stream(), 1, False)
            assert row.line.completed == BASE + 2
    stream.synchronize()


def test_of_an_import_that_two_threads_open_the_second_ones_is_destroyed_at_once(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, (first, second), count, destroyed = row.event_engine(), _events(2), import_count(), list[int]()

    def open_late(_: int) -> DriverObject:
        monkeypatch.setattr(view, "open_event", lambda _: first)
        view.open_first()  # as by another thread
        return second

    def destroy(real: Callable[..., int], event: int) -> int:
        destroyed.append(event)
        return int(real(event))

    monkeypatch.setattr(view, "open_event", open_late)
    with driver_functions.replaced({"cuEventDestroy": destroy}):
        view.open_first()
        assert (destroyed, import_count()) == ([int(second)], count + 1)
        view.close()
        assert view.try_release()
    assert (destroyed, import_count()) == ([int(second), int(first)], count)


def test_a_use_is_not_released_while_a_thread_opens_an_import_of_it(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    view, (event,), count = row.event_engine(), _events(1), import_count()

    def open_late(_: int) -> DriverObject:
        view.close()
        assert not view.try_release()
        return event

    monkeypatch.setattr(view, "open_event", open_late)
    view.open_first()
    assert import_count() == count + 1
    assert view.try_release()
    assert import_count() == count
    with pytest.raises(EventClosed):
        view.open_first()


@pytest.mark.parametrize("engine", ["event", "timeline"])
def test_a_released_use_writes_nothing_in_the_slots_next_one(row: Row, engine: str) -> None:
    """As by a beat that took it from its list before another thread closed and released it."""
    recorder = row.event_engine(recorder=True) if engine == "event" else row.mine
    row.extend(1, row.wait(0))
    recorder.chain = row.chain
    recorder._recorded = recorder._begun = recorder._completed = 1
    row.line.break_at(BASE)
    recorder.close()
    assert recorder.try_release()
    row.line.open(2)
    before = row.line.all_words.tobytes()
    row.complete(0, 1)
    recorder._completed = 0
    recorder.publish_completed()
    assert row.line.all_words.tobytes() == before
