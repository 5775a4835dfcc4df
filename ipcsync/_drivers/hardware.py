"""The driver of real GPUs: whether NVIDIA's libcuda works here."""

from __future__ import annotations

import ctypes
import glob

from cuda.bindings import driver as _bindings

from ipcsync._drivers import software
from ipcsync.errors import ForkedProcessError

_DEVICE_FILES = ("/dev/nvidia*", "/dev/dxg", "/dev/nvhost*", "/dev/nvgpu*")  # of a GPU, in WSL, of a Tegra
_NOT_INITIALIZED = _bindings.CUresult.CUDA_ERROR_NOT_INITIALIZED
_SUCCESS = _bindings.CUresult.CUDA_SUCCESS


def why_absent() -> str | None:
    """Why there can be no GPU here, told without loading anything; None if there may be one."""
    if software.loaded() is not None or any(map(glob.glob, _DEVICE_FILES)):
        return None
    return "there is no device file of a GPU"


def why_not() -> str | None:
    """Initialise the CUDA driver; why it does not work here, or None if it does.

    Raises ForkedProcessError if any library used CUDA before a fork: then it works in the parent alone.
    """
    try:
        ctypes.CDLL(software.SONAME)  # not by the binding: before 13.5 one that found no library never looks again
    except OSError as error:
        return str(error)
    if software.is_ours(software.loaded()):
        return f"the {software.SONAME} here is ipcsync's software driver, which is chosen by IPCSYNC_DRIVER=host"
    try:
        (code,) = _bindings.cuInit(0)
    except Exception as error:  # noqa: BLE001 - the binding raises its own types
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if code == _NOT_INITIALIZED:
        raise ForkedProcessError
    return None if code == _SUCCESS else f"cuInit: {code.name} ({int(code)})"
