"""What each call of ours asks the driver, and what is said when the driver refuses.

Each case is gone through as often as it makes driver's calls: each of them is once the one that fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import ipcsync
from ipcsync._drivers import load, unwrap
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.events.stage import Stage
from tests.kit.driver_calls import DriverCalls
from tests.kit.driver_functions import RECORD, refused_once, replaced

Case = Callable[[Stage], Callable[[], Any]]


pytestmark = pytest.mark.usefixtures("nothing_queued")


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
    point, gate = stage.pending()
    stream = ipcsync.Stream()
    point.wait(stream)

    def call() -> ipcsync.Point:
        point = made.record(stream)
        gate.open()
        return point

    return call


def _wait_on_a_stream(stage: Stage) -> Callable[[], Any]:
    point, gate = stage.pending()
    return partial(_wait_and_open, point, ipcsync.Stream(), gate)


def _wait_once_more(stage: Stage) -> Callable[[], Any]:
    point, gate = stage.pending()
    stream = ipcsync.Stream()
    point.wait(stream)
    return partial(_wait_and_open, point, stream, gate)


def _wait_for_what_is_complete(stage: Stage) -> Callable[[], Any]:
    """Which nobody here knows by now."""
    made, seen = stage.open()
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    made.record(stream)
    stream.synchronize()
    point = seen.latest
    assert point is not None

    def call() -> ipcsync.Point:
        point.wait(other)
        return point

    return call


def _wait_and_open(point: ipcsync.Point, stream: ipcsync.Stream, gate: StreamGate) -> ipcsync.Point:
    point.wait(stream)
    gate.open()
    return point


def _query(stage: Stage) -> Callable[[], Any]:
    point, gate = stage.pending()
    assert not point.query()

    def call() -> ipcsync.Point:
        assert not point.query() or gate.is_open
        gate.open()
        return point

    return call


def _synchronize(stage: Stage) -> Callable[[], Any]:
    point, gate = stage.pending()

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
    seen._engine.wait(1, stream, None, True)  # as one that waited ahead before the other was its recorder
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

# Their failure is no caller's: the first is asked once more, the answers of the second and third are not needed to go
# on, and a finalizer makes the last.
_PASSED_OVER = ("cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuStreamGetCtx", "cuEventDestroy")


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
            assert asked[number] in _PASSED_OVER or asked[number] in asked[number + 1 :], "nor is it asked again"
        calls.watch()
        point = call()
        if point is not None:
            point.synchronize(30)
            assert point.query()
        stage.close()


# --- no more than is needed -------------------------------------------------------------------------------------------

_CAPTURING, _ID, _FLAGS = "cuStreamIsCapturing", "cuStreamGetId", "cuStreamGetFlags"
_DEVICE, _MODE = "cuCtxGetDevice", "cuThreadExchangeStreamCaptureMode"
_HOME, _HERE, _ENTER = "cuStreamGetCtx", "cuCtxGetCurrent", "cuCtxSetCurrent"
_MAPPED = [_HERE, _ENTER, "cuMemHostGetDevicePointer", _ENTER]  # of the word, once for each use
_OPEN = [_HERE, _ENTER, _MODE, "cuIpcOpenEventHandle", _MODE, _ENTER]  # of the ring, each once for each use
_LOOK = [_MODE, "cuEventQuery", _MODE]
_MARKER = [_HOME, _HERE, _ENTER, "cuEventCreate", _ENTER, "cuEventRecord"]  # once for each stream
_DEFAULT_MARKER = [_DEVICE, "cuEventCreate", "cuEventRecord"]
_KNOWN = [_CAPTURING, _ID]  # again behind what is opened or created, and where the stream is not known yet
_RECORD, _WAIT, _WRITE, _WAIT_VALUE = (
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamWriteValue64",
    "cuStreamWaitValue64",
)

_ASKED: dict[Case, dict[str, list[str]]] = {
    _first_record: {
        "event": [*_KNOWN, *_KNOWN, *_OPEN, *_KNOWN, _HOME, _RECORD],
        "timeline": [*_KNOWN, *_KNOWN, *_MAPPED, *_MARKER, *_KNOWN, _WRITE, _RECORD],
    },
    _further_record: {
        "event": [*_KNOWN, *_OPEN, *_KNOWN, _RECORD],
        "timeline": [*_KNOWN, _WRITE, _RECORD],
    },
    _record_on_another_stream: {
        "event": [*_KNOWN, *_KNOWN, _HOME, *_OPEN, *_KNOWN, _HOME, _WAIT, _RECORD],
        "timeline": [*_KNOWN, *_KNOWN, *_MARKER, *_KNOWN, _WAIT_VALUE, _WRITE, _RECORD],
    },
    _record_on_the_default_stream: {
        "event": [_DEVICE, *_KNOWN, *_OPEN, *_KNOWN, _HOME, _RECORD],
        "timeline": [_DEVICE, *_KNOWN, *_MAPPED, *_DEFAULT_MARKER, *_KNOWN, _WRITE, _RECORD],
    },
    _record_behind_a_wait: {
        "event": [*_KNOWN, *_OPEN, *_KNOWN, _HOME, _RECORD],
        "timeline": [*_KNOWN, *_MAPPED, *_MARKER, *_KNOWN, _WRITE, _RECORD],
    },
    _wait_on_a_stream: {
        "event": [_CAPTURING, *_OPEN, *_LOOK, _ID, _CAPTURING, *_LOOK, _ID, *_MARKER, _FLAGS, _WAIT, _RECORD],
        "timeline": [*_KNOWN, *_KNOWN, *_MAPPED, *_MARKER, _FLAGS, _WAIT_VALUE, _RECORD],
    },
    _wait_once_more: {
        "event": [_CAPTURING, *_LOOK, _ID, _WAIT, _RECORD],
        "timeline": [*_KNOWN, _WAIT_VALUE, _RECORD],
    },
    _wait_for_what_is_complete: {"event": [_CAPTURING, *_OPEN, *_LOOK], "timeline": [_CAPTURING]},
    _query: {"event": _LOOK, "timeline": []},
}


def _asked(calls: DriverCalls, call: Callable[[], Any]) -> list[str]:
    calls.watch()
    call()
    return calls.names


@pytest.mark.parametrize("case", _ASKED, ids=_name)
def test_each_call_asks_the_driver_for_no_more_than_it_needs(stage: Stage, calls: DriverCalls, case: Case) -> None:
    case(stage)()  # what is asked once in a process
    asked = _asked(calls, case(stage))
    if "cuMemHostRegister" in asked:  # this event is the first on its page of the board, and the next one is not
        asked = _asked(calls, case(stage))
    assert asked == _ASKED[case][stage.engine]


# --- no memory --------------------------------------------------------------------------------------------------------


class _NoMemory:
    def __int__(self) -> int:
        raise MemoryError


@pytest.mark.parametrize("engine", ["event"])
def test_an_import_that_there_is_no_memory_for_is_opened_by_the_next_call(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = stage.open()
    made.record()  # its import is opened with the event
    stream = ipcsync.Stream()
    gate = StreamGate(stream)
    point = seen.at(made.record(stream).generation)
    with monkeypatch.context() as patch:
        patch.setattr(seen._engine, "open_event", lambda *_: _NoMemory())
        with pytest.raises(MemoryError):
            point.query()
    _wait_and_open(point, ipcsync.Stream(), gate)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_on_which_a_record_is_repeated_and_refused_again_is_behind_what_the_first_one_was_alone(
    new_client: Callable[[], ipcsync.Client], engine: EngineName, is_closed: bool
) -> None:
    theirs, client = new_client(), new_client()
    held, streams = ipcsync.Stream(), (ipcsync.Stream(), ipcsync.Stream())
    event = client.event("e", recorder=True, engine=engine)
    with StreamGate(held):
        point = client.point(bytes(theirs.record(held, engine=engine)))
        point.wait(streams[0])
        for stream in streams:
            with replaced(refused_once(RECORD[engine])), pytest.raises(ipcsync.DriverError):
                event.record(stream)
    point.synchronize(30)
    if is_closed:
        event.close()
    client.record(streams[1], engine=engine).synchronize(30)


@pytest.mark.parametrize("engine", ["event"])
def test_a_record_that_is_repeated_elsewhere_is_not_behind_what_its_first_stream_waited_for_since(
    new_client: Callable[[], ipcsync.Client], engine: EngineName
) -> None:
    client, stream = new_client(), ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine)
    with replaced(refused_once(RECORD[engine])), pytest.raises(ipcsync.DriverError):
        event.record(stream)
    _lose(new_client(), client, stream)
    for _ in range(2):
        event.record(ipcsync.Stream()).synchronize(30)
    with pytest.raises(ipcsync.RecorderLost):
        event.record(stream)


@pytest.mark.parametrize("waits", ["same", "legacy", "other"])
def test_a_record_whose_late_marker_may_be_behind_a_wait_of_a_blocking_stream_is_lost_with_that(
    new_client: Callable[[], ipcsync.Client], waits: str
) -> None:
    client = new_client()
    event = client.event("e", recorder=True, engine="timeline")
    one, other = (ipcsync.ExternalStream(_blocking(), device=0) for _ in range(2))
    event.record(one).synchronize(30)
    with replaced(refused_once("cuEventRecord")), pytest.raises(ipcsync.DriverError):
        event.record(one)
    waiting = {"same": one, "legacy": ipcsync.default_stream(), "other": other}[waits]
    points: list[ipcsync.Point] = []
    _lose(new_client(), client, waiting, lambda: points.append(event.record(ipcsync.Stream())))
    with pytest.raises(ipcsync.RecorderLost):
        points[0].synchronize(30)
    client.resume(waiting, 30)


def _blocking() -> int:
    return int(unwrap(load().cuStreamCreate(0), "cuStreamCreate"))


def _lose(
    theirs: ipcsync.Client, client: ipcsync.Client, stream: ipcsync.Stream, before: Callable[[], object] = lambda: None
) -> None:
    """Have a stream wait for a record that is never made: it goes on, and is behind what is lost."""
    root = theirs.event("root", recorder=True, engine="timeline")
    seen = client.event("root")
    seen._engine.wait(1, stream, None, True)  # as one that waited ahead before the other was its recorder
    before()
    root.close()
    with pytest.raises(ipcsync.RecorderLost):
        seen.at(1).synchronize(30)
