"""The trainer's message about one update: names, the location of each tensor, and the points to wait for.

It consists of JSON types, so vLLM's HTTP client needs no pickle, and no permission to unpickle.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

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
    """No parameters: points and handles are enough."""


@dataclass
class PointUpdateInfo(WeightTransferUpdateInfo):
    """One update. ValueError if its lists are of different lengths."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    points: dict[str, str]
    """By device (a GPU's UUID, or "cpu"): the point, in hexadecimal, after which its tensors are complete."""
    tensors: dict[str, list[dict[str, Any]]]
    """By device: the location of each tensor; on the CPU one memory file for all."""

    def __post_init__(self) -> None:
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes)}
        lengths |= {len(found) for place, found in self.tensors.items() if place != CPU}
        if len(lengths) != 1:
            raise ValueError("names, dtype_names, shapes and tensors must have the same length")
        if self.points.keys() != self.tensors.keys():
            raise ValueError("there must be one point for each device that has tensors")


def encode(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The result of `reduce_tensor` for a CUDA tensor, in JSON types."""
    _, size, stride, offset, _, *rest = arguments
    told = dict(zip(_FIELDS, (list(size), list(stride), offset, *rest), strict=True))
    told["dtype"] = name_of(told["dtype"])
    for name in _BYTES:
        told[name] = None if told[name] is None else base64.b64encode(told[name]).decode()
    return told


def decode(told: dict[str, Any], device: int) -> tuple[Any, ...]:
    """The arguments of `rebuild_cuda_tensor`, for a device of this process."""
    found = {**told, "device": device, "dtype": dtype_of(told["dtype"])}
    for name in _BYTES:
        found[name] = None if found[name] is None else base64.b64decode(found[name], validate=True)
    size, stride, offset, *rest = (found[name] for name in _FIELDS)
    return (torch.Tensor, torch.Size(size), tuple(stride), offset, torch.storage.TypedStorage, *rest)


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name, as vLLM writes it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name. ValueError for an unknown one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
