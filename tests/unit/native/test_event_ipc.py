"""How events cross processes: by handle, by pickle, and as an argument; and which handles are refused."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.kit.driver_kit import in_thread

pytestmark = pytest.mark.driver

SPAWN = multiprocessing.get_context("spawn")


def test_a_handle_is_64_bytes_and_the_same_each_time() -> None:
    event = ipcsync.Event(interprocess=True)
    handle = event.ipc_handle()
    assert isinstance(handle, bytes)
    assert len(handle) == 64
    assert event.device == ipcsync.Device(ipcsync.current_device())
    event.record()
    assert event.ipc_handle() == handle
    assert ipcsync.Event(interprocess=True).ipc_handle() != handle


def test_a_handle_can_be_had_in_a_thread_without_a_context() -> None:
    event = ipcsync.Event(interprocess=True)
    event.record(ipcsync.Stream())
    assert len(in_thread(event.ipc_handle)) == 64
    assert len(in_thread(ipcsync.Event(interprocess=True).ipc_handle)) == 64


def test_an_event_made_without_interprocess_gives_no_handle() -> None:
    event = ipcsync.Event()
    with pytest.raises(ipcsync.DriverError) as caught:
        event.ipc_handle()
    assert caught.value.code == 400
    assert caught.value.call == "cuIpcGetEventHandle"


@pytest.mark.parametrize("length", [0, 1, 63, 65, 128])
def test_a_handle_of_another_length_is_a_handle_error_in_torchs_words(length: int) -> None:
    text = f"^cudaIpcEventHandle_t expects byte-like object of size 64, but got {length}$"
    for data in (bytes(length), bytearray(length), memoryview(bytes(length))):
        with pytest.raises(ipcsync.HandleError, match=text):
            ipcsync.Event.from_ipc_handle(0, data)


@pytest.mark.parametrize("wrong", [None, 64, "x" * 64, [0] * 64, frozenset()], ids=repr)
def test_a_handle_that_is_no_bytes_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError):
        ipcsync.Event.from_ipc_handle(0, wrong)


@pytest.mark.parametrize("handle", [bytes(64), b"\xff" * 64, bytes(range(64)), b"noise..." * 8])
def test_zeros_and_noise_are_a_handle_error(handle: bytes) -> None:
    with pytest.raises(ipcsync.HandleError) as caught:
        ipcsync.Event.from_ipc_handle(0, handle)
    assert caught.value.call == "cuIpcOpenEventHandle"
    assert caught.value.code in (1, 205, 400, 201)


def test_a_process_cannot_open_what_it_exported() -> None:
    event = ipcsync.Event(interprocess=True)
    with pytest.raises(ipcsync.HandleError, match="this process exported the handle itself") as caught:
        ipcsync.Event.from_ipc_handle(0, event.ipc_handle())
    assert caught.value.code == 201


def test_an_event_can_only_be_opened_on_a_cuda_device() -> None:
    class OnCpu:
        type = "cpu"
        index = None

    for device in ("cpu", "cpu:0", OnCpu()):
        with pytest.raises(
            ipcsync.InvalidDevice, match=r"^Event can only be created on CUDA devices, but got device type cpu$"
        ):
            ipcsync.Event.from_ipc_handle(device, bytes(64))
    with pytest.raises(ipcsync.InvalidDevice):
        ipcsync.Event.from_ipc_handle(99, bytes(64))


def test_an_event_without_interprocess_does_not_pickle_or_copy() -> None:
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="interprocess=True"):
            leave(ipcsync.Event())


def peer(pipe: Connection) -> None:
    """The other process: does with the events it gets what it is told."""
    events: dict[str, Any] = {}
    stream = ipcsync.Stream()
    while True:
        try:
            what, name, value = pipe.recv()
        except EOFError:
            return
        answer: Any = None
        try:
            if what == "open":
                events[name] = ipcsync.Event.from_ipc_handle(*value)
            elif what == "take":
                events[name] = value
            elif what == "drop":
                del events[name]
                gc.collect()
            elif what == "wait":
                events[name].wait(stream)
            elif what == "record":
                events[name].record(stream)
            elif what == "stream":
                answer = stream.query()
            elif what == "export":
                events[name] = ipcsync.Event(interprocess=True)
                events[name].record(stream)
                answer = events[name].ipc_handle()
            else:
                answer = getattr(events[name], what)
                answer = answer() if callable(answer) else answer
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            answer = error
        pipe.send(answer)


class Peer:
    """The process above, asked by calls."""

    def __init__(self) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=peer, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: str, name: str = "", value: Any = None) -> Any:
        self._pipe.send((what, name, value))
        assert self._pipe.poll(30), "the peer does not answer"
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self.process.join(30)
        assert self.process.exitcode == 0


@pytest.fixture
def other() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.mark.process
def test_another_process_sees_the_records_and_makes_its_own(
    other: Peer, held: tuple[ipcsync.Stream, StreamGate]
) -> None:
    stream, gate = held
    event = ipcsync.Event(interprocess=True)
    uuid = ipcsync.get_device_properties(0).uuid
    assert other.ask("open", "e", (uuid, event.ipc_handle())) is None
    assert other.ask("query", "e") is True
    assert other.ask("is_imported", "e") is True
    assert other.ask("device", "e") == ipcsync.Device(0)
    assert other.ask("ipc_handle", "e") == event.ipc_handle()
    event.record(stream)
    assert other.ask("query", "e") is False
    other.ask("wait", "e")
    assert other.ask("stream") is False
    gate.open()
    assert other.ask("synchronize", "e") is None
    assert other.ask("query", "e") is True
    assert other.ask("record", "e") is None
    event.synchronize()
    assert event.query()


@pytest.mark.process
def test_an_event_pickles_as_its_device_and_handle(other: Peer, held: tuple[ipcsync.Stream, StreamGate]) -> None:
    stream, gate = held
    event = ipcsync.Event(interprocess=True)
    event.record(stream)
    assert other.ask("take", "e", event) is None
    assert other.ask("is_imported", "e") is True
    assert other.ask("query", "e") is False
    gate.open()
    assert other.ask("synchronize", "e") is None


def start_with(event: ipcsync.Event, pipe: Connection) -> None:
    event.synchronize()
    pipe.send((event.is_imported, event.query()))


@pytest.mark.process
def test_an_event_can_be_an_argument_of_a_spawned_process() -> None:
    event = ipcsync.Event(interprocess=True)
    event.record()
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=start_with, args=(event, theirs))
    child.start()
    assert ours.poll(30)
    assert ours.recv() == (True, True)
    child.join(30)
    assert child.exitcode == 0


def test_an_unpickled_event_of_this_very_process_is_a_handle_error() -> None:
    data = pickle.dumps(ipcsync.Event(interprocess=True))
    with pytest.raises(ipcsync.HandleError):
        pickle.loads(data)


@pytest.mark.process
def test_a_handle_outlives_its_event_and_its_exporter() -> None:
    """CUDA does not tell: a handle names a slot of the exporter's file, which stays."""
    doomed = Peer()
    handle = doomed.ask("export", "e")
    doomed.ask("drop", "e")
    ipcsync.Event.from_ipc_handle(0, handle).synchronize()
    doomed.process.kill()
    doomed.process.join(30)
    ipcsync.Event.from_ipc_handle(0, handle).synchronize()


@pytest.mark.process
def test_an_imported_event_is_recorded_on_its_own_device_and_has_no_timing(other: Peer) -> None:
    event = ipcsync.Event.from_ipc_handle(0, other.ask("export", "e"))
    event.record(ipcsync.Stream())
    event.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        event.elapsed_time(event)
    del event
