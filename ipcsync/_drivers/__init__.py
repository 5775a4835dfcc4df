"""The CUDA driver API as Python functions, from one of two places.

`cuda` is `cuda.bindings.driver`; `host` is our own for machines with no GPU. Both have the same function names, the
same arguments and the same `(CUresult, value…)` tuples, so nothing above this package knows which one it has.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

from cuda.bindings import driver as _bindings

from ipcsync.errors import DriverError, ForkedProcessError, HandleError, NoDriver

__all__ = ["api", "describe", "handle_bytes", "handle_from_bytes", "is_loaded", "load", "name", "unwrap", "wait_event"]

log = logging.getLogger("ipcsync")

DriverObject: TypeAlias = Any
"""A handle, struct or enum of cuda.bindings, which ships no type information."""

SUCCESS = _bindings.CUresult.CUDA_SUCCESS
HANDLE_SIZE = 64

_lock = threading.Lock()
_chosen: ModuleType | None = None


def load() -> ModuleType:
    """The driver of this process, chosen once by IPCSYNC_DRIVER (auto, cuda or host) and initialised.

    Raises NoDriver, which says what was tried; ForkedProcessError in a child forked after any library used CUDA;
    ValueError for another value of IPCSYNC_DRIVER.
    """
    if _chosen is not None:
        return _chosen
    with _lock:
        return _chosen if _chosen is not None else _choose(os.environ.get("IPCSYNC_DRIVER", "auto"))


api = load


def _choose(wanted: str) -> ModuleType:
    global _chosen  # noqa: PLW0603 - one driver a process, for its whole life
    if wanted not in ("auto", "cuda", "host"):
        raise ValueError(f"IPCSYNC_DRIVER must be auto, cuda or host, but is {wanted!r}")
    if wanted != "host":
        from ipcsync._drivers import cuda

        why_not = cuda.probe()
        if why_not is None:
            _chosen = cuda
            return cuda
        if wanted == "cuda":
            raise NoDriver(f"IPCSYNC_DRIVER=cuda, but the CUDA driver does not work here: {why_not}")
        log.warning("no CUDA driver here (%s): using the host driver, which moves no GPU", why_not)
    from ipcsync._drivers import host

    unwrap(host.cuInit(0), "cuInit")
    _chosen = host
    return host


def is_loaded() -> bool:
    """Whether this process has chosen its driver."""
    return _chosen is not None


def name() -> str:
    """ "cuda" or "host"."""
    try:
        return load().__name__.rpartition(".")[2]
    except ForkedProcessError:  # of a child: its parent's works
        return "cuda"


def unwrap(result: tuple[Any, ...], call: str, error: type[DriverError] = DriverError) -> DriverObject:
    """The value (or tuple of values, or None) of a driver call's result; raises `error` if it is not a success."""
    if result[0] is not SUCCESS and result[0] != SUCCESS:
        raise describe(result[0], call, error)
    if len(result) == 2:
        return result[1]
    return None if len(result) == 1 else result[1:]


def describe(code: DriverObject, call: str, error: type[DriverError] = DriverError) -> DriverError:
    """The exception for a driver call that returned `code`."""
    result = _bindings.CUresult(code)
    return error(f"{call} failed: {result.name} ({result.value})", code=int(result.value), name=result.name, call=call)


def handle_bytes(handle: DriverObject) -> bytes:
    """The 64 bytes of a CUipcEventHandle or CUipcMemHandle."""
    return ctypes.string_at(handle.getPtr(), HANDLE_SIZE)


def handle_from_bytes(kind: Callable[[], DriverObject], data: bytes) -> DriverObject:
    """A handle of the binding's class `kind` from its 64 bytes; HandleError for another length."""
    if len(data) != HANDLE_SIZE:
        raise HandleError(f"an IPC handle is {HANDLE_SIZE} bytes, but got {len(data)}")
    handle = kind()
    ctypes.memmove(handle.getPtr(), bytes(data), HANDLE_SIZE)
    return handle


def wait_event(event: DriverObject, deadline_ns: int) -> bool:
    """Block until `event` is complete, with the GIL released; False if CLOCK_MONOTONIC passed `deadline_ns` before."""
    return bool(load().wait_event(event, deadline_ns))
