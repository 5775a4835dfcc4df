"""CUDA events with torch.cuda's API; as 64-byte IPC handles they cross processes too. And events behind many streams.

CUDA records all of a context with one call (cuCtxRecordEvent, CUDA 12.5). While any stream of the context is being
captured, this call fails *and invalidates every such capture*. CUDA cannot say whether anything in a context is being
captured. It can say so of a stream, but only of one that surely exists. So the known streams are asked first. A capture
on another library's non-blocking stream is not seen, and is invalidated, as by `torch.cuda.synchronize`.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._deadline import deadline_of
from ipcsync._drivers import SUCCESS, DriverObject, unwrap
from ipcsync._native import context, fork
from ipcsync._native.context import DEFAULT_STREAMS, LEGACY, OnDevice, call, is_capturing, relaxed_call, stream_call
from ipcsync._native.device import Device, driver_version, has_primary_context, kind_of, parse
from ipcsync._native.stream import Stream, current_stream, made_here, resolve, stream_handle, wrap
from ipcsync._threads import CallLock, under
from ipcsync.errors import (
    DeviceMismatch,
    DriverError,
    HandleError,
    InvalidDevice,
    NotComplete,
    StreamCapturing,
    WaitTimeout,
)
from ipcsync.typing import DeviceLike, StreamLike

__all__ = ["Event", "synchronize"]

# Held while an event is created, so that two threads that record at the same time create one. Reentrant, because the
# garbage collector may run a finalizer that records.
_creating = CallLock()
_RECORDS_CONTEXTS = 12050  # the first version of the driver that has cuCtxRecordEvent
_WHAT = "record everything"

# What the codes mean that the driver returns for a handle of an event or of memory; CUDA describes other meanings.
_GONE = "no such handle, or its exporter has destroyed the {} or is gone"
_HANDLE_FAULTS = {
    _drivers.ERROR_INVALID_VALUE: _GONE,
    _drivers.ERROR_INVALID_DEVICE: "the handle belongs to a device that this process does not see",
    _drivers.ERROR_INVALID_CONTEXT: "this process exported the handle itself, and must use the {} itself",
    _drivers.ERROR_MAP_FAILED: "no such handle",
    _drivers.ERROR_OPERATING_SYSTEM: (
        "no such handle, or its exporter is not on this machine or shares no /dev/shm with this process"
    ),
    _drivers.ERROR_INVALID_HANDLE: _GONE,
}


def handle_fault(code: DriverObject, what: str) -> str:
    """Why the driver did not open a handle of `what`; empty for a code that says nothing of the handle."""
    return _HANDLE_FAULTS.get(int(code), "").format(what)


class Event:
    """A CUDA event, created at its first record or export, on that stream's (or the current) device.

    `enable_timing` makes `elapsed_time` work; `blocking` makes `synchronize` sleep rather than spin; `interprocess`
    lets `ipc_handle` export it, and excludes timing (ValueError); with it an H100's driver spins all the same. An
    exported event must outlive its imports: their use is then undefined in CUDA. Destruction never raises.
    """

    __slots__ = ("__weakref__", "_behind", "_export", "_flags", "_handle", "_imported", "_index", "_owner", "_recorded")

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        fork.arm()
        if interprocess and enable_timing:
            raise ValueError("an event made with interprocess=True cannot have enable_timing=True: CUDA has none")
        self._flags = (
            (_drivers.EVENT_BLOCKING_SYNC if blocking else 0)
            | (0 if enable_timing else _drivers.EVENT_DISABLE_TIMING)
            | (_drivers.EVENT_INTERPROCESS if interprocess else 0)
        )
        self._handle: DriverObject = None
        self._behind: context.Behind | None = None  # the waits that the latest record depends on
        self._export: bytes | None = None
        self._imported = False
        self._index = -1
        self._recorded = False

    @classmethod
    def from_ipc_handle(cls, device: DeviceLike | None, handle: bytes | bytearray | memoryview) -> Event:
        """The event that another process exported on `device` as `handle`, 64 bytes; opened at once.

        Raises HandleError for another length, an unknown handle, and one that this process exported itself;
        InvalidDevice for a device that this process does not see; TypeError for an argument of another type. That the
        exporter destroyed the event or died is not told: CUDA opens such a handle, and may open another event by it.
        """
        fork.arm()
        kind = kind_of(device)
        if kind != "cuda":
            raise InvalidDevice(f"Event can only be created on CUDA devices, but got device type {kind}")
        index = parse(device)
        data = _drivers.handle_from_bytes(CUipcEventHandle, handle)
        event = cls(interprocess=True)
        event._imported = True
        with OnDevice(index) as inside, inside:
            code, opened = context.driver().cuIpcOpenEventHandle(data)
        if code != SUCCESS:
            why = handle_fault(code, "event")
            raise _drivers.describe(code, "cuIpcOpenEventHandle", HandleError if why else DriverError, why)
        event._bind(opened, index, _drivers.handle_bytes(data))
        return event

    def _bind(self, handle: DriverObject, index: int, export: bytes | None) -> None:
        owner = context.Owner("cuEventDestroy", handle)
        if self._handle is None:  # else a call within this one has made it; no such call comes between these words
            self._owner, self._index, self._export, self._handle = owner, index, export, handle

    def record(self, stream: StreamLike | None = None) -> None:
        """Have the event stand for the work submitted to a stream so far; None is the current stream.

        A wait queued earlier keeps waiting for the earlier work. DeviceMismatch if the stream is of another device.
        """
        fork.arm()
        handle, index = stream_handle(stream)
        if self._handle is None:
            self._create(handle, index)
        if index != self._index:
            raise DeviceMismatch(f"Event device {self._index} does not match recording stream's device {index}.")
        stream_call(handle, index, "cuEventRecord", self._handle, handle)
        self._recorded = True
        self._behind = context.behind(handle, index)

    def wait(self, stream: StreamLike | None = None) -> None:
        """Have all work submitted to a stream from now on wait for the latest record; None is the current stream.

        The stream may be of any device. Does nothing if nothing was recorded yet: CUDA takes that for complete.
        """
        fork.arm()
        handle, index = stream_handle(stream)
        if self._handle is not None:
            stream_call(handle, index, "cuStreamWaitEvent", handle, self._handle, 0)

    def query(self) -> bool:
        """Whether the work of the latest record is done; True if nothing was recorded yet."""
        fork.check()
        return self._handle is None or context.is_complete(self._handle)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until the work of the latest record is done, with the GIL released, at most `timeout` seconds.

        At once if nothing was recorded. Without a `timeout` CUDA's own call may run, which Ctrl-C does not end: with
        one, it raises KeyboardInterrupt. Raises WaitTimeout; RecorderLost, of cause "behind", if the record stands
        behind a wait that ipcsync queued and whose recorder was lost; ValueError for a negative timeout or NaN.
        """
        fork.check()
        self._await(None, timeout)

    def _await(self, what: str | None, timeout: float | None) -> None:
        """Block until the latest record is done; `what` is that, in a text."""
        deadline = deadline_of(timeout)  # raises for an invalid one, also if nothing was recorded
        waits = self._behind
        if self._handle is None:
            return
        if waits is None and timeout is None:
            relaxed_call(call, "cuEventSynchronize", self._handle)
            return
        what = what or f"the record of {self!r}"
        check = partial(waits, what) if waits else str
        if not context.await_event(self._handle, deadline, check):
            left = check()
            reason = f": it stands behind {left}" if left else ""
            raise WaitTimeout(f"{what} was not done within {timeout} s{reason}", timeout=timeout)
        if self._behind is waits:  # it keeps engines
            self._behind = None

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event's record to that of `end`, on the same device.

        Raises ValueError unless both have timing and were recorded, NotComplete while one is not complete.
        """
        fork.check()
        if not isinstance(end, Event):
            raise TypeError(f"elapsed_time takes an ipcsync.Event, but got {type(end).__name__}")
        if (self._flags | end._flags) & _drivers.EVENT_DISABLE_TIMING:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._recorded and end._recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        result = None
        if self.query() and end.query():
            result = relaxed_call(_drivers.load().cuEventElapsedTime, self._handle, end._handle)
        if result is None or result[0] == _drivers.ERROR_NOT_READY:
            raise NotComplete("Both events must be completed before calculating elapsed time.")
        return float(unwrap(result, "cuEventElapsedTime"))

    def ipc_handle(self) -> bytes:
        """The 64 bytes by which another process opens the event: the same at each call; of an import, the exporter's.

        Creates the event on the current device if need be. Raises DriverError (400) if made without `interprocess`.
        """
        fork.check()
        if self._handle is None:
            self._create(None, parse(None))
        if self._export is None:
            if not self._flags & _drivers.EVENT_INTERPROCESS:
                why = "CUDA does not export this event: make it as ipcsync.Event(interprocess=True)"
                raise _drivers.describe(_drivers.ERROR_INVALID_HANDLE, "cuIpcGetEventHandle", why=why)
            with OnDevice(self._index) as inside, inside:
                self._export = _drivers.handle_bytes(call("cuIpcGetEventHandle", self._handle))
        return self._export

    @property
    def device(self) -> Device | None:
        """The event's device; None until it is created."""
        return Device(self._index) if self._index >= 0 else None

    @property
    def is_imported(self) -> bool:
        """Whether another process exported it."""
        return self._imported

    @property
    def cuda_event(self) -> int:
        """The CUevent's address; 0 until it is created."""
        fork.check()
        return 0 if self._handle is None else int(self._handle)

    @property
    def event_id(self) -> int:
        """The same as `cuda_event`; a new record does not change it."""
        return self.cuda_event

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_event)

    def _create(self, stream: StreamLike | None, index: int) -> None:
        """Create the event in the stream's own context, or in the current one of the device for None."""
        under(_creating, self._create_once, stream, index)

    def _create_once(self, stream: DriverObject, index: int) -> None:
        if self._handle is not None:
            return
        # None for a default stream, or one that is being captured.
        is_plain = stream is None or int(stream) in DEFAULT_STREAMS or is_capturing(stream)
        with OnDevice(index, None if is_plain else call("cuStreamGetCtx", stream)) as inside, inside:
            handle, export = call("cuEventCreate", self._flags), None
            if self._flags & _drivers.EVENT_INTERPROCESS:
                # Now: it needs a current context. If it fails, `ipc_handle` raises the same; the event is usable here.
                with contextlib.suppress(DriverError):
                    export = _drivers.handle_bytes(call("cuIpcGetEventHandle", handle))
        self._bind(handle, index, export)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._flags & _drivers.EVENT_INTERPROCESS:
            raise TypeError("only an event made with interprocess=True can be pickled: it travels as its IPC handle")
        handle = self.ipc_handle()
        return (Event.from_ipc_handle, (context.uuid_of(self._index), handle))

    def __repr__(self) -> str:
        if self._handle is None:
            return "<ipcsync.Event uninitialized>"
        return f"<ipcsync.Event {int(self._handle):#x}>"


# --- all streams of a context, or named ones --------------------------------------------------------------------------


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
            try:
                relaxed_call(call, "cuCtxRecordEvent", call("cuCtxGetCurrent"), event._handle)
            except DriverError as error:
                if error.code != _drivers.ERROR_STREAM_CAPTURE_UNSUPPORTED:
                    raise
                raise StreamCapturing(
                    f"cannot {_WHAT} while a stream of the context is being captured into a CUDA graph; ipcsync does "
                    "not know that stream, and the driver has invalidated its capture: capture it again, and name the "
                    "streams to record (streams=[…]) where others may capture"
                ) from None
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


def _known(ordinal: int) -> list[Stream]:
    """The streams of a device that surely exist: the default one, those made here, and this thread's current ones.

    The default stream stands for all blocking ones of its context. No other is destroyed while the list is kept.
    """
    legacy = wrap(context.driver().CUstream(LEGACY), ordinal)
    others = dict.fromkeys([*made_here(), resolve(None, ordinal), current_stream(ordinal)])
    return [legacy, *(one for one in others if one.device_index == ordinal and one.stream_id not in DEFAULT_STREAMS)]


def _refuse_capturing(streams: Sequence[Stream]) -> None:
    for stream in streams:
        with OnDevice(stream.device_index) as inside, inside:
            context.refuse_capturing(stream._handle, _WHAT)


def wait_for_each(joined: Stream, streams: Sequence[Stream]) -> None:
    """Make `joined` wait for all streams' work so far, on any device, or for none: then StreamCapturing is raised."""
    _refuse_capturing(streams)
    for stream in streams:
        (context.behind(stream._handle, stream._index) or str)(f"the work of {stream!r}")  # as in `synchronize`
        joined.wait_stream(stream)


def synchronize(device: DeviceLike | None = None, timeout: float | None = None) -> None:
    """Block until all work queued on the device is done, with the GIL released, at most `timeout` seconds.

    Returns at once for a device that this process has no context on, and makes none. Raises WaitTimeout; RecorderLost,
    of cause "behind", if ipcsync has queued a wait on a stream of the device whose recorder was lost, and on which that
    stream may stand still for ever; InvalidDevice if this process has no such device, TypeError for an argument of
    another type, ValueError for a negative timeout or NaN, DriverError if work on the device failed. With a timeout, or
    while such waits are queued, StreamCapturing as `Client.record_all`. Without a `timeout` CUDA's own call runs, which
    Ctrl-C does not end: with one, it raises KeyboardInterrupt.
    """
    deadline_of(timeout)
    ordinal = parse(device)
    if context.current() != ordinal and not has_primary_context(ordinal):
        return
    with OnDevice(ordinal) as inside, inside:
        waits = context.behind(None, ordinal)
        if waits is not None or timeout is not None:
            event = _event_behind_all(ordinal, stacklevel=3)
            event._behind = waits
            event._await(f"the work of device {ordinal}", timeout)
        if timeout is None:
            relaxed_call(call, "cuCtxSynchronize")
