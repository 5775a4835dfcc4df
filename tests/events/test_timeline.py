"""The timeline engine: waits ahead of the record, and the release of waiters whose recorder never comes."""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync import _drivers
from ipcsync._board import INT64_MAX, SlotLine
from ipcsync._board.layout import PAGE
from ipcsync._native import context, pinned
from ipcsync.testing import StreamGate
from tests.faults import fixtures
from tests.kit import boards, remote
from tests.kit.driver_kit import code
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

RECORDER = {"engine": "timeline", "recorder": True}


def _line(event: ipcsync.SharedEvent) -> SlotLine:
    return event._attached.engine.line


def _assert_lost(point: ipcsync.Point) -> None:
    """Every way to use the point says that it never will be."""
    stream = ipcsync.Stream()
    uses: list[Callable[[], Any]] = [
        point.query,
        lambda: point.synchronize(10),
        lambda: point.wait(stream, timeout=10),
        lambda: point.wait(stream, ahead=True),
    ]
    for use in uses:
        with pytest.raises(ipcsync.RecorderLost) as caught:
            use()
        assert caught.value.generation == point.generation
    assert isinstance(point.exception(), ipcsync.RecorderLost)
    assert stream.query(), "nothing may be queued for a point that never comes"


@pytest.fixture
def recorder(coordinator: ipcsync.Coordinator, peer: Peer) -> Peer:
    """A peer that records on the timeline event "e" and whose stream "main" is held."""
    peer.call(remote.connect, coordinator.endpoint, "recorder")
    peer.call(remote.open_event, "e", RECORDER)
    return peer


def test_a_wait_ahead_does_not_block_the_host_and_ends_with_the_record(client: ipcsync.Client, recorder: Peer) -> None:
    event = client.event("e")
    stream = ipcsync.Stream()
    point = event.at(2)
    point.wait(stream, ahead=True)
    assert not stream.query()
    recorder.call(remote.hold)
    recorder.call(remote.record, "e", "main", 2)
    assert point.is_recorded
    assert not point.query()
    assert not stream.query()
    recorder.call(remote.let_go)
    until(stream.query, "the stream goes on after the record")
    assert point.query()


def test_a_wait_ahead_passes_at_once_for_what_is_complete(client: ipcsync.Client, recorder: Peer) -> None:
    event = client.event("e")
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    recorder.call(remote.record, "e")
    event.at(1).synchronize(10)
    with StreamGate(other):
        event.at(1).wait(stream, ahead=True)
        until(stream.query, "a complete point holds nobody")


def test_the_event_engine_refuses_a_wait_ahead_and_says_what_to_do(client: ipcsync.Client) -> None:
    event = client.event("e", engine="event", recorder=True)
    stream = ipcsync.Stream()
    with pytest.raises(ipcsync.EngineMismatch, match="engine='timeline'"):
        event.at(1).wait(stream, ahead=True)
    point = event.record(stream)
    with pytest.raises(ipcsync.EngineMismatch, match="engine='timeline'"):
        point.wait(stream, ahead=True)
    point.synchronize(10)
    with pytest.raises(ipcsync.EngineMismatch, match="engine='timeline'"):
        point.wait(stream, ahead=True)  # also where there is nothing to wait for
    until(stream.query, "nothing was queued but the record")


def test_when_the_recorder_is_killed_every_waiters_stream_goes_on_and_nothing_released_is_success(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, recorder: Peer, new_peer: Callable[..., Peer]
) -> None:
    recorder.call(remote.record, "e")
    event = client.event("e")
    event.at(1).synchronize(10)
    recorder.call(remote.hold)
    (unfinished,) = recorder.call(remote.record, "e")
    streams = [ipcsync.Stream() for _ in range(3)]
    event.at(2).wait(streams[0])
    event.at(3).wait(streams[1], ahead=True)
    event.at(1 << 40).wait(streams[2], ahead=True)
    other = new_peer()
    other.call(remote.connect, coordinator.endpoint, "other")
    other.call(remote.wait, unfinished, "first")
    assert not any(stream.query() for stream in streams)
    recorder.kill()
    for stream in streams:
        until(stream.query, "a waiter's stream is released")
    until(lambda: other.call(remote.stream_is_idle, "first"), "the other process's stream is released")
    assert event.state == "broken"
    assert (event.generation, event.completed) == (2, 1)
    assert event.at(1).query()
    for generation in (2, 3, 1 << 40):
        _assert_lost(event.at(generation))
    error = other.call(remote.error_of, remote.synchronize, unfinished)
    assert error is not None
    assert error[0] == "RecorderLost"


def test_what_was_lost_stays_lost_even_if_the_dead_recorders_write_comes_after_all(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, recorder: Peer
) -> None:
    event = client.event("e")
    recorder.call(remote.hold)
    recorder.call(remote.record, "e", "main", 2)
    point, earlier, line = event.at(2), event.at(1), _line(event)
    fixtures.stop(coordinator.pid)  # it does not see the death yet
    try:
        recorder.kill()
        with pytest.raises(ipcsync.RecorderLost):
            point.synchronize(10)
        assert isinstance(point.exception(), ipcsync.RecorderLost)
        line.store_completed(line.recorded)  # as a GPU would whose work was not torn down yet
        with pytest.raises(ipcsync.RecorderLost):
            point.query()
        assert event.completed == 1
    finally:
        fixtures.resume(coordinator.pid)
    until(lambda: event.state == "broken", "the death is told")
    _assert_lost(point)
    assert earlier.query(), "nobody was told yet that this one is lost, and the board says that it is complete"
    assert event.completed == 1


def test_a_recorder_that_closes_releases_what_waits_ahead_and_keeps_what_it_recorded_good(
    client: ipcsync.Client, recorder: Peer
) -> None:
    (done,) = recorder.call(remote.record, "e")
    event = client.event("e")
    stream = ipcsync.Stream()
    event.at(2).wait(stream, ahead=True)
    assert not stream.query()
    recorder.call(remote.close_event, "e")
    until(stream.query, "the stream is released")
    assert event.state == "closed"
    assert event.at(1).query()
    client.point(done).synchronize(10)
    event.at(1).wait(stream)
    _assert_lost(event.at(2))
    assert event.completed == 1


def test_a_recorder_that_closes_with_work_unfinished_releases_nobody_before_it_is_done(
    client: ipcsync.Client, recorder: Peer
) -> None:
    recorder.call(remote.hold)
    recorder.call(remote.record, "e")
    event = client.event("e")
    on_time, ahead = ipcsync.Stream(), ipcsync.Stream()
    event.at(1).wait(on_time)
    event.at(2).wait(ahead, ahead=True)
    recorder.call(remote.close_event, "e")
    until(lambda: event.state == "closed", "the close is told")
    _assert_lost(event.at(2))
    assert not event.at(1).query()
    assert not on_time.query()
    recorder.call(remote.let_go)
    event.at(1).synchronize(10)
    until(on_time.query, "the record is done")
    until(ahead.query, "the wait ahead is released")
    assert event.at(1).query()
    _assert_lost(event.at(2))


@pytest.fixture
def expired(coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer) -> tuple[Peer, ipcsync.SharedEvent]:
    """A recorder of "e" with two records queued behind a gate, stopped for so long that its lease has ended."""
    peer.call(remote.connect, coordinator.endpoint, "recorder", {"lease_ttl": 2.0})
    peer.call(remote.open_event, "e", RECORDER)
    peer.call(remote.hold)
    peer.call(remote.record, "e", "main", 2)
    event = client.event("e")
    peer.signal(signal.SIGSTOP)
    until(lambda: event.state == "broken", "the recorder's lease ends")
    peer.signal(signal.SIGCONT)
    return peer, event


def test_writes_still_queued_by_an_expired_recorder_deceive_nobody_and_are_written_over(
    coordinator: ipcsync.Coordinator, expired: tuple[Peer, ipcsync.SharedEvent]
) -> None:
    recorder, event = expired
    line = _line(event)
    until(lambda: line.completed == INT64_MAX, "the word is released")
    fixtures.stop(coordinator.pid)
    try:
        recorder.call(remote.let_go)
        until(lambda: line.completed != INT64_MAX, "the queued writes pull the word down")
        until(lambda: line.completed == line.recorded, "both writes are done")
        for generation in (1, 2, 3):
            with pytest.raises(ipcsync.RecorderLost):
                event.at(generation).query()
        assert event.completed == 0
    finally:
        fixtures.resume(coordinator.pid)
    until(lambda: line.completed == INT64_MAX, "the coordinator pulls the word up again")
    error = recorder.call(remote.error_of, remote.record, "e")
    assert error is not None
    assert error[0] == "SessionExpired"


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_word_is_used_again_only_when_nobody_is_left_who_could_write_it(
    client: ipcsync.Client, expired: tuple[Peer, ipcsync.SharedEvent], end: str
) -> None:
    recorder, event = expired
    old = (event._engine.slot, _line(event).incarnation)
    stale = event.at(1)
    event.close()
    assert client.stats()["quarantined"] == 1
    between = client.event("e", engine="timeline", recorder=True)
    assert between._engine.slot != old[0]
    if end == "kill":
        recorder.kill()
    else:
        recorder.call(remote.close)
    until(lambda: client.stats()["quarantined"] == 0, "the last who could write is gone")
    with _next_use(client, old[0]) as again:
        assert _line(again).incarnation == old[1] + 1
        assert (again.generation, again.completed, again.latest) == (0, 0, None)
        assert not again.at(1).query()
        stream, waiting = ipcsync.Stream(), ipcsync.Stream()
        again._engine.wait(1, waiting, None, True)
        assert not waiting.query()
        point = again.record(stream)
        assert point.generation == 1
        point.synchronize(10)
        until(waiting.query, "the first generation of the new use")
        assert not again.at(2).query()
    with pytest.raises(ipcsync.EventClosed):
        stale.query()


def _next_use(client: ipcsync.Client, slot: int) -> ipcsync.SharedEvent:
    """A new event in that slot, which rests until many others were used."""
    for _ in range(2000):
        event = client.event("again", engine="timeline", recorder=True)
        if event._engine.slot == slot:
            return event
        event.close()
    raise AssertionError(f"slot {slot} is never used again")


def test_generations_begin_at_one_in_each_use_of_a_slot(client: ipcsync.Client) -> None:
    stream = ipcsync.Stream()
    slots: set[int] = set()
    for records in (3, 1, 2):
        with _next_use(client, *slots) if slots else client.event("e", engine="timeline", recorder=True) as event:
            slots.add(event._engine.slot)
            assert not event.at(1).query()
            points = [event.record(stream) for _ in range(records)]
            assert [point.generation for point in points] == list(range(1, records + 1))
            points[-1].synchronize(10)
            assert (event.generation, event.completed) == (records, records)
        until(lambda: client.stats()["pool_in_use"] == 0, "the slot is free again")
    assert len(slots) == 1


def test_a_client_that_closes_gives_its_boards_pages_back_to_cuda(coordinator: ipcsync.Coordinator) -> None:
    client = ipcsync.connect(coordinator.endpoint)
    board = client._session.lease.board
    client.event("e", recorder=True, engine="timeline").record(ipcsync.Stream()).synchronize(10)
    page = client.event("e")._attached.engine.line.completed_address & ~(PAGE - 1)
    assert boards.is_pinned(board)
    client.close()
    until(lambda: not boards.is_pinned(board), "no page is registered")
    # Else CUDA would go on to write to what lay at this address first, whatever is mapped there later.
    ipcsync.Stream()  # a context
    driver = _drivers.load()
    assert code(driver.cuMemHostRegister(page, PAGE, 0)) == 0
    assert code(driver.cuMemHostUnregister(page)) == 0


def test_a_handler_that_registers_the_same_page_in_the_middle_of_its_registration_does_no_harm(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ipcsync.Stream()  # a context
    with mmap.mmap(-1, PAGE) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        found: list[int] = []

        def handled() -> int:
            monkeypatch.undo()
            found.append(pinned.word(address, page, 0))
            return context.current_ordinal()

        monkeypatch.setattr(context, "current_ordinal", handled)
        assert [pinned.word(address, page, 0)] == found
        assert pinned.unpin(address, PAGE)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_page_that_is_given_up_in_the_middle_of_its_registration_stays_mapped(
    monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    """By the end of its session, while another thread of the user's is about to wait there."""
    ipcsync.Stream()  # a context
    driver = _drivers.load()
    register, page = driver.cuMemHostRegister, mmap.mmap(-1, PAGE)
    address, mapping = ctypes.addressof(ctypes.c_char.from_buffer(page)), weakref.ref(page)

    def meanwhile(start: int, length: int, flags: int) -> Any:
        thread = threading.Thread(target=pinned.unpin, args=(address, PAGE))
        thread.start()
        thread.join()
        return register(start, 0 if is_refused else length, flags)

    monkeypatch.setattr(driver, "cuMemHostRegister", meanwhile)
    if is_refused:
        with pytest.raises(ipcsync.DriverError):
            pinned.word(address, page, 0)
    else:
        pinned.word(address, page, 0)
    del page
    assert (mapping() is None) is is_refused
    assert pinned.unpin(address, PAGE)
    assert mapping() is None


def test_a_session_that_ends_beside_a_stream_that_stands_still_holds_up_no_other(
    coordinator: ipcsync.Coordinator,
) -> None:
    stream, held = ipcsync.Stream(), ipcsync.Stream()
    with ipcsync.connect(coordinator.endpoint) as first, first.event("a", recorder=True, engine="timeline") as event:
        event.record(stream).synchronize(10)
        gate = StreamGate(held)  # a driver may let who unregisters memory wait for all streams
    with ipcsync.connect(coordinator.endpoint) as second, second.event("b", recorder=True, engine="timeline") as event:
        event.record(stream).synchronize(10)
    gate.open()


def test_a_thread_without_a_context_may_be_the_first_to_use_a_words_page(client: ipcsync.Client) -> None:
    events = [client.event(f"e{number}", recorder=True, engine="timeline") for number in range(40)]
    stream = ipcsync.Stream()
    events[0].record(stream)
    made: list[int] = []

    def record() -> None:
        made.append(events[-1].record(stream).generation)

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    assert made == [1]  # the last one's page had no other user
    events[-1].at(1).synchronize(10)
