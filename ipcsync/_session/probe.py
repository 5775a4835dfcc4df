"""Testing the engines between this process and the coordinator, with real calls."""

from __future__ import annotations

import time

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._board import Board
from ipcsync._drivers import unwrap
from ipcsync._drivers.constants import EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING, STREAM_WAIT_VALUE_GEQ
from ipcsync._native import pinned
from ipcsync._native.capture import relaxed_call
from ipcsync._native.context import OnDevice
from ipcsync._wire.messages import ProbeReply
from ipcsync.errors import DriverError, HandleError
from ipcsync.typing import EngineChecks

_PASS_S = 4.0  # longer than a busy machine keeps the driver from it


def of_engines(reply: ProbeReply, ordinal: int, board: Board) -> EngineChecks:
    """The result of `Client.check`."""
    event = reply.why_not_event or _why_not_event(reply.handle, ordinal)
    timeline = reply.why_not_timeline or _why_not_timeline(board, ordinal)
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


def _why_not_timeline(board: Board, ordinal: int) -> str | None:
    with OnDevice(ordinal) as inside, inside:
        return relaxed_call(_wait_for_the_board, board)


def _wait_for_the_board(board: Board) -> str | None:
    try:
        pinned.page(board.page_of_slots)
        pointer = pinned.page(board.address) + board.probe_offset
    except DriverError as error:
        return f"the board's page cannot be registered here: {error}"
    try:
        passed = _wait_passes(pointer, board.probe)
    except DriverError as error:
        return f"a stream cannot wait for a word of the board here: {error}"
    return None if passed else f"a stream's wait for a word of the board did not end within {_PASS_S:g} s"


def _wait_passes(pointer: int, value: int) -> bool:
    """Whether a stream's wait for `value` ends, in a word that has it already."""
    driver = _drivers.load()
    stream = unwrap(driver.cuStreamCreate(STREAM_NON_BLOCKING), "cuStreamCreate")
    event = unwrap(driver.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")
    try:
        unwrap(driver.cuStreamWaitValue64(stream, pointer, value, STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue64")
        unwrap(driver.cuEventRecord(event, stream), "cuEventRecord")
        return _drivers.wait_event(event, time.monotonic_ns() + int(_PASS_S * 1e9))
    finally:
        unwrap(driver.cuEventDestroy(event), "cuEventDestroy")
        unwrap(driver.cuStreamDestroy(stream), "cuStreamDestroy")
