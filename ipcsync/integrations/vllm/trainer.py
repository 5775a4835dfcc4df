"""The trainer's side: it records behind its weights, and sends the workers their location and the points."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.multiprocessing.reductions import reduce_tensor
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

import ipcsync
from ipcsync.integrations.host_memory import copied
from ipcsync.integrations.vllm import BACKEND, message
from ipcsync.integrations.vllm.errors import RankFailed

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class PointTrainerInitInfo(TrainerInitInfo):
    """`rank` is this trainer's; rank 0 talks to the workers."""

    backend: ClassVar[str] = BACKEND


class PointTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """Sends full tensors, each rank for its own GPU; every rank holds every parameter, as with vLLM's `ipc`."""

    init_info_cls = PointTrainerInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: PointTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Connect, and have the workers do so. Raises ConnectError, TypeError for a source without full tensors."""
        if source is None or not source.implements_iter_full():
            raise TypeError("ipcsync sends full tensors: the source must implement iter_full()")
        if len(source.owned_names(init_info.rank)) != len(source.metadata):
            raise ValueError(f"rank {init_info.rank} does not own every parameter")
        ipcsync.default_client()
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        if engine.is_sender:
            engine.client.init_weight_transfer_engine({})
        return engine

    def send_weights(self) -> None:
        """One update, from start to finish. The source's tensors may be written again when it returns.

        If a rank fails outside the source's own collectives, it raises its error, and all others RankFailed.
        """
        with ExitStack() as undo:
            named: list[tuple[str, torch.Tensor]] = []
            with _together() as outcome:
                named = [(name, tensor.detach().contiguous()) for name, tensor in self.source.iter_full()]
                tensors = [tensor for _, tensor in named]
                place, told, descriptor = _placed(tensors)
                if descriptor is not None:
                    undo.callback(os.close, descriptor)
                outcome.value = {place: _recorded(tensors)}, {place: told}
            points: dict[str, str] = {}
            places: dict[str, list[dict[str, Any]]] = {}
            for theirs, there in outcome.values:
                points |= theirs
                places |= there
            with _together():
                if self.is_sender:
                    self._send(named, points, places)  # returns when every worker has read them

    def _send(
        self,
        named: list[tuple[str, torch.Tensor]],
        points: dict[str, str],
        places: dict[str, list[dict[str, Any]]],
    ) -> None:
        update = message.PointUpdateInfo(
            names=[name for name, _ in named],
            dtype_names=[message.name_of(tensor.dtype) for _, tensor in named],
            shapes=[list(tensor.shape) for _, tensor in named],
            points=points,
            tensors=places,
        )
        self.client.start_weight_update()
        self.client.update_weights(asdict(update))
        self.client.finish_weight_update()


def _placed(tensors: list[torch.Tensor]) -> tuple[str, list[dict[str, Any]], int | None]:
    """The device, where each tensor is on it, and the descriptor of a memory file if it is the CPU.

    ValueError if they are on several: the point would be behind those of the first one only.
    """
    device = tensors[0].device if tensors else torch.device(message.CPU)
    others = {str(tensor.device) for tensor in tensors} - {str(device)}
    if others:
        raise ValueError(
            f"the tensors of one rank must be on one device: some are on {device}, others on {min(others)}"
        )
    if device.type != "cuda":
        descriptor, memory = copied(tensors)
        return message.CPU, [asdict(memory)], descriptor
    uuid = str(torch.cuda.get_device_properties(device.index).uuid)
    return uuid, [message.encode(reduce_tensor(tensor)[1]) for tensor in tensors], None


def _recorded(tensors: list[torch.Tensor]) -> str:
    """A point behind the tensors, in hexadecimal."""
    on_gpu = bool(tensors) and tensors[0].device.type == "cuda"
    stream = torch.cuda.current_stream(tensors[0].device) if on_gpu else ipcsync.default_stream()
    return bytes(ipcsync.default_client().record(stream)).hex()


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


class _Outcome:
    """The result of one step: this rank's `value`, and then the `values` of all."""

    def __init__(self) -> None:
        self.value: Any = None
        self.values: list[Any] = []


@contextmanager
def _together() -> Iterator[_Outcome]:
    """A step that all ranks make: none goes on before all have, and all raise if one does."""
    outcome = _Outcome()
    error: Exception | None = None
    try:
        yield outcome
    except Exception as failed:  # noqa: BLE001 - raised below, once the others know
        error = failed
    told: list[Any] = [(None if error is None else f"{type(error).__name__}: {error}", outcome.value)]
    if _ranks() > 1:
        mine, told = told[0], [None] * _ranks()
        torch.distributed.all_gather_object(told, mine)
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(told):
        if failure is not None:
            raise RankFailed(f"rank {rank} failed, and this update with it: {failure}", rank=rank)
    outcome.values = [value for _, value in told]
