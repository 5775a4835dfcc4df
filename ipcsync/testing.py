"""Helpers for tests of code that uses streams and events."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ipcsync._drivers import unwrap
from ipcsync._native import capture, context, fork
from ipcsync._native.context import OnDevice, stream_call
from ipcsync._native.stream import stream_handle
from ipcsync.errors import StreamCapturing
from ipcsync.typing import StreamLike

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StreamGate"]

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ


class StreamGate:
    """Holds a stream's later work until `open()` or the end of the `with` block, on either driver.

    It queues a wait for a word of pinned host memory, which `open` stores: no kernel, and no Python inside a driver's
    callback. Work queued before the gate goes on. Other streams are not held, except where a GPU maps them to the same
    hardware queue.

        with StreamGate(stream) as gate:
            point = event.record(stream)
            assert not point.query()
            gate.open()
            point.synchronize(5)

    Raises StreamCapturing for a stream that is being captured, TypeError for what is no stream, DriverError if the
    driver has no stream memory operations.
    """

    def __init__(self, stream: StreamLike | None = None) -> None:
        fork.arm()
        self._handle, self._ordinal = stream_handle(stream)
        self._memory: Any = None
        self._word: ctypes.c_uint32 | None = None

    def __enter__(self) -> Self:
        driver = context.driver()
        if capture.is_capturing(self._handle):
            raise StreamCapturing("cannot hold a stream that is being captured into a CUDA graph")
        with OnDevice(self._ordinal), capture.Relaxed():
            self._memory = unwrap(driver.cuMemAllocHost(4), "cuMemAllocHost")
            address = int(self._memory)
            self._word = ctypes.c_uint32.from_address(address)
            self._word.value = 0
            pointer = unwrap(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer")
        wait = driver.cuStreamWaitValue32
        unwrap(stream_call(self._handle, self._ordinal, wait, self._handle, pointer, 1, _GEQ), "cuStreamWaitValue32")
        return self

    @property
    def is_open(self) -> bool:
        """Whether the stream may go on."""
        fork.check()  # the word lies in memory of the driver's, which a forked child need not have
        return self._word is None or self._word.value != 0

    def open(self) -> None:
        """Let the stream go on; twice is nothing."""
        fork.check()
        if self._word is not None:
            self._word.value = 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.open()
        driver = context.driver()
        with OnDevice(self._ordinal), capture.Relaxed():
            # The word must outlive the wait on it.
            unwrap(driver.cuStreamSynchronize(self._handle), "cuStreamSynchronize")
            self._word = None
            unwrap(driver.cuMemFreeHost(self._memory), "cuMemFreeHost")
