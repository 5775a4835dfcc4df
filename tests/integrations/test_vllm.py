"""The engine for vLLM against its published interface, on tensors of the CPU: `make test-vllm`.

vLLM's own base classes and factories are imported from its source distribution; no vLLM runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.kit.peer import Peer, PeerError
from tests.kit.until import until

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM's source is not here: make test-vllm fetches it", allow_module_level=True)

import torch
from vllm.distributed.weight_transfer import (
    ParamMeta,
    WeightSource,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.model_loader.mtp_validation import is_mtp_completeness_check_enabled

from ipcsync.integrations import vllm as plugin
from ipcsync.integrations.vllm.errors import WorkerAsleep
from ipcsync.integrations.vllm.trainer import PointTrainerInitInfo, dtype_of
from ipcsync.integrations.vllm.worker import PointWeightTransferEngine

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


class _Model:
    def __init__(self) -> None:
        self.weights: dict[str, list[float]] = {}

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: tensor.flatten().tolist() for name, tensor in weights}


def _worker() -> Any:
    plugin.register()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    backend = SimpleNamespace(backend="ipcsync")
    return WeightTransferEngineFactory.create_engine(backend, config, torch.device("cpu"), _Model())


class _Source(WeightSource):
    value = 1.0

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta("a", torch.float32, (2, 2)), ParamMeta("b", torch.bfloat16, (3,))]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self.metadata:
            yield meta.name, torch.full(meta.shape, self.value, dtype=meta.dtype)


class _Client:
    """Carries the calls to a worker of this process as JSON, as vLLM's HTTP client does; or keeps the last update."""

    def __init__(self, worker: Any = None) -> None:
        self.worker = worker
        self.calls: list[str] = []
        self.update = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        if self.worker:
            self.worker.init_transfer_engine(self.worker.parse_init_info(json.loads(json.dumps(init_info))))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        self.update = json.dumps(update_info)
        if self.worker:
            self.worker.update_weights(json.loads(self.update))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


class _GpuWorker(_Client):
    """Has vLLM's rule for its workers: an update is open until it ends, or until what a worker is sent fails there."""

    is_open = False

    def start_weight_update(self) -> None:
        super().start_weight_update()
        if self.is_open:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.worker.start_weight_update()
        self.is_open = True

    def update_weights(self, update_info: Any) -> None:
        if not self.is_open:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            super().update_weights(update_info)
        except BaseException:
            self.is_open = False
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        super().finish_weight_update()
        self.worker.finish_weight_update()
        self.is_open = False


def _trainer(client: _Client, source: WeightSource, **settings: int) -> Any:
    plugin.register()
    info = PointTrainerInitInfo(rank=0, **settings)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _buckets(update: str) -> dict[str, Any]:
    buckets: dict[str, Any] = json.loads(update)["buckets"]
    return buckets


def _point(update: str) -> ipcsync.Point:
    """The point of an update's only bucket."""
    ((_, bucket),) = _buckets(update).items()
    return ipcsync.default_client().point(bytes.fromhex(bucket["point"]))


@pytest.fixture
def process(coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process's default client is of the test's coordinator."""
    monkeypatch.setenv("IPCSYNC_ENDPOINT", coordinator.endpoint)
    yield
    ipcsync.default_client().close()


def test_the_factories_know_both_sides_by_one_name() -> None:
    plugin.register()
    plugin.register()  # vLLM may load its plugins twice in a process
    assert WeightTransferEngineFactory._registry["ipcsync"]() is PointWeightTransferEngine


def test_updates_arrive_one_after_another(process: None) -> None:
    worker, source = _worker(), _Source()
    client = _Client(worker)
    trainer = _trainer(client, source)
    for value in (1.0, 2.0):
        source.value = value
        trainer.send_weights()
        assert worker.model.weights == {"a": [value] * 4, "b": [value] * 3}
    assert client.calls == ["init", *(["start", "update", "finish"] * 2)]


def test_weights_are_sent_in_buckets_of_a_size_and_a_larger_one_by_itself(process: None) -> None:
    class Many(_Source):
        @cached_property
        def metadata(self) -> list[ParamMeta]:
            shapes = [(64,), (64,), (4096,), (), (0, 3), (64,)]
            return [ParamMeta(f"w{i}", torch.float32, shape) for i, shape in enumerate(shapes)]

    worker, loaded = _worker(), []
    worker.model.load_weights = lambda weights: loaded.append([(name, tensor.clone()) for name, tensor in weights])
    client = _Client(worker)
    _trainer(client, Many(), bucket_bytes=600).send_weights()
    assert [[name for name, _ in bucket] for bucket in loaded] == [["w0", "w1"], ["w2"], ["w3", "w4", "w5"]]
    assert all(bool((tensor == 1).all()) for bucket in loaded for _, tensor in bucket)
    assert [tensor.shape for bucket in loaded for _, tensor in bucket] == [meta.shape for meta in Many().metadata]
    assert client.calls == ["init", "start", "update", "update", "update", "finish"]


def test_a_model_may_keep_what_it_loads(process: None) -> None:
    """As vLLM's layerwise reload does, over several buckets."""
    worker, source = _worker(), _Source()
    kept: list[tuple[str, torch.Tensor]] = []
    worker.model.load_weights = kept.extend
    trainer = _trainer(_Client(worker), source, bucket_bytes=1)
    for value in (1.0, 2.0):
        source.value = value
        trainer.send_weights()
    assert [(name, tensor.flatten()[0].item()) for name, tensor in kept] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_behind_one_that_did_not_end(process: None, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """vLLM refuses it while that is open, and would count what that has left half loaded; it is ended first."""
    calls = []
    for name in ("start_weight_update", "finish_weight_update"):
        monkeypatch.setattr(
            IPCWeightTransferEngine, name, lambda self, name=name: calls.append((name.split("_")[0], self.model))
        )
    worker, draft = _worker(), _Model()
    model, client = worker.model, _GpuWorker(worker)
    worker.set_weight_update_target(draft, None)
    client.start_weight_update()
    if fails:
        with pytest.raises(ValueError, match="Invalid update_info"):
            client.update_weights({})
    worker.reset_weight_update_target()
    _trainer(client, _Source()).send_weights()  # the one before is dead
    assert model.weights == {"a": [1.0] * 4, "b": [1.0] * 3}
    assert calls == [("start", draft), ("finish", draft), ("start", model), ("finish", model)]


def test_an_update_has_buckets_of_one_trainer(process: None) -> None:
    """Of two that live the later one takes over: the other's buckets would be mixed with its own."""
    worker = _worker()
    client = _Client(worker)
    _trainer(client, _Source()).send_weights()
    others = json.loads(client.update)
    for bucket in others["buckets"].values():
        bucket["pid"] += 1
    with pytest.raises(ValueError, match=f"sends into the update of process {os.getpid()}, which took over"):
        worker.update_weights(others)


def test_a_bucket_may_have_a_part_of_a_draft_models_weights(process: None) -> None:
    """vLLM's loaders of such models look whether all are there, unless they are told that it is a part."""
    worker, asked = _worker(), []
    worker.model.load_weights = lambda _: asked.append(is_mtp_completeness_check_enabled())
    _trainer(_Client(worker), _Source(), bucket_bytes=1).send_weights()
    assert asked == [False, False]
    assert is_mtp_completeness_check_enabled()


def test_weights_that_are_not_what_the_metadata_says_are_refused(process: None) -> None:
    class Short(_Source):
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield next(super().iter_full())

    with pytest.raises(ValueError, match=r"metadata names \('b', .* but iter_full\(\) gave None"):
        _trainer(_Client(), Short()).send_weights()


def test_weights_that_the_metadata_does_not_name_are_refused(process: None) -> None:
    class Long(_Source):
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().iter_full()
            yield "c", torch.zeros(1)

    client = _Client()
    with pytest.raises(ValueError, match=r"metadata names None, but iter_full\(\) gave \('c', "):
        _trainer(client, Long()).send_weights()
    assert client.calls == ["init", "start", "update"]


def test_a_worker_loads_nothing_before_the_trainers_record_is_complete(process: None) -> None:
    worker, client = _worker(), _Client()
    with StreamGate(ipcsync.default_stream()) as gate:
        _trainer(client, _Source()).send_weights()
        point = _point(client.update)
        assert not point.query()
        gate.open()
        point.synchronize(30)
    late = client.update
    _trainer(client, _Source()).send_weights()
    with pytest.raises(ipcsync.HandleError, match="was filled again"):
        worker.update_weights(json.loads(late))  # the trainer has gone on, and its bucket with it
    assert worker.model.weights == {}


class _Keeping(_Client):
    """Keeps a worker waiting: it says where the update is, and does not return."""

    def update_weights(self, update_info: Any) -> None:
        _told.append(json.dumps(update_info))
        threading.Event().wait()


_told: list[str] = []
_held: list[StreamGate] = []


def _begin_sending() -> str:
    """A trainer that has sent an update whose weights are not complete."""
    _held.append(StreamGate(ipcsync.default_stream()))
    trainer = _trainer(_Keeping(), _Source())
    threading.Thread(target=trainer.send_weights, daemon=True).start()
    update = until(lambda: _told and _told[0], "the update is sent")
    assert isinstance(update, str)
    return update


def _send_and_stay() -> str:
    """A trainer that has sent an update whose weights are complete."""
    _told.clear()
    trainer = _trainer(_Keeping(), _Source())
    threading.Thread(target=trainer.send_weights, daemon=True).start()
    update = until(lambda: _told and _told[0], "the update is sent")
    assert isinstance(update, str)
    return update


def _let_go() -> None:
    _held[0].open()


def _is_complete(update: str) -> bool:
    """What a worker that is attached already says of an update."""
    _worker()
    return _point(update).query()


def _receive(update: str) -> dict[str, list[float]]:
    worker = _worker()
    worker.update_weights(json.loads(update))
    weights: dict[str, list[float]] = worker.model.weights
    return weights


@pytest.fixture
def two(coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]) -> tuple[Peer, Peer]:
    """A trainer's process and a worker's."""
    trainer, worker = (new_peer(IPCSYNC_ENDPOINT=coordinator.endpoint, PYTHONWARNINGS="ignore") for _ in range(2))
    return trainer, worker


def test_a_record_that_is_held_back_holds_up_the_worker(two: tuple[Peer, Peer]) -> None:
    trainer, worker = two
    update = trainer.call(_begin_sending, timeout=120)
    assert not worker.call(_is_complete, update, timeout=120)
    worker.begin(_receive, update)
    assert not worker.connection.poll(1)
    trainer.call(_let_go)
    assert worker.result(120) == {"a": [1.0] * 4, "b": [1.0] * 3}


def test_the_death_of_the_trainer_ends_the_workers_update_and_no_later_one(
    two: tuple[Peer, Peer], coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]
) -> None:
    trainer, worker = two
    update = trainer.call(_begin_sending, timeout=120)
    assert not worker.call(_is_complete, update, timeout=120)
    worker.begin(_receive, update)
    assert not worker.connection.poll(1)
    os.kill(trainer.pid, signal.SIGKILL)
    with pytest.raises(PeerError, match="RecorderLost"):
        worker.result(60)
    another = new_peer(IPCSYNC_ENDPOINT=coordinator.endpoint, PYTHONWARNINGS="ignore")
    for _ in range(2):
        worker.begin(_receive, another.call(_send_and_stay, timeout=120))
        assert worker.result(60) == {"a": [1.0] * 4, "b": [1.0] * 3}, "the next trainer's updates arrive"


def test_weights_on_several_devices_are_refused(process: None) -> None:
    class Elsewhere(_Source):
        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, tensor) in enumerate(super().iter_full()):
                yield name, tensor.to("meta") if number else tensor

    with pytest.raises(ValueError, match="must be on one device: some are on cpu, others on meta"):
        _trainer(_Client(), Elsewhere()).send_weights()


def test_a_worker_on_another_device_is_told_so(process: None) -> None:
    client = _Client()
    _trainer(client, _Source()).send_weights()
    update = json.loads(client.update)
    ((place, bucket),) = update["buckets"].items()
    update["buckets"] = {"GPU-1": bucket}
    with pytest.raises(ValueError, match=f"no weights are on {place}; there are on GPU-1"):
        _worker().update_weights(update)


def test_a_message_that_does_not_fit_itself_is_refused() -> None:
    worker = _worker()
    good = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "buckets": {}}
    worker.parse_update_info(good)
    with pytest.raises(ValueError, match="same length"):
        worker.parse_update_info({**good, "shapes": []})
    with pytest.raises(ValueError, match="Invalid update_info"):
        worker.parse_update_info({**good, "buckets": {"GPU-1": {"point": ""}}})
    with pytest.raises(ValueError, match="Invalid update_info"):
        worker.parse_update_info({**good, "ipc_handles_pickled": "x"})
    with pytest.raises(ValueError, match="'nn' is not a dtype"):
        dtype_of("nn")


def test_a_trainer_that_died_after_its_weights_were_complete_is_a_recorder_lost(two: tuple[Peer, Peer]) -> None:
    trainer, worker = two
    update = trainer.call(_send_and_stay, timeout=120)
    assert until(lambda: worker.call(_is_complete, update, timeout=120), "the weights are complete")
    os.kill(trainer.pid, signal.SIGKILL)
    assert trainer.wait(30)
    with pytest.raises(PeerError, match=r"RecorderLost: the process \d+, which had the tensors, has ended"):
        worker.call(_receive, update, timeout=60)


# --- sleep mode -------------------------------------------------------------------------------------------------------


class _Parameter:
    is_cuda = True

    def numel(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return 0x7F0000000000


class _OnGpu(_Model):
    def parameters(self) -> list[_Parameter]:
        return [_Parameter()]


def test_an_update_of_a_sleeping_worker_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU: the driver's answer, that no memory is behind the weights, is a stand-in."""
    plugin.register()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    backend, model = SimpleNamespace(backend="ipcsync"), _OnGpu()
    worker = WeightTransferEngineFactory.create_engine(backend, config, torch.device("cuda", 0), model)
    monkeypatch.setattr("ipcsync.integrations.vllm.worker._is_mapped", lambda _: False)
    for call in (worker.start_weight_update, worker.finish_weight_update, lambda: worker.update_weights({})):
        with pytest.raises(WorkerAsleep, match="wake it up first"):
            call()
    assert model.weights == {}
    monkeypatch.setattr("ipcsync.integrations.vllm.worker._is_mapped", lambda _: True)
    with pytest.raises(ValueError, match="Invalid update_info"):  # awake: it is looked at
        worker.update_weights({})


# --- several ranks ----------------------------------------------------------------------------------------------------


class _Failing(_Client):
    def update_weights(self, update_info: Any) -> None:
        raise ConnectionError("no such server")


class _Broken(_Source):
    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise KeyError("no such block")


def _send_as(rank: int, folder: str, what: str) -> str:
    """One rank of two: how its `send_weights` ended."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    plugin.register()
    client = _Failing() if what == "the sender" and not rank else _Client()
    source = _Broken() if what == "the other" and rank else _Source()
    info = PointTrainerInitInfo(rank=rank)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    try:
        trainer.send_weights()
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    finally:
        torch.distributed.destroy_process_group()
    return "sent"


@pytest.mark.parametrize("what", ["nobody", "the sender", "the other"])
def test_a_rank_that_fails_leaves_no_other_waiting(two: tuple[Peer, Peer], tmp_path: Path, what: str) -> None:
    for rank, peer in enumerate(two):
        peer.begin(_send_as, rank, str(tmp_path), what)
    ended = [peer.result(120) for peer in two]
    assert (
        ended
        == {
            "nobody": ["sent", "sent"],
            "the sender": [
                "ConnectionError: no such server",
                "RankFailed: rank 0 failed, and this update with it: ConnectionError: no such server",
            ],
            "the other": [
                "RankFailed: rank 1 failed, and this update with it: KeyError: 'no such block'",
                "KeyError: 'no such block'",
            ],
        }[what]
    )
