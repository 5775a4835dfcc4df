"""Stream capture: whether a stream captures, and the refusal of what must not be captured."""

from __future__ import annotations

from typing import Any

from cuda.bindings.driver import CUstreamCaptureStatus

from ipcsync import _drivers
from ipcsync._drivers import SUCCESS, DriverObject, unwrap
from ipcsync._drivers.constants import ERROR_STREAM_CAPTURE_IMPLICIT
from ipcsync._native import context
from ipcsync.errors import StreamCapturing

_INSTEAD = {
    "record": ": capture an ipcsync.GraphRecord, and name the event at Client.replay",
    "wait": ": capture an ipcsync.GraphWait, and name the point at Client.replay",
}
_NONE = CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


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
