"""Stream capture as functions of the driver API; `capture` has the rules."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings.driver import CUgraph, CUresult, CUstreamCaptureMode, CUstreamCaptureStatus, cuuint64_t

from ipcsync._drivers.host import capture as capturing
from ipcsync._drivers.host.process import process
from ipcsync._drivers.host.results import INVALID_VALUE, OK, SUCCESS, CallFailed, Result, entry, number
from ipcsync._drivers.host.stream import Stream, find_stream, streams
from ipcsync._locks import CallLock, under

_MODES = {int(mode): mode for mode in CUstreamCaptureMode}  # looked up by number or member, for speed
NOT_CAPTURING: Result = (SUCCESS, CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
_graphs: set[int] = set()
_lock = CallLock()


@entry()
def cuStreamBeginCapture(hStream: Any, mode: Any) -> Result:
    """Begin to capture a stream. Modes: CUstreamCaptureMode.

    STREAM_CAPTURE_UNSUPPORTED on the legacy stream, ILLEGAL_STATE on one that captures.
    """
    stream, wanted = find_stream(hStream), int(CUstreamCaptureMode(mode))
    if stream.is_legacy:
        raise CallFailed(capturing.UNSUPPORTED)
    under(_lock, _begin, stream, wanted)
    return OK


def _begin(stream: Stream, mode: int) -> None:
    if stream.capture is not None:
        raise CallFailed(CUresult.CUDA_ERROR_ILLEGAL_STATE)
    capture = capturing.Capture(stream, mode)
    capturing.active.append(capture)
    stream.capture = capture


@entry(1)
def cuStreamEndCapture(hStream: Any) -> Result:
    """End a capture and return its graph; STREAM_CAPTURE_INVALIDATED if something spoiled it.

    It has to be ended on the stream and, unless it is relaxed, by the thread where it began.
    """
    return SUCCESS, CUgraph(under(_lock, _end, find_stream(hStream)))


def _end(stream: Stream) -> int:
    capture = stream.capture
    if capture is None:
        raise CallFailed(CUresult.CUDA_ERROR_ILLEGAL_STATE)
    if capture.origin is not stream:
        raise CallFailed(CUresult.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
    if capture.mode != capturing.RELAXED and capture.thread != threading.get_ident():
        raise CallFailed(CUresult.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
    capture.end()
    if capture.invalid:
        raise CallFailed(capturing.INVALIDATED)
    _graphs.add(capture.graph)
    return capture.graph


def cuStreamIsCapturing(hStream: Any) -> Result:
    """The CUstreamCaptureStatus of a stream."""
    # Every record and every wait asks: of a stream that is there, while nothing captures, without the frame of `entry`.
    mark = process.mark
    if mark is not None and mark.byte[0] and not capturing.active and number(hStream) in streams:
        return NOT_CAPTURING
    return _is_capturing(hStream)


@entry(1)
def _is_capturing(hStream: Any) -> Result:
    return SUCCESS, capturing.status_of(find_stream(hStream))


@entry(6)
def cuStreamGetCaptureInfo(hStream: Any) -> Result:
    """Status, id and graph of a stream's capture; no dependencies, no edges."""
    stream = find_stream(hStream)
    status, capture = capturing.status_of(stream), stream.capture
    if capture is None or capture.invalid:
        return SUCCESS, status, cuuint64_t(0), CUgraph(0), [], [], 0
    return SUCCESS, status, cuuint64_t(capture.number), CUgraph(capture.graph), [], [], 0


@entry(1)
def cuThreadExchangeStreamCaptureMode(mode: Any) -> Result:
    """Set how this thread's potentially unsafe calls meet captures (CUstreamCaptureMode); the mode it had before."""
    wanted = _MODES[mode] if mode in _MODES else CUstreamCaptureMode(mode)
    before, capturing.thread.value = capturing.thread.value, wanted
    return SUCCESS, before


@entry()
def cuGraphDestroy(hGraph: Any) -> Result:
    """Forget a graph that a capture has left."""
    graph = number(hGraph)
    if graph not in _graphs:
        raise CallFailed(INVALID_VALUE)
    _graphs.discard(graph)
    return OK
