"""Tools for tests and examples of code with streams and events, on either driver: StreamGate and Memory."""

from __future__ import annotations

import atexit
import ctypes
import warnings
import weakref
from typing import Any, NoReturn

from cuda.bindings.driver import CUipcMemHandle

from ipcsync import _drivers
from ipcsync._closing import Closing
from ipcsync._drivers import STREAM_NON_BLOCKING, STREAM_WAIT_VALUE_GEQ, SUCCESS
from ipcsync._linux.futex import Futex
from ipcsync._native import context, fork, pinned
from ipcsync._native import device as devices
from ipcsync._native.context import OnDevice, call, relaxed_call, stream_call
from ipcsync._native.device import Device
from ipcsync._native.event import handle_fault
from ipcsync._native.stream import resolve, stream_handle
from ipcsync.errors import HandleError
from ipcsync.typing import DeviceLike, StreamLike

__all__ = ["Memory", "StreamGate"]

_LAZY_PEER_ACCESS = 1  # cuIpcOpenMemHandle requires this flag, its only one


class StreamGate:
    """Holds a stream's later work from its construction to `open()`, on either driver.

    It queues a wait for a word of pinned host memory, to which `open` stores: it uses no kernel, and no Python in a
    driver's callback. Work queued before the gate goes on. Other streams are not held, unless the GPU maps them to the
    same hardware queue. Gates on one stream may be opened in any order: it goes on to the first that is still closed.

    A context manager: leaving its block opens it, and waits for nothing. A gate that is dropped without being opened
    opens too, with a ResourceWarning. Each takes 4 bytes of pinned memory until the process ends.

        with StreamGate(stream) as gate:
            point = event.record(stream)
            assert not point.query()
            gate.open()
            point.synchronize(5)

    Raises StreamCapturing for a stream that is being captured, TypeError for an argument that is not a stream,
    DriverError if the driver has no stream memory operations.
    """

    def __init__(self, stream: StreamLike | None = None) -> None:
        fork.arm()
        self._stream = resolve(None) if stream is None else stream  # kept alive as long as the gate
        handle, ordinal = stream_handle(self._stream)
        with OnDevice(ordinal) as inside, inside:
            context.refuse_capturing(handle, "put a gate")
        self._address, pointer = pinned.take(ordinal, "gate", 4)
        # Before the wait is queued, so that an exception afterwards cannot leave the stream held for ever.
        self._finalizer = weakref.finalize(self, _drop, self._address, repr(self._stream))
        self._finalizer.atexit = False
        _held.add(self._address)
        atexit.unregister(_release_all)
        atexit.register(_release_all)  # anew: it comes before the end of sessions that were begun until now
        try:
            arguments = handle, pointer, 1, STREAM_WAIT_VALUE_GEQ
            relaxed_call(stream_call, handle, ordinal, "cuStreamWaitValue32", *arguments)
        except BaseException:
            self.open()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the gate no longer holds the stream."""
        fork.check()
        return self._address not in _held

    def open(self) -> None:
        """Let the stream go on; a second call does nothing."""
        fork.check()
        _release(self._address)
        self._finalizer.detach()

    def __enter__(self) -> StreamGate:
        if self.is_open:
            raise ValueError("this gate was opened and cannot hold again: make another one")
        return self

    def __exit__(self, *error: object) -> None:
        if not fork.is_in_bad_fork():
            self.open()

    def __repr__(self) -> str:
        return f"<ipcsync.testing.StreamGate {'closed' if self._address in _held else 'open'} {self._stream!r}>"


# The words of gates that are closed. None is used again: only the driver knows when its stream has passed it.
_held: set[int] = set()


def _release(address: int) -> bool:
    """Let the stream pass, without a driver call; returns whether it was held."""
    was_held = address in _held
    ctypes.c_uint32.from_address(address).value = 1
    Futex(address).wake()  # a software driver's stream sleeps on the word; on a GPU it does nothing
    _held.discard(address)
    return was_held


def _drop(address: int, stream: str) -> None:
    """The finalizer of a gate that was not opened."""
    if fork.is_in_bad_fork() or not _release(address):
        return  # a forked child may not have the driver's memory
    warnings.warn(f"a StreamGate of {stream} was dropped before it was opened", ResourceWarning, stacklevel=2)


def _release_all() -> None:
    """Open all gates at exit: a process that ends must not wait for a stream that is held."""
    if not fork.is_in_bad_fork():
        for address in tuple(_held):
            _release(address)


class Memory(Closing):
    """`size` bytes, all zeros, on a device (the current one by default).

    Streams fill and copy it in their order, on either driver, without kernels. `pinned=True` allocates host memory,
    from and to which streams copy without blocking. `handle` opens another process's device memory; that process must
    keep it until the use here ends.

    A context manager that closes it. The end of its block stands still for as long as any stream of the process's
    context does, one that waits for a killed process too (see `close`): open gates within it. Memory that is not closed
    stays until its process ends: streams may still use it.

    Raises ValueError for a size below 1, TypeError for another type, InvalidDevice, HandleError for an invalid handle
    or one of this process itself, and DriverError if there is not enough memory.
    """

    def __init__(
        self, size: int, device: DeviceLike | None = None, *, handle: bytes | None = None, pinned: bool = False
    ) -> None:
        fork.arm()
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"a size is an int, but got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"a size is 1 byte or more, but got {size}")
        if pinned and handle is not None:
            raise ValueError("pinned memory has no handle: give one of the two")
        self.size = size
        self._kind = "pinned" if pinned else "device" if handle is None else "opened"
        self._ordinal = devices.parse(device)
        with OnDevice(self._ordinal) as inside, inside:
            self.address: int = _opened(handle) if handle is not None else _allocated(size, pinned=pinned)

    @property
    def device(self) -> Device:
        """Its device; of pinned memory, the device that was current."""
        return Device(self._ordinal)

    @property
    def is_pinned(self) -> bool:
        """Whether it is pinned host memory."""
        return self._kind == "pinned"

    def handle(self) -> bytes:
        """64 bytes for another process's `Memory`. ValueError unless it was allocated here, on a device."""
        self._check()
        if self._kind != "device":
            raise ValueError(f"only device memory that was allocated here has a handle, and this is {self._kind}")
        with OnDevice(self._ordinal) as inside, inside:
            return _drivers.handle_bytes(relaxed_call(call, "cuIpcGetMemHandle", self.address))

    def fill(self, value: int, stream: StreamLike | None = None) -> None:
        """Have `stream` set every byte to `value`, 0 to 255: a stand-in for a kernel."""
        self._check()
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"a byte is an int, but got {type(value).__name__}")
        if not 0 <= value <= 255:
            raise ValueError(f"a byte is from 0 to 255, but got {value}")
        handle, ordinal = stream_handle(stream)
        stream_call(handle, ordinal, "cuMemsetD8Async", self.address, value, self.size, handle)

    def copy_from(self, other: Memory, stream: StreamLike | None = None) -> None:
        """Have `stream` copy all of `other` to here. ValueError if that is of another size."""
        self._check()
        if not isinstance(other, Memory):
            raise TypeError(f"memory is copied from a Memory, but got {type(other).__name__}")
        other._check()
        if other.size != self.size:
            raise ValueError(f"this memory is {self.size} bytes, but the other is {other.size}")
        handle, ordinal = stream_handle(stream)
        stream_call(handle, ordinal, "cuMemcpyAsync", self.address, other.address, self.size, handle)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Store `data`, of exactly its size, now; no stream may be using the memory."""
        self._check()
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data are bytes, but got {type(data).__name__}")
        content = bytes(data)
        if len(content) != self.size:
            raise ValueError(f"this memory is {self.size} bytes, but got {len(content)}")
        if self.is_pinned:
            ctypes.memmove(self.address, content, self.size)
            return
        with OnDevice(self._ordinal) as inside, inside:
            relaxed_call(_finish, "cuMemcpyHtoDAsync", self.address, content, self.size)

    def read(self) -> bytes:
        """The present bytes: synchronize the stream that writes them, or wait for its point, first."""
        self._check()
        if self.is_pinned:
            return ctypes.string_at(self.address, self.size)
        data = bytearray(self.size)
        with OnDevice(self._ordinal) as inside, inside:
            call("cuMemcpyDtoH", data, self.address, self.size)
        return bytes(data)

    def holds(self, value: int) -> bool:
        """Whether every byte is `value` now."""
        return self.read() == bytes([value]) * self.size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The protocol by which torch, cupy and numba use device memory without a copy."""
        if self.is_pinned:
            raise AttributeError("this is pinned host memory: read() returns its bytes")
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def close(self) -> None:
        """Free it; no stream may use it any more. A second call, and a call in a forked child, do nothing.

        A driver waits for all streams of the process's context first, with no limit: also for one that a StreamGate
        holds, or that stands behind a wait for a process that died.
        """
        address, self.address = self.address, 0
        if not address or fork.is_in_bad_fork():
            return
        name = {"device": "cuMemFree", "pinned": "cuMemFreeHost", "opened": "cuIpcCloseMemHandle"}[self._kind]
        with OnDevice(self._ordinal) as inside, inside:
            relaxed_call(call, name, address)

    def _check(self) -> None:
        fork.check()
        if not self.address:
            raise ValueError("this memory was closed")

    def __reduce__(self) -> NoReturn:
        raise TypeError("memory is not copied or sent: send memory.handle(), and open Memory(size, handle=...) there")

    def __repr__(self) -> str:
        state = f"0x{self.address:x}" if self.address else "closed"
        return f"<ipcsync.testing.Memory {self._kind} size={self.size} {state}>"


def _allocated(size: int, *, pinned: bool) -> int:
    """The address of new memory, all zeros."""
    if pinned:
        address = int(relaxed_call(call, "cuMemAllocHost", size))
        ctypes.memset(address, 0, size)
        return address
    address = int(relaxed_call(call, "cuMemAlloc", size))
    # A driver may fill memory by a kernel, whose first launch waits for all streams of the device. So it is launched
    # here, before a gate holds one of them.
    relaxed_call(_finish, "cuMemsetD8Async", address, 0, size)
    return address


def _finish(name: str, *args: object) -> None:
    """Run it on a stream, and wait: calls without a stream return before they are done, and no stream waits."""
    stream = call("cuStreamCreate", STREAM_NON_BLOCKING)
    try:
        call(name, *args, stream)
        call("cuStreamSynchronize", stream)
    finally:
        call("cuStreamDestroy", stream)


def _opened(handle: bytes) -> int:
    """The address of another process's memory."""
    data = _drivers.handle_from_bytes(CUipcMemHandle, handle)
    code, opened = relaxed_call(context.driver().cuIpcOpenMemHandle, data, _LAZY_PEER_ACCESS)
    if code != SUCCESS:
        raise _drivers.describe(code, "cuIpcOpenMemHandle", HandleError, handle_fault(code, "memory"))
    return int(opened)
