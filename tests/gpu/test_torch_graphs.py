"""Replays of graphs that torch captured and launches, beside torch's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync.client import graphs as replays
from ipcsync.integrations import torch as integration
from tests.kit import driver_kit as kit
from tests.kit.until import DEADLINE_S

pytestmark = [pytest.mark.driver, pytest.mark.process, pytest.mark.ipcsync_gpu, pytest.mark.usefixtures("context")]

LAYERS, SIZE = 4, 1 << 16


class Decode:
    """A graph of layers: each waits, adds its part of a cache to a sum, and records."""

    def __init__(self, torch: Any, endpoint: str) -> None:
        self._torch = torch
        self.client, self.other = (ipcsync.connect(endpoint, engine="timeline") for _ in range(2))
        self.stream, self.sending = torch.cuda.Stream(), torch.cuda.Stream()
        self.cache, self.read = (torch.zeros(LAYERS, SIZE, device="cuda") for _ in range(2))
        self.waits = [ipcsync.GraphWait() for _ in range(LAYERS)]
        self.records = [ipcsync.GraphRecord() for _ in range(LAYERS)]
        self.graph = torch.cuda.CUDAGraph()
        self.read.copy_(self.cache)  # its kernels are loaded before streams are held back
        self.cache.fill_(0.0)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for layer, (wait, record) in enumerate(zip(self.waits, self.records, strict=True)):
                wait.capture()
                self.read[layer].copy_(self.cache[layer])
                record.capture()
        self.done = self.client.event("gpu/done", recorder=True)
        self.sent = self.other.event("gpu/sent", recorder=True)
        self.seen = self.client.event("gpu/sent")

    def send(self, value: float) -> dict[ipcsync.GraphWait, ipcsync.Point]:
        points = {}
        with self._torch.cuda.stream(self.sending):
            for layer, wait in enumerate(self.waits):
                self.cache[layer].fill_(value)
                points[wait] = self.seen.at(self.sent.record(self.sending).generation)
        return points

    def expect(self, value: float, replay: ipcsync.Replay) -> None:
        ipcsync.synchronize_all([replay[record] for record in self.records], timeout=DEADLINE_S)
        self._torch.cuda.synchronize()
        assert bool((self.read == value).all().item())

    def close(self) -> None:
        self.client.close()
        self.other.close()


@pytest.fixture
def torch(real_gpu: str) -> Any:
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture
def decode(torch: Any) -> Iterator[Decode]:
    with ipcsync.launch(driver="cuda") as coordinator:
        one = Decode(torch, coordinator.endpoint)
        yield one
        one.close()


def test_a_graph_of_torch_waits_for_each_layer_and_records_it(torch: Any, decode: Decode) -> None:
    for value in range(1, 21):
        latch = kit.Latch(decode.sending.cuda_stream)
        points = decode.send(float(value))
        with torch.cuda.stream(decode.stream):
            replaying = decode.client.replay(points, dict.fromkeys(decode.records, decode.done), timeout=DEADLINE_S)
            with replaying as replay:
                decode.graph.replay()
        assert not replay[decode.records[0]].query()
        latch.open()
        decode.expect(float(value), replay)


def test_torchs_hooks_name_the_points_of_a_replay(torch: Any, decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.cuda.graphs, "register_graph_replay_start_hook"):
        pytest.skip("this torch has no hooks for replays")
    monkeypatch.setattr(replays, "has_hooks", False)
    integration.install()
    for value in (1.0, 2.0, 3.0):
        latch = kit.Latch(decode.sending.cuda_stream)
        points = decode.send(value)
        with (
            torch.cuda.stream(decode.stream),
            decode.client.next(points, dict.fromkeys(decode.records, decode.done), timeout=DEADLINE_S) as replay,
        ):
            decode.graph.replay()
        latch.open()
        decode.expect(value, replay)


def test_a_stream_of_torch_waits_for_a_point_as_for_an_event(torch: Any, decode: Decode) -> None:
    latch = kit.Latch(decode.sending.cuda_stream)
    points = decode.send(5.0)
    decode.stream.wait_event(points[decode.waits[-1]])
    with torch.cuda.stream(decode.stream):
        decode.read.copy_(decode.cache)
    assert not decode.stream.query()
    latch.open()
    decode.stream.synchronize()
    assert bool((decode.read == 5.0).all().item())
