"""Stream capture: its states, modes and errors. What is captured is checked, counted and dropped; the graph is empty.

The rules are those of NVIDIA's driver API reference ("Stream Management", `cuStreamBeginCapture` and
`cuThreadExchangeStreamCaptureMode`) and of the CUDA error codes' descriptions.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from cuda.bindings.driver import CUresult, CUstreamCaptureMode, CUstreamCaptureStatus

from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import INVALID_VALUE, CallFailed

if TYPE_CHECKING:
    from ipcsync._drivers.host.context import Context
    from ipcsync._drivers.host.event import Event
    from ipcsync._drivers.host.stream import Stream

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
UNSUPPORTED = CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
IMPLICIT = CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
INVALIDATED = CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
_NONE = CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_ACTIVE = CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
_INVALIDATED = CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED


class Capture:
    """One sequence of operations that is being captured, from begin to end."""

    __slots__ = ("count", "graph", "invalid", "mode", "number", "origin", "streams", "thread")

    def __init__(self, origin: Stream, mode: int) -> None:
        self.number = next(process.numbers)
        self.graph = next(process.numbers)
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.streams = {origin}
        self.invalid = False
        self.count = 0

    def refuse(self, code: Any) -> CallFailed:
        """Invalidate the capture, and make the refusal to raise for it."""
        self.invalid = True
        return CallFailed(code)

    def end(self) -> None:
        """Let all its streams go."""
        for stream in self.streams:
            stream.capture = None
        active.remove(self)


class _Mode(threading.local):
    # What the thread's potentially unsafe calls may do, as CUstreamCaptureMode.
    value: Any = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


active: list[Capture] = []  # empty almost always: what hot functions look at first
thread = _Mode()


def unsafe() -> None:
    """Refuse a potentially unsafe call that a capture forbids to this thread, and invalidate that capture.

    A thread in relaxed mode is never refused; one in thread-local mode only for its own captures that are not relaxed;
    one in global mode (every thread at first) also for any capture begun in global mode.
    """
    mode, me = thread.value, threading.get_ident()
    if mode == RELAXED:
        return
    forbid = [
        capture
        for capture in active
        if (capture.thread == me and capture.mode != RELAXED) or (mode == GLOBAL and capture.mode == GLOBAL)
    ]
    for capture in forbid:
        capture.invalid = True
    if forbid:
        raise CallFailed(UNSUPPORTED)


def look_at_stream(stream: Stream) -> None:
    """Before a stream is queried or synchronized: one that captures cannot be."""
    _look_at_legacy(stream)
    if stream.capture is not None:
        raise stream.capture.refuse(INVALIDATED if stream.capture.invalid else UNSUPPORTED)
    unsafe()


def look_at_context(ctx: Context) -> None:
    """Before all of a context is synchronized or recorded: one with capturing streams cannot be."""
    conflicting = [capture for capture in active if any(stream.context is ctx for stream in capture.streams)]
    for capture in conflicting:
        capture.invalid = True
    if conflicting:
        raise CallFailed(UNSUPPORTED)
    unsafe()


def look_at_event(event: Event) -> None:
    """Before an event is queried, synchronized or timed: one last recorded in a capture cannot be."""
    if event.captured is not None:
        raise event.captured.refuse(CUresult.CUDA_ERROR_CAPTURED_EVENT)
    unsafe()


def capture_op(stream: Stream) -> bool:
    """Before an operation is queued: whether the stream captures, so that the operation is counted and dropped."""
    _look_at_legacy(stream)
    capture = stream.capture
    if capture is None:
        return False
    if capture.invalid:
        raise CallFailed(INVALIDATED)
    capture.count += 1
    return True


def _in_the_way(stream: Stream) -> list[Capture]:
    """The captures of blocking streams during which a legacy stream cannot be used."""
    if not stream.is_legacy:
        return []
    return [
        capture
        for capture in active
        if any(other.is_blocking and other.context is stream.context for other in capture.streams)
    ]


def _look_at_legacy(stream: Stream) -> None:
    for capture in _in_the_way(stream):
        raise capture.refuse(IMPLICIT)


def capture_wait(stream: Stream, event: Event, is_recorded: bool) -> bool:
    """Before a stream waits for an event: whether that belongs to a capture, which the stream then joins."""
    theirs = event.captured
    if theirs is not None and (theirs not in active or theirs.invalid) and stream.capture is None:
        raise CallFailed(INVALID_VALUE)
    if stream.capture is None and theirs is not None:
        if stream.is_legacy:
            raise theirs.refuse(UNSUPPORTED)
        theirs.streams.add(stream)
        stream.capture = theirs
    if not capture_op(stream):
        return False
    ours = stream.capture
    if ours is not None and theirs is not ours:
        if theirs is not None:
            theirs.invalid = True
            raise ours.refuse(CUresult.CUDA_ERROR_STREAM_CAPTURE_MERGE)
        if is_recorded:
            raise ours.refuse(CUresult.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
    return True


def drop(stream: Stream) -> None:
    """A capturing stream is destroyed: its capture ends with it if it began there."""
    capture = stream.capture
    if capture is not None:
        if capture.origin is stream:
            capture.end()
        else:
            capture.streams.discard(stream)


def status_of(stream: Stream) -> Any:
    """The capture status of a stream, which asking never changes; refused on the legacy stream during a capture."""
    if active and _in_the_way(stream):
        raise CallFailed(IMPLICIT)
    if stream.capture is None:
        return _NONE
    return _INVALIDATED if stream.capture.invalid else _ACTIVE
