"""What an exception or a refusal in the middle of a call leaves queued, and what comes after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

import ipcsync
from ipcsync._engines import queued
from ipcsync.testing import StreamGate
from tests.events.stage import Stage
from tests.kit.driver_calls import DriverCalls, Interrupted
from tests.kit.shortcuts import IN_PYTHON, has_shortcuts
from tests.kit.until import until

pytestmark = pytest.mark.usefixtures("nothing_queued")


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "further"])
@pytest.mark.parametrize("how", ["interrupted", "refused"])
def test_a_record_that_an_exception_ended_is_passed_by_none_that_comes_after_it(
    stage: Stage, calls: DriverCalls, how: str, is_first: bool
) -> None:
    recording = "cuEventRecord" if stage.engine == "event" else "cuStreamWriteValue64"
    for number in itertools.count():
        made, seen = stage.open()
        held, free, third = (ipcsync.Stream() for _ in range(3))
        if not is_first:
            made.record(held).synchronize(30)
        with StreamGate(held) as gate:
            calls.watch(**{how: number})
            with suppress(Interrupted, ipcsync.DriverError):
                made.record(held)
            asked = list(calls.names)
            calls.watch()
            is_made = recording in asked[: number + (how == "interrupted")]
            point = made.record(free)
            if is_made:
                assert not point.query(), f"the record after it does not wait for what {asked[number:]} left"
                made.at(point.generation).wait(third)
                assert not third.query()
            gate.open()
            point.synchronize(30)
            assert point.generation == made.generation <= 3 - is_first
            for generation in range(1, point.generation + 1):
                seen.at(generation).synchronize(30)
        assert made.record(third).generation == point.generation + 1
        stage.close()
        if number >= len(asked):
            break


@pytest.mark.parametrize("what", ["record", "wait"])
@pytest.mark.parametrize("how", ["interrupted", "refused"])
def test_nothing_is_released_while_what_an_exception_left_queued_is_pending(
    stage: Stage, calls: DriverCalls, how: str, what: str
) -> None:
    queuing = {
        "record": {"event": "cuEventRecord", "timeline": "cuStreamWriteValue64"},
        "wait": {"event": "cuStreamWaitEvent", "timeline": "cuStreamWaitValue64"},
    }[what][stage.engine]
    for number in itertools.count():
        made, seen = stage.open()
        held, stream = ipcsync.Stream(), ipcsync.Stream()
        with StreamGate(held) as gate:
            call: Callable[[], object] = partial(made.record, held)
            engine = made._engine
            if what == "wait":
                made.record(held)
                point = seen.latest
                assert point is not None
                call, engine = partial(point.wait, stream), seen._engine
            calls.watch(**{how: number})
            with suppress(Interrupted, ipcsync.DriverError):
                call()
            asked = list(calls.names)
            calls.watch()
            engine.close()
            if queuing in asked[: number + (how == "interrupted")]:
                assert not engine.try_release(), f"{asked[number:]} would have to find it"
            gate.open()
        until(engine.try_release, "all is over")
        assert not queued.waits_on(engine)
        stage.close()
        if number >= len(asked):
            break


@pytest.mark.skipif(has_shortcuts(), reason=IN_PYTHON)
@pytest.mark.parametrize("engine", ["timeline"])  # an event's record is known by its event
def test_a_record_whose_place_on_its_stream_is_not_known_is_made_nowhere_else(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = stage.open()
    held, free = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(held) as gate:
        made.record(held)
        with monkeypatch.context() as patch:
            patch.setattr(made._engine._markers, "add", _interrupt)
            with pytest.raises(Interrupted):
                made.record(held)
        with pytest.raises(ipcsync.IpcSyncError, match=r"interrupted twice.* once more, or close the event"):
            made.record(free)
        assert made.generation == 1
        assert made.record(held).generation == 3
        point = made.record(free)
        assert not point.query()
        gate.open()
        point.synchronize(30)
    for generation in range(1, 5):
        seen.at(generation).synchronize(30)


def _interrupt(*_: object) -> None:
    raise Interrupted
