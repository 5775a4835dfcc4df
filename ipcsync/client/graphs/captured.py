"""What is captured: a wait for a gate, and a write of a tap."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, NoReturn

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._engines.core import Place
from ipcsync._locks import CallLock, under
from ipcsync._native import context, fork
from ipcsync._native.context import OnDevice
from ipcsync._native.device import Device, parse
from ipcsync._native.pinned import take
from ipcsync._native.stream import stream_handle
from ipcsync.errors import CaptureError
from ipcsync.typing import DeviceLike, StreamLike

_MANY = 64  # captures that are remembered: more are not under way at once

_lock = CallLock()
_captures: OrderedDict[int, list[Captured]] = OrderedDict()  # by the ids of captures: what went into each, in order


class Captured(Place):
    """What both have: a word of 32 bits, and the captures that it went into."""

    _noun: ClassVar[str]
    _function: ClassVar[str]  # that is captured: with the word, and 1

    def __init__(self, device: DeviceLike | None = None) -> None:
        fork.arm()
        index = parse(device)
        super().__init__(index, take(index, self._noun, 4)[1], is_gate=isinstance(self, GraphWait))
        self._behind: set[Captured] = set()  # of the same capture, those that came before in any, and behind in any
        self._ahead_of: set[Captured] = set()

    @property
    def device(self) -> Device:
        """The device of the graphs that it is for."""
        return Device(self._index)

    def is_capturing(self, stream: StreamLike | None = None) -> bool:
        """Whether `stream` (the current one by default) is being captured, so that `capture` is possible."""
        fork.check()
        handle, ordinal = stream_handle(stream, self._index if stream is None else None)
        with OnDevice(ordinal) as inside, inside:
            return bool(context.is_capturing(handle))

    def capture(self, stream: StreamLike | None = None) -> None:
        """Put it into the graph that `stream` (the current one by default) is being captured into.

        It may be in many graphs, in each once. Raises CaptureError where nothing is captured, for a second time in one
        capture, and for a stream of another device; DriverError if the driver refuses it, as within the body of a
        conditional node.
        """
        fork.check()
        handle, ordinal = stream_handle(stream, self._index if stream is None else None)
        with OnDevice(ordinal) as inside, inside:
            number = self._capture_of(handle)
            if ordinal != self._index:
                self._refuse(f"it is for device {self._index}, and the stream is of device {ordinal}")
            under(_lock, self._capture, handle, number)

    def _capture_of(self, handle: DriverObject) -> int:
        if not context.is_capturing(handle):
            self._refuse(
                "the stream is not being captured: call it between the begin and the end of a capture, and use "
                "Point.wait or SharedEvent.record for work outside of graphs"
            )
        status, number = unwrap(_drivers.load().cuStreamGetCaptureInfo(handle), "cuStreamGetCaptureInfo")[:2]
        if int(status) != 1:
            self._refuse("this capture is invalid already: an earlier call of it was refused")
        return int(number)

    def _capture(self, handle: DriverObject, number: int) -> None:
        others = _captures.get(number, [])
        if self in others:
            self._refuse("it is in this capture already; make one for each place")
        unwrap(getattr(_drivers.load(), self._function)(handle, self._address, 1, 0), self._function)
        self._note_capture()
        _captures[number] = [*others, self]
        for other in others:
            self._behind.add(other)
            other._ahead_of.add(self)
        while len(_captures) > _MANY:
            _captures.popitem(last=False)

    def _refuse(self, why: str) -> NoReturn:
        raise CaptureError(f"this {self._noun} cannot be captured: {why}")

    def is_surely_before(self, other: Captured) -> bool:
        """Whether it came before `other` in each capture that has both, and there is one."""
        return other in self._ahead_of and other not in self._behind

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} belongs to the graphs of its process: make one in the other process")


class GraphWait(Captured):
    """A place in CUDA graphs at which each replay waits for a point of its own, named at `Client.replay`.

    `device` is that of the graphs, the current one by default. It belongs to the process: any client may use it, for
    points of any event, and graphs that have it outlive clients.
    """

    _noun = "wait"
    _function = "cuStreamWaitValue32"


class GraphRecord(Captured):
    """A place in CUDA graphs at which each replay records on an event that is named at `Client.replay`.

    `device` is that of the graphs, the current one by default. It belongs to the process, as a GraphWait does.
    """

    _noun = "record"
    _function = "cuStreamWriteValue32"
