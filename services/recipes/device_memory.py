"""Memory for the recipes: allocated, shared, filled and copied, in the order of a stream.

ipcsync shares events, never memory: a program has its own way of that, such as torch tensors over
torch.multiprocessing. So that the recipes run with no GPU and no torch too, this takes memory from whichever driver
ipcsync works with. Where torch sees the GPU, the fills and copies are torch's, on a tensor over the same memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings.driver import CUipcMemHandle, CUstream

import ipcsync

# The driver itself is not among the public names; a program of its own calls torch, or cuda.bindings.driver.
from ipcsync import _drivers
from ipcsync._drivers import unwrap

_LAZY_PEER_ACCESS = 1  # the one flag that cuIpcOpenMemHandle has, and it must be given


class Memory:
    """`size` bytes at `address`, on the device or pinned on the host. It stays until its process ends."""

    def __init__(self, address: int, size: int, *, on_device: bool) -> None:
        self.address = address
        self.size = size
        self.is_on_device = on_device
        self._tensor = _as_tensor(self) if on_device else None

    @classmethod
    def on_device(cls, size: int) -> Memory:
        """New memory of the current device."""
        return cls(int(unwrap(_driver().cuMemAlloc(size), "cuMemAlloc")), size, on_device=True)

    @classmethod
    def pinned(cls, size: int) -> Memory:
        """New memory of the host that streams copy from and to without waiting."""
        return cls(int(unwrap(_driver().cuMemAllocHost(size), "cuMemAllocHost")), size, on_device=False)

    @classmethod
    def opened(cls, handle: bytes, size: int) -> Memory:
        """Device memory of another process, which must outlive its use here."""
        opened = _driver().cuIpcOpenMemHandle(_drivers.handle_from_bytes(CUipcMemHandle, handle), _LAZY_PEER_ACCESS)
        return cls(int(unwrap(opened, "cuIpcOpenMemHandle")), size, on_device=True)

    def handle(self) -> bytes:
        """64 bytes for `opened` in another process; for memory that was allocated here."""
        return _drivers.handle_bytes(unwrap(_driver().cuIpcGetMemHandle(self.address), "cuIpcGetMemHandle"))

    def fill(self, value: int, stream: ipcsync.Stream) -> None:
        """Set every byte, after all that the stream has to do; stands for a kernel that computes something."""
        if self._tensor is not None:
            with _torch_stream(stream):
                self._tensor.fill_(value)
            return
        unwrap(_driver().cuMemsetD8Async(self.address, value, self.size, _handle(stream)), "cuMemsetD8Async")

    def copy_from(self, other: Memory, stream: ipcsync.Stream) -> None:
        """Copy all of `other` to here, after all that the stream has to do."""
        if self._tensor is not None and other._tensor is not None:
            with _torch_stream(stream):
                self._tensor.copy_(other._tensor, non_blocking=True)
            return
        copied = _driver().cuMemcpyAsync(self.address, other.address, self.size, _handle(stream))
        unwrap(copied, "cuMemcpyAsync")

    def contents(self) -> bytes:
        """The bytes as they are now: synchronize the stream that writes them first."""
        if not self.is_on_device:
            return ctypes.string_at(self.address, self.size)
        data = bytearray(self.size)
        unwrap(_driver().cuMemcpyDtoH(data, self.address, self.size), "cuMemcpyDtoH")
        return bytes(data)

    def holds(self, value: int) -> bool:
        """Whether every byte is `value`."""
        return self.contents() == bytes([value]) * self.size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What lets torch, cupy and numba see this memory without a copy."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _driver() -> Any:
    ipcsync.set_device(ipcsync.current_device())  # a thread's first call needs a context
    return _drivers.load()


def _handle(stream: ipcsync.Stream) -> CUstream:
    return CUstream(stream.cuda_stream)


def _as_tensor(memory: Memory) -> Any:
    """A torch tensor over the memory, None where torch is not installed or sees no GPU."""
    if ipcsync.driver_name() != "cuda":
        return None
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    # A kernel's first launch loads it, which may wait for all streams of the device: not while one of them is held.
    torch.empty(memory.size, dtype=torch.uint8, device="cuda").fill_(0)
    torch.cuda.synchronize()
    return torch.as_tensor(memory, device="cuda")


def _torch_stream(stream: ipcsync.Stream) -> Any:
    """The block in which torch's work goes to this stream."""
    import torch

    return torch.cuda.stream(torch.cuda.ExternalStream(stream.cuda_stream))
