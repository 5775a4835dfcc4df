"""What each call of ours asks the driver, and what becomes of it when the driver refuses or an exception comes between.

Each case is gone through as often as it makes driver's calls: each of them is once the one that fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync import _drivers
from ipcsync._engines import queued
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit.driver_calls import DriverCalls, Interrupted
from tests.kit.failing import Failing
from tests.kit.until import until

NewClient = Callable[..., ipcsync.Client]

_GLOBAL = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


class Stage:
    """A recorder and who waits for it, with new events for each case."""

    def __init__(self, new_client: NewClient, engine: EngineName) -> None:
        self.engine = engine
        self.recording, self.waiting = new_client("recording"), new_client("waiting")
        self._count = 0
        self._events: list[ipcsync.SharedEvent] = []

    def open(self, depth: int = 4) -> tuple[ipcsync.SharedEvent, ipcsync.SharedEvent]:
        self._count += 1
        name = f"e{self._count}"
        made = self.recording.event(name, recorder=True, engine=self.engine, depth=depth)
        seen = self.waiting.event(name)
        self._events += [made, seen]
        return made, seen

    def close(self) -> None:
        while self._events:
            self._events.pop().close()


Case = Callable[[Stage], Callable[[], Any]]


pytestmark = pytest.mark.usefixtures("nothing_queued")


@pytest.fixture
def stage(new_client: NewClient, engine: EngineName) -> Iterator[Stage]:
    one = Stage(new_client, engine)
    yield one
    one.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverCalls]:
    made = DriverCalls(monkeypatch)
    yield made
    made.watch()
    _drivers.load().cuThreadExchangeStreamCaptureMode(_GLOBAL)  # which one that was refused did not restore


# --- what is called, on events of its own each time -------------------------------------------------------------------


def _first_record(stage: Stage) -> Callable[[], Any]:
    made, _ = stage.open()
    stream = ipcsync.Stream()
    return lambda: made.record(stream)


def _further_record(stage: Stage) -> Callable[[], Any]:
    made, _ = stage.open()
    stream = ipcsync.Stream()
    made.record(stream)
    return lambda: made.record(stream)


def _record_on_another_stream(stage: Stage) -> Callable[[], Any]:
    made, _ = stage.open()
    streams = ipcsync.Stream(), ipcsync.Stream()
    made.record(streams[0])
    return lambda: made.record(streams[1])


def _record_on_the_default_stream(stage: Stage) -> Callable[[], Any]:
    made, _ = stage.open()
    return lambda: made.record(None)


def _record_into_a_full_ring(stage: Stage) -> Callable[[], Any]:
    made, _ = stage.open(depth=1)
    stream = ipcsync.Stream()
    made.record(stream)
    return lambda: made.record(stream, timeout=30)


def _record_behind_a_wait(stage: Stage) -> Callable[[], Any]:
    made, _ = stage.open()
    other, seen = stage.open()
    held, stream = ipcsync.Stream(), ipcsync.Stream()
    gate = StreamGate(held)
    other.record(held)
    pending = seen.latest
    assert pending is not None
    pending.wait(stream)

    def call() -> ipcsync.Point:
        point = made.record(stream)
        gate.open()
        return point

    return call


def _wait_on_a_stream(stage: Stage) -> Callable[[], Any]:
    made, seen = stage.open()
    held, stream = ipcsync.Stream(), ipcsync.Stream()
    gate = StreamGate(held)
    made.record(held)
    point = seen.latest
    assert point is not None

    def call() -> ipcsync.Point:
        point.wait(stream)
        gate.open()
        return point

    return call


def _wait_once_more(stage: Stage) -> Callable[[], Any]:
    made, seen = stage.open()
    held, stream = ipcsync.Stream(), ipcsync.Stream()
    gate = StreamGate(held)
    made.record(held)
    point = seen.latest
    assert point is not None
    point.wait(stream)

    def call() -> ipcsync.Point:
        point.wait(stream)
        gate.open()
        return point

    return call


def _query(stage: Stage) -> Callable[[], Any]:
    made, seen = stage.open()
    stream = ipcsync.Stream()
    gate = StreamGate(stream)
    made.record(stream)
    point = seen.latest
    assert point is not None
    assert not point.query()

    def call() -> ipcsync.Point:
        assert not point.query() or gate.is_open
        gate.open()
        return point

    return call


def _synchronize(stage: Stage) -> Callable[[], Any]:
    made, seen = stage.open()
    stream = ipcsync.Stream()
    gate = StreamGate(stream)
    made.record(stream)
    point = seen.latest
    assert point is not None

    def call() -> ipcsync.Point:
        if not gate.is_open:
            with pytest.raises(ipcsync.WaitTimeout):
                point.synchronize(0)
        gate.open()
        point.synchronize(30)
        return point

    return call


def _resume(stage: Stage) -> Callable[[], Any]:
    """A stream that waited for what was closed before it was recorded."""
    made, seen = stage.open()
    stream = ipcsync.Stream()
    if stage.engine == "event":  # nothing waits ahead there, and so nothing that is lost without a death
        return lambda: stage.waiting.resume(stream)
    seen.at(1).wait(stream, ahead=True)
    made.close()

    def call() -> None:
        stage.waiting.resume(stream, 30)

    return call


CASES = [
    _first_record,
    _further_record,
    _record_on_another_stream,
    _record_on_the_default_stream,
    _record_into_a_full_ring,
    _record_behind_a_wait,
    _wait_on_a_stream,
    _wait_once_more,
    _query,
    _synchronize,
    _resume,
]

# Their failure is no caller's: the first is asked once more, the second's own answer is not needed to go on.
_PASSED_OVER = ("cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode")


def _error_of(call: Callable[[], object]) -> ipcsync.DriverError | None:
    try:
        call()
    except ipcsync.DriverError as error:
        return error
    return None


def _name(case: Case) -> str:
    return case.__name__.strip("_")


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_what_the_driver_refuses_is_said_by_name_and_the_next_try_works(
    stage: Stage, calls: DriverCalls, case: Case
) -> None:
    for number in itertools.count():
        call = case(stage)
        calls.watch(refused=number)
        error = _error_of(call)
        asked = list(calls.names)
        if error is not None:
            assert error.call == asked[number]
            assert str(error) == f"{error.call} failed: CUDA_ERROR_UNKNOWN (999)"
        elif number >= len(asked):
            break
        else:
            assert asked[number] in _PASSED_OVER
        calls.watch()
        point = call()
        if point is not None:
            point.synchronize(30)
            assert point.query()
        stage.close()


# --- exceptions between the driver and us -----------------------------------------------------------------------------


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
def test_nothing_is_let_go_of_while_what_an_exception_left_queued_is_pending(
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


@pytest.mark.parametrize("engine", ["timeline"])  # an event's record is known by its event
def test_a_record_whose_place_on_its_stream_is_not_known_is_made_nowhere_else(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = stage.open()
    held, free = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(held) as gate:
        made.record(held)
        with monkeypatch.context() as patch:
            patch.setattr(made._engine, "_add_marker", _interrupt)
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


# --- no more than is needed -------------------------------------------------------------------------------------------

_CAPTURING, _ID, _FLAGS = "cuStreamIsCapturing", "cuStreamGetId", "cuStreamGetFlags"
_DEVICE, _MODE, _MAPPED = "cuCtxGetDevice", "cuThreadExchangeStreamCaptureMode", "cuMemHostGetDevicePointer"
_OPEN = [_DEVICE, _MODE, "cuIpcOpenEventHandle", _MODE]  # of the ring, each once in a process
_LOOK = [_MODE, "cuEventQuery", _MODE]
_MARK = [_DEVICE, "cuEventCreate", "cuEventRecord"]  # once for each stream
_RECORD, _WAIT, _WRITE, _WAIT_VALUE = (
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamWriteValue64",
    "cuStreamWaitValue64",
)

_ASKED: dict[Case, dict[str, list[str]]] = {
    _first_record: {
        "event": [_CAPTURING, _ID, *_OPEN, _RECORD],
        "timeline": [_CAPTURING, _ID, _MAPPED, _WRITE, *_MARK],
    },
    _further_record: {
        "event": [_CAPTURING, _ID, *_OPEN, _RECORD],
        "timeline": [_CAPTURING, _ID, _WRITE, "cuEventRecord"],
    },
    _record_on_another_stream: {
        "event": [_CAPTURING, _ID, _WAIT, *_OPEN, _RECORD],
        "timeline": [_CAPTURING, _ID, _WAIT_VALUE, _WRITE, *_MARK],
    },
    _record_on_the_default_stream: {
        "event": [_DEVICE, _CAPTURING, _ID, *_OPEN, _RECORD],
        "timeline": [_DEVICE, _CAPTURING, _ID, _MAPPED, _WRITE, *_MARK],
    },
    _record_behind_a_wait: {
        "event": [_CAPTURING, _ID, _FLAGS, *_OPEN, _RECORD],
        "timeline": [_CAPTURING, _ID, _FLAGS, _MAPPED, _WRITE, *_MARK],
    },
    _wait_on_a_stream: {
        "event": [_CAPTURING, _ID, _FLAGS, _WAIT, *_MARK],
        "timeline": [_CAPTURING, _ID, _FLAGS, _MAPPED, _WAIT_VALUE, *_MARK],
    },
    _wait_once_more: {
        "event": [_CAPTURING, _ID, _WAIT, "cuEventRecord"],
        "timeline": [_CAPTURING, _ID, _WAIT_VALUE, "cuEventRecord"],
    },
    _query: {"event": _LOOK, "timeline": []},
}


@pytest.mark.parametrize("case", _ASKED, ids=_name)
def test_each_call_asks_the_driver_for_no_more_than_it_needs(stage: Stage, calls: DriverCalls, case: Case) -> None:
    case(stage)()  # what is asked once in a process
    call = case(stage)
    calls.watch()
    call()
    assert calls.names == _ASKED[case][stage.engine]


# --- room in the ring -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["event"])
@pytest.mark.parametrize("is_default", [True, False])
def test_a_full_ring_has_room_for_nobody_in_no_time(stage: Stage, is_default: bool) -> None:
    made, _ = stage.open(depth=2)
    held = ipcsync.Stream()
    stream = None if is_default else ipcsync.Stream()
    with StreamGate(held):
        for _ in range(2):
            made.record(held)
        text = (
            f"^no room for a further record: all depth=2 are in flight, and generation 1 of {made.name!r}, the oldest, "
            "was not complete within 0.01 s$"
        )
        with pytest.raises(ipcsync.WaitTimeout, match=text) as caught:
            made.record(stream, timeout=0.01)
        assert (caught.value.event, caught.value.generation, caught.value.timeout) == (made.name, 1, 0.01)
    assert made.record(stream, timeout=30).generation == 3


@pytest.mark.parametrize("engine", ["event"])
def test_a_record_awaits_its_turn_behind_another_threads_and_says_so(stage: Stage) -> None:
    made, _ = stage.open(depth=1)
    held = ipcsync.Stream()
    before = stage.recording.stats()["client"]["full_ring_waits"]
    with StreamGate(held):
        made.record(held)
        further = Failing(lambda: made.record(held))
        until(lambda: stage.recording.stats()["client"]["full_ring_waits"] == before + 1, "it waits for room")
        text = (
            f"^generation 2 of {made.name!r} was not recorded (another thread's record waits for room) within 0.01 s$"
        )
        for stream in (held, None):
            with pytest.raises(ipcsync.WaitTimeout, match=text.replace("(", r"\(").replace(")", r"\)")) as caught:
                made.record(stream, timeout=0.01)
            assert (caught.value.event, caught.value.generation, caught.value.timeout) == (made.name, 2, 0.01)
        last = Failing(lambda: made.record(held))
    assert (further.raised(), last.raised()) == (None, None)
    assert made.generation == 3
    assert made.record(held, timeout=float("inf")).generation == 4
