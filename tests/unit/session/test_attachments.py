"""What a client is attached to and when it lets go: real engines on a real board, and what the coordinator is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

import ipcsync
from ipcsync._board import CLOSED
from ipcsync._deadline import deadline_of
from ipcsync._engines import Engine
from ipcsync._native import context
from ipcsync._session.attachments import AttachmentRef, Life
from ipcsync._session.connection import Request
from ipcsync._session.waits import Pending
from ipcsync._wire import messages
from ipcsync._wire.codec import PointKey
from ipcsync._wire.messages import Break, Close
from ipcsync.errors import (
    DeviceMismatch,
    IpcSyncError,
    QuotaExceeded,
    SessionExpired,
    WaitTimeout,
)
from ipcsync.testing import StreamGate
from tests.kit.steps import at_step
from tests.kit.until import until
from tests.unit.session.attachment_scene import TOLD_S, Scene


def _engine_of(found: AttachmentRef | None) -> Engine:
    assert found is not None
    return found.engine


def test_the_last_close_of_an_event_ends_its_attachment_and_is_told_once(scene: Scene) -> None:
    first, second, third = scene.open(), scene.open(), scene.open()
    assert first.engine is second.engine is third.engine is _engine_of(scene.find((0, 1)))
    for opening in (first, first, second):
        scene.close(opening)
        assert scene.coordinator.heard() == []
    scene.close(third)
    scene.close(third)
    assert scene.coordinator.heard() == [Close(0, 1)]
    assert scene.find((0, 1)) is None
    assert not scene.table.ending


def test_a_use_is_closed_before_anybody_may_release_it(scene: Scene) -> None:
    """Another thread looks at any moment what there is to release."""
    opening = scene.open(recorder=True)
    engine, looked = opening.engine, []
    close = engine.close

    def close_and_look() -> None:
        thread = threading.Thread(target=scene.driving.look)
        thread.start()
        thread.join()
        looked.append(engine.is_released)
        close()

    engine.close = close_and_look  # type: ignore[method-assign]
    scene.close(opening)
    assert looked == [False]
    assert engine.is_released


@contextmanager
def _closed_amid_work(scene: Scene) -> Iterator[None]:
    """A recorder's event is closed, and its work is over once the block is."""
    opening, stream = scene.open(recorder=True), ipcsync.Stream()
    engine = opening.engine
    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        scene.close(opening)
        assert scene.coordinator.heard() == [Close(0, 1, released=False)]
        yield
    stream.synchronize()


def test_who_still_has_work_releases_only_when_it_is_over(scene: Scene) -> None:
    with _closed_amid_work(scene):
        assert scene.look() == []
        assert scene.table.is_draining
        assert not scene.table.has_closes
    told = list[Close | Break]()
    until(lambda: told.extend(scene.look()) or not scene.table.ending, "it is released")  # type: ignore[func-returns-value]
    assert told[-1] == Close(0, 1)
    assert told[:-1] in ([], [Close(0, 1, released=False, drained=True)]), "its work is told to be over before, at most"


def test_a_close_that_is_not_taken_is_told_later_and_before_anything_is_attached(scene: Scene) -> None:
    opening = scene.open()
    scene.coordinator.refusal = WaitTimeout("no answer")
    scene.close(opening)
    assert scene.table.has_closes
    with pytest.raises(WaitTimeout, match=r"^the coordinator did not take an earlier close within 0.25 s$") as caught:
        scene.table.tell_all(0.25, deadline_of(0.25))
    assert caught.value.timeout == 0.25
    scene.coordinator.refusal = None
    scene.table.tell_all(1.0, deadline_of(1.0))
    assert scene.coordinator.heard() == [Close(0, 1)]
    assert not scene.table.has_closes


def test_of_what_was_just_closed_it_is_told_before_something_is_attached_and_else_not_before_it_was_looked_at(
    scene: Scene,
) -> None:
    scene.close(scene.open(), wait=False)
    scene.table.tell()
    assert scene.coordinator.heard() == []
    scene.table.tell_all(1.0, deadline_of(1.0))
    assert scene.coordinator.heard() == [Close(0, 1, released=False)]
    assert scene.look() == [Close(0, 1)]


def test_a_close_is_told_at_the_next_beat_though_the_driver_keeps_the_look_at_what_is_left(scene: Scene) -> None:
    scene.close(scene.open(), wait=False)
    for told in ([Close(0, 1, released=False)], []):
        scene.table.beat()
        assert scene.coordinator.heard() == told
    assert scene.look() == [Close(0, 1)]


@pytest.mark.parametrize("refusal", [SessionExpired("over already"), IpcSyncError("invalid")])
def test_a_close_that_the_coordinator_refuses_is_not_told_again(scene: Scene, refusal: IpcSyncError) -> None:
    opening = scene.open()
    scene.coordinator.refusal = refusal
    scene.close(opening)
    assert not scene.table.has_closes


def test_a_coordinator_without_memory_is_told_later_and_nothing_is_attached_before(scene: Scene) -> None:
    opening = scene.open()
    scene.coordinator.refusal = QuotaExceeded("no memory")
    scene.close(opening)
    with pytest.raises(QuotaExceeded):
        scene.table.tell_all(1.0, deadline_of(1.0))
    scene.coordinator.refusal = None
    assert scene.look() == [Close(0, 1)]


@pytest.mark.parametrize("is_recorder", [False, True])
def test_what_drains_ends_no_use_of_its_slot_that_was_made_since(scene: Scene, is_recorder: bool) -> None:
    first, stream = scene.open(recorder=True), ipcsync.Stream()
    engine = first.engine
    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        scene.close(first)
        again = scene.open(recorder=is_recorder)
        assert again.engine is not engine
        assert again.engine.chain is engine.chain, "they are judged as one"
    stream.synchronize()
    scene.coordinator.heard()
    told = list[Close | Break]()
    until(lambda: told.extend(scene.look()) or not scene.table.ending, "the first is released")  # type: ignore[func-returns-value]
    assert set(told) <= ({Close(0, 1, released=False, drained=True)} if not is_recorder else set())
    scene.close(again)
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_uses_of_one_slot_do_not_judge_their_chain_at_once(scene: Scene) -> None:
    opening, above = scene.open(recorder=True), scene.open(1, recorder=True).engine
    first, stream, other = opening.engine, ipcsync.Stream(), ipcsync.Stream()
    above.wait(1, stream, None, True)
    first.record(stream._handle, 0, 1)
    scene.close(opening)
    again = scene.open(recorder=True).engine
    above.record(other._handle, 0, 1)
    until(stream.query, "the record is complete")
    assert first.chain.entries
    with at_step("load completed", again.publish_completed, behind=1):  # amid the look at what it depends on
        first.publish_completed()
    assert not first.chain.entries


def test_what_points_made_ends_when_the_event_is_over_and_no_point_is_left(scene: Scene) -> None:
    held = scene.attach()
    scene.table.beat()
    assert scene.find((0, 1)) is held
    scene.board.slot(0).finish(CLOSED)
    scene.table.beat()
    assert scene.find((0, 1)) is held
    del held
    scene.table.beat()
    assert scene.find((0, 1)) is None
    assert scene.look() == [Close(0, 1)]


def test_an_open_event_that_is_over_stays_until_it_is_closed(scene: Scene) -> None:
    opening = scene.open()
    scene.board.slot(0).finish(CLOSED)
    scene.table.beat()
    assert _engine_of(scene.find((0, 1))) is opening.engine
    scene.close(opening)
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_what_a_request_that_was_given_up_made_is_released(scene: Scene) -> None:
    scene.table.give_back(scene.reply(1))
    scene.table.give_back(messages.Done())
    scene.table.tell()
    assert scene.coordinator.heard() == [Close(1, 1)]


def test_what_a_request_that_was_given_up_made_stays_while_it_is_used_and_its_role_too(scene: Scene) -> None:
    opening = scene.open()
    scene.table.give_back(scene.reply(recorder=True))
    scene.table.beat()
    assert scene.coordinator.heard() == []
    assert opening.engine.is_recorder
    scene.close(opening)
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_what_came_too_late_of_a_use_that_drains_is_told_once_more(scene: Scene) -> None:
    with _closed_amid_work(scene):
        scene.table.give_back(scene.reply())
        scene.table.tell()
        assert scene.coordinator.heard() == [Close(0, 1, released=False)], "it counts as one more user there"
        scene.table.tell()
        assert scene.coordinator.heard() == []


def test_a_role_that_came_too_late_for_a_use_that_drains_is_given_back_though_that_waits_for_a_record(
    scene: Scene,
) -> None:
    opening, stream, line = scene.open(), ipcsync.Stream(), scene.board.slot(0)
    line.recorder = 0  # there was none so far
    opening.engine.wait(1, stream, None, ahead=True)
    scene.close(opening)
    assert scene.coordinator.heard() == [Close(0, 1, released=False)]
    scene.table.give_back(scene.reply(recorder=True))
    assert scene.table.is_due
    scene.table.tell()
    assert scene.coordinator.heard() == [Close(0, 1, released=False)]
    line.finish(CLOSED)
    assert scene.look() == [Close(0, 1, released=False, drained=True)], "it will make none"
    line.store_completed(1)  # as the coordinator then does, which releases the stream
    stream.synchronize(30)
    until(lambda: scene.look() == [Close(0, 1)], "it is released")


def test_of_a_use_that_was_over_nothing_is_given_up(scene: Scene) -> None:
    found = scene.table.add(messages.Remains("e0", 0, 1, scene.device, 3, 3, "closed"), 0)
    scene.table.give_up(PointKey(scene.board.epoch, 0, 1, 1))
    assert scene.find((0, 1)) is found
    assert scene.look() == []


def test_what_nobody_uses_stays_while_its_event_is_open_unless_its_call_is_gone(scene: Scene) -> None:
    scene.attach()
    scene.table.beat()
    found = scene.find((0, 1))
    assert found is not None
    key = PointKey(scene.board.epoch, 0, 1, 1)
    scene.table.give_up(key)
    scene.table.beat()
    assert scene.find((0, 1)) is found, "somebody uses it all the same"
    scene.table.give_up(key)
    del found
    scene.table.beat()
    assert scene.find((0, 1)) is None
    assert scene.look() == [Close(0, 1)]


def test_each_request_has_the_time_of_the_call_that_makes_it(scene: Scene) -> None:
    scene.close(scene.open())
    scene.table.give_back(scene.reply(1))
    scene.table.tell_all(3.0, deadline_of(3.0))
    closed, told = scene.coordinator.timeouts
    assert closed <= TOLD_S < told <= 3


def _close_many(scene: Scene, count: int = 5) -> None:
    """So many events are closed, and released, but not told yet."""
    for opening in [scene.open(slot) for slot in range(count)]:
        scene.close(opening, wait=False)
    scene.driving.look()
    scene.coordinator.timeouts.clear()


def test_very_many_closes_are_told_a_part_at_a_time(scene: Scene) -> None:
    """To make all of them takes longer than a beat has."""
    _close_many(scene, 70)
    scene.table.tell()
    assert len(scene.coordinator.timeouts) == 2
    assert scene.coordinator.heard() == [Close(slot, 1) for slot in range(70)]
    assert not scene.table.ending


def test_many_closes_are_told_at_once(scene: Scene) -> None:
    _close_many(scene)
    scene.table.tell()
    assert len(scene.coordinator.timeouts) == 1
    assert scene.coordinator.heard() == [Close(slot, 1) for slot in range(5)]


@pytest.mark.parametrize("refusal", [WaitTimeout("no answer"), QuotaExceeded("no memory")])
def test_of_closes_that_were_told_at_once_those_that_were_answered_are_not_told_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, refusal: IpcSyncError
) -> None:
    coordinator, exchange = scene.coordinator, scene.coordinator.exchange

    def answer_two(requests: list[Request], *arguments: Any) -> None:
        exchange(requests[:2], *arguments)
        coordinator.refusal = refusal  # of the others

    _close_many(scene)
    scene.table.give_back(scene.reply(5))
    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "exchange", answer_two)
        scene.table.tell()
    coordinator.refusal = None
    for first, end in ((0, 2), (2, 6), (6, 6)):
        assert coordinator.heard() == [Close(slot, 1) for slot in range(first, end)]
        scene.table.tell()
    assert not scene.table.has_closes


def test_a_closed_table_tells_nothing_that_the_goodbye_does(scene: Scene) -> None:
    scene.open(0), scene.open(1)
    scene.table.close_all()
    assert scene.find((0, 1)) is scene.find((1, 1)) is None
    scene.driving.look()
    scene.table.forget_closes()
    scene.table.tell()
    assert scene.coordinator.heard() == []
    assert not scene.table.ending


def test_an_event_of_a_device_that_is_not_visible_is_refused_and_nothing_is_attached(scene: Scene) -> None:
    with pytest.raises(DeviceMismatch, match=r"^the event 'e0' is on a device that is not visible here: "):
        scene.open(reply=scene.reply(device="00000000-0000-0000-0000-000000000000"))
    assert scene.find((0, 1)) is None
    assert context.ordinal_of(scene.device) == 0


def test_that_a_recorders_work_is_over_is_told_once_though_it_is_still_waited_for_here(scene: Scene) -> None:
    opening = scene.open(recorder=True)
    engine, recording, waiting = opening.engine, ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(waiting):
        with StreamGate(recording):
            engine.record(recording._handle, engine.ordinal, 1)
            engine.wait(1, waiting, 1, False)
            scene.close(opening)
            assert scene.coordinator.heard() == [Close(0, 1, released=False)]
        recording.synchronize()
        for told in ([Close(0, 1, released=False, drained=True)], []):
            assert scene.look() == told
    waiting.synchronize()
    assert scene.look() == [Close(0, 1)]


def test_the_loss_of_a_part_is_told_until_the_coordinator_took_it(scene: Scene) -> None:
    opening = scene.open(recorder=True)
    chain = opening.engine.chain
    scene.table.beat()
    assert scene.coordinator.heard() == []
    chain.wants_break = True  # as it is once all before the loss is settled
    for refusal in (WaitTimeout("no answer"), QuotaExceeded("no memory")):
        scene.coordinator.refusal = refusal
        scene.table.beat()
        assert not chain.has_asked
    scene.coordinator.refusal = None
    scene.driving.look()  # which has the owner do so at once
    scene.table.beat()
    assert scene.coordinator.heard() == [Break(0, 1)]


def test_of_breaks_that_the_coordinator_does_not_take_one_is_tried_at_a_beat(scene: Scene) -> None:
    for slot in range(5):
        scene.open(slot, recorder=True).engine.chain.wants_break = True
    scene.coordinator.timeouts.clear()
    scene.coordinator.refusal = WaitTimeout("no answer")
    scene.table.beat()
    assert len(scene.coordinator.timeouts) == 1
    scene.coordinator.refusal = None
    scene.table.beat()
    assert scene.coordinator.heard() == [Break(slot, 1) for slot in range(5)]


@pytest.mark.parametrize("is_callback", [False, True])
def test_a_wait_is_over_when_its_point_is_and_one_that_is_forgotten_says_nothing(
    scene: Scene, is_callback: bool
) -> None:
    opening = scene.open(recorder=True)
    engine, stream = opening.engine, ipcsync.Stream()
    settled: list[Exception | None] = []
    forgotten: list[Exception | None] = []
    threads: list[str] = []
    over = threading.Event()

    def settle(error: Exception | None) -> None:
        settled.append(error)
        threads.append(threading.current_thread().name)
        over.set()

    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        late = Pending(engine, 1)
        opening.waits.add(late, forgotten.append, is_callback=is_callback)
        opening.waits.add(Pending(engine, 1), settle, is_callback=is_callback)
        opening.waits.remove(late)
        assert settled == []
    assert over.wait(30)
    assert (settled, forgotten) == ([None], [])
    assert threads == ["ipcsync-callbacks" if is_callback else "ipcsync-waits"]


def test_an_opening_that_never_was_bound_is_of_no_event(scene: Scene) -> None:
    opening = scene.open()
    fresh = AttachmentRef()
    scene.close(fresh)
    assert scene.table.close([fresh]) == []
    assert _engine_of(scene.find((0, 1))) is opening.engine
    assert scene.coordinator.heard() == []


def test_what_mirrors_another_nodes_event_is_found_by_what_it_mirrors_until_it_ends(scene: Scene) -> None:
    """Also where the device that it is recorded on is not seen."""
    origin, others = (b"o" * 16, 3, 2), (b"o" * 16, 3, 3)
    reply = replace(scene.reply(device="GPU-of-another-node"), origin=messages.Origin(*origin, "two"))
    opening = scene.open(reply=reply)
    scene.open(1)
    assert opening.engine.ordinal == ipcsync.current_device()
    assert scene.find(origin[1:], origin[0]) is scene.find((0, 1))
    assert _engine_of(scene.find((0, 1))) is opening.engine
    assert scene.find(others[1:], others[0]) is None
    scene.close(opening)
    assert scene.find(origin[1:], origin[0]) is None


def test_a_life_only_grows(scene: Scene) -> None:
    scene.close(scene.open(), wait=False)
    (use,) = scene.table.ending
    scene.table.advance(use, Life.DRAINED)
    scene.table.advance(use, Life.DRAINING)  # as a second thread has found it before
    assert use.life is Life.DRAINED
