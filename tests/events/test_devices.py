"""Several GPUs: which one an event is on, in every process, whatever it sees and in whatever order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cuda.bindings.driver import CUresult

import ipcsync
from ipcsync import _drivers
from ipcsync.typing import EngineChecks, EngineName
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

DEVICES = 4
Start = Callable[..., Peer]


@pytest.fixture(autouse=True)
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of the test but this one see four devices; this one has started its driver as ever."""
    if os.environ["IPCSYNC_DRIVER"] == "cuda":
        pytest.skip("a real machine's devices cannot be told to be four")
    ipcsync.device_count()
    segment = f"{os.environ['IPCSYNC_HOST_SEGMENT']}-four"
    monkeypatch.setenv("IPCSYNC_HOST_SEGMENT", segment)
    monkeypatch.setenv("IPCSYNC_HOST_DEVICES", str(DEVICES))


@pytest.fixture
def start(coordinator: ipcsync.Coordinator, new_peer: Start) -> Start:
    """Starts a connected peer that sees the devices given, in their order."""

    def started(visible: str = "0,1,2,3") -> Peer:
        peer = new_peer(CUDA_VISIBLE_DEVICES=visible)
        peer.call(remote.connect, coordinator.endpoint)
        return peer

    return started


def _uuids() -> list[str]:
    return [ipcsync.get_device_properties(i).uuid for i in range(ipcsync.device_count())]


def _device_of(data: bytes) -> int:
    return remote.client().point(data).device.index


def _open_on_current(name: str, device: int) -> int:
    with ipcsync.device(device):
        return remote.open_event(name)[1]


def _record_on(name: str, device: int, after: Sequence[bytes] = ()) -> None:
    points = [remote.client().point(data) for data in after]
    remote.event(name).record(remote.stream(f"on-{device}", device), after=points)


def _unnamed_on(device: int, stream: str = "") -> bytes:
    return bytes(remote.client().record(remote.stream(stream or f"on-{device}", device)))


def _check_on(device: int) -> EngineChecks:
    return remote.client().check(device)


def _state(name: str) -> tuple[str, int]:
    event = remote.event(name)
    return event.state, event.generation


def _contexts() -> list[int]:
    return [device for device in range(ipcsync.device_count()) if ipcsync.has_primary_context(device)]


def _named_stream(name: str, device: int | None = None) -> tuple[str, int]:
    made = remote.client().stream(name, device=device, priority=-1)
    return ipcsync.get_device_properties(made.device).uuid, made.priority


def _error(peer: Peer, fn: Callable[..., object], *args: Any) -> str:
    error = peer.call(remote.error_of, fn, *args)
    assert error is not None, "it was to be refused"
    assert error[0] == "DeviceMismatch", error
    return error[1]


def test_streams_of_other_gpus_and_other_processes_wait_for_a_record(start: Start, engine: EngineName) -> None:
    recorder, waiter = start(), start()
    recorder.call(remote.open_event, "e", {"recorder": True, "device": 2, "engine": engine})
    recorder.call(remote.hold, "main", 2)
    (data,) = recorder.call(remote.record, "e")
    for device in (0, 2, 3):
        waiter.call(remote.wait, data, f"gpu{device}", None, device)
    assert not any(waiter.call(remote.stream_is_idle, f"gpu{device}") for device in (0, 2, 3))
    recorder.call(remote.let_go)
    waiter.call(remote.synchronize, data)
    for device in (0, 2, 3):
        until(lambda: waiter.call(remote.stream_is_idle, f"gpu{device}"), f"the stream of GPU {device} goes on")  # noqa: B023 - asked at once


def _wait_on_many(data: bytes, count: int, name: str) -> None:
    for number in range(count):
        remote.wait(data, f"{name}-{number}")


def test_a_stream_of_another_gpu_waits_after_its_marker_was_dropped(start: Start, engine: EngineName) -> None:
    """Of many streams that have waited, those that are past it lose their markers; the next wait makes another one."""
    recorder, waiter = start(), start()
    recorder.call(remote.open_event, "e", {"recorder": True, "device": 0, "engine": engine})

    def wait(count: int, name: str) -> None:
        recorder.call(remote.hold)
        (data,) = recorder.call(remote.record, "e")
        waiter.call(_wait_on_many, data, count, name)
        waiter.call(remote.wait, data, "other", None, 1)
        assert not waiter.call(remote.stream_is_idle, "other")
        recorder.call(remote.let_go)
        waiter.call(remote.synchronize, data)
        until(lambda: waiter.call(remote.stream_is_idle, "other"), "the stream goes on")

    wait(16, "first")
    wait(1, "second")


class _Mislabelled:
    """A stream of device 1 that says that it is of device 0."""

    def __init__(self) -> None:
        self.cuda_stream = remote.stream("of-1", 1).cuda_stream
        self.device_index = 0


def _record_on_mislabelled(name: str) -> None:
    remote.event(name).record(_Mislabelled())


def _wait_on_mislabelled(data: bytes) -> None:
    remote.client().point(data).wait(_Mislabelled())


def test_a_call_refused_for_a_stream_that_names_another_device_changes_nothing(
    start: Start, engine: EngineName
) -> None:
    recorder, waiter = start(), start()
    recorder.call(remote.open_event, "e", {"recorder": True, "device": 0, "engine": engine})
    recorder.call(remote.record, "e")
    refused = "DriverError", "cuEventRecord failed: CUDA_ERROR_INVALID_HANDLE (400)"
    for _ in range(2):
        error = recorder.call(remote.error_of, _record_on_mislabelled, "e")
        if engine == "event":
            assert error is not None
            assert error[0] == "EngineMismatch"
        else:
            assert error == refused
        assert recorder.call(_state, "e") == ("open", 1)
    recorder.call(remote.hold)
    (data,) = recorder.call(remote.record, "e")
    for _ in range(2):
        assert waiter.call(remote.error_of, _wait_on_mislabelled, data) == refused
        assert waiter.call(remote.stream_is_idle, "of-1"), "no wait was queued on it"
    waiter.call(remote.wait, data, "of-1", None, 1)
    assert not waiter.call(remote.stream_is_idle, "of-1")
    recorder.call(remote.let_go)
    waiter.call(remote.synchronize, data)
    (data,) = recorder.call(remote.record, "e", "another")
    waiter.call(remote.synchronize, data)


def test_a_stream_whose_wait_was_refused_is_behind_nothing(start: Start, engine: EngineName) -> None:
    recorder, waiter = start(), start()
    recorder.call(remote.open_event, "e", {"recorder": True, "device": 0, "engine": engine})
    recorder.call(remote.hold)
    (data,) = recorder.call(remote.record, "e")
    assert waiter.call(remote.error_of, _wait_on_mislabelled, data) is not None
    recorder.kill()
    error = waiter.call(remote.error_of, remote.synchronize, data)
    assert error is not None
    assert error[0] == "RecorderLost"
    waiter.call(remote.synchronize, waiter.call(_unnamed_on, 1, "of-1"))


def _wait_on_default(data: bytes, handle: int, device: int) -> bool:
    """Have a default stream wait while device 1 is current; whether it is idle then."""
    ipcsync.set_device(1)
    stream = ipcsync.ExternalStream(handle, device)
    remote.client().point(data).wait(stream)
    return stream.query()


def _record_on_default(name: str, handle: int, device: int) -> None:
    ipcsync.set_device(1)
    remote.event(name).record(ipcsync.ExternalStream(handle, device))


@pytest.mark.parametrize("handle", [1, 2], ids=["legacy", "per-thread"])
def test_a_default_stream_is_its_devices_while_another_one_is_current(
    start: Start, engine: EngineName, handle: int
) -> None:
    recorder, waiter = start(), start()
    recorder.call(remote.open_event, "e", {"recorder": True, "device": 0, "engine": engine})
    recorder.call(remote.hold)
    (data,) = recorder.call(remote.record, "e")
    assert not waiter.call(_wait_on_default, data, handle, 1)
    assert not waiter.call(_wait_on_default, data, handle, 0)
    recorder.call(remote.let_go)
    waiter.call(remote.synchronize, data)
    waiter.call(remote.open_event, "on-1", {"recorder": True, "device": 1, "engine": engine})
    waiter.call(_record_on_default, "on-1", handle, 1)
    _error(waiter, _record_on_default, "on-1", handle, 0)
    assert waiter.call(_state, "on-1") == ("open", 1)


def test_a_timeline_is_waited_for_ahead_from_another_gpu(start: Start) -> None:
    recorder, waiter = start(), start()
    recorder.call(remote.open_event, "e", {"recorder": True, "device": 1, "engine": "timeline"})
    recorder.call(remote.hold, "main", 1)
    data = recorder.call(_at, "e", 1)
    waiter.call(remote.wait, data, "ahead", {"ahead": True}, 3)
    assert not waiter.call(remote.stream_is_idle, "ahead")
    recorder.call(remote.record, "e")
    recorder.call(remote.let_go)
    until(lambda: waiter.call(remote.stream_is_idle, "ahead"), "the stream goes on")


def _at(name: str, generation: int) -> bytes:
    return bytes(remote.event(name).at(generation))


def test_a_device_is_the_same_gpu_in_processes_that_number_them_differently(start: Start, engine: EngineName) -> None:
    recorder, waiter = start("3,1"), start("1,0,3")
    kind, ordinal, uuid = recorder.call(remote.open_event, "e", {"recorder": True, "device": 0, "engine": engine})
    assert (kind, ordinal) == (engine, 0)
    assert waiter.call(remote.open_event, "e") == (engine, 2, uuid)
    recorder.call(remote.hold, "main", 0)
    (data,) = recorder.call(remote.record, "e")
    assert waiter.call(_device_of, data) == 2
    waiter.call(remote.wait, data, "same", None, 2)
    waiter.call(remote.wait, data, "other", None, 0)
    assert not waiter.call(remote.stream_is_idle, "same")
    recorder.call(remote.let_go)
    waiter.call(remote.synchronize, data)
    for stream in ("same", "other"):
        until(lambda: waiter.call(remote.stream_is_idle, stream), f"the {stream} device's stream goes on")  # noqa: B023 - asked at once


def test_a_new_event_is_on_the_current_device(start: Start) -> None:
    peer = start("2,3")
    assert peer.call(_open_on_current, "e", 1) == 1
    uuids = start().call(_uuids)
    assert peer.call(_uuids) == uuids[2:]


def test_a_process_that_does_not_see_the_device_is_refused_and_harms_nobody(start: Start, engine: EngineName) -> None:
    owner, blind = start(), start("0,1")
    owner.call(remote.open_event, "e", {"device": 3, "engine": engine})
    assert "not visible" in _error(blind, remote.open_event, "e")
    assert "not visible" in _error(blind, remote.open_event, "e", {"recorder": True})
    assert owner.call(_state, "e") == ("open", 0)
    owner.call(remote.open_event, "e", {"recorder": True})
    owner.call(remote.hold, "main", 3)
    (data,) = owner.call(remote.record, "e")
    assert "not visible" in _error(blind, remote.synchronize, data)
    assert owner.call(_state, "e") == ("open", 1)


def test_another_device_than_the_events_is_refused(start: Start, engine: EngineName) -> None:
    owner, other = start(), start()
    owner.call(remote.open_event, "e", {"device": 1, "engine": engine})
    _error(other, remote.open_event, "e", {"device": 0})
    _error(owner, remote.open_event, "e", {"device": 2, "recorder": True})
    assert other.call(remote.open_event, "e", {"device": 1})[1] == 1


def _refuse_words_on(device: int) -> None:
    driver: Any = _drivers.load()
    write = driver.cuStreamWriteValue64

    def refuse(*arguments: Any) -> Any:
        is_there = int(driver.cuCtxGetDevice()[1]) == device
        return (CUresult.CUDA_ERROR_NOT_SUPPORTED,) if is_there else write(*arguments)

    driver.cuStreamWriteValue64 = refuse


def test_where_words_fail_on_one_device_they_are_taken_on_the_others(start: Start) -> None:
    owner, other = start(), start()
    other.call(_refuse_words_on, 0)
    owner.call(remote.open_event, "e", {"device": 1, "engine": "timeline", "recorder": True})
    assert other.call(remote.open_event, "e")[:2] == ("timeline", 1), "tried is the current device"
    assert other.call(remote.open_event, "here", {"device": 0})[0] == "event"
    assert other.call(remote.open_event, "there", {"device": 1})[0] == "timeline"


def test_recording_from_a_stream_of_another_device_is_refused(start: Start, engine: EngineName) -> None:
    peer, other = start(), start()
    other.call(remote.open_event, "first", {"device": 0, "engine": engine, "recorder": True})
    other.call(remote.hold)
    after = other.call(remote.record, "first")
    peer.call(remote.open_event, "e", {"device": 1, "engine": engine, "recorder": True})
    text = _error(peer, _record_on, "e", 0, after)
    assert text == "Event device 1 does not match recording stream's device 0."
    assert peer.call(remote.stream_is_idle, "on-0"), "it waits for nothing"
    assert peer.call(_state, "e") == ("open", 0)
    peer.call(_record_on, "e", 1)
    assert peer.call(_state, "e") == ("open", 1)


def test_an_unnamed_event_is_on_its_streams_device(start: Start) -> None:
    recorder, waiter = start("2,1"), start()
    for device, there in ((0, 2), (1, 1)):
        data = recorder.call(_unnamed_on, device)
        assert waiter.call(_device_of, data) == there
        waiter.call(remote.synchronize, data)


def test_a_named_stream_is_on_the_same_gpu_in_every_process(start: Start) -> None:
    first, second, blind = start(), start("3,2,1"), start("0")
    spec = first.call(_named_stream, "decode", 3)
    assert second.call(_named_stream, "decode") == spec
    assert second.call(_named_stream, "decode", 0) == spec
    _error(second, _named_stream, "decode", 1)
    assert "not visible" in _error(blind, _named_stream, "decode")


@pytest.mark.parametrize("wanted", ["auto", "event", "timeline"])
def test_a_device_that_the_coordinator_does_not_serve_is_refused(
    new_coordinator: Callable[..., ipcsync.Coordinator], new_peer: Start, wanted: str
) -> None:
    coordinator = new_coordinator(devices="0,2")
    peer = new_peer()
    peer.call(remote.connect, coordinator.endpoint)
    for fn, *args in (
        (remote.open_event, "e", {"device": 1, "engine": wanted}),
        (remote.open_event, "e", {"device": 3, "engine": wanted, "recorder": True}),
        (_unnamed_on, 1),
        (_check_on, 1),
    ):
        assert "does not serve" in _error(peer, fn, *args)
    assert peer.call(remote.open_event, "e", {"device": 2, "engine": wanted})[1] == 2
    assert peer.call(_check_on, 2)["event"]["ok"]


def test_a_point_behind_another_devices_streams_holds_up_nothing_on_the_current_one(
    start: Start, engine: EngineName
) -> None:
    peer = start()
    peer.call(remote.hold, "held", 1)
    peer.call(ipcsync.set_device, 0)
    data = peer.call(remote.record_all, ["held"], {"engine": engine})
    assert peer.call(_device_of, data) == 1
    peer.call(remote.synchronize, peer.call(remote.record_all, None, {"device": 0, "engine": engine}))
    peer.call(remote.let_go, "held")


def test_who_reads_what_is_on_another_device_has_no_context_on_its_first_one(start: Start) -> None:
    recorder, reader = start(), start()
    recorder.call(remote.open_event, "e", {"recorder": True, "device": 3})
    reader.call(remote.open_event, "e")
    assert reader.call(_contexts) == [3]


def test_who_records_what_is_on_another_device_has_no_context_on_its_first_one(start: Start) -> None:
    reader, recorder = start(), start()
    reader.call(remote.open_event, "e", {"device": 3})
    recorder.call(remote.open_event, "e", {"recorder": True})
    assert recorder.call(_contexts) == [3]
