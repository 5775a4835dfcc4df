"""CUDA events with torch.cuda's API; as 64-byte IPC handles they cross processes too."""

from __future__ import annotations

import contextlib
import ctypes
from functools import partial
from typing import Any

from cuda.bindings.driver import CUipcEventHandle

from ipcsync import _drivers
from ipcsync._deadline import deadline_of
from ipcsync._drivers import (
    ERROR_INVALID_CONTEXT,
    ERROR_INVALID_DEVICE,
    ERROR_INVALID_HANDLE,
    ERROR_INVALID_VALUE,
    ERROR_MAP_FAILED,
    ERROR_NOT_READY,
    ERROR_OPERATING_SYSTEM,
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    EVENT_INTERPROCESS,
    SUCCESS,
    DriverObject,
    unwrap,
)
from ipcsync._locks import CallLock, under
from ipcsync._native import context, fork, host_wait, living
from ipcsync._native.context import OnDevice, call, is_capturing, relaxed_call, stream_call
from ipcsync._native.device import Device, kind_of, parse
from ipcsync._native.stream import stream_handle
from ipcsync.errors import DeviceMismatch, DriverError, HandleError, InvalidDevice, NotComplete, WaitTimeout
from ipcsync.typing import DeviceLike, StreamLike

__all__ = ["Event"]

# What the driver returns when it cannot open a handle of an event or of memory, and what that means. CUDA describes
# these codes for other calls.
_HANDLE_FAULTS = {
    ERROR_INVALID_VALUE: "no such handle, or its exporter has destroyed the {} or is gone",
    ERROR_INVALID_DEVICE: "the handle belongs to a device that this process does not see",
    ERROR_INVALID_CONTEXT: "this process exported the handle itself, and must use the {} itself",
    ERROR_MAP_FAILED: "no such handle",
    ERROR_OPERATING_SYSTEM: "no such handle, or its exporter is not on this machine or shares no /dev/shm with this "
    "process",
    ERROR_INVALID_HANDLE: "no such handle, or its exporter has destroyed the {} or is gone",
}


def handle_fault(code: DriverObject, what: str) -> str:
    """Why the driver did not open a handle of `what`; empty for a code that says nothing of the handle."""
    return _HANDLE_FAULTS.get(int(code), "").format(what)


# Held while an event is created, so that two threads that record at the same time create one. Reentrant, because the
# garbage collector may run a finalizer that records.
_creating = CallLock()


class Event:
    """A CUDA event, created at its first record or export, on that stream's (or the current) device.

    `enable_timing` makes `elapsed_time` work; `blocking` makes `synchronize` sleep rather than spin; `interprocess`
    lets `ipc_handle` export it, and excludes timing (ValueError). For an interprocess event an H100's driver spins all
    the same. An exported event must outlive its imports: using one after its export is gone is undefined in CUDA.
    Destruction never raises.
    """

    __slots__ = ("__weakref__", "_behind", "_export", "_flags", "_handle", "_imported", "_index", "_owner", "_recorded")

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        fork.arm()
        if interprocess and enable_timing:
            raise ValueError(
                "an event made with interprocess=True cannot have enable_timing=True: CUDA has no such event"
            )
        self._flags = (
            (EVENT_BLOCKING_SYNC if blocking else 0)
            | (0 if enable_timing else EVENT_DISABLE_TIMING)
            | (EVENT_INTERPROCESS if interprocess else 0)
        )
        self._handle: DriverObject = None
        self._behind: host_wait.Behind | None = None  # the waits that the latest record depends on
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
        event._export = _drivers.handle_bytes(data)
        with OnDevice(index) as inside, inside:
            code, opened = context.driver().cuIpcOpenEventHandle(data)
        if code != SUCCESS:
            why = handle_fault(code, "event")
            raise _drivers.describe(code, "cuIpcOpenEventHandle", HandleError if why else DriverError, why)
        event._bind(opened, index)
        return event

    def _bind(self, handle: DriverObject, index: int) -> None:
        self._owner = living.Owner("cuEventDestroy", handle)
        self._index = index
        self._handle = handle

    def record(self, stream: StreamLike | None = None) -> None:
        """Have the event stand for the work submitted to a stream so far; None is the current stream.

        A wait that was queued earlier keeps waiting for the earlier work. Raises DeviceMismatch on a stream of another
        device than the event's.
        """
        fork.arm()
        handle, index = stream_handle(stream)
        if self._handle is None:
            self._create(handle, index)
        if index != self._index:
            raise DeviceMismatch(f"Event device {self._index} does not match recording stream's device {index}.")
        stream_call(handle, index, "cuEventRecord", self._handle, handle)
        self._recorded = True
        self._behind = host_wait.behind(handle, index)

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
        return self._handle is None or host_wait.is_complete(self._handle)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until the work of the latest record is done, with the GIL released, at most `timeout` seconds.

        At once if nothing was recorded. Without a `timeout` CUDA's own call may run, which Ctrl-C does not end: with
        one, it raises KeyboardInterrupt. Raises WaitTimeout; RecorderLost, of cause "behind", if the record stands
        behind a wait that ipcsync queued on its stream, whose recorder was lost, and on which the stream may stand
        still for ever; ValueError for a timeout that is negative or NaN.
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
        check = bool if waits is None else partial(waits.check, what)
        if not host_wait.await_event(self._handle, deadline, check):
            left = str(waits or "")
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
        if (self._flags | end._flags) & EVENT_DISABLE_TIMING:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._recorded and end._recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        result = None
        if self.query() and end.query():
            result = relaxed_call(_drivers.load().cuEventElapsedTime, self._handle, end._handle)
        if result is None or result[0] == ERROR_NOT_READY:
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
            if not self._flags & EVENT_INTERPROCESS:
                why = "CUDA does not export this event: make it as ipcsync.Event(interprocess=True)"
                raise _drivers.describe(ERROR_INVALID_HANDLE, "cuIpcGetEventHandle", why=why)
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
        with OnDevice(index, _context_for(stream)) as inside, inside:
            handle = call("cuEventCreate", self._flags)
            if self._flags & EVENT_INTERPROCESS:
                # Now, because it needs a current context. If it fails, `ipc_handle` raises the same later: within this
                # process the event is usable.
                with contextlib.suppress(DriverError):
                    self._export = _drivers.handle_bytes(call("cuIpcGetEventHandle", handle))
        self._bind(handle, index)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._flags & EVENT_INTERPROCESS:
            raise TypeError("only an event made with interprocess=True can be pickled: it travels as its IPC handle")
        handle = self.ipc_handle()
        return (Event.from_ipc_handle, (context.uuid_of(self._index), handle))

    def __repr__(self) -> str:
        if self._handle is None:
            return "<ipcsync.Event uninitialized>"
        return f"<ipcsync.Event {int(self._handle):#x}>"


def _context_for(stream: DriverObject) -> DriverObject:
    """The context of a stream, to create an event in; None for a default stream, or one that is being captured."""
    if stream is None or int(stream) in context.LEGACY or is_capturing(stream):
        return None
    return call("cuStreamGetCtx", stream)
