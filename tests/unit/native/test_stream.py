"""Streams: made, wrapped, current on a thread, compared."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
from typing import Any

import pytest

import ipcsync
from ipcsync._drivers import load
from ipcsync._native import stream as streams
from tests.kit.driver_kit import in_thread

pytestmark = pytest.mark.driver


def is_real_gpu() -> bool:
    """Whether a wrong handle may crash the process, as it may in NVIDIA's own driver."""
    return ipcsync.driver_name() == "cuda"


def test_a_stream_tells_what_it_is() -> None:
    s = ipcsync.Stream()
    assert s.cuda_stream != 0
    assert s.device == ipcsync.Device(0)
    assert (s.device_index, s.device_type) == (0, 1)
    assert s.__cuda_stream__() == (0, s.cuda_stream)
    assert isinstance(s._as_parameter_, ctypes.c_void_p)
    assert s._as_parameter_.value == s.cuda_stream
    assert repr(s) == f"<ipcsync.Stream device=cuda:0 cuda_stream={s.cuda_stream:#x}>"
    assert not s.is_capturing()


def test_priorities_are_clamped_to_the_range() -> None:
    least, greatest = ipcsync.Stream.priority_range()
    assert least == 0
    assert greatest <= -1
    assert ipcsync.Stream().priority == 0
    assert ipcsync.Stream(priority=-1).priority == -1
    assert ipcsync.Stream(priority=10**20).priority == least
    assert ipcsync.Stream(0, -(10**20)).priority == greatest


@pytest.mark.parametrize("wrong", ["0", 1.5, None, True, frozenset()], ids=repr)
def test_a_priority_that_is_no_int_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        ipcsync.Stream(priority=wrong)


def test_streams_are_equal_by_device_and_address() -> None:
    a, b = ipcsync.Stream(), ipcsync.Stream()
    again = ipcsync.Stream(stream_id=a.stream_id, device_index=a.device_index, device_type=a.device_type)
    assert a == again == ipcsync.ExternalStream(a.cuda_stream) == ipcsync.ExternalStream(a.cuda_stream, device="cuda:0")
    assert len({a, again, b}) == 2
    assert a != b
    assert a != a.cuda_stream
    assert ipcsync.default_stream() == ipcsync.ExternalStream(0)


def test_one_from_a_triple_or_an_address_is_not_destroyed() -> None:
    s = ipcsync.Stream()
    ipcsync.Stream(stream_id=s.stream_id, device_index=0, device_type=1).synchronize()
    ipcsync.ExternalStream(s.cuda_stream).synchronize()
    gc.collect()
    assert s.query()


def test_a_stream_is_destroyed_with_its_last_reference() -> None:
    s = ipcsync.Stream()
    address = s.cuda_stream
    del s
    if is_real_gpu():
        pytest.skip("a stale handle is undefined in CUDA")
    with pytest.raises(ipcsync.DriverError) as caught:
        ipcsync.ExternalStream(address)
    assert caught.value.code == 400


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"stream_id": 5}, TypeError),
        ({"device_index": 0, "device_type": 1}, TypeError),
        ({"stream_id": "5", "device_index": 0, "device_type": 1}, TypeError),
        ({"stream_id": -5, "device_index": 0, "device_type": 1}, ValueError),
        ({"stream_id": 5, "device_index": 99, "device_type": 1}, ipcsync.InvalidDevice),
        ({"stream_id": 5, "device_index": 0, "device_type": 0}, ipcsync.InvalidDevice),
        ({"device": 0, "stream_id": 5, "device_index": 0, "device_type": 1}, TypeError),
    ],
)
def test_a_wrong_triple_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ipcsync.Stream(**arguments)


@pytest.mark.parametrize("wrong", [None, "0x5", 1.5, True, b"", frozenset()], ids=repr)
def test_an_address_that_is_no_int_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        ipcsync.ExternalStream(wrong)


@pytest.mark.parametrize("wrong", [-1, 2**64, 10**30])
def test_an_int_that_is_no_address_is_a_value_error(wrong: int) -> None:
    with pytest.raises(ValueError, match="pointer"):
        ipcsync.ExternalStream(wrong)


def test_the_default_stream_is_current_until_another_is_set() -> None:
    def body() -> tuple[bool, bool, bool]:
        first = ipcsync.current_stream() == ipcsync.default_stream()
        s = ipcsync.Stream()
        ipcsync.set_stream(s)
        second = ipcsync.current_stream() == s == ipcsync.current_stream(0)
        ipcsync.set_stream(None)
        return first, second, ipcsync.current_stream() == s

    assert in_thread(body) == (True, True, True)
    assert ipcsync.current_stream() == ipcsync.default_stream()
    assert ipcsync.default_stream().cuda_stream == 0
    assert ipcsync.default_stream().priority == 0


def test_current_streams_are_each_threads_own() -> None:
    with ipcsync.stream(ipcsync.Stream()) as s:
        assert ipcsync.current_stream() == s
        assert in_thread(lambda: ipcsync.current_stream() == ipcsync.default_stream())


def test_blocks_nest_and_come_back() -> None:
    a, b = ipcsync.Stream(), ipcsync.Stream()
    before = ipcsync.current_stream()
    block = ipcsync.stream(b)
    with ipcsync.stream(a), block, ipcsync.stream(None):
        assert ipcsync.current_stream() == b
        with a, block:
            assert ipcsync.current_stream() == b
        assert ipcsync.current_stream() == b
        with pytest.raises(KeyError), a:
            raise KeyError
        assert ipcsync.current_stream() == b
    assert ipcsync.current_stream() == before
    assert not streams._thread.streams


def test_a_stream_set_inside_a_block_of_another_is_undone_by_it() -> None:
    def body() -> bool:
        with ipcsync.stream(ipcsync.Stream()):
            ipcsync.set_stream(ipcsync.Stream())
        return ipcsync.current_stream() == ipcsync.default_stream()

    assert in_thread(body)


@pytest.mark.parametrize("wrong", ["stream", 1.5, True, frozenset(), [], ipcsync.Device(0), int, b"12345678"], ids=repr)
def test_what_is_no_stream_is_a_type_error_wherever_one_is_taken(wrong: Any) -> None:
    event = ipcsync.Event()
    for call in (event.record, event.wait, ipcsync.set_stream, ipcsync.stream, ipcsync.Stream().wait_stream):
        with pytest.raises(TypeError):
            call(wrong)


def test_an_unknown_address_is_a_driver_error() -> None:
    if is_real_gpu():
        pytest.skip("CUDA may crash on an address that is not a stream's")
    for call in (ipcsync.ExternalStream, ipcsync.Event().record, ipcsync.set_stream):
        with pytest.raises(ipcsync.DriverError):
            call(0xDEAD000)


def test_streams_wait_for_each_other() -> None:
    a, b = ipcsync.Stream(), ipcsync.Stream()
    event = a.record_event()
    assert isinstance(event, ipcsync.Event)
    assert a.record_event(event) is event
    b.wait_event(event)
    b.wait_stream(a)
    b.wait_stream(a.cuda_stream)
    b.wait_event(ipcsync.Event())
    b.synchronize()
    assert a.query()
    assert b.query()


def test_every_stream_function_works_on_the_default_stream_in_a_new_thread() -> None:
    def body() -> bool:
        s = ipcsync.default_stream()
        event = s.record_event()
        s.wait_event(event)
        s.wait_stream(ipcsync.Stream())
        s.synchronize()
        return s.query() and event.query() and not s.is_capturing()

    assert in_thread(body)


def test_a_stream_of_ours_works_in_a_thread_without_a_context() -> None:
    s, event = ipcsync.Stream(), ipcsync.Event()
    event.record(s)

    def body() -> bool:
        event.record(s)
        event.wait(s)
        s.wait_event(event)
        s.record_event().synchronize()
        event.synchronize()
        s.synchronize()
        return event.query() and s.query() and s.priority == 0 and not s.is_capturing()

    assert in_thread(body)


def test_a_stream_does_not_pickle_or_copy() -> None:
    s = ipcsync.Stream()
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot leave its process"):
            leave(s)


def test_our_stream_asks_the_driver_nothing_to_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    s = ipcsync.Stream()
    api = load()
    for name in ("cuStreamGetCtx", "cuStreamIsCapturing", "cuCtxGetDevice", "cuCtxSetCurrent", "cuCtxGetCurrent"):
        monkeypatch.setattr(api, name, None)
    handle, ordinal = streams.stream_handle(s)
    assert (int(handle), ordinal) == (s.cuda_stream, 0)
    assert streams.resolve(s) is s


def test_streams_can_be_made_and_dropped_by_the_thousand() -> None:
    for _ in range(2000):
        ipcsync.Stream()
