"""The trainer's message about one bucket of weights: names, layouts, and for each device the bucket and its point.

It consists of JSON types, so vLLM's HTTP client needs no pickle, and no permission to unpickle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from ipcsync.integrations.buckets import Layout, Sent


@dataclass
class PointInitInfo(WeightTransferInitInfo):
    """No parameters: points and handles are enough."""


@dataclass
class PointUpdateInfo(WeightTransferUpdateInfo):
    """One bucket of an update. ValueError if its lists are of different lengths."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    buckets: dict[str, Sent]
    """By the UUID of the device that it is on; all hold the same weights, in this order."""

    def __post_init__(self) -> None:
        if len({len(self.names), len(self.dtype_names), len(self.shapes)}) != 1:
            raise ValueError("names, dtype_names and shapes must have the same length")
        self.buckets = {place: told if isinstance(told, Sent) else Sent(**told) for place, told in self.buckets.items()}

    @property
    def layouts(self) -> list[Layout]:
        """The shape and dtype of each weight. ValueError for an unknown dtype."""
        return [(shape, dtype_of(name)) for shape, name in zip(self.shapes, self.dtype_names, strict=True)]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name. ValueError for an unknown one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
