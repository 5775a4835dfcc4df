"""What the tests and their peer processes share: result codes, contexts, streams held back, waits with a deadline."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ipcsync._drivers import is_loaded, load, name, unwrap
from tests.kit.peer import at_end
from tests.kit.until import DEADLINE_S, until

# Result codes (CUresult), by the names in the driver API reference.
SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
INVALID_CONTEXT = 201
MAP_FAILED = 205
INVALID_HANDLE = 400
ILLEGAL_STATE = 401
NOT_READY = 600
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
LEGACY, PER_THREAD = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD
BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS = 1, 2, 4  # CU_EVENT_…
SHAREABLE = DISABLE_TIMING | INTERPROCESS
GEQ, EQ, AND, NOR = 0, 1, 2, 3  # CU_STREAM_WAIT_VALUE_…
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # CU_STREAM_CAPTURE_MODE_…
NONE, ACTIVE, INVALIDATED = 0, 1, 2  # CU_STREAM_CAPTURE_STATUS_…

T = TypeVar("T")


def ok(result: tuple[Any, ...]) -> Any:
    """The value of a driver call that must succeed."""
    return unwrap(result, "the driver call")


def code(result: tuple[Any, ...]) -> int:
    """The CUresult of a driver call."""
    return int(result[0])


def use_device(ordinal: int = 0) -> Any:
    """Make the primary context of device `ordinal` current on this thread; returns it."""
    drv = load()
    context = ok(drv.cuDevicePrimaryCtxRetain(ok(drv.cuDeviceGet(ordinal))))
    ok(drv.cuCtxSetCurrent(context))
    return context


def use_copies() -> None:
    """Copy and set memory once, before a test holds a stream back.

    A GPU's driver may load a kernel at its first use, in a graph too, and then waits for all streams of the context.
    """
    drv = load()
    stream = ok(drv.cuStreamCreate(NON_BLOCKING))
    host, device = drv.CUdeviceptr(int(ok(drv.cuMemAllocHost(16)))), ok(drv.cuMemAlloc(16))

    def put() -> None:
        for memory in (host, device):
            ok(drv.cuMemsetD8Async(memory, 0, 16, stream))
            for source in (host, device):
                ok(drv.cuMemcpyDtoDAsync(memory, drv.CUdeviceptr(int(source) + 8), 8, stream))

    put()
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(THREAD_LOCAL)))
    put()
    graph = ok(drv.cuStreamEndCapture(stream))
    executable = ok(drv.cuGraphInstantiate(graph, 0))
    ok(drv.cuGraphLaunch(executable, stream))
    finish(stream)
    ok(drv.cuGraphExecDestroy(executable))
    ok(drv.cuGraphDestroy(graph))
    ok(drv.cuMemFree(device))
    ok(drv.cuMemFreeHost(int(host)))
    ok(drv.cuStreamDestroy(stream))


def device_name(ordinal: int = 0) -> str:
    """The name that the driver gives the device."""
    raw: bytes = ok(load().cuDeviceGetName(256, ok(load().cuDeviceGet(ordinal))))
    return raw.split(b"\0", 1)[0].decode().strip()


def device_uuid(ordinal: int) -> bytes:
    """The 16 bytes of the device's UUID."""
    return bytes(ok(load().cuDeviceGetUuid(ok(load().cuDeviceGet(ordinal)))).bytes)


def driver_kind() -> str:
    """gpu, or software."""
    return "gpu" if name() == "cuda" else "software"


def is_ready(result: tuple[Any, ...]) -> bool:
    """True for SUCCESS, False for NOT_READY; raises for everything else."""
    if code(result) == NOT_READY:
        return False
    ok(result)
    return True


def finish(stream: Any) -> None:
    """Wait until all work of the stream is done. By queries: a synchronize call would have no deadline."""
    until(lambda: is_ready(load().cuStreamQuery(stream)), "the stream finishes")


def complete(event: Any) -> None:
    """Wait until the event's latest record is complete."""
    until(lambda: is_ready(load().cuEventQuery(event)), "the event completes")


def in_threads(functions: Sequence[Callable[[], T]], context: Any = None) -> list[T]:
    """What the functions return, each on a thread of its own on which `context` is current (None: no context is).

    The threads are daemons, so that one inside a driver call that never returns does not hold up the end of the tests.
    """
    results: dict[int, T] = {}

    def run(number: int) -> None:
        if context is not None:
            ok(load().cuCtxSetCurrent(context))
        results[number] = functions[number]()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    deadline = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"a thread did not end within {DEADLINE_S:g} s"
    assert len(results) == len(functions), "a thread raised"
    return [results[number] for number in range(len(functions))]


def in_thread(fn: Callable[[], T], context: Any = None) -> T:
    """What `fn` returns on a thread of its own, on which `context` is current (None: no context is)."""
    return in_threads([fn], context)[0]


def streams_end() -> None:
    """AssertionError if a stream of this process stands still: memory is freed behind all work of its context."""
    drv = load() if is_loaded() else None
    if drv is None or code(counted := drv.cuDeviceGetCount()):
        return  # nothing was asked of a driver
    for ordinal in range(counted[1]):
        if ok(drv.cuDevicePrimaryCtxGetState(ok(drv.cuDeviceGet(ordinal))))[1]:
            in_thread(lambda: ok(drv.cuMemFree(ok(drv.cuMemAlloc(1)))), use_device(ordinal))
            ok(drv.cuDevicePrimaryCtxRelease(ok(drv.cuDeviceGet(ordinal))))


_WORDS_A_PAGE = mmap.PAGESIZE // 4
_free_words: dict[int, list[int]] = {}  # context: addresses; never given back, since a stream may still look at one
_latches: list[Latch] = []


def _word() -> int:
    """The address of an unused 32-bit word of pinned memory; allocated ahead, since allocating may wait for streams."""
    drv = load()
    words = _free_words.setdefault(int(ok(drv.cuCtxGetCurrent())), [])
    if not words:
        page = int(ok(drv.cuMemAllocHost(_WORDS_A_PAGE * 4)))
        ctypes.memset(page, 0, _WORDS_A_PAGE * 4)
        words.extend(page + 4 * i for i in range(_WORDS_A_PAGE))
    return words.pop()


class Latch:
    """Holds back what is put on `stream` from now on, until `open`: without kernels, and without host functions."""

    def __init__(self, stream: Any) -> None:
        address = _word()
        self._value = ctypes.c_uint32.from_address(address)
        _latches.append(self)
        ok(load().cuStreamWaitValue32(stream, load().CUdeviceptr(address), 1, GEQ))

    def open(self) -> None:
        """Let the stream go on; twice does nothing."""
        self._value.value = 1


def open_all_latches() -> None:
    """Let every stream of this process go on."""
    while _latches:
        _latches.pop().open()


at_end.append(open_all_latches)


class Page:
    """One page of a file on tmpfs, mapped shared: 512 words of 8 bytes that processes and streams both reach."""

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = memoryview(self._map).cast("Q")

    def register(self) -> int:
        """Register the page with the driver; the device address of its first word."""
        drv = load()
        ok(drv.cuMemHostRegister(self.address, mmap.PAGESIZE, 1 | 2))  # PORTABLE | DEVICEMAP
        return int(ok(drv.cuMemHostGetDevicePointer(self.address, 0)))

    def unregister(self) -> int:
        """The result code of taking the registration back."""
        return code(load().cuMemHostUnregister(self.address))

    def close(self) -> None:
        """Unmap it."""
        self.words.release()
        self._map.close()


def capture_status(drv: ModuleType, stream: Any) -> int:
    """What the stream says of its capture."""
    return int(ok(drv.cuStreamIsCapturing(stream)))


def end_capture(drv: ModuleType, stream: Any) -> int:
    """The code of ending the capture; its graph is destroyed."""
    result = drv.cuStreamEndCapture(stream)
    if code(result) == SUCCESS:
        ok(drv.cuGraphDestroy(result[1]))
    return code(result)
