"""The trainer's side: it records behind its weights, and sends the workers their location and the points.

Its message about a bucket has names, layouts, and for each device the bucket and its point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import ipcsync
from ipcsync.integrations.buckets import Layout, Sent, bucket_for, device_of, size_of
from ipcsync.integrations.vllm import BACKEND
from ipcsync.integrations.vllm.errors import RankFailed


@dataclass
class PointInitInfo(WeightTransferInitInfo):
    """No parameters: points and handles are enough."""


@dataclass
class PointUpdateInfo(WeightTransferUpdateInfo):
    """The message about one bucket of an update, in JSON types: vLLM's HTTP client need not pickle it.

    ValueError if its lists are of different lengths.
    """

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


@dataclass
class PointTrainerInitInfo(TrainerInitInfo):
    """`rank` is this trainer's; rank 0 talks to the workers.

    Weights are sent in buckets of at most `bucket_bytes`, or of one weight that is larger: each rank has memory for one
    bucket, which it keeps, and each worker for one more.
    """

    bucket_bytes: int = 1 << 28
    backend: ClassVar[str] = BACKEND


class PointTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    """Sends full tensors, each rank for its own GPU; every rank holds every parameter, as with vLLM's `ipc`."""

    init_info_cls = PointTrainerInitInfo
    bucket_bytes: int

    @classmethod
    def trainer_init(
        cls, init_info: PointTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> PointTrainerWeightTransferEngine:
        """Connect, and have the workers do so. Raises ConnectError, TypeError for a source without full tensors."""
        if source is None or not source.implements_iter_full():
            raise TypeError("ipcsync sends full tensors: the source must implement iter_full()")
        if len(source.owned_names(init_info.rank)) != len(source.metadata):
            raise ValueError(f"rank {init_info.rank} does not own every parameter")
        ipcsync.default_client()
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine.bucket_bytes = init_info.bucket_bytes
        if engine.is_sender:
            engine.client.init_weight_transfer_engine({})
        return engine

    def send_weights(self) -> None:
        """One update, from start to finish. The source's tensors may be written again when it returns.

        If a rank fails outside the source's own collectives, it raises its error, and all others RankFailed.
        """
        weights: Iterator[tuple[str, torch.Tensor]] | None = None
        bucket, parts = None, self._parts()
        try:
            for number, part in enumerate(parts):
                with _together() as told:
                    weights = weights or iter(self.source.iter_full())
                    named = list(islice(weights, len(part)))
                    _refuse_others(named, part)
                    tensors = [tensor for _, tensor in named]
                    if bucket is None:
                        bucket = bucket_for(max(map(_size, parts)), device_of(tensors))
                    place = ipcsync.get_device_properties(bucket.ordinal).uuid
                    told.append((place, bucket.fill(tensors)))
                buckets = dict(told)
                if not number:
                    with _together():
                        if self.is_sender:
                            self._start()
                with _together():
                    if self.is_sender:
                        self.client.update_weights(asdict(_update(part, buckets)))  # returns when all have read it
            with _together():
                _refuse_others(list(islice(weights or (), 1)), [])
                if self.is_sender and parts:
                    self.client.finish_weight_update()
        finally:
            if bucket is not None:
                bucket.close()  # a worker that may still read it, after an error, finds another mark there

    def _start(self) -> None:
        try:
            self.client.start_weight_update()
        except Exception:  # noqa: BLE001 - raised again, unless it was only that an earlier update is open somewhere
            with suppress(Exception):
                self.client.update_weights({})  # which is no update, so vLLM ends the open one in each worker
            self.client.start_weight_update()

    def _parts(self) -> list[list[ParamMeta]]:
        """The weights of each bucket, the same on every rank."""
        parts: list[list[ParamMeta]] = []
        for meta in self.source.metadata:
            if not parts or _size([*parts[-1], meta]) > self.bucket_bytes:
                parts.append([])
            parts[-1].append(meta)
        return parts


def _size(part: Sequence[ParamMeta]) -> int:
    return size_of([(meta.shape, meta.dtype) for meta in part])


def _refuse_others(named: list[tuple[str, torch.Tensor]], part: list[ParamMeta]) -> None:
    """Raise ValueError unless these are the weights that the source's metadata told of: the workers are told by it."""
    found = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    for is_, was in zip_longest(found, [(meta.name, meta.dtype, tuple(meta.shape)) for meta in part]):
        if is_ != was:
            raise ValueError(f"the source's metadata names {was}, but iter_full() gave {is_}")


def _update(part: list[ParamMeta], buckets: dict[str, Sent]) -> PointUpdateInfo:
    return PointUpdateInfo(
        names=[meta.name for meta in part],
        dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in part],
        shapes=[list(meta.shape) for meta in part],
        buckets=buckets,
    )


@contextmanager
def _together() -> Iterator[list[Any]]:
    """A step that all ranks make: none goes on before all have, and all raise if one does.

    Each rank adds to the list what it tells the others; after the block it has what all told.
    """
    values: list[Any] = []
    error: Exception | None = None
    try:
        yield values
    except Exception as failed:  # noqa: BLE001 - raised below, once the others know
        error = failed
    mine = (None if error is None else f"{type(error).__name__}: {error}", values[:])
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    told: list[Any] = [mine] * ranks
    if ranks > 1:
        torch.distributed.all_gather_object(told, mine)
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(told):
        if failure is not None:
            raise RankFailed(f"rank {rank} failed, and this update with it: {failure}", rank=rank)
    values[:] = [value for _, added in told for value in added]
