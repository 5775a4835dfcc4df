"""Tensors between actors of a real Ray, ordered by points; functions and points that Ray ships: `make test-ray`.

The tensors of a CPU are copied within the call, so their values are right with any order. What tells is time: a record
that is held back in the sender holds up the receiver.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._drivers import unwrap
from ipcsync._native.context import driver

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make test-ray installs it", allow_module_level=True)

import ray
import torch

from ipcsync.integrations.ray import PointTransport, TransferAborted, register
from ipcsync.testing import StreamGate

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),  # Ray's of its own
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

_HELD_S = 0.5
_DEADLINE_S = 60.0


register()


class _Worker:
    """Sends tensors, receives them, and holds back what it sends."""

    gate: Any = None

    def pid(self) -> int:
        return os.getpid()

    def hold(self) -> None:
        self.gate = StreamGate(ipcsync.default_stream())

    def let_go(self) -> None:
        self.gate.open()

    def record(self) -> ipcsync.Point:
        return ipcsync.default_client().record(ipcsync.default_stream())

    @ray.method(tensor_transport="ipcsync")
    def make(self, value: float, count: int = 3) -> list[torch.Tensor]:
        return [torch.full((count, 5), value, dtype=torch.bfloat16), torch.zeros(0, 4), torch.arange(7)]

    def total(self, tensors: list[torch.Tensor]) -> float:
        return float(sum(float(tensor.sum()) for tensor in tensors))


Actor: Any = ray.remote(enable_tensor_transport=True)(_Worker)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ipcsync.Coordinator]:
    """One Ray and one coordinator, for all tests."""
    with ipcsync.launch() as coordinator:
        environment = {"IPCSYNC_ENDPOINT": coordinator.endpoint, "IPCSYNC_DRIVER": "host"}
        environment["IPCSYNC_HOST_SEGMENT"] = os.environ["IPCSYNC_HOST_SEGMENT"]
        ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=False)
        yield coordinator
        ray.shutdown()


def test_tensors_arrive_as_they_were_sent(cluster: ipcsync.Coordinator) -> None:
    sender, receiver = Actor.remote(), Actor.remote()
    for value in (1.0, 2.0, 3.0):
        assert ray.get(receiver.total.remote(sender.make.remote(value)), timeout=_DEADLINE_S) == 15 * value + 21
    with ipcsync.connect(cluster.endpoint) as observer:
        assert sum(event.generation for event in observer.list_events()) == 3, "the sender records"


def test_the_pages_program_runs_twice_over(cluster: ipcsync.Coordinator) -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    (program,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Encoder" in text)
    program = program.replace("num_gpus=0.5, ", "").replace('device="cuda"', 'device="cpu"')
    last = program.splitlines()[-1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{program}{last}\n"],
        env={**os.environ, "IPCSYNC_ENDPOINT": cluster.endpoint, "IPCSYNC_DRIVER": "host", "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert done.stdout == "1024.0\n" * 2, done.stderr


def test_the_receiver_waits_for_a_record_that_is_held_back(cluster: ipcsync.Coordinator) -> None:
    sender, receiver = Actor.remote(), Actor.remote()
    assert ray.get(receiver.total.remote(sender.make.remote(1.0)), timeout=_DEADLINE_S)
    ray.get(sender.hold.remote())
    total = receiver.total.remote(sender.make.remote(2.0))
    assert ray.wait([total], timeout=_HELD_S)[0] == []
    ray.get(sender.let_go.remote())
    assert ray.get(total, timeout=_DEADLINE_S) == 51


def test_the_death_of_the_sender_ends_the_receivers_wait(cluster: ipcsync.Coordinator) -> None:
    sender, receiver = Actor.remote(), Actor.remote()
    assert ray.get(receiver.total.remote(sender.make.remote(1.0)), timeout=_DEADLINE_S)
    ray.get(sender.hold.remote())
    total = receiver.total.remote(sender.make.remote(2.0))
    assert ray.wait([total], timeout=_HELD_S)[0] == []
    pid = ray.get(sender.pid.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayTaskError, match="RecorderLost") as lost:
        ray.get(total, timeout=_DEADLINE_S)
    assert f"pid {pid}" in str(lost.value)
    assert ray.get(receiver.pid.remote(), timeout=_DEADLINE_S)  # it was not killed for it


# --- functions and points, as Ray ships them --------------------------------------------------------------------------


@pytest.fixture
def ray_client(cluster: ipcsync.Coordinator) -> Iterator[ipcsync.Client]:
    """This process's client."""
    with ipcsync.connect(cluster.endpoint, name="driver") as connected:
        yield connected


def test_functions_that_name_the_module_arrive(cluster: ipcsync.Coordinator) -> None:
    tasks = [lambda: ipcsync.driver_name(), lambda: ipcsync]  # noqa: PLW0108 - the module's name in it
    results = [ray.remote(task).remote() for task in tasks]
    assert ray.get(results, timeout=_DEADLINE_S) == ["host", ipcsync]


@pytest.mark.parametrize("way", ["captured", "as an argument", "within an object"])
def test_a_task_waits_for_a_point_that_it_is_sent(ray_client: ipcsync.Client, way: str) -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        point = ray_client.record(stream)

        def wait_for(sent: ipcsync.Point) -> tuple[int, str]:
            own = ipcsync.default_client()
            sent.synchronize(_DEADLINE_S)
            return sent.generation, own.name

        def wait_for_captured() -> tuple[int, str]:
            return wait_for(point)

        def wait_for_first(sent: dict[str, list[ipcsync.Point]]) -> tuple[int, str]:
            return wait_for(sent["points"][0])

        task = {
            "captured": lambda: ray.remote(wait_for_captured).remote(),
            "as an argument": lambda: ray.remote(wait_for).remote(point),
            "within an object": lambda: ray.remote(wait_for_first).remote(ray.put({"points": [point]})),
        }[way]()
        assert ray.wait([task], timeout=_HELD_S)[0] == []
        gate.open()
        generation, name = ray.get(task, timeout=_DEADLINE_S)
    assert generation == point.generation
    assert name.startswith("default_worker-")  # Ray's program; the pid says which of them


def test_a_point_that_an_actor_returns_is_waited_for_here_and_its_end_told(ray_client: ipcsync.Client) -> None:
    actor = Actor.remote()
    ray.get(actor.hold.remote(), timeout=_DEADLINE_S)
    points = [ray.get(actor.record.remote(), timeout=_DEADLINE_S) for _ in range(2)]
    assert [point.generation for point in points] == [1, 2]
    assert not points[0].query()
    ray.get(actor.let_go.remote(), timeout=_DEADLINE_S)
    points[1].synchronize(_DEADLINE_S)
    ray.get(actor.hold.remote(), timeout=_DEADLINE_S)
    held = ray.get(actor.record.remote(), timeout=_DEADLINE_S)
    pid = ray.get(actor.pid.remote(), timeout=_DEADLINE_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ipcsync.RecorderLost) as lost:
        held.synchronize(_DEADLINE_S)
    assert lost.value.pid == pid
    assert points[1].query()


# --- the transport by itself ------------------------------------------------------------------------------------------


@pytest.fixture
def transports(cluster: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PointTransport, ...]]:
    """A sender's and a receiver's, in this process."""
    monkeypatch.setenv("IPCSYNC_ENDPOINT", cluster.endpoint)
    yield PointTransport(), PointTransport()
    ipcsync.default_client().close()


def test_an_abort_ends_a_wait_of_the_host(transports: tuple[PointTransport, ...]) -> None:
    sender, receiver = transports
    with StreamGate(ipcsync.default_stream()):
        metadata = sender.extract_tensor_transport_metadata("a", [torch.ones(3)])
        transfers = [receiver.fetch_multiple_tensors("a", metadata, None) for _ in range(2)]
        other = receiver.fetch_multiple_tensors("b", metadata, None)
        with pytest.raises(ipcsync.WaitTimeout):
            receiver.wait_fetch_complete(transfers[0], 0)
        receiver.abort_transport("a", None)
        for transfer in transfers:
            with pytest.raises(TransferAborted, match="object a"):
                receiver.wait_fetch_complete(transfer, _DEADLINE_S)
        with pytest.raises(ipcsync.WaitTimeout):
            receiver.wait_fetch_complete(other, 0)
    receiver.abort_transport("unknown", None)


def test_target_buffers_are_filled(transports: tuple[PointTransport, ...]) -> None:
    sender, receiver = transports
    metadata = sender.extract_tensor_transport_metadata("a", [torch.ones(3), torch.arange(4)])
    targets = [torch.zeros(3), torch.zeros(4, dtype=torch.int64)]
    received = receiver.recv_multiple_tensors("a", metadata, None, targets)
    assert [tensor is target for tensor, target in zip(received, targets, strict=True)] == [True, True]
    assert [tensor.tolist() for tensor in targets] == [[1, 1, 1], [0, 1, 2, 3]]


def test_what_is_received_is_the_receivers_own(transports: tuple[PointTransport, ...]) -> None:
    sender, receiver = transports
    (sent,) = tensors = [torch.ones(3)]
    metadata = sender.extract_tensor_transport_metadata("a", tensors)
    (first,), (second,) = (receiver.recv_multiple_tensors("a", metadata, None) for _ in range(2))
    first += 1
    assert (sent.tolist(), second.tolist()) == ([1, 1, 1], [1, 1, 1])
    sender.garbage_collect("a", metadata, tensors)
    assert first.tolist() == [2, 2, 2]
    sender.extract_tensor_transport_metadata("b", [torch.zeros(3)])
    with pytest.raises(ipcsync.HandleError, match="was filled again"):
        receiver.recv_multiple_tensors("a", metadata, None)


def _free_bytes() -> int:
    ipcsync.Stream()  # makes a context current
    return int(unwrap(driver().cuMemGetInfo(), "cuMemGetInfo")[0])


def test_memory_is_used_again(transports: tuple[PointTransport, ...]) -> None:
    sender, _ = transports
    before = _free_bytes()
    for name in "aab":  # Ray may ask again for the same object
        metadata = sender.extract_tensor_transport_metadata(name, [torch.ones(1 << 20)])
        ipcsync.default_stream().synchronize(_DEADLINE_S)
    assert _free_bytes() == before - 2 * (5 << 20)
    for name in "ab":
        sender.garbage_collect(name, metadata, [])
    sender.extract_tensor_transport_metadata("c", [torch.ones(1 << 20)])
    assert _free_bytes() == before - 2 * (5 << 20)


def test_nothing_is_sent_of_an_empty_object(transports: tuple[PointTransport, ...]) -> None:
    sender, receiver = transports
    assert receiver.recv_multiple_tensors("a", sender.extract_tensor_transport_metadata("a", []), None) == []
