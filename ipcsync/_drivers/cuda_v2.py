"""The calls of the hot path by `cuda.bindings._v2`: the same names, arguments and result tuples, at half the cost.

That module (cuda-bindings 13.5 and later) takes plain ints and raises errors. So handles are ints here. A handle of
another class, and an address of no user's process, go to the old call. Importing this module imports NumPy.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from cuda.bindings import driver as _bindings
from cuda.bindings._v2.driver import (
    DriverError,
    event_record,
    stream_is_capturing,
    stream_wait_event,
    stream_wait_value64_v2,
    stream_write_value64_v2,
    thread_exchange_stream_capture_mode,
)

__all__ = [
    "CUevent",
    "CUstream",
    "cuEventCreate",
    "cuEventRecord",
    "cuIpcOpenEventHandle",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuStreamWaitValue64",
    "cuStreamWriteValue64",
    "cuThreadExchangeStreamCaptureMode",
]

Result: TypeAlias = Any  # (CUresult, value…): the binding has no types

_NO_HANDLES = (TypeError, OverflowError)  # what `_v2` raises for another class, and above 2**63
_DONE = (_bindings.CUresult.CUDA_SUCCESS,)
_STATUS = {int(status): (*_DONE, status) for status in _bindings.CUstreamCaptureStatus}
_MODES = {int(mode): (*_DONE, mode) for mode in _bindings.CUstreamCaptureMode}


def _code(error: DriverError) -> Any:
    return _bindings.CUresult(error.status)


class _Handle(int):
    """An address. Each is an object of its own, which a plain int need not be: some callers ask by identity."""

    __slots__ = ()


CUevent = CUstream = _Handle


def cuEventRecord(hEvent: Any, hStream: Any) -> Result:
    """Have the event stand for the work submitted to the stream so far."""
    try:
        event_record(hEvent, hStream)
    except DriverError as error:
        return (_code(error),)
    except _NO_HANDLES:
        return _bindings.cuEventRecord(hEvent, hStream)
    return _DONE


def cuStreamWaitEvent(hStream: Any, hEvent: Any, Flags: int) -> Result:
    """Have the stream's later work wait for the event."""
    try:
        stream_wait_event(hStream, hEvent, Flags)
    except DriverError as error:
        return (_code(error),)
    except _NO_HANDLES:
        return _bindings.cuStreamWaitEvent(hStream, hEvent, Flags)
    return _DONE


def cuStreamWriteValue64(stream: Any, addr: Any, value: Any, flags: int) -> Result:
    """Write 64 bits behind the stream's work so far."""
    try:
        stream_write_value64_v2(stream, addr, value, flags)
    except DriverError as error:
        return (_code(error),)
    except _NO_HANDLES:
        return _bindings.cuStreamWriteValue64(stream, addr, value, flags)
    return _DONE


def cuStreamWaitValue64(stream: Any, addr: Any, value: Any, flags: int) -> Result:
    """Have the stream's later work wait until 64 bits compare with `value`."""
    try:
        stream_wait_value64_v2(stream, addr, value, flags)
    except DriverError as error:
        return (_code(error),)
    except _NO_HANDLES:
        return _bindings.cuStreamWaitValue64(stream, addr, value, flags)
    return _DONE


def cuStreamIsCapturing(hStream: Any) -> Result:
    """The stream's CUstreamCaptureStatus."""
    try:
        return _STATUS[stream_is_capturing(hStream)]
    except DriverError as error:
        return (_code(error), None)
    except _NO_HANDLES:
        return _bindings.cuStreamIsCapturing(hStream)


def cuThreadExchangeStreamCaptureMode(mode: Any) -> Result:
    """Set the thread's CUstreamCaptureMode; the mode it had before."""
    try:
        return _MODES[thread_exchange_stream_capture_mode(mode)]
    except DriverError as error:
        return (_code(error), None)


# --- new handles ------------------------------------------------------------------------------------------------------


def _made(result: Result) -> Result:
    return (result[0], _Handle(result[1])) if result[0] is _DONE[0] else result


def cuEventCreate(Flags: int) -> Result:
    """A new event of the current context."""
    return _made(_bindings.cuEventCreate(Flags))


def cuIpcOpenEventHandle(handle: Any) -> Result:
    """The event of another process's handle."""
    return _made(_bindings.cuIpcOpenEventHandle(handle))


def cuStreamCreate(Flags: int) -> Result:
    """A new stream of the current context."""
    return _made(_bindings.cuStreamCreate(Flags))


def cuStreamCreateWithPriority(flags: int, priority: int) -> Result:
    """A new stream of the current context, with a priority."""
    return _made(_bindings.cuStreamCreateWithPriority(flags, priority))
