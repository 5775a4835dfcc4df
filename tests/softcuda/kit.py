"""What each of these tests begins with: calls of the bindings, the library's own counters, a latch for a stream."""

from __future__ import annotations

import ctypes
import glob
import os
from typing import Any, ClassVar

from cuda.bindings import driver as drv

from ipcsync._drivers import LIBRARY

SIM = ctypes.CDLL(str(LIBRARY))
"""The library itself, which has a few functions beside the driver API."""
SIM.softcudaStat.restype = ctypes.c_longlong
SIM.softcudaPath.restype = ctypes.c_char_p

NONBLOCK = 1  # CU_STREAM_NON_BLOCKING
IPC = 6  # CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING


def ok(result: tuple[Any, ...]) -> Any:
    """What the call returned; AssertionError if it failed."""
    assert result[0] == drv.CUresult.CUDA_SUCCESS, result
    values = result[1:]
    return values[0] if len(values) == 1 else values or None


def code(result: tuple[Any, ...]) -> int:
    """The number of the call's result, 0 if it succeeded."""
    return int(result[0])


def stat(what: str) -> int:
    """One of the library's counters, as its README names them; `reap` cleans up."""
    return int(SIM.softcudaStat(what.encode()))


def start(device: int = 0) -> Any:
    """Initialise, with a device's primary context current."""
    ok(drv.cuInit(0))
    context = ok(drv.cuDevicePrimaryCtxRetain(ok(drv.cuDeviceGet(device))))
    ok(drv.cuCtxSetCurrent(context))
    return context


class Latch:
    """Holds a stream back until `open`, at most until the test ends."""

    _all: ClassVar[list[Latch]] = []

    def __init__(self, stream: Any) -> None:
        self._memory = ok(drv.cuMemAllocHost(4))
        self._word = ctypes.c_uint32.from_address(int(self._memory))
        self._word.value = 0
        ok(drv.cuStreamWaitValue32(stream, drv.CUdeviceptr(int(self._memory)), 1, 0))
        self._all.append(self)

    def open(self) -> None:
        """Let the stream go on."""
        self._word.value = 1

    @classmethod
    def open_all(cls) -> None:
        """Open every latch of this process, else a test that failed would hold up the next one."""
        while cls._all:
            cls._all.pop().open()


def raw(handle: Any) -> bytes:
    """The bytes of a handle, which newer bindings show no member of."""
    return ctypes.string_at(handle.getPtr(), 64)


def _handle(kind: Any, data: bytes) -> Any:
    made = kind()
    ctypes.memmove(made.getPtr(), data, 64)
    return made


def handle_bytes(event: Any) -> bytes:
    """An event's handle."""
    return raw(ok(drv.cuIpcGetEventHandle(event)))


def open_event(data: bytes) -> tuple[Any, ...]:
    """The result of opening an event's handle."""
    result: tuple[Any, ...] = drv.cuIpcOpenEventHandle(_handle(drv.CUipcEventHandle, data))
    return result


def open_memory(data: bytes, flags: int = 1) -> tuple[Any, ...]:
    """The result of opening a memory handle, with LAZY_ENABLE_PEER_ACCESS."""
    result: tuple[Any, ...] = drv.cuIpcOpenMemHandle(_handle(drv.CUipcMemHandle, data), flags)
    return result


def files(pattern: str = "*") -> list[str]:
    """The names of this segment's files in shared memory."""
    base = os.path.basename(SIM.softcudaPath().decode())
    return sorted(os.path.basename(path) for path in glob.glob(f"/dev/shm/{base}{pattern}"))
