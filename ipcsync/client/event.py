"""Shared events: the users' objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from ipcsync._closing import Closing
from ipcsync._drivers import DriverObject
from ipcsync._engines.core import EventBase, shortened
from ipcsync._native import fork
from ipcsync._native.stream import Stream, stream_handle
from ipcsync._session.attachments import Opening
from ipcsync.client._twins import EventView
from ipcsync.client.point import Point, bound
from ipcsync.typing import StreamLike

if TYPE_CHECKING:
    from typing_extensions import Self

    from ipcsync._engines import Engine
    from ipcsync._engines.core import Wait


# Attributes of torch.cuda.Event that its users try first.
_POINTS = "its points have it: take the one that record() gave, event.at(generation) or event.latest, and call point."
_HINTS = {
    "wait": f": {_POINTS}wait(stream)",
    "query": f": {_POINTS}query()",
    "synchronize": f": {_POINTS}synchronize(timeout)",
    "elapsed_time": ": it has no timing; use ipcsync.Event(enable_timing=True) within one process",
    "ipc_handle": ": event.handles has those of its ring, and other processes open it by its name",
}


@shortened("record")
class SharedEvent(EventBase, EventView[Point], Closing):
    """A named channel of GPU work: one session records on it, any number wait.

    Made by `Client.event`. Each record makes the next generation, and returns its point. A context manager that closes
    it.
    """

    def __init__(self, opening: Opening, *, is_recorder: bool) -> None:
        assert opening.attached is not None
        self._opening = opening
        self._attached = opening.attached
        self._point_type = Point
        self._is_recorder = is_recorder
        self._is_open = True

    def record(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, after: Iterable[Point] = ()
    ) -> Point:
        """Record the next generation after all work submitted to `stream` so far; returns its point.

        If `depth` records are in flight on the `event` engine, it first blocks until the oldest is complete, at most
        `timeout` seconds (WaitTimeout names the oldest). Raises NotRecorder if it was not opened with `recorder=True`,
        DeviceMismatch for a stream of another device, StreamCapturing, EventClosed, and what each use of a Point
        raises.

        The record depends on every wait that this library queued on `stream` earlier, and on the points `after`:
        name those that the work depends on by other means (torch, CUDA events, a graph), which ipcsync cannot see. The
        stream is made to wait for those that are not complete, as by `Point.wait`, so the record is not complete before
        they are; the host first waits until they are recorded, within the same `timeout`. If any of them is lost,
        nothing is recorded, and RecorderLost of cause "behind" says which session ended. Raises ValueError for a point
        of this event that is not recorded before this one.
        """
        if not (self._is_open and self._is_recorder):
            self._raise_not_recorder()
        engine = self._engine
        if type(stream) is Stream:
            handle, ordinal = stream._handle, stream._index
        else:
            handle, ordinal = stream_handle(stream, engine.ordinal if stream is None else None)
        if after:
            return Point(self._attached, engine.record(handle, ordinal, timeout, bound(after)))
        return Point(self._attached, engine.record(handle, ordinal, timeout))

    def _record_on(
        self,
        handle: DriverObject,
        ordinal: int,
        timeout: float | None,
        after: Sequence[tuple[Engine, int]] = (),
        behind: Sequence[Wait] = (),
    ) -> Point:
        """Record on the CUstream `handle` of device `ordinal`, without a check of the role; for `Client.record`."""
        return Point(self._attached, self._engine.record(handle, ordinal, timeout, after, behind))

    def _raise_not_recorder(self) -> None:
        self._check()
        self._engine.raise_not_recorder("this object")

    def _point(self, generation: int) -> Point:
        return Point(self._attached, generation)

    def close(self) -> None:
        """Close this object. The last one over the attachment ends that, and wakes this process's waits on it.

        A recorder's close finishes the event: its name is free, and waits for later generations raise RecorderLost. A
        second call, and a call in a forked child, do nothing.
        """
        if not fork.is_in_bad_fork():
            self._is_open = False
            self._opening.close()

    def __copy__(self) -> Self:
        """Another object of the same event, as if the name were opened again: each is closed separately."""
        self._check()
        opening = Opening()
        try:
            self._opening.share(opening)
            return type(self)(opening, is_recorder=self._is_recorder)
        except BaseException:
            opening.close(wait=False)
            raise

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        """The same."""
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a shared event cannot be sent: send bytes(point), or open it by its name in the other process with "
            "client.event(name)"
        )


class _Hint:
    """An attribute that raises AttributeError with a hint. A `__getattr__` would make each call slower."""

    def __init__(self, name: str, hint: str) -> None:
        self._name = name
        self._hint = hint

    def __get__(self, event: SharedEvent | None, owner: type) -> NoReturn:
        raise AttributeError(f"a SharedEvent has no {self._name!r}{self._hint}", name=self._name, obj=event)


for _name, _hint in _HINTS.items():
    setattr(SharedEvent, _name, _Hint(_name, _hint))
