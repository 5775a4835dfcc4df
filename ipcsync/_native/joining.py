"""Make a stream, or the host, wait for others: for all streams of a context, or for named ones.

CUDA records all of a context with one call (cuCtxRecordEvent, CUDA 12.5). While any stream of the context is being
captured, this call fails *and invalidates every such capture*. CUDA cannot say whether anything in a context is being
captured. It can say so of a stream, but only of one that surely exists. So the known streams are asked first, and the
call is not made if one of them is being captured. A capture on another library's non-blocking stream is not seen, and
is invalidated, as it is by cuCtxSynchronize (`torch.cuda.synchronize`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

from ipcsync._deadline import deadline_of
from ipcsync._drivers import ERROR_STREAM_CAPTURE_UNSUPPORTED, DriverObject
from ipcsync._native import context, host_wait
from ipcsync._native.context import LEGACY, OnDevice, call, relaxed_call
from ipcsync._native.device import driver_version, has_primary_context, parse
from ipcsync._native.event import Event
from ipcsync._native.stream import Stream, current_stream, made_here, resolve, wrap
from ipcsync.errors import DriverError, StreamCapturing
from ipcsync.typing import DeviceLike

__all__ = ["synchronize"]

_RECORDS_CONTEXTS = 12050  # the first version of the driver that has cuCtxRecordEvent
_WHAT = "record everything"
_LEGACY = 1  # CU_STREAM_LEGACY; not 0, which is the thread's own default stream if the binding is set up so


@cache
def _records_contexts() -> bool:
    return driver_version() >= _RECORDS_CONTEXTS


def wait_for_all(joined: Stream) -> None:
    """Make `joined` wait for all work submitted so far to a context of its device: the current one, else the primary.

    Raises StreamCapturing while a stream of the context is being captured; the capture stays valid if the stream is
    known here. If the driver cannot record a context, `joined` waits for the known streams, with a RuntimeWarning.
    """
    joined.wait_event(_event_behind_all(joined.device_index, stacklevel=5, asks=joined))


def _event_behind_all(ordinal: int, stacklevel: int, asks: Stream | None = None) -> Event:
    """An event behind all that `wait_for_all` waits for; its errors, and its warning for the caller at `stacklevel`.

    `asks` is the stream that is to wait for it, and needs no wait for itself.
    """
    event = Event()
    with OnDevice(ordinal) as inside, inside:
        known = [stream for stream in _known(ordinal) if stream != asks]
        if _records_contexts():
            _refuse_capturing(known)
            event._create(None, ordinal)
            _record_context(event._handle)
            return event
        joined = Stream(ordinal)
        wait_for_each(joined, known)
        event.record(joined)
    warnings.warn(
        "this driver is older than CUDA 12.5 and cannot record all of a context: the point covers its blocking streams "
        f"and {len(known) - 1} others that ipcsync knows; name the streams (streams=[…]) to cover any others",
        RuntimeWarning,
        stacklevel,
    )
    return event


def _record_context(event: DriverObject) -> None:
    try:
        relaxed_call(call, "cuCtxRecordEvent", call("cuCtxGetCurrent"), event)
    except DriverError as error:
        if error.code != ERROR_STREAM_CAPTURE_UNSUPPORTED:
            raise
        raise StreamCapturing(
            f"cannot {_WHAT} while a stream of the context is being captured into a CUDA graph; ipcsync does not "
            "know that stream, and the driver has invalidated its capture: capture it again, and name the streams "
            "to record (streams=[…]) where others may capture"
        ) from None


def _known(ordinal: int) -> list[Stream]:
    """The streams of a device that surely exist: the default one, those made here, and this thread's current ones.

    The default stream stands for all blocking streams of its context, by whichever code made. None of the others is
    destroyed while the list is kept.
    """
    legacy = wrap(context.driver().CUstream(_LEGACY), ordinal)
    others = dict.fromkeys([*made_here(), resolve(None, ordinal), current_stream(ordinal)])
    return [legacy, *(one for one in others if one.device_index == ordinal and one.stream_id not in LEGACY)]


def _refuse_capturing(streams: Sequence[Stream]) -> None:
    for stream in streams:
        with OnDevice(stream.device_index) as inside, inside:
            context.refuse_capturing(stream._handle, _WHAT)


def wait_for_each(joined: Stream, streams: Sequence[Stream]) -> None:
    """Make `joined` wait for all work submitted so far to each of the streams, on any device.

    Raises StreamCapturing if one of them is being captured; `joined` then waits for none of them.
    """
    _refuse_capturing(streams)
    for stream in streams:
        joined.wait_stream(stream)


def synchronize(device: DeviceLike | None = None, timeout: float | None = None) -> None:
    """Block until all work queued on the device is done, with the GIL released, at most `timeout` seconds.

    Returns at once for a device that this process has no context on, and makes none. Raises WaitTimeout; RecorderLost,
    of cause "behind", if ipcsync has queued a wait on a stream of the device whose recorder was lost, and on which that
    stream may stand still for ever; InvalidDevice if this process has no such device, TypeError for an argument of
    another type, ValueError for a timeout that is negative or NaN, DriverError if work on the device failed. With a
    timeout, or while such waits are queued, StreamCapturing as `Client.record_all`. Without a `timeout` CUDA's own call
    runs, which Ctrl-C does not end: with one, it raises KeyboardInterrupt.
    """
    deadline_of(timeout)
    ordinal = parse(device)
    if context.current() != ordinal and not has_primary_context(ordinal):
        return
    with OnDevice(ordinal) as inside, inside:
        waits = host_wait.behind(None, ordinal)
        if waits is not None or timeout is not None:
            event = _event_behind_all(ordinal, stacklevel=3)
            event._behind = waits
            event._await(f"the work of device {ordinal}", timeout)
        if timeout is None:
            relaxed_call(call, "cuCtxSynchronize")
