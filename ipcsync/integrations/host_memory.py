"""CPU tensors for another process of this machine: copies in a memory file, which the kernel frees at any death."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import ipcsync
from ipcsync._linux.memory_file import memory_file
from ipcsync.errors import RecorderLost

_ALIGNMENT = 64
Layout = tuple[tuple[int, ...], torch.dtype]


@dataclass
class HostMemory:
    """The location of copies of CPU tensors: a memory file that its process holds open."""

    pid: int
    descriptor: int
    inode: int
    offsets: list[int]
    size: int


def copied(tensors: Sequence[torch.Tensor]) -> tuple[int, HostMemory]:
    """Copies of CPU tensors in a memory file: its descriptor, and its location for another process."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    size = max(size, 1)
    descriptor = memory_file("ipcsync-tensors")
    try:
        os.ftruncate(descriptor, size)
        memory = HostMemory(os.getpid(), descriptor, os.fstat(descriptor).st_ino, offsets, size)
        with_layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        for copy, tensor in zip(_views(mmap.mmap(descriptor, size), offsets, with_layout), tensors, strict=True):
            copy.copy_(tensor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def opened(memory: HostMemory, layouts: Sequence[Layout], point: ipcsync.Point) -> list[torch.Tensor]:
    """Another process's CPU tensors, mapped privately: writes to them stay in this process.

    RecorderLost if that process has ended, and its memory with it; FileNotFoundError if it has freed them.
    """
    try:
        descriptor = os.open(f"/proc/{memory.pid}/fd/{memory.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        point.query()  # raises RecorderLost if the recorder died before they were complete
        if not os.path.exists(f"/proc/{memory.pid}"):
            raise RecorderLost(
                f"the process {memory.pid}, which had the tensors, has ended, and their memory with it: have them sent "
                "again",
                event=point.event_name,
                generation=point.generation,
                pid=memory.pid,
                cause="died",
            ) from None
        raise
    try:
        if os.fstat(descriptor).st_ino != memory.inode:
            point.query()
            raise FileNotFoundError(f"the tensors' memory in process {memory.pid} is gone: their object was freed")
        pages = mmap.mmap(descriptor, memory.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return _views(pages, memory.offsets, layouts)


def _views(pages: mmap.mmap, offsets: list[int], layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Tensors over the mapped pages, which they keep mapped."""
    return [
        torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
        if math.prod(shape)
        else torch.empty(shape, dtype=dtype)
        for offset, (shape, dtype) in zip(offsets, layouts, strict=True)
    ]
