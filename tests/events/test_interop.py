"""Streams and events of other libraries beside ours: cuda.core, torch, cupy, numba, and captures of theirs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda.bindings.driver import CUstreamCaptureMode

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

_GLOBAL = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
_kept: dict[str, Any] = {}


@pytest.fixture
def core() -> Any:
    """cuda.core, its device 0 current."""
    module = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    module.Device(0).set_current()
    return module


# --- streams ----------------------------------------------------------------------------------------------------------


class Protocol:
    """A stream of a library that follows the protocol of cuda.core and numba."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self._address = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


class Pointer:
    """A stream as cupy has it."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self.ptr = stream.cuda_stream


class TorchLike:
    """A stream as torch has it."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self.cuda_stream = stream.cuda_stream
        self.device_index = stream.device_index


def _address(stream: ipcsync.Stream) -> int:
    return stream.cuda_stream


@pytest.mark.parametrize("kind", [Protocol, Pointer, TorchLike, _address])
def test_every_kind_of_stream_records_and_waits_as_it_is(
    client: ipcsync.Client, engine: EngineName, kind: Callable[[ipcsync.Stream], Any]
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    held, waiting = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(kind(held)):
        points = [event.record(kind(held)), client.record(kind(held), engine=engine)]
        for point in points:
            point.wait(kind(waiting))
            assert not point.query()
        assert not waiting.query()
    for point in points:
        point.synchronize(10)
    until(waiting.query, "the waiting stream goes on")


def test_a_stream_of_cuda_core_records_and_waits_as_it_is(
    core: Any, client: ipcsync.Client, engine: EngineName
) -> None:
    device = core.Device(0)
    held, waiting = device.create_stream(), device.create_stream()
    event = client.event("e", recorder=True, engine=engine)
    with StreamGate(held) as gate:
        point = event.record(held)
        point.wait(waiting)
        seen = waiting.record()
        assert not point.query()
        assert not seen.is_done
        gate.open()
        point.synchronize(10)
        until(lambda: bool(seen.is_done), "cuda.core's stream goes on")
    assert client.record(held).generation == 1


def test_cuda_core_takes_a_stream_of_ours(core: Any, client: ipcsync.Client) -> None:
    ours = client.stream("decode")
    theirs = core.Device(0).create_stream(ours)
    assert int(theirs.handle) == ours.cuda_stream
    with StreamGate(ours):
        done = theirs.record()
        assert not done.is_done
    until(lambda: bool(done.is_done), "our stream's work is seen by cuda.core")


# --- handles ----------------------------------------------------------------------------------------------------------


def _core_event(core: Any, handle: bytes) -> Any:
    """cuda.core's event of a handle. Its descriptor is made by unpickling only, of the class, the bytes and a flag."""
    event = importlib.import_module("cuda.core._event")
    return core.Event.from_ipc_descriptor(event.IPCEventDescriptor._init(handle, False))


def test_the_handle_of_a_shared_event_is_waited_for_by_cuda_core(core: Any, client: ipcsync.Client) -> None:
    event = client.event("e", recorder=True, engine="event", depth=1)
    theirs = _core_event(core, event.handle)
    assert theirs.is_ipc_enabled
    held, waiting = ipcsync.Stream(), core.Device(0).create_stream()
    with StreamGate(held) as gate:
        point = event.record(held)
        assert not theirs.is_done
        waiting.wait(theirs)
        after = waiting.record()
        assert not after.is_done
        gate.open()
        point.synchronize(10)
        until(lambda: bool(theirs.is_done), "cuda.core sees the record complete")
        until(lambda: bool(after.is_done), "cuda.core's stream goes on")
    theirs.close()
    event.record(held).synchronize(10)


def _record_with_core() -> bytes:
    """An event of cuda.core's, made as it makes one to share: by a record, here behind a closed gate. Its handle."""
    ipcsync.driver_name()  # the software driver has to be loaded before another library looks for one
    core = importlib.import_module("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    gate = StreamGate(stream)
    event = stream.record(options=core.EventOptions(ipc_enabled=True))
    _kept.update(device=device, stream=stream, gate=gate, event=event)
    # The descriptor says its bytes only to pickle.
    handle: bytes = event.ipc_descriptor.__reduce__()[1][0]
    return handle


def _open_cores_gate() -> None:
    _kept["gate"].open()


def test_the_handle_of_an_event_of_cuda_core_opens_here(core: Any, peer: Peer) -> None:
    event = ipcsync.Event.from_ipc_handle(0, peer.call(_record_with_core))
    assert event.is_imported
    stream = ipcsync.Stream()
    event.wait(stream)
    assert not event.query()
    assert not stream.query()
    peer.call(_open_cores_gate)
    until(event.query, "cuda.core's record is complete")
    until(stream.query, "our stream goes on")


# --- captures ---------------------------------------------------------------------------------------------------------


@contextmanager
def _captured(stream: ipcsync.Stream) -> Iterator[None]:
    """A capture of the stream by this thread in global mode, the most sensitive; it must come out whole."""
    driver = _drivers.load()
    unwrap(driver.cuStreamBeginCapture(stream.cuda_stream, _GLOBAL), "cuStreamBeginCapture")
    try:
        yield
    finally:
        graph = unwrap(driver.cuStreamEndCapture(stream.cuda_stream), "cuStreamEndCapture")
    unwrap(driver.cuGraphDestroy(graph), "cuGraphDestroy")


def test_a_capturing_stream_neither_records_nor_waits_and_its_capture_comes_out_whole(
    client: ipcsync.Client, engine: EngineName
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream, held = ipcsync.Stream(), ipcsync.Stream()
    pending = event.record(held)
    pending.synchronize(10)
    with StreamGate(held):
        pending = event.record(held)
        with _captured(stream):
            for use in (
                lambda: event.record(stream),
                lambda: client.record(stream, engine=engine),
                lambda: pending.wait(stream),
                lambda: event.at(1).wait(stream),
                lambda: event.at(9).wait(stream, timeout=0),
            ):
                with pytest.raises(ipcsync.StreamCapturing):
                    use()
        assert event.generation == 2
    assert event.record(stream).generation == 3
    event.at(3).synchronize(10)


def test_our_queries_on_other_threads_do_not_break_a_capture(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    recorder, waiter = new_client(), new_client()
    event = recorder.event("e", recorder=True, engine=engine, depth=2)
    seen = waiter.event("e")
    held, other, captured = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Stream()
    errors: list[BaseException] = []
    begun, ended = threading.Barrier(2), threading.Event()

    def use() -> None:
        try:
            begun.wait(10)
            while not ended.is_set():
                point = event.record(other, timeout=10)
                seen.at(point.generation).wait(held)
                seen.at(point.generation).query()
                seen.at(point.generation).synchronize(10)
                assert event.completed <= event.generation
                waiter.check()
                for client in (recorder, waiter):
                    client._session.owner.wake()  # heartbeats query too
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)
            begun.abort()

    thread = threading.Thread(target=use)
    thread.start()
    begun.wait(10)
    for _ in range(5):
        with _captured(captured):
            recorded = event.generation
            until(lambda: event.generation > recorded or bool(errors), "the other thread works")  # noqa: B023 - at once
    ended.set()
    thread.join(15)
    assert errors == []


# --- libraries that may be missing ------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    """torch with a GPU."""
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("torch has no GPU here")
    module.cuda.init()
    return module


def test_torchs_current_stream_is_meant_by_none(torch: Any, client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    with StreamGate(stream):
        with torch.cuda.stream(stream):
            point = event.record()
            assert client.record(engine=engine) is not None
        with torch.cuda.stream(waiting):
            point.wait()
        assert not point.query()
        assert not waiting.query()
    until(waiting.query, "torch's stream goes on")


def _wait_with_torch(handle: bytes) -> bool:
    torch = importlib.import_module("torch")
    torch.cuda.init()
    event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), handle)
    event.wait(torch.cuda.current_stream())
    event.synchronize()
    return bool(event.query())


def test_the_handle_of_a_shared_event_is_waited_for_by_torch(
    torch: Any, client: ipcsync.Client, new_peer: Callable[..., Peer]
) -> None:
    event = client.event("e", recorder=True, engine="event", depth=1)
    peer, stream = new_peer(PYTHONWARNINGS="default"), ipcsync.Stream()
    with StreamGate(stream) as gate:
        event.record(stream)
        peer.begin(_wait_with_torch, event.handle)
        assert not peer.has_result
        gate.open()
        assert peer.result() is True


def test_a_graph_that_torch_captures_on_another_thread_survives_our_queries(
    torch: Any, client: ipcsync.Client, engine: EngineName
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    graph, target = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    stream, errors, ended = ipcsync.Stream(), [], threading.Event()

    def query() -> None:
        try:
            while not ended.is_set():
                event.record(stream).synchronize(10)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    target += 1
    torch.cuda.synchronize()
    thread = threading.Thread(target=query)
    thread.start()
    try:
        with torch.cuda.graph(graph):
            for _ in range(100):
                target += 1
    finally:
        ended.set()
        thread.join(15)
    assert errors == []
    graph.replay()
    assert float(target.sum().item()) == 8 * 101


def test_a_stream_of_cupy_records_and_waits_as_it_is(client: ipcsync.Client, engine: EngineName) -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    if ipcsync.driver_name() != "cuda":
        pytest.skip("cupy needs a GPU")
    _record_and_wait(client, engine, cupy.cuda.Stream(non_blocking=True))


def test_a_stream_of_numba_records_and_waits_as_it_is(client: ipcsync.Client, engine: EngineName) -> None:
    numba = pytest.importorskip("numba.cuda", reason="numba is not installed")
    if not numba.is_available():
        pytest.skip("numba has no GPU here")
    stream = numba.stream()
    if not hasattr(stream, "__cuda_stream__"):
        pytest.skip("numba's own CUDA target has no stream protocol; that of the package numba-cuda has")
    _record_and_wait(client, engine, stream)


def _record_and_wait(client: ipcsync.Client, engine: EngineName, stream: Any) -> None:
    event = client.event("e", recorder=True, engine=engine)
    with StreamGate(stream):
        point = event.record(stream)
        assert not point.query()
    point.synchronize(10)
    with remote.held(ipcsync.Stream()):
        point.wait(stream)
