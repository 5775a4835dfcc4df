"""Tensors for another process of this machine: copied into one piece of device memory, a bucket, and out of it there.

Torch's own sharing of CUDA memory synchronizes a stream where the last tensor over it is freed, with the GIL held: if
that stream stands still, the process does. Here no tensor lies over another process's memory. The receiver copies the
bucket into its own, and closes it behind the point of that copy. A driver may wait for a whole device before it frees
or closes memory, so while a stream of this process stands still, buckets stay.

It works the same on tensors of the CPU, and on the software driver.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import ipcsync
from ipcsync._deadline import deadline_of, left_of
from ipcsync._native.context import stream_call
from ipcsync._native.stream import stream_handle
from ipcsync.errors import HandleError, IpcSyncError, RecorderLost
from ipcsync.integrations import failing_once
from ipcsync.testing import Memory
from ipcsync.typing import StreamLike

Layout = tuple[Sequence[int], torch.dtype]

_ALIGNMENT = 256
_END_S = 1.0  # of a process that dies, or of the device's work
_left: list[Memory] = []
"""What could not be closed yet."""
_own: weakref.WeakValueDictionary[bytes, Memory] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Sent:
    """The message about a bucket that was filled, in JSON types."""

    point: str
    """The point after which the tensors in it are complete, in hexadecimal."""
    handle: str
    """What opens it, in hexadecimal."""
    pid: int
    """The process whose it is."""

    def received_point(self) -> ipcsync.Point:
        """The point, in the receiving process. Raises as `Client.point`."""
        return ipcsync.default_client().point(bytes.fromhex(self.point))


class Bucket:
    """Memory on the tensors' device (of CPU tensors: the current one) for `size` bytes, as `size_of` counts them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = Memory(max(size, 1), device.index if device.type == "cuda" else None)
        self._handle = self._memory.handle()
        _own[self._handle] = self._memory

    @property
    def place(self) -> str:
        """Its device's UUID."""
        return ipcsync.get_device_properties(self._memory.device).uuid

    def fill(self, tensors: Sequence[torch.Tensor]) -> Sent:
        """Have the current stream copy the tensors into it, and record behind that; the host waits for nothing.

        Raises RecorderLost if they depend on a peer that died; the next call does not raise it again, once the
        stream is past the wait for that peer.
        """
        device = device_of(tensors)
        on_gpu = device.type == "cuda"
        stream = torch.cuda.current_stream(device) if on_gpu else ipcsync.default_stream(self._memory.device)
        for tensor, offset in zip(tensors, _offsets([(t.shape, t.dtype) for t in tensors])[0], strict=True):
            flat = tensor.detach().contiguous()
            _copy(self._memory.address + offset, flat.data_ptr(), flat.numel() * flat.element_size(), stream)
        with failing_once(stream):
            point = ipcsync.default_client().record(stream)
        return Sent(bytes(point).hex(), self._handle.hex(), os.getpid())

    def close(self) -> None:
        """Free it, now or later. No process may be reading it; one that is not closed stays as long as this process."""
        _own.pop(self._handle, None)
        _close(self._memory)


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The one device of the tensors. ValueError for several: one point would be behind those of the first only."""
    device = tensors[0].device
    others = {str(tensor.device) for tensor in tensors} - {str(device)}
    if others:
        raise ValueError(f"the tensors must be on one device: some are on {device}, others on {min(others)}")
    return device


def size_of(layouts: Sequence[Layout]) -> int:
    """The bytes that tensors of these shapes and dtypes take in a bucket."""
    return _offsets(layouts)[1]


def received(
    sent: Sent,
    layouts: Sequence[Layout],
    point: ipcsync.Point,
    device: torch.device,
    targets: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """The tensors of another process's bucket, as this process's own on `device`, or in `targets`; complete by then.

    `point` is that of `sent`, and complete. RecorderLost if its process has ended and the memory with it,
    HandleError if the bucket was closed.
    """
    offsets, size = _offsets(layouts)
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    tensors = [
        flat[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        for offset, (shape, dtype) in zip(offsets, layouts, strict=True)
    ]
    if not size:
        return tensors if targets is None else list(targets)
    # Torch's allocator reckons with its current stream. For tensors of the CPU any does, but one that stands still.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else ipcsync.Stream(point.device)
    with _opened(sent, size, point) as address:
        _copy(flat.data_ptr(), address, size, stream)
        if targets is not None:
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            tensors = list(targets)
        with failing_once(stream):
            copied = ipcsync.default_client().record(stream)
        copied.synchronize()
    return tensors


@contextmanager
def _opened(sent: Sent, size: int, point: ipcsync.Point) -> Iterator[int]:
    """The address of a bucket, which is closed behind the block."""
    handle = bytes.fromhex(sent.handle)
    own = _own.get(handle)
    if own is not None:  # a process does not open its own handles
        yield own.address
        return
    try:
        memory = Memory(size, point.device, handle=handle)
    except HandleError:
        if ipcsync.default_client().wait_over(point, _END_S):
            raise RecorderLost(
                f"the process {sent.pid}, which had the tensors, has ended, and their memory with it: have them "
                "sent again",
                event=point.event_name,
                generation=point.generation,
                pid=sent.pid,
                cause="died",
                over=True,
            ) from None
        raise
    try:
        yield memory.address
    finally:
        _close(memory)


def _close(memory: Memory) -> None:
    """Close memory, and what was left, once its device is past all work so far; else leave it for a later call.

    A copy may be under way, and a driver may wait for that, or for any other stream, with no limit.
    """
    deadline = deadline_of(_END_S)
    _left.append(memory)
    for each in reversed(_left.copy()):  # the new one first: another device may stand still
        try:
            ipcsync.synchronize(each.device, timeout=left_of(deadline))
            _left.remove(each)
        except (IpcSyncError, ValueError):  # the next one may be done; another thread took it
            continue
        each.close()


def _offsets(layouts: Sequence[Layout]) -> tuple[list[int], int]:
    offsets, size = [], 0
    for shape, dtype in layouts:
        offsets.append(size)
        size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def _copy(target: int, source: int, size: int, stream: StreamLike) -> None:
    if not size:
        return
    handle, ordinal = stream_handle(stream)
    stream_call(handle, ordinal, "cuMemcpyAsync", target, source, size, handle)
