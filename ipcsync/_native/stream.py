"""Streams with torch.cuda's API, and the handle behind a stream argument of any library."""

from __future__ import annotations

import ctypes
import inspect
import operator
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

from ipcsync import _drivers
from ipcsync._deadline import deadline_of
from ipcsync._drivers import ERROR_NOT_READY, STREAM_NON_BLOCKING, DriverObject, unwrap
from ipcsync._native import context, foreign, fork
from ipcsync._native.context import OnDevice, call, relaxed_call, stream_call
from ipcsync._native.device import Device, Entered, parse
from ipcsync.errors import InvalidDevice
from ipcsync.typing import DeviceLike, EventLike, StreamLike

if TYPE_CHECKING:
    from typing_extensions import Self

    from ipcsync._native.event import Event

__all__ = [
    "ExternalStream",
    "Stream",
    "current_stream",
    "default_stream",
    "is_current_stream_capturing",
    "set_stream",
    "stream",
]

_KIND_CUDA = 1  # torch's DeviceType of CUDA
# The streams that were made here, by address. Their owners are objects of their own: one whose finalizer has begun is
# not found here any more, and one that is found is not destroyed before the reference goes.
_made: WeakValueDictionary[int, Stream] = WeakValueDictionary()


class Stream:
    """A CUDA stream of this process, non-blocking towards the legacy stream; or one that exists, from its triple.

    `device` is any way to name a device. A lower `priority` goes first; it is clamped to `priority_range()`. A stream
    made here is destroyed with its last reference, which does not wait: CUDA finishes what is queued. One rebuilt from
    `stream_id`, `device_index` and `device_type` is never destroyed here, and must not outlive its owner.
    """

    __slots__ = ("__weakref__", "_handle", "_home", "_index", "_owner", "_pointer")

    def __init__(
        self,
        device: DeviceLike | None = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
    ) -> None:
        fork.arm()
        if stream_id is None and device_index is None and device_type is None:
            index = parse(device)
            if isinstance(priority, bool):
                raise TypeError("a stream's priority is an int, but got a bool")
            with OnDevice(index) as inside, inside:
                self._home = call("cuCtxGetCurrent")
                least, greatest = call("cuCtxGetStreamPriorityRange")
                clamped = max(greatest, min(least, operator.index(priority)))
                handle = call("cuStreamCreateWithPriority", STREAM_NON_BLOCKING, clamped)
            self._bind(handle, index, context.Owner("cuStreamDestroy", handle))
            _made[self._pointer] = self
            return
        if stream_id is None or device_index is None:
            raise TypeError("a stream's triple is stream_id, device_index and device_type")
        if device is not None:
            raise TypeError("a stream is made on a device or from its triple, not both")
        if device_type not in (None, _KIND_CUDA):
            raise InvalidDevice(f"device_type must be {_KIND_CUDA} (CUDA), but got {device_type!r}")
        self._bind(_handle_of(stream_id), parse(device_index))

    def _bind(self, handle: DriverObject, index: int, owner: context.Owner | None = None) -> None:
        self._handle = handle
        self._index = index
        self._owner = owner  # destroys it with the last reference; None for one of somebody else
        self._pointer = int(handle)

    @property
    def device(self) -> Device:
        """The device on which the stream's work is done."""
        return Device(self._index)

    @property
    def device_index(self) -> int:
        """The device's ordinal."""
        return self._index

    @property
    def device_type(self) -> int:
        """Always 1, torch's number for CUDA."""
        return _KIND_CUDA

    @property
    def stream_id(self) -> int:
        """The stream's address; with `device_index` and `device_type`, torch's name for it within this process."""
        return self._pointer

    @property
    def cuda_stream(self) -> int:
        """The CUstream's address; 0 for the default stream."""
        fork.check()
        return self._pointer

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol of cuda.core and numba: (version 0, address)."""
        return (0, self.cuda_stream)

    @property
    def priority(self) -> int:
        """The stream's priority: lower goes first, 0 is the least."""
        fork.check()
        if self._pointer in context.DEFAULT_STREAMS:
            return 0
        return int(stream_call(self._handle, self._index, "cuStreamGetPriority", self._handle))

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The (least, greatest) priority on the current device; the greatest is the lower number."""
        fork.arm()
        with OnDevice(parse(None)) as inside, inside:
            least, greatest = call("cuCtxGetStreamPriorityRange")
        return int(least), int(greatest)

    def is_capturing(self) -> bool:
        """Whether the stream is being captured into a CUDA graph."""
        fork.check()
        if self._pointer not in context.DEFAULT_STREAMS:
            return bool(context.is_capturing(self._handle))
        with OnDevice(self._index) as inside, inside:
            return bool(context.is_capturing(self._handle))

    def query(self) -> bool:
        """Whether all work submitted so far is done. Raises StreamCapturing rather than spoil a capture."""
        fork.check()
        with OnDevice(self._index) as inside, inside:
            result = relaxed_call(self._ask, "query", "cuStreamQuery")
        if result[0] == ERROR_NOT_READY:
            return False
        unwrap(result, "cuStreamQuery")
        return True

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all work submitted so far is done, with the GIL released, at most `timeout` seconds.

        Without a `timeout` CUDA's own call may run, which Ctrl-C does not end: with one, it raises KeyboardInterrupt.
        Raises StreamCapturing as `query`; WaitTimeout; RecorderLost, of cause "behind", if ipcsync has queued a wait
        here whose recorder was lost, and that may never end; ValueError for a timeout that is negative or NaN.
        """
        fork.check()
        deadline_of(timeout)
        with OnDevice(self._index) as inside, inside:
            behind = context.behind(self._handle, self._index)
            if timeout is None and behind is None:
                unwrap(relaxed_call(self._ask, "synchronize", "cuStreamSynchronize"), "cuStreamSynchronize")
                return
            context.refuse_capturing(self._handle, "synchronize")
            if self.query():  # else an idle stream would not be done within a timeout of 0
                return
            (behind or str)(f"the work of {self!r}")  # a full one that stands takes in no event
            self.record_event()._await(f"the work of {self!r}", timeout)

    def _ask(self, what: str, name: str) -> tuple[Any, ...]:
        context.refuse_capturing(self._handle, what)
        result: tuple[Any, ...] = getattr(context.driver(), name)(self._handle)
        return result

    def wait_event(self, event: EventLike) -> None:
        """Have all work submitted to this stream from now on wait for an event.

        `event` is an Event, a point or whatever else has `wait(stream)`, an int pointer, or another library's event
        with `cuda_event` (torch) or `handle` (cuda.core). Raises TypeError for anything else, for a shared event maybe
        EngineMismatch: take one of its points.
        """
        from ipcsync._native.event import Event

        fork.check()
        if isinstance(event, Stream) or hasattr(event, "__cuda_stream__"):
            # cuda.core's streams have a `wait` of their own, which would do the opposite.
            raise TypeError("wait_event takes an event; for a stream use wait_stream")
        waiter = getattr(event, "wait", None)
        if inspect.iscoroutinefunction(waiter):
            raise TypeError("wait_event takes an event; of an asynchronous point await its own wait(stream)")
        if callable(waiter) and (isinstance(event, Event) or not hasattr(event, "cuda_event")):
            waiter(self)
            return
        handle = foreign.event_handle(event)
        if handle is not None:
            stream_call(self._handle, self._index, "cuStreamWaitEvent", self._handle, handle, 0)

    def wait_stream(self, other: StreamLike | None) -> None:
        """Have all work submitted to this stream from now on wait for what was submitted to `other`, any stream."""
        fork.check()
        self.wait_event(resolve(other).record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event (a new one for None) after the work submitted so far; returns it."""
        from ipcsync._native.event import Event

        fork.check()
        if event is None:
            event = Event()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        block = stream(self)
        block.__enter__()
        _thread.entered.append(block)
        return self

    def __exit__(self, *error: object) -> None:
        _thread.entered.pop().__exit__(*error)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return self._index == other._index and self._pointer == other._pointer

    def __hash__(self) -> int:
        return hash((self._index, self._pointer))

    def __repr__(self) -> str:
        return f"<ipcsync.Stream device=cuda:{self._index} cuda_stream={self._pointer:#x}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot leave its process: share its name by Client.stream, or its work by an event")


class ExternalStream(Stream):
    """A stream that another library made, from its address. It is never destroyed here; its owner must outlive its use.

    `device` is its device; None asks the driver. Raises DriverError if the driver does not know the stream.
    """

    __slots__ = ()

    def __init__(self, stream_ptr: int, device: DeviceLike | None = None) -> None:
        fork.arm()
        handle = _handle_of(stream_ptr)
        index = foreign.ordinal_of_stream(int(handle)) if device is None else parse(device)
        self._bind(handle, index)


def made_here() -> list[Stream]:
    """The streams that ipcsync has made in the current context, and that somebody still has."""
    here = call("cuCtxGetCurrent")
    return [stream for each in _made.valuerefs() if (stream := each()) is not None and stream._home == here]


def _handle_of(address: int | DriverObject) -> DriverObject:
    value = foreign.pointer(address, "stream")
    if value is None:
        raise TypeError(f"a stream's address is an int, but got {type(address).__name__}")
    return _drivers.load().CUstream(value)


def wrap(handle: DriverObject, index: int) -> Stream:
    """A stream object for a handle whose device is known, with no driver call."""
    made = Stream.__new__(ExternalStream)
    made._bind(handle, index)
    return made


class _Thread(threading.local):
    """A thread's current streams by ordinal (missing: none was set), and its `with stream:` blocks."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.entered: list[stream] = []


_thread = _Thread()


@cache
def _default(index: int) -> Stream:
    return wrap(_drivers.load().CUstream(0), index)


def default_stream(device: DeviceLike | None = None) -> Stream:
    """The device's default stream, whose address is 0. Raises InvalidDevice and TypeError as `set_device`."""
    fork.arm()
    return _default(parse(device))


def current_stream(device: DeviceLike | None = None) -> Stream:
    """This thread's stream of the device, by `set_stream` or `stream`, else its default one. Raises as `set_device`."""
    fork.arm()
    index = parse(device)
    return _thread.streams.get(index) or _default(index)


def set_stream(stream: StreamLike | None) -> None:
    """Make a stream current on this thread for its device, and that device current; None does nothing.

    From then on a stream of None is ipcsync's current one on this thread, for all devices, and no longer torch's.
    Raises TypeError for an argument that is not a stream, DriverError for an address that the driver does not know.
    """
    fork.arm()
    if stream is None:
        return
    chosen = resolve(stream)
    context.ensure_context(chosen._index)
    _thread.streams[chosen._index] = chosen


class stream:  # noqa: N801 - torch.cuda's name for it
    """A `with` block in which a stream, and its device, are current on this thread. None does nothing."""

    def __init__(self, stream: StreamLike | None) -> None:
        fork.arm()
        self.stream: Stream | None = None if stream is None else resolve(stream)
        self._entered = Entered()

    def __enter__(self) -> Stream | None:
        fork.check()
        if self.stream is not None:
            index, outer = self.stream._index, call("cuCtxGetCurrent")
            context.ensure_context(index)
            self._entered.blocks.append((outer, _thread.streams.get(index)))
            _thread.streams[index] = self.stream
        return self.stream

    def __exit__(self, *error: object) -> None:
        if self.stream is None or fork.is_in_bad_fork():
            return
        outer, before = self._entered.blocks.pop()
        if before is None:
            _thread.streams.pop(self.stream._index, None)
        else:
            _thread.streams[self.stream._index] = before
        call("cuCtxSetCurrent", outer)


def is_current_stream_capturing() -> bool:
    """Whether the stream that work goes to by default on this thread is being captured into a CUDA graph."""
    chosen = resolve(None)
    if chosen._pointer in context.DEFAULT_STREAMS and context.current() is None:
        return False
    return chosen.is_capturing()


def resolve(stream: StreamLike | None, device: int | None = None) -> Stream:
    """The stream that an argument means, of any library.

    None is torch's current stream once torch is imported and has initialised CUDA (unless `set_stream` was called on
    this thread), else `current_stream()`; `device` is then the ordinal asked for, else the current one. Raises
    TypeError for an argument that is not a stream, DriverError for an address that the driver does not know.
    """
    fork.arm()
    if isinstance(stream, Stream):
        return stream
    if stream is None:
        stream = None if _thread.streams else foreign.torch_stream(device)
        if stream is None:
            return current_stream(device)
    address = foreign.stream_pointer(stream)
    index = foreign.ordinal_of_stream(address, getattr(stream, "device_index", None))
    return wrap(_drivers.load().CUstream(address), index)


def stream_handle(stream: StreamLike | None, device: int | None = None) -> tuple[Any, int]:
    """The same as (CUstream, device ordinal), for hot paths: no driver call is made for a Stream of ours.

    See `stream_call` for the handles of default streams. For a Stream of ours the caller checks the fork guard.
    """
    chosen = stream if isinstance(stream, Stream) else resolve(stream, device)
    return chosen._handle, chosen._index
