"""What a trainer tells its workers of one update: names, where each tensor is, and the points to wait for.

It is made of what JSON has, so vLLM's HTTP client needs no pickle, and no leave to unpickle.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from ipcsync.integrations.host_memory import HostMemory

CPU = "cpu"
_BYTES = ("handle", "ref_counter_handle", "event_handle")
_FIELDS = (  # what torch rebuilds a CUDA tensor from, in its order, between the classes of tensor and storage
    "size",
    "stride",
    "offset",
    "dtype",
    "device",
    "handle",
    "storage_size",
    "storage_offset",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


@dataclass
class PointInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on: points and handles say all."""


@dataclass
class PointUpdateInfo(WeightTransferUpdateInfo):
    """One update. ValueError if its lists are of different lengths."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    points: dict[str, str]
    """By the UUID of a GPU, or "cpu": the point, in hexadecimal, behind which its tensors are complete."""
    tensors: dict[str, list[dict[str, Any]]]
    """By the same: where each tensor is; on the CPU one memory file for all."""

    def __post_init__(self) -> None:
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes)}
        lengths |= {len(found) for place, found in self.tensors.items() if place != CPU}
        if len(lengths) != 1:
            raise ValueError("names, dtype_names, shapes and tensors are of one length")
        if self.points.keys() != self.tensors.keys():
            raise ValueError("there is one point for each device that has tensors")


def encode(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What `reduce_tensor` gives for a CUDA tensor, in JSON's types."""
    _, size, stride, offset, _, *rest = arguments
    told = dict(zip(_FIELDS, (list(size), list(stride), offset, *rest), strict=True))
    told["dtype"] = name_of(told["dtype"])
    for name in _BYTES:
        told[name] = None if told[name] is None else base64.b64encode(told[name]).decode()
    return told


def decode(told: dict[str, Any], device: int) -> tuple[Any, ...]:
    """What `rebuild_cuda_tensor` takes, on a device by this process's number."""
    found = {**told, "device": device, "dtype": dtype_of(told["dtype"])}
    for name in _BYTES:
        found[name] = None if found[name] is None else base64.b64decode(found[name], validate=True)
    size, stride, offset, *rest = (found[name] for name in _FIELDS)
    return (torch.Tensor, torch.Size(size), tuple(stride), offset, torch.storage.TypedStorage, *rest)


def encode_memory(memory: HostMemory) -> list[dict[str, Any]]:
    """Where CPU tensors are."""
    return [asdict(memory)]


def decode_memory(told: list[dict[str, Any]]) -> HostMemory:
    """The same, from a message."""
    (memory,) = told
    return HostMemory(**memory)


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name, as vLLM writes it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name. ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
