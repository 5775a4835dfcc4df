"""Trying the engines between this process and the coordinator, with real calls."""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._board import Board
from ipcsync._board.registration import register_page
from ipcsync._drivers import check
from ipcsync._wire.messages import Means
from ipcsync.errors import DriverError, HandleError
from ipcsync.native.capture import Relaxed
from ipcsync.native.context import OnDevice


def of_engines(means: Means, ordinal: int, board: Board) -> dict[str, dict[str, Any]]:
    """What `Client.check` returns."""
    event = means.why_not_event or _why_not_event(means.handle, ordinal)
    timeline = means.why_not_timeline or _why_not_timeline(board, ordinal)
    return {
        "event": {"ok": not event, "why": event},
        "timeline": {"ok": not timeline, "why": timeline},
    }


def _why_not_event(handle: bytes, ordinal: int) -> str:
    driver = _drivers.load()
    with OnDevice(ordinal), Relaxed():
        try:
            data = _drivers.handle_from_bytes(CUipcEventHandle, handle)
            event = check(driver.cuIpcOpenEventHandle(data), "cuIpcOpenEventHandle", HandleError)
        except HandleError as error:
            return f"a handle of the coordinator does not open here: {error}"
        check(driver.cuEventDestroy(event), "cuEventDestroy")
    return ""


def _why_not_timeline(board: Board, ordinal: int) -> str:
    with OnDevice(ordinal):
        try:
            register_page(board.page_of_slots)
        except DriverError as error:
            return f"the board's page cannot be registered here: {error}"
    return ""
