"""The CUDA driver API, as `cuda.bindings.driver` has it, over one of two libraries.

`cuda` is NVIDIA's libcuda. `host` is a software driver for machines without a GPU, a libcuda of our own. No layer above
this package knows which one it has.
"""

from __future__ import annotations

import ctypes
import logging
import os
from types import ModuleType
from typing import Any, TypeAlias

from cuda.bindings import driver as _bindings

from ipcsync._drivers import hardware, software
from ipcsync._locks import CallLock, under
from ipcsync.errors import DriverError, ForkedProcessError, HandleError, NoDriver

log = logging.getLogger("ipcsync")

DriverObject: TypeAlias = Any
"""A handle, struct or enum of cuda.bindings, which ships no type information."""

SUCCESS = _bindings.CUresult.CUDA_SUCCESS
HANDLE_SIZE = 64

WARNED = "IPCSYNC_WARNED_OF_NO_DRIVER"
"""The environment variable that is set once a parent process has warned that there is no CUDA driver."""

_lock = CallLock()
_chosen: tuple[str, ModuleType] | None = None


def load() -> ModuleType:
    """`cuda.bindings.driver`, over the library chosen once by IPCSYNC_DRIVER (auto, cuda or host) and initialised.

    Raises NoDriver, which says what was tried; ForkedProcessError in a child forked after any library used CUDA;
    ValueError for another value of IPCSYNC_DRIVER.
    """
    return (_chosen or under(_lock, _choose_once))[1]


def _choose_once() -> tuple[str, ModuleType]:
    global _chosen  # noqa: PLW0603 - one driver a process, for its whole life
    if _chosen is None:
        _chosen = (_choose(os.environ.get("IPCSYNC_DRIVER") or "auto"), _bindings)
    return _chosen


def _choose(wanted: str) -> str:
    """Initialise the library that IPCSYNC_DRIVER=`wanted` means here; returns "cuda" or "host"."""
    if wanted not in ("auto", "cuda", "host"):
        raise ValueError(f"IPCSYNC_DRIVER must be auto, cuda or host, but is {wanted!r}")
    if wanted == "host":
        return _load_software(hidden=False)
    if wanted == "auto" and software.is_ours(software.loaded()):
        return _load_software(hidden=None)
    reason = (hardware.why_absent() if wanted == "auto" else None) or hardware.why_not()
    if reason is None:
        return "cuda"
    if wanted == "cuda":
        raise NoDriver(f"IPCSYNC_DRIVER=cuda, but the CUDA driver does not work here: {reason}")
    try:
        _load_software(hidden=True)
    except NoDriver as error:
        raise NoDriver(f"the CUDA driver does not work here ({reason}), and {error}") from None
    if not os.environ.get(WARNED):
        log.warning("no CUDA driver here (%s): using the software driver; no GPU is involved", reason)
        os.environ[WARNED] = "1"  # the processes that this one starts do not warn again
    return "host"


def _load_software(hidden: bool | None) -> str:
    code, said = software.load(hidden)
    if code:
        raise describe(code, "cuInit", why=said)
    return "host"


def is_loaded() -> bool:
    """Whether this process has chosen its driver."""
    return _chosen is not None


def name() -> str:
    """ "cuda" or "host"."""
    try:
        load()
    except ForkedProcessError:  # in a child, whose parent's driver works
        return "host" if software.is_ours(software.loaded()) else "cuda"
    assert _chosen is not None
    return _chosen[0]


# --- results ----------------------------------------------------------------------------------------------------------


def unwrap(result: tuple[Any, ...], call: str, error: type[DriverError] = DriverError) -> DriverObject:
    """The value (or tuple of values, or None) of a driver call's result; raises `error` if the call failed."""
    if result[0] is not SUCCESS and result[0] != SUCCESS:
        raise describe(result[0], call, error)
    if len(result) == 2:
        return result[1]
    return None if len(result) == 1 else result[1:]


def describe(code: DriverObject, call: str, error: type[DriverError] = DriverError, why: str = "") -> DriverError:
    """The exception for a driver call that returned `code`; `why` says what that means, if it is known."""
    result = _bindings.CUresult(code)
    text = f"{call} failed: {result.name} ({result.value}){why and ': '}{why}"
    return error(text, code=int(result.value), name=result.name, call=call)


def handle_bytes(handle: DriverObject) -> bytes:
    """The 64 bytes of a CUipcEventHandle or CUipcMemHandle."""
    return ctypes.string_at(handle.getPtr(), HANDLE_SIZE)


def handle_from_bytes(kind: type[DriverObject], data: bytes | bytearray | memoryview) -> DriverObject:
    """A handle of the binding's class `kind`, CUipcEventHandle or CUipcMemHandle, from its 64 bytes.

    Raises HandleError for another length, in torch's words, and TypeError for what is not bytes-like.
    """
    try:
        content = bytes(memoryview(data))
    except TypeError:
        raise TypeError(f"an IPC handle is {HANDLE_SIZE} bytes, but got {type(data).__name__}") from None
    if len(content) != HANDLE_SIZE:
        what = kind.__name__.removeprefix("CUipc")
        text = f"cudaIpc{what}_t expects byte-like object of size {HANDLE_SIZE}, but got {len(content)}"
        raise HandleError(text, code=1, name="CUDA_ERROR_INVALID_VALUE", call=f"cuIpcOpen{what}")
    handle = kind()
    ctypes.memmove(handle.getPtr(), content, HANDLE_SIZE)
    return handle
