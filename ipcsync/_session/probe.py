"""Testing the engines between this process and the coordinator, with real calls."""

from __future__ import annotations

import time

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._board import SessionLine
from ipcsync._drivers import unwrap
from ipcsync._drivers.constants import (
    EVENT_DISABLE_TIMING,
    STREAM_NON_BLOCKING,
    STREAM_WAIT_VALUE_GEQ,
    STREAM_WRITE_VALUE_DEFAULT,
)
from ipcsync._native import pinned
from ipcsync._native.capture import relaxed_call
from ipcsync._native.context import OnDevice
from ipcsync._wire.messages import ProbeReply
from ipcsync.errors import DriverError, HandleError, WaitTimeout
from ipcsync.typing import EngineChecks

_PASS_S = 4.0  # longer than a busy machine keeps the driver from it


def of_engines(reply: ProbeReply, ordinal: int, line: SessionLine) -> EngineChecks:
    """The result of `Client.check`."""
    event = reply.why_not_event or _why_not_event(reply.handle, ordinal)
    timeline = reply.why_not_timeline or why_not_timeline(line, ordinal)
    return {
        "event": {"ok": event is None, "why": event or ""},
        "timeline": {"ok": timeline is None, "why": timeline or ""},
    }


def _why_not_event(handle: bytes, ordinal: int) -> str | None:
    with OnDevice(ordinal) as inside, inside:
        return relaxed_call(_open, handle)


def _open(handle: bytes) -> str | None:
    driver = _drivers.load()
    try:
        data = _drivers.handle_from_bytes(CUipcEventHandle, handle)
        event = unwrap(driver.cuIpcOpenEventHandle(data), "cuIpcOpenEventHandle", HandleError)
    except HandleError as error:
        return f"a handle of the coordinator does not open here: {error}"
    unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
    return None


def why_not_timeline(line: SessionLine, ordinal: int, seconds: float = _PASS_S) -> str | None:
    """Why streams of a device cannot write words of the board and wait for them here, in this session's own line.

    None if they can. WaitTimeout if fewer `seconds` than a try may take did not tell.
    """
    try:
        with OnDevice(ordinal) as inside, inside:
            return relaxed_call(_try_word, line, seconds)
    except DriverError as error:
        return f"there is no context: {error}"


def _try_word(line: SessionLine, seconds: float) -> str | None:
    try:
        pointer = pinned.word(line.probe_address)
    except DriverError as error:
        return f"the board's page cannot be registered here: {error}"
    passed = False
    try:
        value = line.probe + 1
        passed = _passes(pointer, value, min(seconds, _PASS_S)) and line.probe >= value  # another thread writes it too
    except DriverError as error:
        return f"a stream cannot write a word of the board, or wait for it, here: {error}"
    finally:
        if not passed:
            pinned.keep(line.probe_address)
    if passed:
        return None
    late = "a stream's write to the board, and its wait for that, were not over in"
    if seconds < _PASS_S:
        raise WaitTimeout(f"{late} {seconds:g} s: earlier work may hold up the device's streams", timeout=seconds)
    return f"{late} {_PASS_S:g} s"


def _passes(pointer: int, value: int, seconds: float) -> bool:
    """Whether a stream writes `value`, and its wait for that ends, within `seconds`."""
    driver = _drivers.load()
    stream = unwrap(driver.cuStreamCreate(STREAM_NON_BLOCKING), "cuStreamCreate")
    event = unwrap(driver.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")
    try:
        unwrap(driver.cuStreamWriteValue64(stream, pointer, value, STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue64")
        unwrap(driver.cuStreamWaitValue64(stream, pointer, value, STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue64")
        unwrap(driver.cuEventRecord(event, stream), "cuEventRecord")
        return _drivers.wait_event(event, time.monotonic_ns() + int(seconds * 1e9))
    finally:
        unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
        unwrap(driver.cuStreamDestroy(stream), "cuStreamDestroy")
