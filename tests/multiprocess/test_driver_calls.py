"""What each call of ours asks the driver, and what becomes of it when the driver refuses or an exception comes between.

Each case is gone through as often as it makes driver's calls: each of them is once the one that fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit.driver_calls import DriverCalls, Interrupted

NewClient = Callable[..., ipcsync.Client]


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


@pytest.fixture
def stage(new_client: NewClient, engine: EngineName) -> Iterator[Stage]:
    one = Stage(new_client, engine)
    yield one
    one.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> DriverCalls:
    return DriverCalls(monkeypatch)


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
        assert not point.query()
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
        with pytest.raises(ipcsync.IpcSyncError, match=r"interrupted twice over.* once more, or close the event"):
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
        "event": [_CAPTURING, *_OPEN, _RECORD],
        "timeline": [_CAPTURING, _WRITE, "cuEventRecord"],
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
        "event": [_CAPTURING, _WAIT, "cuEventRecord"],
        "timeline": [_CAPTURING, _WAIT_VALUE, "cuEventRecord"],
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
