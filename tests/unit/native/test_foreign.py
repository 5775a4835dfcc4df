"""Other libraries' streams and events are taken wherever ours are."""

from __future__ import annotations

import sys
import types
from numbers import Integral
from typing import Any

import pytest

import ipcsync
from ipcsync._drivers import load, unwrap
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import resolve, stream_handle

pytestmark = pytest.mark.driver


class WithProtocol:
    """cuda.core, numba: a method."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._pointer)


class WithProtocolProperty:
    """The protocol's first version: an attribute."""

    def __init__(self, pointer: int) -> None:
        self.__cuda_stream__ = (0, pointer)


class Torchlike:
    """torch.cuda.Stream of before it had the protocol."""

    def __init__(self, pointer: int, device_index: int = 0) -> None:
        self.cuda_stream = pointer
        self.device_index = device_index


class Cupylike:
    """cupy.cuda.Stream."""

    def __init__(self, pointer: int) -> None:
        self.ptr = pointer


WAYS = [int, WithProtocol, WithProtocolProperty, Torchlike, Cupylike, ipcsync.ExternalStream]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_of_giving_a_stream_names_the_same_one(way: Any) -> None:
    ours = ipcsync.Stream()
    theirs = way(ours.cuda_stream)
    assert resolve(theirs) == ours
    handle, ordinal = stream_handle(theirs)
    assert (int(handle), ordinal) == (ours.cuda_stream, 0)
    event = ipcsync.Event()
    event.record(theirs)
    event.wait(theirs)
    ours.wait_stream(theirs)
    with ipcsync.stream(theirs):
        assert ipcsync.current_stream() == ours
    ours.synchronize()
    assert event.query()


def test_the_handle_object_of_cuda_python_is_a_stream_and_an_event_too() -> None:
    api = load()
    ipcsync.set_device(0)
    theirs = unwrap(api.cuStreamCreateWithPriority(1, 0), "cuStreamCreateWithPriority")
    event = unwrap(api.cuEventCreate(2), "cuEventCreate")
    assert resolve(theirs).cuda_stream == int(theirs)
    ipcsync.Event().record(theirs)
    ipcsync.Stream().wait_event(event)
    unwrap(api.cuEventDestroy(event), "cuEventDestroy")
    unwrap(api.cuStreamDestroy(theirs), "cuStreamDestroy")


@pytest.mark.parametrize("pointer", [0, 1, 2])
def test_the_default_streams_numbers_belong_to_the_current_device(pointer: int) -> None:
    for way in WAYS:
        event = ipcsync.Event()
        event.record(way(pointer))
        event.synchronize()
        assert event.device == ipcsync.Device(ipcsync.current_device())
    assert resolve(pointer).query() in (True, False)


@pytest.mark.parametrize("answer", [None, 5, (0,), (1, 5), (0, None), (0, "5"), (0, 5, 6), "05"], ids=repr)
def test_a_protocol_that_answers_nonsense_is_a_type_error(answer: Any) -> None:
    class Wrong:
        def __cuda_stream__(self) -> Any:
            return answer

    with pytest.raises(TypeError):
        ipcsync.Event().record(Wrong())


def test_a_small_number_of_numpys_kind_is_a_timeout_too() -> None:
    @Integral.register
    class Int64:
        def __init__(self, value: int) -> None:
            self._value = value

        def __index__(self) -> int:
            return self._value

        def __lt__(self, other: int) -> bool:
            return self._value < other

    with pytest.raises(TypeError, match="is not a stream; did you mean timeout="):
        refuse_small_number(Int64(30), 0)
    refuse_small_number(Int64(4096), 0)
    refuse_small_number(Int64(2), 3)


def test_a_class_is_no_stream() -> None:
    for wrong in (WithProtocol, Torchlike, ipcsync.Stream):
        with pytest.raises(TypeError):
            resolve(wrong)  # type: ignore[arg-type]


def test_events_of_others_are_waited_for() -> None:
    ours = ipcsync.Event()
    ours.record()

    class Core:
        handle = ours.cuda_event

    class Torch:
        cuda_event = ours.cuda_event

        def wait(self, stream: Any) -> None:
            raise AssertionError("torch's own wait takes torch's streams only")

    class NeverRecorded:
        cuda_event = 0

    waited: list[Any] = []

    class Pointlike:
        def wait(self, stream: Any) -> None:
            waited.append(stream)

    stream = ipcsync.Stream()
    for event in (ours, ours.cuda_event, Core(), Torch(), NeverRecorded(), Pointlike()):
        stream.wait_event(event)
    stream.synchronize()
    assert waited == [stream]


class WithoutEvent:
    """An event object of cuda.core's kind that has no event any more."""

    handle = 0


def test_a_null_event_is_a_driver_error() -> None:
    with pytest.raises(ipcsync.DriverError) as caught:
        ipcsync.Stream().wait_event(WithoutEvent())
    assert caught.value.code == 400


def test_a_null_event_is_refused_before_the_driver_sees_it() -> None:
    with pytest.raises(TypeError, match="0 is not an event"):
        ipcsync.Stream().wait_event(0)


def test_a_stream_is_no_event() -> None:
    stream = ipcsync.Stream()
    for wrong in (stream, ipcsync.Stream(), WithProtocol(stream.cuda_stream)):
        with pytest.raises(TypeError, match="wait_stream"):
            stream.wait_event(wrong)  # type: ignore[arg-type]


def test_what_holds_handle_bytes_is_no_event() -> None:
    class SharedEventlike:
        handle = bytes(64)

    with pytest.raises(TypeError, match="wait"):
        ipcsync.Stream().wait_event(SharedEventlike())


class FakeTorch(types.ModuleType):
    """As much of torch as is asked."""

    def __init__(self, stream: Any, initialized: bool = True) -> None:
        super().__init__("torch")
        self.cuda = types.SimpleNamespace(is_initialized=lambda: initialized, current_stream=lambda device=None: stream)


def test_none_is_torchs_current_stream_once_torch_has_initialised_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ipcsync.Stream()
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(Torchlike(theirs.cuda_stream)))
    assert resolve(None) == theirs
    assert int(stream_handle(None)[0]) == theirs.cuda_stream
    assert ipcsync.current_stream() == ipcsync.default_stream()
    assert not ipcsync.is_current_stream_capturing()
    with ipcsync.stream(ipcsync.Stream()) as ours:
        assert resolve(None) == ours
        assert int(stream_handle(None)[0]) == ours.cuda_stream
    assert resolve(None) == theirs


def test_none_is_our_current_stream_while_torch_has_not_initialised_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(Torchlike(5), initialized=False)
    for half in (torch, types.ModuleType("torch")):  # the second: in the middle of its own import
        monkeypatch.setitem(sys.modules, "torch", half)
        assert resolve(None) == ipcsync.default_stream()


def test_torchs_current_stream_of_a_device_is_asked_for_by_ordinal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    torch = FakeTorch(None)

    def current_stream(device: Any = None) -> Torchlike:
        asked.append(device)
        return Torchlike(0)

    torch.cuda.current_stream = current_stream
    monkeypatch.setitem(sys.modules, "torch", torch)
    resolve(None, 0)
    stream_handle(None, 0)
    assert set(asked) == {0}


@pytest.mark.process  # its library looks for another one by ldconfig
def test_cuda_cores_objects_work_with_ours() -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    theirs = device.create_stream()
    assert ipcsync.get_device_properties(device).ordinal == 0
    event = ipcsync.Event()
    event.record(theirs)
    event.wait(theirs)
    ours = ipcsync.Stream()
    ours.wait_event(theirs.record())
    ours.wait_stream(theirs)
    assert resolve(theirs).cuda_stream == int(theirs.handle)
    wrapped = device.create_stream(ours)
    assert int(wrapped.handle) == ours.cuda_stream
    ours.synchronize()
    theirs.sync()
    assert event.query()
    closed = theirs.record()
    closed.close()
    with pytest.raises(ipcsync.DriverError):
        ours.wait_event(closed)
    theirs.close()
    with pytest.raises(RuntimeError):
        event.record(theirs)
