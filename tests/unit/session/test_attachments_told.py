"""What a client tells of its attachments, when, and what it says of a driver that fails it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from msgspec.structs import replace

import ipcsync
from ipcsync._deadline import deadline_of
from ipcsync._drivers import describe
from ipcsync._engines.engine import Engine
from ipcsync._session.attachments import ClosedMeanwhile
from ipcsync._session.references import Opening
from ipcsync._session.waits import Pending
from ipcsync._wire import messages
from ipcsync._wire.messages import Break, Close
from ipcsync.errors import DriverError, Reentered, SessionExpired, WaitTimeout
from ipcsync.testing import StreamGate
from tests.kit.until import until
from tests.unit.session.attachment_scene import Scene

_FLUSH_S = 0.5


@pytest.fixture
def within(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each request was to take at most."""
    timeouts: list[float] = []

    def send(body: Close | Break, timeout: float) -> None:
        timeouts.append(timeout)
        scene.coordinator.send(body, timeout)

    monkeypatch.setattr(scene.table.closes, "_send", send)
    return timeouts


def _failing(scene: Scene, name: str, opening: Opening, patch: pytest.MonkeyPatch) -> DriverError:
    """Have a method of the engine meet a context that is broken."""
    error = describe(700, "cuEventQuery")
    assert opening.attached is not None

    def fail(*_: object) -> None:
        raise error

    patch.setattr(opening.attached.engine, name, fail)
    return error


def test_each_request_has_the_time_of_the_call_that_makes_it(scene: Scene, within: list[float]) -> None:
    scene.open().close()
    assert within == [_FLUSH_S]
    scene.table.give_back(scene.reply(1))
    scene.table.closes.change(3, lambda: None)
    assert within == [_FLUSH_S, pytest.approx(3, abs=0.5)]
    assert within[1] <= 3
    scene.table.give_back(scene.reply(1))
    scene.table.closes.flush(wait=True, timeout=0.25)
    assert within[2:] == [0.25]


def test_a_close_waits_for_another_threads_change_if_it_is_to(scene: Scene) -> None:
    with scene.changing():
        scene.table.give_back(scene.reply(1))
        scene.table.closes.flush(wait=False, timeout=30)
        assert scene.coordinator.heard() == []
        flushing = threading.Thread(target=scene.table.closes.flush, kwargs={"wait": True, "timeout": 30})
        flushing.start()
    flushing.join(30)
    assert scene.coordinator.heard() == [Close(1, 1)]


def test_a_change_within_a_change_says_what_it_interrupts(scene: Scene) -> None:
    why = "^an event is opened or closed on this thread, which an opening here interrupts$"
    with pytest.raises(Reentered, match=why):
        scene.table.closes.change(1, lambda: scene.table.closes.change(1, lambda: None))


def test_a_close_that_no_change_may_pass_says_how_long_it_was_tried(scene: Scene) -> None:
    scene.coordinator.refusal = WaitTimeout("silent")
    scene.table.give_back(scene.reply(1))
    with pytest.raises(WaitTimeout, match=r"^the coordinator did not take an earlier close within 0.2 s$"):
        scene.table.closes.change(0.2, lambda: None)


def test_the_end_tells_that_a_recorders_work_is_over_though_it_is_still_waited_for_here(scene: Scene) -> None:
    opening = scene.open(recorder=True)
    assert opening.attached is not None
    engine, recording, waiting = opening.attached.engine, ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(waiting):
        with StreamGate(recording):
            engine.record(recording._handle, engine.ordinal, 1)
            engine.wait(1, waiting, 1, False)
        recording.synchronize()
        pauses: list[float] = []
        scene.table.close_all(0.02, pauses.append)
        assert scene.coordinator.heard() == [Close(0, 1, released=False, drained=True)]
    waiting.synchronize()
    assert pauses[:7] == [0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016], "the first is a beat behind the close"
    assert set(pauses[7:]) <= {0.02}


def test_what_is_attached_anew_while_it_drains_is_judged_as_one(scene: Scene) -> None:
    first, stream = scene.open(recorder=True), ipcsync.Stream()
    assert first.attached is not None
    engine = first.attached.engine
    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        first.close()
        again = scene.open()
        assert again.attached is not None
        assert again.attached.engine is not engine
        assert again.attached.engine.chain is engine.chain
    other = scene.open(1)
    assert other.attached is not None
    assert other.attached.engine.chain is not engine.chain
    stream.synchronize()
    for opening in (again, other):
        opening.close()


def test_what_was_closed_before_the_reply_came_is_told_and_asked_for_anew(scene: Scene) -> None:
    first, stream = scene.open(recorder=True), ipcsync.Stream()
    assert first.attached is not None
    engine = first.attached.engine

    def reply() -> None:
        first.close()
        for opening in (Opening(), None):
            with pytest.raises(ClosedMeanwhile):
                scene.table.add(scene.reply(recorder=True), opening)
        assert scene.coordinator.heard() == []
        scene.table.finish_close((0, 1), 1, deadline_of(1))
        assert scene.coordinator.heard() == [Close(0, 1, released=False)]
        again = scene.table.add(scene.reply(recorder=True))  # of a point: the coordinator knows that it is closed
        assert again.engine.chain is engine.chain
        assert again.engine.earlier is engine

    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        scene.table.closes.change(1, reply)
    stream.synchronize()


def test_a_close_that_was_interrupted_is_finished_before_it_is_asked_for_anew(scene: Scene) -> None:
    opening = scene.open(recorder=True)
    assert opening.attached is not None
    engine = opening.attached.engine
    scene.table.draining.add(engine)
    engine.close()  # as far as a close has come

    def reply() -> None:
        with pytest.raises(ClosedMeanwhile):
            scene.table.add(scene.reply(recorder=True), Opening())
        scene.table.finish_close((0, 1), 1, deadline_of(1))

    scene.table.closes.change(1, reply)
    assert scene.coordinator.heard() == [Close(0, 1)]
    assert scene.table.find((0, 1)) is None


@pytest.mark.parametrize("is_recorder", [False, True])
def test_of_several_replies_no_other_ones_close_is_told(scene: Scene, is_recorder: bool) -> None:
    first, second = scene.open(recorder=True), scene.open(1, recorder=is_recorder)

    def reply() -> None:
        first.close()
        second.close()
        with pytest.raises(ClosedMeanwhile):
            scene.table.add(scene.reply(recorder=True), Opening())
        scene.table.finish_close((0, 1), 1, deadline_of(1))
        assert scene.coordinator.heard() == [Close(0, 1)]
        if is_recorder:
            with pytest.raises(ClosedMeanwhile):
                scene.table.add(scene.reply(1, recorder=True), Opening())
        else:
            scene.table.add(scene.reply(1), again)

    again = Opening()
    scene.table.closes.change(1, reply)
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == ([Close(1, 1)] if is_recorder else [])


def test_a_handler_that_closes_the_event_amid_the_reply_leaves_no_opening_behind(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, hold = scene.open(recorder=True), Opening(), scene.table._hold

    def close_first(*args: Any) -> Any:
        held = hold(*args)
        monkeypatch.undo()
        first.close()
        return held

    def reply() -> None:
        with pytest.raises(ClosedMeanwhile):
            scene.table.add(scene.reply(recorder=True), second)
        scene.table.finish_close((0, 1), 1, deadline_of(1))

    monkeypatch.setattr(scene.table, "_hold", close_first)
    scene.table.closes.change(1, reply)
    heard = scene.coordinator.heard()
    assert heard == [Close(0, 1)] * len(heard) != [], "a second one does nothing"
    assert not scene.table._opened
    assert scene.table.find((0, 1)) is None


def test_a_close_that_was_interrupted_is_told_while_its_use_drains(scene: Scene) -> None:
    opening, stream = scene.open(recorder=True), ipcsync.Stream()
    assert opening.attached is not None
    engine = opening.attached.engine
    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        scene.table.draining.add(engine)
        engine.close()  # as far as a close has come
        scene.table.draining.release_all()
        scene.table.closes.flush(wait=True, timeout=1)
        assert scene.coordinator.heard() == [Close(0, 1, released=False)]
    stream.synchronize()


def test_a_close_that_the_coordinator_does_not_take_lets_nothing_be_asked_for_anew(scene: Scene) -> None:
    opening = scene.open(recorder=True)

    def reply() -> None:
        opening.close()
        scene.coordinator.refusal = WaitTimeout("no answer")
        scene.table.finish_close((0, 1), 1, deadline_of(1))

    with pytest.raises(WaitTimeout, match="did not take an earlier close within 1 s"):
        scene.table.closes.change(1, reply)
    assert scene.table.closes.has_recorders((0, 1))
    assert not scene.table.closes.has_recorders((1, 1))


def test_of_a_context_that_is_broken_each_event_is_warned_of_once_and_keeps_no_other_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, well, stream = scene.open(recorder=True), scene.open(1, recorder=True), ipcsync.Stream()
    assert well.attached is not None
    engine = well.attached.engine
    engine.record(stream._handle, engine.ordinal, 1)
    stream.synchronize()
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, "ipcsync"):
        error = _failing(scene, "publish_completed", broken, patch)
        scene.table.beat()
        scene.table.beat()
    said = [(each.levelno, each.getMessage()) for each in caplog.records if "cannot" in each.getMessage()]
    text = f"cannot publish what is complete of the event 'e0': {error}"
    assert said == [(logging.WARNING, text), (logging.DEBUG, text)]
    assert engine.line.completed - engine.base == 1


def test_an_event_that_cannot_be_waited_for_ends_no_beat(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other, stream = scene.open(recorder=True), scene.open(1), ipcsync.Stream()
    assert broken.attached is not None
    with monkeypatch.context() as patch, StreamGate(stream):
        error = _failing(scene, "park_pending", broken, patch)
        scene.table.beat()
        broken.attached.engine.record(stream._handle, broken.attached.engine.ordinal, 1)
        broken.close()
        scene.table.beat()
    assert [each.getMessage() for each in caplog.records] == [
        f"cannot wait for what is pending of the event 'e0': {error}"
    ]
    stream.synchronize()
    other.close()


def test_what_the_driver_cannot_say_is_not_told_to_be_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening = scene.open(recorder=True)
    with monkeypatch.context() as patch:
        error = _failing(scene, "is_drained", opening, patch)
        _failing(scene, "try_release", opening, patch)
        opening.close()
    assert scene.coordinator.heard() == [Close(0, 1, released=False)]
    assert [each.getMessage() for each in caplog.records] == [f"cannot release the event 'e0': {error}"]
    assert scene.table.draining.release_all() == 1
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == [Close(0, 1)]


def test_a_wait_of_the_librarys_own_ends_on_the_thread_that_looks_and_a_users_callback_on_another(
    scene: Scene,
) -> None:
    opening = scene.open(recorder=True)
    assert opening.attached is not None
    engine, stream, threads = opening.attached.engine, ipcsync.Stream(), list[str]()
    engine.record(stream._handle, engine.ordinal, 1)
    for options in ({}, {"is_callback": True}):
        count = len(threads)
        opening.attached.when_done(
            Pending(engine, 1), lambda _: threads.append(threading.current_thread().name), **options
        )
        until(lambda count=count: len(threads) > count, "it is told")  # type: ignore[misc]
    assert threads == ["ipcsync-waits", "ipcsync-callbacks"]


def test_an_opening_that_never_was_bound_is_of_no_event(scene: Scene) -> None:
    opening = scene.open()
    fresh = Opening()
    fresh.close()
    scene.table.close_one(fresh, wait=True)
    assert scene.table.find((0, 1)) is opening.attached
    assert scene.coordinator.heard() == []
    opening.close()


def test_what_mirrors_another_nodes_event_is_found_by_what_it_mirrors_until_it_ends(scene: Scene) -> None:
    origin, others = (b"e" * 16, 3, 2), (b"e" * 16, 3, 3)
    opening = Opening()
    reply = replace(scene.reply(), origin=messages.Origin(*origin, "two"))
    scene.table.closes.change(1, lambda: scene.table.add(reply, opening))
    here = scene.open(1)
    assert scene.table.find_mirror(origin) is opening.attached is scene.table.find((0, 1))
    assert scene.table.find_mirror(others) is None
    opening.close()
    assert scene.table.find_mirror(origin) is None
    here.close()


def test_how_many_were_released_is_told(scene: Scene) -> None:
    openings, stream = [scene.open(slot, recorder=True) for slot in range(3)], ipcsync.Stream()
    with StreamGate(stream):
        for opening in openings:
            assert opening.attached is not None
            opening.attached.engine.record(stream._handle, opening.attached.engine.ordinal, 1)
            opening.close()
        assert scene.table.draining.release_all() == 0
    stream.synchronize()
    assert scene.table.draining.release_all() == 3
    assert scene.table.draining.release_all() == 0


def test_a_close_that_the_goodbye_has_told_meanwhile_is_done(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.table.closes, "_send", lambda *_: scene.table.closes.drop())
    scene.table.give_back(scene.reply(1))
    scene.table.closes.flush(wait=True, timeout=1)
    assert not scene.table.closes.has_any


def test_a_mirror_is_attached_where_the_device_that_it_is_recorded_on_is_not_seen(scene: Scene) -> None:
    opening = Opening()
    reply = replace(scene.reply(device="GPU-of-another-node"), origin=messages.Origin(b"e" * 16, 3, 2, "two"))
    scene.table.closes.change(1, lambda: scene.table.add(reply, opening))
    assert opening.attached is not None
    assert opening.attached.device == ipcsync.Device(ipcsync.current_device())
    opening.close()


def test_what_came_too_late_of_a_use_that_drains_is_told_when_that_is_over(scene: Scene) -> None:
    opening, stream = scene.open(recorder=True), ipcsync.Stream()
    assert opening.attached is not None
    engine = opening.attached.engine
    with StreamGate(stream):
        engine.record(stream._handle, engine.ordinal, 1)
        opening.close()
        assert scene.coordinator.heard() == [Close(0, 1, released=False)]
        scene.table.give_back(scene.reply())
        scene.table.closes.flush(wait=True, timeout=1)
        assert scene.coordinator.heard() == []
    stream.synchronize()


def test_an_opening_that_an_exception_ends_closes_no_use_that_others_have(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = scene.open()
    assert opening.attached is not None

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scene.table, "_put", interrupt)
        for slot in (0, 1):
            with pytest.raises(KeyboardInterrupt):
                scene.open(slot)
    assert not opening.attached.engine.is_closed
    assert [engine.slot for engine in scene.table.draining.engines] == [1]
    assert all(engine.is_closed for engine in scene.table.draining.engines)


def test_a_use_whose_end_an_exception_interrupted_is_ended_by_a_beat(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, other = scene.open(), scene.open(1)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scene.table, "_begin_close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            opening.close()
    assert scene.table.find((0, 1)) is not None
    scene.table.beat()
    scene.table.closes.flush(wait=True, timeout=1)
    assert scene.coordinator.heard() == [Close(0, 1)]
    assert scene.table.find((0, 1)) is None
    assert scene.table.find((1, 1)) is other.attached


@pytest.mark.parametrize("wait", [True, False])
def test_a_close_is_told_before_it_returns_if_it_is_to_wait(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    monkeypatch.setattr("ipcsync._session.closes._FLUSH_S", 30)
    opening = scene.open()
    with scene.changing() as left:
        threading.Timer(0.1, left.set).start()
        opening.close(wait=wait)
        assert scene.coordinator.heard() == ([Close(0, 1)] if wait else [])


def test_a_session_that_is_over_does_not_keep_points_from_being_attached(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise SessionExpired("silent")

    monkeypatch.setattr(scene.table, "beat", fail)
    monkeypatch.setattr(scene.table, "_since_beat", 64)
    scene.table.relieve()
    assert scene.table._since_beat == 0


def test_whether_an_engine_works_here_is_tried_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(Engine, "open_first", lambda engine: tried.append(engine.slot))
    for slot in range(3):
        scene.open(slot).close()
    assert tried == [0]
