"""Results of driver calls, and the bytes of handles: the same for every driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

from cuda.bindings import driver as _bindings

from ipcsync.errors import DriverError, HandleError

DriverObject: TypeAlias = Any
"""A handle, struct or enum of cuda.bindings, which ships no type information."""

SUCCESS = _bindings.CUresult.CUDA_SUCCESS
HANDLE_SIZE = 64


def unwrap(result: tuple[Any, ...], call: str, error: type[DriverError] = DriverError) -> DriverObject:
    """The value (or tuple of values, or None) of a driver call's result; raises `error` if the call failed."""
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
