"""Stream capture: queries of this package must not break a capture, and some work must not be captured.

While any thread captures a stream in global mode, a potentially unsafe call of another thread (a query of an event, for
instance) fails and invalidates that capture; in relaxed thread mode it succeeds (CUDA driver API,
cuThreadExchangeStreamCaptureMode). The mode belongs to the thread and costs 0.2 µs to change, so it is always changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from cuda.bindings.driver import CUstreamCaptureMode, CUstreamCaptureStatus

from ipcsync import _drivers
from ipcsync._drivers import SUCCESS, DriverObject, unwrap
from ipcsync._drivers.constants import ERROR_STREAM_CAPTURE_IMPLICIT
from ipcsync._native import context
from ipcsync.errors import StreamCapturing

T = TypeVar("T")

_RELAXED = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_INSTEAD = {
    "record": ": capture an ipcsync.GraphRecord, and name the event at Client.replay",
    "wait": ": capture an ipcsync.GraphWait, and name the point at Client.replay",
}
_NONE = CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


class _Thread(threading.local):
    # The last mode found on the thread other than relaxed; CUDA's default at first.
    mode: DriverObject = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


_thread = _Thread()


def relaxed_call(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, driver calls, in relaxed thread capture mode; the thread's own mode is restored."""
    exchange = _drivers.load().cuThreadExchangeStreamCaptureMode
    previous = None
    try:
        previous = unwrap(exchange(_RELAXED), "cuThreadExchangeStreamCaptureMode")
        result = function(*args)
        exchange(previous)
    except BaseException:
        if previous is None:  # it may have come before the mode was known
            now = exchange(_RELAXED)[1]
            previous = _thread.mode if now == _RELAXED else now
        _thread.mode = previous
        exchange(previous)
        raise
    return result


def is_capturing(handle: DriverObject) -> bool | None:
    """Whether the stream is being captured, also if that capture is already invalid.

    The legacy stream cannot be captured: None while another stream captures that waits for it.
    """
    ask = _drivers.load().cuStreamIsCapturing
    result: tuple[Any, ...] = ask(handle)
    if result[0] is not SUCCESS and context.bad_context(result):  # the thread's first use of CUDA
        context.ensure_context(0)
        result = ask(handle)
    if result[0] == ERROR_STREAM_CAPTURE_IMPLICIT:
        return None
    return bool(unwrap(result, "cuStreamIsCapturing") != _NONE)


def refuse_capturing(handle: DriverObject, what: str) -> None:
    """Raise StreamCapturing if `what` ("record", "wait") on this stream would go into a graph, or break a capture.

    The legacy stream breaks one: nothing may use it while a blocking stream of its context captures.
    """
    state = is_capturing(handle)
    if state is None:
        raise StreamCapturing(f"cannot {what} on the legacy stream while a stream that waits for it is being captured")
    if state:
        how = _INSTEAD.get(what, "")
        raise StreamCapturing(f"cannot {what} on a stream that is being captured into a CUDA graph{how}")
