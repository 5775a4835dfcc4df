"""cuInit: joining the segment, and leaving it when the interpreter exits."""

from __future__ import annotations

import atexit
import logging
import os
from typing import Any

from cuda.bindings.driver import CUresult

from ipcsync._drivers.host.context import contexts_in_use
from ipcsync._drivers.host.device import devices
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import INVALID_VALUE, OK, SUCCESS, Result, number
from ipcsync._drivers.host.segment import open_segment
from ipcsync._linux.fork import ForkMark
from ipcsync._locks import CallLock, under

VERSION = 13000

log = logging.getLogger("ipcsync")
_lock = CallLock()


def cuInit(Flags: Any) -> Result:
    """Join the segment IPCSYNC_HOST_SEGMENT. Once is enough; NOT_INITIALIZED in a child forked after that.

    NO_DEVICE if none is visible, INVALID_VALUE for a setting that means nothing, OPERATING_SYSTEM if the shared memory
    cannot be had; the log says why.
    """
    if number(Flags):
        return (INVALID_VALUE,)
    mark = process.mark
    if mark is not None:
        return (CUresult.CUDA_ERROR_NOT_INITIALIZED,) if mark.in_child else OK
    return under(_lock, _join)


def _join() -> Result:
    if process.mark is not None:
        return OK
    if process.refusal is CUresult.CUDA_ERROR_DEINITIALIZED:
        return (process.refusal,)
    try:
        devices.read_environment()
        if not devices.visible:
            return (CUresult.CUDA_ERROR_NO_DEVICE,)
        process.segment = open_segment(os.environ.get("IPCSYNC_HOST_SEGMENT", "default"))
    except ValueError as error:
        log.error("host driver: %s", error)
        return (INVALID_VALUE,)
    except OSError as error:
        log.error("host driver: %s", error)
        return (CUresult.CUDA_ERROR_OPERATING_SYSTEM,)
    process.words = process.segment.words
    process.asynchronous = os.environ.get("IPCSYNC_HOST_ASYNC", "0") not in ("", "0")
    process.mark = ForkMark()
    atexit.register(_leave)
    return OK


def _leave() -> None:
    """At exit: refuse all calls from now on, and free this process's objects in the segment.

    Queued work stays unfinished for ever, as after a kill.
    """
    if process.mark is None or process.mark.in_child:
        return
    process.refusal = CUresult.CUDA_ERROR_DEINITIALIZED
    process.mark = None
    for context in contexts_in_use():
        for stream in list(context.streams):
            stream.close()
    process.segment.leave()


def cuDriverGetVersion() -> Result:
    """The CUDA version that this driver speaks, 13.0; also before cuInit."""
    if process.mark is not None and process.mark.in_child:
        return CUresult.CUDA_ERROR_NOT_INITIALIZED, None
    return SUCCESS, VERSION


def _result_of(error: Any) -> Any:
    try:
        return CUresult(error)
    except ValueError:
        return None


def cuGetErrorName(error: Any) -> Result:
    """The name of an error code, as bytes; also before cuInit."""
    result = _result_of(error)
    return (INVALID_VALUE, None) if result is None else (SUCCESS, result.name.encode())


def cuGetErrorString(error: Any) -> Result:
    """A few words on an error code, as bytes; also before cuInit."""
    result = _result_of(error)
    if result is None:
        return INVALID_VALUE, None
    return SUCCESS, result.name.removeprefix("CUDA_").replace("_", " ").lower().encode()
