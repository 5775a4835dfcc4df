"""What a session asks of the driver by itself, and what it says of one that fails it."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest

import ipcsync
from ipcsync._drivers import describe
from ipcsync._engines.engine import Engine
from ipcsync._session.attachments import AttachmentRef
from ipcsync._wire.messages import Close
from ipcsync.errors import DriverError, EngineMismatch
from tests.kit.until import until
from tests.unit.session.attachment_scene import Scene


def _failing(name: str, opening: AttachmentRef, patch: pytest.MonkeyPatch) -> DriverError:
    """Have a method of the engine meet a context that is broken."""
    error = describe(700, "cuEventQuery")

    def fail(*_: object) -> None:
        raise error

    patch.setattr(opening.engine, name, fail)
    return error


def test_whether_an_engine_works_here_is_tried_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(Engine, "open_first", lambda engine: tried.append(engine.slot))
    for slot in range(3):
        scene.close(scene.open(slot))
    assert tried == [0]


def test_an_engine_that_does_not_work_here_says_so_each_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Engine) -> None:
        raise describe(201, "cuMemHostRegister")

    monkeypatch.setattr(Engine, "open_first", fail)
    for slot in range(2):
        with pytest.raises(EngineMismatch, match="does not work in this process"):
            scene.open(slot)


def test_of_a_context_that_is_broken_each_event_is_warned_of_once_and_keeps_no_other_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, well, stream = scene.open(recorder=True), scene.open(1, recorder=True), ipcsync.Stream()
    engine = well.engine
    engine.record(stream._handle, engine.ordinal, 1)
    stream.synchronize()
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, "ipcsync"):
        error = _failing("publish_completed", broken, patch)
        scene.driving.look()
        scene.driving.look()
    said = [(each.levelno, each.getMessage()) for each in caplog.records if "cannot" in each.getMessage()]
    text = f"cannot publish what is complete of the event 'e0': {error}"
    assert said == [(logging.WARNING, text), (logging.DEBUG, text)]
    assert engine.line.completed - engine.base == 1


def test_what_the_driver_cannot_say_is_not_told_to_be_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opening = scene.open(recorder=True)
    with monkeypatch.context() as patch:
        error = _failing("try_release", opening, patch)
        scene.close(opening)
    assert scene.coordinator.heard() == [Close(0, 1, released=False)]
    assert [each.getMessage() for each in caplog.records] == [f"cannot release the event 'e0': {error}"]
    assert scene.look() == [Close(0, 1)]


def test_after_the_coordinators_death_a_look_asks_the_driver_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, asked = scene.open(recorder=True), list[str]()
    monkeypatch.setattr(opening.engine, "publish_completed", partial(asked.append, "publish_completed"))
    scene.driving.look()
    assert asked == ["publish_completed"]
    monkeypatch.setattr(scene.lease, "coordinator_is_alive", lambda: False)
    scene.driving.look()
    assert len(asked) == 1


def test_a_trial_ends_with_its_call_though_the_exception_that_ended_it_is_kept(scene: Scene) -> None:
    def fail() -> None:
        assert scene.driving.is_trying
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        scene.driving._tried(fail, 1)
    assert not scene.driving.is_trying
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("event", ["line", "return"])
def test_no_trial_is_left_by_a_caller_that_is_interrupted_at_any_of_its_steps(scene: Scene, event: str) -> None:
    driving, left = scene.driving, [0]

    def step(_frame: FrameType, what: str, _: object) -> Any:
        if what == event:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return step

    def enter(frame: FrameType, _what: str, _: object) -> Any:
        return step if frame.f_code.co_filename == inspect.getfile(type(driving)) else None

    interrupted, tracer = 0, sys.gettrace()
    while left[0] <= 0:
        left[0] = interrupted + 1
        sys.settrace(enter)
        try:
            with suppress(KeyboardInterrupt):
                driving._tried(lambda: None, 1)
        finally:
            sys.settrace(tracer)
        assert not driving.is_trying, f"after an exception at step {interrupted + 1}"
        interrupted += left[0] <= 0
    assert interrupted > 1


def test_a_driver_that_keeps_the_thread_is_told_of_once_and_the_thread_goes_on_behind_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ipcsync._session.driving._STANDING_S", 0.01)
    opening, gate, looks = scene.open(recorder=True), threading.Event(), list[None]()

    def stand() -> None:
        looks.append(None)
        gate.wait(30)

    monkeypatch.setattr(opening.engine, "publish_completed", stand)
    thread = threading.Thread(target=scene.driving.run)
    thread.start()
    scene.driving.wake()
    until(lambda: scene.driving.standing_s() > 0, "it stands")
    assert scene.driving.standing_s() > 0
    assert [each.getMessage().partition(" for ")[0] for each in caplog.records] == [
        "the driver has kept a session's thread"
    ]
    gate.set()
    until(lambda: not scene.driving.standing_s(), "it goes on")
    scene.driving.wake()
    until(lambda: len(looks) == 2, "it looks again")
    monkeypatch.undo()
    scene.driving._wakes.put(False)
    thread.join(30)
    assert not thread.is_alive()
