"""How events cross processes: by handle, by pickle, and as an argument; and which handles are refused."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
from multiprocessing.connection import Connection
from typing import Any

import pytest

import ipcsync
from ipcsync._native import context
from ipcsync.testing import StreamGate
from tests.kit import remote
from tests.kit.driver_kit import in_thread
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S

pytestmark = pytest.mark.driver


def test_a_handle_is_64_bytes_and_the_same_each_time() -> None:
    event = ipcsync.Event(interprocess=True)
    handle = event.ipc_handle()
    assert isinstance(handle, bytes)
    assert len(handle) == 64
    assert event.device == ipcsync.Device(ipcsync.current_device())
    event.record()
    assert event.ipc_handle() == handle
    assert ipcsync.Event(interprocess=True).ipc_handle() != handle


def test_an_export_within_the_creation_stays_that_of_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    event, real = ipcsync.Event(interprocess=True), context.call
    within: list[tuple[bytes, int]] = []

    def call(name: str, *arguments: Any) -> Any:
        made = real(name, *arguments)
        if name == "cuEventCreate" and not within:
            within.append((b"", 0))  # for its own creation
            within[0] = event.ipc_handle(), event.cuda_event  # as a signal's handler would
        return made

    monkeypatch.setattr("ipcsync._native.event.call", call)
    event.record(ipcsync.Stream())
    assert within == [(event.ipc_handle(), event.cuda_event)]


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


def test_an_unpickled_event_of_this_very_process_is_a_handle_error() -> None:
    data = pickle.dumps(ipcsync.Event(interprocess=True))
    with pytest.raises(ipcsync.HandleError):
        pickle.loads(data)


# --- in a peer --------------------------------------------------------------------------------------------------------

_events: dict[str, ipcsync.Event] = {}


def _take(event: ipcsync.Event) -> None:
    _events["e"] = event


def _open(device: str, handle: bytes) -> None:
    _events["e"] = ipcsync.Event.from_ipc_handle(device, handle)


def _export() -> bytes:
    event = _events["e"] = ipcsync.Event(interprocess=True)
    event.record(ipcsync.Stream())
    return event.ipc_handle()


def _drop() -> None:
    _events.clear()
    gc.collect()


def _ask(what: str, *args: Any) -> Any:
    answer = getattr(_events["e"], what)
    return answer(*args) if callable(answer) else answer


def _wait() -> bool:
    """Whether a stream that waits is done."""
    _ask("wait", remote.stream())
    return remote.stream().query()


def _wait_and_tell(event: ipcsync.Event, pipe: Connection) -> None:
    event.synchronize()
    pipe.send((event.is_imported, event.query()))


@pytest.mark.process
def test_another_process_sees_the_records_and_makes_its_own(
    peer: Peer, held: tuple[ipcsync.Stream, StreamGate]
) -> None:
    stream, gate = held
    event = ipcsync.Event(interprocess=True)
    peer.call(_open, ipcsync.get_device_properties(0).uuid, event.ipc_handle())
    assert [peer.call(_ask, what) for what in ("query", "is_imported")] == [True, True]
    assert peer.call(_ask, "device") == ipcsync.Device(0)
    assert peer.call(_ask, "ipc_handle") == event.ipc_handle()
    event.record(stream)
    assert peer.call(_ask, "query") is False
    assert peer.call(_wait) is False
    gate.open()
    peer.call(_ask, "synchronize")
    assert peer.call(_ask, "query") is True
    peer.call(_ask, "record")
    event.synchronize()
    assert event.query()


@pytest.mark.process
def test_an_event_pickles_as_its_device_and_handle(peer: Peer, held: tuple[ipcsync.Stream, StreamGate]) -> None:
    stream, gate = held
    event = ipcsync.Event(interprocess=True)
    event.record(stream)
    peer.call(_take, event)
    assert [peer.call(_ask, what) for what in ("query", "is_imported")] == [False, True]
    gate.open()
    peer.call(_ask, "synchronize")


@pytest.mark.process
def test_an_event_can_be_an_argument_of_a_spawned_process() -> None:
    event = ipcsync.Event(interprocess=True)
    event.record()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_wait_and_tell, args=(event, theirs))
    child.start()
    assert ours.poll(DEADLINE_S)
    assert ours.recv() == (True, True)
    child.join(DEADLINE_S)
    assert child.exitcode == 0


@pytest.mark.process
def test_a_handle_outlives_its_event_and_its_exporter(peer: Peer) -> None:
    """CUDA does not tell: a handle names a slot of the exporter's file, which stays."""
    handle = peer.call(_export)
    peer.call(_drop)
    ipcsync.Event.from_ipc_handle(0, handle).synchronize()
    peer.kill()
    ipcsync.Event.from_ipc_handle(0, handle).synchronize()


@pytest.mark.process
def test_an_imported_event_is_recorded_on_its_own_device_and_has_no_timing(peer: Peer) -> None:
    event = ipcsync.Event.from_ipc_handle(0, peer.call(_export))
    event.record(ipcsync.Stream())
    event.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        event.elapsed_time(event)
