"""What only a real GPU can show: torch and cuda.core beside ipcsync, and both engines under a real coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.typing import EngineName
from tests.gpu import torch_actions
from tests.kit import driver_kit as kit
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.driver, pytest.mark.process, pytest.mark.ipcsync_gpu, pytest.mark.usefixtures("context")]

New = Callable[..., Peer]


@pytest.fixture
def torch(real_gpu: str) -> Any:
    """torch, with CUDA, and with the kernels of these tests loaded: loading one can wait for streams held back."""
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    warm = module.zeros(8, device="cuda")
    warm += 1
    warm.copy_(module.ones(8, device="cuda"))
    assert float(warm.sum().item()) == 8.0
    module.cuda.synchronize()
    return module


def test_the_device_is_a_gpu_and_the_driver_is_cuda(real_gpu: str) -> None:
    assert ipcsync.driver_name() == "cuda"
    assert ipcsync.get_device_properties(0).name == real_gpu


def test_torch_in_another_process_opens_our_event_and_waits_for_it(torch: Any, new_peer: New) -> None:
    event, stream = ipcsync.Event(interprocess=True), ipcsync.Stream()
    other = new_peer(PYTHONWARNINGS="default")  # torch's import may warn
    other.call(torch_actions.open_with_torch, event.ipc_handle())
    latch = kit.Latch(stream.cuda_stream)
    event.record(stream)
    assert other.call(torch_actions.torch_query) is False
    other.begin(torch_actions.torch_wait_then_sum, 1000)
    assert not other.has_result
    latch.open()
    assert other.result() == 1000.0
    assert other.call(torch_actions.torch_query) is True


def test_we_open_an_event_of_torch_and_see_its_record(torch: Any, new_peer: New) -> None:
    other = new_peer(PYTHONWARNINGS="default")  # torch's import may warn
    event = ipcsync.Event.from_ipc_handle(0, other.call(torch_actions.make_torch_event))
    assert event.is_imported
    assert event.query() is True
    other.call(torch_actions.torch_record)
    until(event.query, "torch's record completes")
    stream = ipcsync.Stream()
    event.wait(stream)
    stream.synchronize()


def test_an_event_records_torchs_current_stream_behind_its_kernels(torch: Any) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        target = torch.zeros(1024, device="cuda")
        latch = kit.Latch(side.cuda_stream)
        target += 1
        event = ipcsync.Event()
        event.record()  # no stream given: torch's current one
    assert event.query() is False
    latch.open()
    event.synchronize()
    assert float(target.sum().item()) == 1024.0


def _cupy_stream(module: Any) -> Any:
    return module.cuda.Stream(non_blocking=True)


def _numba_stream(module: Any) -> Any:
    return module.stream()


@pytest.mark.parametrize(("library", "make"), [("cupy", _cupy_stream), ("numba.cuda", _numba_stream)])
def test_a_stream_of_another_library_is_taken_as_it_is(
    real_gpu: str, library: str, make: Callable[[Any], Any], engine: EngineName
) -> None:
    stream = make(pytest.importorskip(library, reason=f"{library} is not installed"))
    with ipcsync.launch(driver="cuda") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        point = client.record(stream, engine=engine)
        point.wait(stream)
        point.synchronize(timeout=DEADLINE_S)
        assert point.query() is True


def test_a_stream_of_cuda_core_is_taken_as_it_is(real_gpu: str) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    event = ipcsync.Event()
    event.record(stream)
    event.synchronize()
    assert event.query() is True
    event.wait(stream)
    stream.sync()


def test_both_engines_work_between_this_process_and_a_coordinator(real_gpu: str) -> None:
    with ipcsync.launch(driver="cuda") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        report = client.check()
        assert report["event"]["ok"], report["event"]["why"]
        assert report["timeline"]["ok"], report["timeline"]["why"]


def test_a_record_amid_torchs_capture_is_refused_and_the_capture_goes_on(torch: Any, engine: EngineName) -> None:
    with ipcsync.launch(driver="cuda") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        graph, stream, target = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.zeros(8, device="cuda")
        with client.event("gpu/capture", recorder=True, engine=engine) as shared:
            shared.record(stream).synchronize(timeout=DEADLINE_S)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                target += 1
                with pytest.raises(ipcsync.StreamCapturing):
                    shared.record(stream)
                target += 1
            graph.replay()
            shared.record(stream).synchronize(timeout=DEADLINE_S)
        torch.cuda.synchronize()
        assert float(target.sum().item()) == 16.0


def test_a_point_orders_torch_work_on_two_streams(torch: Any, engine: EngineName) -> None:
    with ipcsync.launch(driver="cuda") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
        target, copied = (torch.zeros(1 << 20, device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        with client.event("gpu/order", recorder=True, engine=engine) as shared:
            latch = kit.Latch(producer.cuda_stream)
            with torch.cuda.stream(producer):
                target += 1
            point = shared.record(producer)
            assert point.query() is False
            point.wait(consumer)
            with torch.cuda.stream(consumer):
                copied.copy_(target)
            latch.open()
            consumer.synchronize()
            assert float(copied.sum().item()) == float(1 << 20)
            point.synchronize(timeout=DEADLINE_S)
