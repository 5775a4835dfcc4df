"""What a client is attached to and when it lets go: real engines on a real board, and what the coordinator is told."""

from __future__ import annotations

import threading
from functools import partial

import pytest

import ipcsync
from ipcsync._board import CLOSED
from ipcsync._drivers import describe
from ipcsync._engines.engine import Engine
from ipcsync._native import context
from ipcsync._session.closes import PendingCloses
from ipcsync._session.references import Opening
from ipcsync._session.waits import Pending
from ipcsync._wire.messages import Break, Close
from ipcsync.errors import (
    ClientClosed,
    CoordinatorLost,
    DeviceMismatch,
    EngineMismatch,
    EventClosed,
    IpcSyncError,
    Reentered,
    SessionExpired,
    WaitTimeout,
)
from ipcsync.testing import StreamGate
from tests.kit.until import until
from tests.unit.session.attachment_scene import Scene


def test_the_last_close_of_an_event_ends_its_attachment_and_is_told_once(scene: Scene) -> None:
    first, second = scene.open(), scene.open()
    third = Opening()
    second.share(third)
    assert first.attached is second.attached is third.attached is scene.table.find((0, 1))
    for opening in (first, first, second):
        opening.close()
        assert scene.coordinator.heard() == []
    third.close()
    third.close()
    assert scene.coordinator.heard() == [Close(0, 1)]
    assert scene.table.find((0, 1)) is None
    assert not scene.table.draining.has_any
    assert not scene.table.closes.has_any
    for opening in (third, Opening()):
        with pytest.raises(EventClosed, match="closed in this process"):
            opening.share(Opening())


def test_who_still_has_work_releases_only_when_it_is_over(scene: Scene) -> None:
    opening = scene.open(recorder=True)
    assert opening.attached is not None
    engine, stream = opening.attached.engine, ipcsync.Stream()
    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        opening.close()
        assert scene.coordinator.heard() == [Close(0, 1, released=False)]
        assert scene.table.draining.has_any
        scene.table.beat()
        assert scene.table.draining.release_all() == 0
        assert not scene.table.closes.has_any
    stream.synchronize()
    until(scene.table.draining.release_all, "it is released: the driver may be inside its last wait for a moment")
    assert scene.table.closes.has_any
    scene.table.closes.flush(wait=True, timeout=1)
    *earlier, last = scene.coordinator.heard()
    assert last == Close(0, 1)
    assert earlier in ([], [Close(0, 1, released=False, drained=True)]), "its work is told to be over, at most, before"
    assert not scene.table.draining.has_any


def test_a_close_that_is_told_the_moment_it_is_added_releases_the_slot(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, or by a finalizer that opens an event just then."""
    add = PendingCloses.add

    def add_and_flush(self: PendingCloses, engine: Engine, **options: bool) -> None:
        add(self, engine, **options)
        self.flush(wait=True, timeout=1)

    monkeypatch.setattr(PendingCloses, "add", add_and_flush)
    scene.open().close()
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_a_close_that_is_not_taken_is_told_later_and_before_anything_is_attached(scene: Scene) -> None:
    opening = scene.open()
    scene.coordinator.refusal = WaitTimeout("no answer")
    opening.close()
    assert scene.table.closes.has_any
    with pytest.raises(WaitTimeout, match=r"^the coordinator did not take an earlier close within 0.25 s$") as caught:
        scene.table.closes.change(0.25, lambda: pytest.fail("nothing may be attached before it is told"))
    assert caught.value.timeout == 0.25
    scene.coordinator.refusal = None
    assert scene.table.closes.change(1, scene.coordinator.heard) == [Close(0, 1)]
    assert not scene.table.closes.has_any


def test_within_a_request_of_the_thread_an_opening_says_so_and_a_close_is_told_later(scene: Scene) -> None:
    opening = scene.open()
    scene.coordinator.refusal = Reentered("a request is under way on this thread")
    opening.close()
    assert scene.table.closes.has_any
    with pytest.raises(Reentered, match="under way"):
        scene.table.closes.change(1, lambda: pytest.fail("nothing may be attached before it is told"))
    scene.coordinator.refusal = None
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_a_close_that_the_coordinator_refuses_is_not_told_again(scene: Scene) -> None:
    opening = scene.open()
    scene.coordinator.refusal = SessionExpired("over already")
    opening.close()
    assert not scene.table.closes.has_any


def test_a_close_that_was_put_off_ends_no_use_that_was_made_since(scene: Scene) -> None:
    opening = scene.open()
    scene.coordinator.refusal = WaitTimeout("no answer")
    opening.close()
    scene.table.add(scene.reply(), again := Opening())
    scene.coordinator.refusal = None
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == []
    again.close()
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_a_recorders_close_is_told_though_the_slot_is_still_touched_here(scene: Scene) -> None:
    opening = scene.open(recorder=True)
    scene.coordinator.refusal = WaitTimeout("no answer")
    opening.close()
    scene.table.add(scene.reply(), again := Opening())
    scene.coordinator.refusal = None
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == [Close(0, 1, released=False)]
    again.close()
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_what_points_made_ends_when_the_event_is_over_and_no_point_is_left(scene: Scene) -> None:
    held = scene.table.closes.change(1, lambda: scene.table.add(scene.reply()))
    scene.table.beat()
    assert scene.table.find((0, 1)) is held
    scene.board.slot(0).finish(CLOSED)
    scene.table.beat()
    assert scene.table.find((0, 1)) is held
    del held
    scene.table.beat()
    assert scene.table.find((0, 1)) is None
    assert scene.table.closes.has_any  # told by whoever may wait for the reply
    scene.table.closes.flush(wait=False, timeout=1)
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_an_open_event_that_is_over_stays_until_it_is_closed(scene: Scene) -> None:
    opening = scene.open()
    scene.board.slot(0).finish(CLOSED)
    scene.table.beat()
    assert scene.table.find((0, 1)) is opening.attached
    opening.close()
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_what_a_request_that_was_given_up_made_is_released(scene: Scene) -> None:
    scene.table.give_back(scene.reply(1))
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == [Close(1, 1)]


def test_what_a_request_that_was_given_up_made_stays_while_it_is_used_and_its_role_too(scene: Scene) -> None:
    opening = scene.open()
    scene.table.give_back(scene.reply(recorder=True))
    scene.table.closes.flush(wait=True, timeout=1)
    scene.table.beat()
    assert scene.coordinator.heard() == []
    assert opening.attached is not None
    assert opening.attached.engine.is_recorder
    opening.close()
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_many_points_are_looked_through_before_a_further_one(scene: Scene) -> None:
    for number in range(64):
        scene.table.relieve()
        assert not scene.table.closes.has_any
        scene.table.closes.change(1, partial(scene.attach_for_a_point, number))
        scene.board.slot(number).finish(CLOSED)
    scene.table.relieve()
    assert scene.table.closes.has_any
    scene.table.closes.flush(wait=True, timeout=1)
    assert len(scene.coordinator.heard()) == 64


def test_a_closed_table_takes_nothing_in_and_tells_nothing_that_the_goodbye_does(scene: Scene) -> None:
    scene.open(0), scene.open(1)
    scene.table.close_all(1)
    assert scene.coordinator.heard() == []
    assert scene.table.find((0, 1)) is scene.table.find((1, 1)) is None
    with pytest.raises(ClientClosed, match=r"^the client was closed while the event was opened$"):
        scene.table.add(scene.reply(2), Opening())


def test_the_end_waits_for_work_until_its_time_is_over_and_then_tells_what_drains(scene: Scene) -> None:
    opening, other = scene.open(recorder=True), scene.open(1)
    assert opening.attached is not None
    engine, stream, pauses = opening.attached.engine, ipcsync.Stream(), [0.0]
    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        scene.table.close_all(0.05)
        assert scene.coordinator.heard() == [Close(1, 1)]  # others may wait for just that
        assert scene.table.draining.has_any
    stream.synchronize()
    scene.table.close_all(5, pauses.append)
    assert pauses == [0.0]  # nothing was to be waited for
    assert not scene.table.draining.has_any
    other.close()


def test_an_event_of_a_device_that_is_not_visible_is_refused_and_nothing_is_attached(scene: Scene) -> None:
    with pytest.raises(DeviceMismatch, match=r"^the event 'e0' is on a device that is not visible here: "):
        scene.table.closes.change(
            1, lambda: scene.table.add(scene.reply(device="00000000-0000-0000-0000-000000000000"))
        )
    assert scene.table.find((0, 1)) is None
    assert context.ordinal_of(scene.device) == 0


def test_changes_wait_for_each_other_and_never_within_each_other(scene: Scene) -> None:
    with (
        scene.changing(),
        pytest.raises(WaitTimeout, match=r"^other requests of this client took all of the 0.01 s$") as caught,
    ):
        scene.table.closes.change(0.01, lambda: None)
    assert caught.value.timeout == 0.01
    assert scene.table.closes.change(5, lambda: 7) == 7
    with pytest.raises(ValueError, match="timeout"):
        scene.table.closes.change(-1, lambda: None)
    with pytest.raises(ZeroDivisionError):
        scene.table.closes.change(5, lambda: 1 // 0)
    assert scene.table.closes.change(5, lambda: 8) == 8


def test_an_ended_session_is_told_nothing_more(scene: Scene) -> None:
    opening = scene.open()
    scene.table.closes.end()
    opening.close()
    assert scene.coordinator.heard() == []
    assert not scene.table.closes.has_any
    scene.table.give_back(scene.reply(1))
    scene.table.closes.drop()
    assert not scene.table.closes.has_any


def test_a_close_within_a_change_of_the_same_thread_is_told_later(scene: Scene) -> None:
    opening = scene.open()
    scene.coordinator.refusal = Reentered("a request of this thread is under way")
    opening.close()
    assert scene.table.closes.has_any
    scene.coordinator.refusal = None
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_that_a_recorders_work_is_over_is_told_once_though_it_is_still_waited_for_here(scene: Scene) -> None:
    opening = scene.open(recorder=True)
    assert opening.attached is not None
    engine, recording, waiting = opening.attached.engine, ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(waiting):
        with StreamGate(recording):
            engine.record(recording._handle, engine.ordinal, 1)
            engine.wait(1, waiting, 1, False)
            opening.close()
            assert scene.coordinator.heard() == [Close(0, 1, released=False)]
        recording.synchronize()
        for told in ([Close(0, 1, released=False, drained=True)], []):
            assert scene.table.draining.release_all() == 0
            scene.table.closes.flush(wait=True, timeout=1)
            assert scene.coordinator.heard() == told
    waiting.synchronize()
    assert scene.table.draining.release_all() == 1
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_what_nobody_uses_stays_while_its_event_is_open_unless_its_request_was_given_up(scene: Scene) -> None:
    scene.attach_for_a_point(0)
    scene.table.beat()
    assert scene.table.find((0, 1)) is not None
    scene.table.give_back(scene.reply())
    scene.table.beat()
    assert scene.table.find((0, 1)) is None
    scene.table.closes.flush(wait=True, timeout=1)
    assert set(scene.coordinator.heard()) == {Close(0, 1)}


def test_the_loss_of_a_part_is_told_until_the_coordinator_took_it(scene: Scene) -> None:
    opening = scene.open(recorder=True)
    assert opening.attached is not None
    chain = opening.attached.engine.chain
    scene.table.beat()
    assert scene.coordinator.heard() == []
    chain.wants_break = True  # as it is once all before the loss is settled
    for refusal in (WaitTimeout("no answer"), Reentered("a request of this thread is under way")):
        scene.coordinator.refusal = refusal
        scene.table.beat()
        assert not chain.has_asked
    scene.coordinator.refusal = None
    scene.table.beat()
    scene.table.beat()
    assert scene.coordinator.heard() == [Break(0, 1)]


@pytest.mark.parametrize(("before", "after", "closed"), [(3, 1, 2), (1, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("error", [None, SessionExpired, CoordinatorLost])
def test_how_many_imports_a_collection_closed_is_told(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    after: int,
    closed: int,
    error: type[IpcSyncError] | None,
) -> None:
    beats: list[None] = []

    def beat() -> None:
        beats.append(None)
        if error is not None:
            raise error("this session's own calls say so")

    monkeypatch.setattr(scene.table, "beat", beat)
    monkeypatch.setattr("ipcsync._engines.imports.count", iter((before, after)).__next__)
    assert scene.table.collect() == closed
    assert len(beats) == 1


@pytest.mark.parametrize("is_callback", [False, True])
def test_a_wait_is_over_when_its_point_is_and_one_that_is_forgotten_says_nothing(
    scene: Scene, is_callback: bool
) -> None:
    opening = scene.open(recorder=True)
    assert opening.attached is not None
    engine, stream = opening.attached.engine, ipcsync.Stream()
    settled: list[Exception | None] = []
    forgotten: list[Exception | None] = []
    over = threading.Event()

    def settle(error: Exception | None) -> None:
        settled.append(error)
        over.set()

    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        late = opening.attached.when_done(Pending(engine, 1), forgotten.append, is_callback=is_callback)
        opening.attached.when_done(Pending(engine, 1), settle, is_callback=is_callback)
        opening.attached.forget(late)
        assert settled == []
    assert over.wait(30)
    assert (settled, forgotten) == ([None], [])


def test_the_end_waits_for_a_call_that_opens_an_event_meanwhile_and_releases_what_it_made(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Engine] = []

    def open_late(engine: Engine) -> None:
        scene.table.close_all(0.01)  # as by another thread, while this one is in the driver
        assert scene.table.draining.is_making
        made.append(engine)

    monkeypatch.setattr(Engine, "open_first", open_late)
    with pytest.raises(ClientClosed, match=r"^the client was closed while the event was opened$"):
        scene.table.add(scene.reply(), Opening())
    assert scene.table.draining.has_any
    assert not scene.table.draining.is_making
    scene.table.beat()
    assert made[0].is_released
    assert not scene.table.draining.has_any


def test_an_engine_that_does_not_work_here_is_released(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Engine] = []

    def fail(engine: Engine) -> None:
        tried.append(engine)
        raise describe(201, "cuMemHostRegister")

    monkeypatch.setattr(Engine, "open_first", fail)
    with pytest.raises(EngineMismatch, match="does not work in this process"):
        scene.table.add(scene.reply(), Opening())
    assert tried[0].is_closed
    scene.table.beat()
    assert tried[0].is_released
    assert not scene.table.draining.has_any


def test_a_use_that_is_about_to_be_closed_is_not_released_before(scene: Scene) -> None:
    opening = scene.open()
    assert opening.attached is not None
    engine = opening.attached.engine
    scene.table.draining.add(engine)  # as far as a close has come
    scene.table.beat()
    assert not engine.is_released
    assert not scene.table.closes.has_any
    opening.close()
    assert engine.is_released


def test_after_the_coordinators_death_a_beat_asks_the_driver_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, asked = scene.open(recorder=True), list[str]()
    assert opening.attached is not None
    engine = opening.attached.engine
    for name in ("publish_completed", "park_pending"):
        monkeypatch.setattr(engine, name, partial(asked.append, name))
    scene.table.beat()
    assert asked == ["publish_completed", "park_pending"]
    monkeypatch.setattr(engine.guard, "coordinator_is_alive", lambda: False)
    scene.table.beat()
    assert len(asked) == 2


def test_a_making_ends_with_its_block_though_the_exception_that_ended_it_is_kept(scene: Scene) -> None:
    draining = scene.table.draining

    def fail() -> None:
        with draining.making():
            assert draining.has_any
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        fail()
    assert not draining.has_any
    unused = draining.making()
    assert not draining.has_any, "it holds nothing before its block"
    del unused, kept
    with draining.making():
        assert len(draining._makings._references) == 1, "those that are over are forgotten"
