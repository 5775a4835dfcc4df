"""Tensors for another process of this machine: copied into one piece of device memory, a bucket, and out of it there.

Torch's own sharing of CUDA memory synchronizes a stream where the last tensor over it is freed, with the GIL held: if
that stream stands still, the process does. Here no tensor lies over another process's memory. The receiver copies the
bucket into its own, and closes it once that copy is done. A driver may wait for a whole device before it closes memory,
so while a stream of this process stands still, buckets stay open.

CUDA does not define what happens if memory is freed while another process has it open, and no process knows who has. So
a bucket is never freed: what is closed here is filled again for later tensors. A message that is older than that must
not give their bytes. So each filling begins with a mark, which the message names, and the receiver reads it last.

It works the same on tensors of the CPU, and on the software driver.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import ipcsync
from ipcsync._deadline import FOREVER, deadline_of, left_of
from ipcsync._native import pinned
from ipcsync._native.context import stream_call
from ipcsync._native.stream import resolve, stream_handle
from ipcsync.errors import HandleError, IpcSyncError, RecorderLost, StreamCapturing
from ipcsync.integrations import failing_once
from ipcsync.testing import Memory
from ipcsync.typing import StreamLike

Layout = tuple[Sequence[int], torch.dtype]

_ALIGNMENT = 256
_END_S = 1.0  # of a process that dies, or of the device's work
_left: list[Memory] = []
"""What could not be closed yet."""
_words: dict[int, list[int]] = {}
"""Pinned words that marks are read into, of each device, which no copy may yet write."""
_own: dict[bytes, Memory] = {}
_spare: list[Bucket] = []
_taking = threading.Lock()


@dataclass(frozen=True)
class Sent:
    """The message about a bucket that was filled, in JSON types."""

    point: str
    """The point after which the tensors in it are complete, in hexadecimal."""
    handle: str
    """What opens it, in hexadecimal."""
    pid: int
    """The process whose it is."""
    mark: int
    """What the bucket begins with until it is filled again."""

    def received_point(self) -> ipcsync.Point:
        """The point, in the receiving process. Raises as `Client.point`."""
        return ipcsync.default_client().point(bytes.fromhex(self.point))


class Bucket:
    """`size` bytes on a device, for `bucket_for`."""

    def __init__(self, size: int, ordinal: int) -> None:
        self.size, self.ordinal = size, ordinal
        self.filled: ipcsync.Event | None = ipcsync.Event()  # None: nobody knows when it will be
        self._memory = Memory(size, ordinal)
        try:
            self._handle = self._memory.handle()
        except BaseException:
            _close(self._memory)
            raise
        _own[self._handle] = self._memory

    def fill(self, tensors: Sequence[torch.Tensor]) -> Sent:
        """Have the current stream copy the tensors into it, and record behind that; the host waits for nothing.

        Raises RecorderLost if they depend on a peer that died; the next call does not raise it again, once the
        stream is past the wait for that peer. StreamCapturing, before anything is captured.
        """
        device, mark = device_of(tensors), secrets.randbits(63)
        if device.type == "cuda" and device.index != self.ordinal:
            raise ValueError(f"the tensors are on {device}, and the bucket for them on cuda:{self.ordinal}")
        stream = _copying(device, ipcsync.default_stream, self.ordinal)
        first = torch.tensor(mark, dtype=torch.int64, device="cpu")  # on a GPU a kernel's first launch may stand still
        offsets, _ = _offsets([(tensor.shape, tensor.dtype) for tensor in tensors])
        self.filled = None
        try:
            for tensor, offset in zip([first, *tensors], [-_ALIGNMENT, *offsets], strict=True):
                flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
                _copy(self._memory.address + _ALIGNMENT + offset, flat.data_ptr(), flat.nbytes, stream)
        finally:
            self.filled = stream.record_event()
        with failing_once(stream):
            point = ipcsync.default_client().record(stream)
        return Sent(bytes(point).hex(), self._handle.hex(), os.getpid(), mark)

    def close(self) -> None:
        """Leave it to later tensors; the messages about it are valid until those are there. Only once."""
        _spare.append(self)


def bucket_for(size: int, device: torch.device) -> Bucket:
    """A bucket on the tensors' device (of CPU tensors: the current one) for `size` bytes, as `size_of` counts them.

    It is the smallest that was closed and is not more than twice too large, else a new one.
    """
    ordinal = device.index if device.type == "cuda" else ipcsync.current_device()
    size += _ALIGNMENT  # for the mark
    step = 1 << max(size.bit_length() - 3, 12)  # a quarter more, or 4 KiB, so that tensors of similar sizes fit too
    size = -(-size // step) * step
    with _taking:
        spare = [each for each in _spare if each.ordinal == ordinal and size <= each.size <= 2 * size]
        fit = [each for each in spare if each.filled and each.filled.query()]  # else its stream may yet write there
        if fit:
            bucket = min(fit, key=lambda each: each.size)
            _spare.remove(bucket)
            return bucket
    return Bucket(size, ordinal)


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
    timeout: float | None = None,
) -> list[torch.Tensor]:
    """The tensors of another process's bucket, as this process's own on `device`, or in `targets`; complete by then.

    `point` is that of `sent`, and complete. Raises WaitTimeout; HandleError if the bucket was filled again, or cannot
    be opened; but RecorderLost if that is because its process has ended, and with it the memory (under MPS, which does
    not tell, HandleError). RecorderLost of cause "behind" too, if the current stream stands still behind a lost wait.
    `targets` may then be written all the same.
    """
    deadline = deadline_of(timeout)
    offsets, size = _offsets(layouts)
    ordinal = point.device.index
    stream = _copying(device, ipcsync.Stream, ordinal)  # new: another may stand still
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    tensors = [
        flat[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        for offset, (shape, dtype) in zip(offsets, layouts, strict=True)
    ]
    words = _words.setdefault(ordinal, [])
    try:
        word = words.pop()
    except IndexError:
        word, _ = pinned.take(ordinal, "mark", 8)
    with _opened(sent, _ALIGNMENT + size, point, deadline) as address:
        _copy(flat.data_ptr(), address + _ALIGNMENT, size, stream)
        _copy(word, address, 8, stream)
        # No record: that would fail by what else was lost on the stream, on which these tensors do not depend.
        stream.synchronize(None if timeout is None else left_of(deadline))
        mark = ctypes.c_int64.from_address(word).value
        words.append(word)
    if mark != sent.mark:
        raise HandleError(f"the bucket of process {sent.pid} was filled again: its tensors are gone")
    if targets is None:
        return tensors
    for target, tensor in zip(targets, tensors, strict=True):
        target.copy_(tensor)  # only now: for tensors of the CPU the host does it at once
    stream.synchronize(None if timeout is None else left_of(deadline))
    return list(targets)


@contextmanager
def _opened(sent: Sent, size: int, point: ipcsync.Point, deadline: int = FOREVER) -> Iterator[int]:
    """The address of a bucket, which is closed behind the block."""
    handle = bytes.fromhex(sent.handle)
    own = _own.get(handle)
    if own is not None:  # a process does not open its own handles
        yield own.address
        return
    try:
        memory = Memory(size, point.device, handle=handle)
    except HandleError:
        if ipcsync.default_client().wait_over(point, min(_END_S, left_of(deadline))):
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
        _close(memory, deadline)


def _close(memory: Memory, deadline: int = FOREVER) -> None:
    """Close memory, and what was left, once its device is past all work so far; else leave it for a later call.

    A copy may be under way, and a driver may wait for that, or for any other stream, with no limit.
    """
    deadline = min(deadline, deadline_of(_END_S))
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


def _copying(device: torch.device, other: Callable[[int], ipcsync.Stream], ordinal: int) -> ipcsync.Stream:
    """Torch's current stream, with which its allocator reckons; `other(ordinal)` for tensors of the CPU.

    StreamCapturing if it captures: copies in a graph are not made now.
    """
    stream = resolve(torch.cuda.current_stream(device)) if device.type == "cuda" else other(ordinal)
    if stream.is_capturing():
        raise StreamCapturing("cannot copy tensors on a stream that is being captured into a CUDA graph")
    return stream


def _copy(target: int, source: int, size: int, stream: StreamLike) -> None:
    if not size:
        return
    handle, ordinal = stream_handle(stream)
    stream_call(handle, ordinal, "cuMemcpyAsync", target, source, size, handle)
