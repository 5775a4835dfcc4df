"""Shared events: the users' objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ipcsync._drivers import DriverObject
from ipcsync._engines.compiled import EventBase, shortened
from ipcsync._native import fork
from ipcsync._native.device import Device
from ipcsync._native.stream import Stream, stream_handle
from ipcsync._session.references import Opening
from ipcsync.client.point import Point, bound
from ipcsync.errors import EngineMismatch, EventClosed
from ipcsync.typing import EngineName, EventState, StreamLike

if TYPE_CHECKING:
    from typing_extensions import Self

    from ipcsync._engines import Engine
    from ipcsync._engines.compiled import Wait


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
class SharedEvent(EventBase):
    """A named channel of GPU work: one session records on it, any number wait.

    Made by `Client.event`. Each record makes the next generation, and returns its point. A context manager that closes
    it.
    """

    def __init__(self, opening: Opening, *, is_recorder: bool) -> None:
        assert opening.attached is not None
        self._opening = opening
        self._attached = opening.attached
        self._engine = opening.attached.engine
        self._point_type = Point
        self._is_recorder = is_recorder
        self._is_open = True

    @property
    def name(self) -> str:
        """The event's name."""
        return self._engine.name

    @property
    def node(self) -> str:
        """The name of the node on which it is recorded; "" for the node of this process."""
        return self._engine.node

    @property
    def device(self) -> Device:
        """The event's device, by this process's ordinals; of another node's event, the device that was current here."""
        return self._attached.device

    @property
    def engine(self) -> EngineName:
        """Either "event" or "timeline"; the same for every session."""
        return self._engine.kind

    @property
    def depth(self) -> int:
        """How many records may be in flight on the `event` engine."""
        return self._engine.depth

    @property
    def handles(self) -> tuple[bytes, ...]:
        """The IPC handles of the ring, 64 bytes each. EngineMismatch on the `timeline` engine, which has none."""
        if self._engine.kind == "timeline":
            raise EngineMismatch(
                f"the event {self._engine.label} uses the engine 'timeline', and has no CUDA event whose handle "
                "another library could open: open it with engine='event', or have the other process wait for "
                "bytes(point)"
            )
        return self._engine.handles

    @property
    def handle(self) -> bytes:
        """The IPC handle of the CUDA event, 64 bytes: torch or cuda.core can wait with it alone.

        EngineMismatch unless `depth` is 1: each further record is made on the next CUDA event of the ring, so that a
        wait with one handle would wait for another record, or for none; and on the `timeline` engine.
        """
        handles = self.handles
        if len(handles) != 1:
            raise EngineMismatch(
                f"the event {self._engine.label} has a ring of {len(handles)} CUDA events, and one handle would wait "
                "for every so many records only: open it with depth=1, or send bytes(point) and wait for that; "
                "handles[(generation - 1) % depth] is the one of a generation"
            )
        return handles[0]

    @property
    def generation(self) -> int:
        """The last generation recorded, 0 for none."""
        fork.check()
        generation = self._engine.generation
        self._check()  # after the read: it proves that the word was this event's
        return generation

    @property
    def completed(self) -> int:
        """Every generation up to this one is known complete; never more than `generation`."""
        self._check()
        completed = self._engine.completed
        self._check()  # after the read too: it proves that the word was this event's
        return completed

    @property
    def state(self) -> EventState:
        """One of "open", "broken" (its recorder, or what that stood behind, was lost) and "closed"."""
        fork.check()
        return self._engine.state if self._is_open else "closed"

    def record(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, after: Iterable[Point] = ()
    ) -> Point:
        """Record the next generation after all work submitted to `stream` so far; returns its point.

        If `depth` records are in flight, it first blocks until the oldest is complete, at most `timeout` seconds
        (WaitTimeout names the oldest). Raises NotRecorder if it was not opened with `recorder=True`, DeviceMismatch for
        a stream of another device, StreamCapturing, EventClosed, and what each use of a Point raises.

        The record stands behind every wait that this library queued on `stream` earlier, and behind the points `after`:
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

    @property
    def is_lost(self) -> bool:
        """Whether a record of this process stood behind a lost wait: then no further record is possible."""
        return self._engine.chain.loss is not None

    def at(self, generation: int) -> Point:
        """The point of a generation, recorded already or not; ValueError below 1."""
        self._check()
        if isinstance(generation, bool) or not isinstance(generation, int):
            raise TypeError(f"a generation is an int, but got {type(generation).__name__}")
        if not 1 <= generation < 1 << 62:
            raise ValueError(f"generations are counted from 1, but got {generation}")
        return self._point(generation)

    @property
    def latest(self) -> Point | None:
        """The point of the last record, None if there is none yet."""
        generation = self.generation
        return self._point(generation) if generation else None

    def _check(self) -> None:
        self._engine.check()
        if not self._is_open:
            raise EventClosed(f"this object of the event {self._engine.label} was closed", event=self.name)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

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

    def __repr__(self) -> str:
        if not self._is_open or fork.is_in_bad_fork():
            return f"<ipcsync.SharedEvent {self.name!r} {self.engine} closed>"
        return f"<ipcsync.SharedEvent {self.name!r} {self.engine} {self.state} generation={self._engine.generation}>"


class _Hint:
    """An attribute that raises AttributeError with a hint. A `__getattr__` would make each call slower."""

    def __init__(self, name: str, hint: str) -> None:
        self._name = name
        self._hint = hint

    def __get__(self, event: SharedEvent | None, owner: type) -> NoReturn:
        raise AttributeError(f"a SharedEvent has no {self._name!r}{self._hint}", name=self._name, obj=event)


for _name, _hint in _HINTS.items():
    setattr(SharedEvent, _name, _Hint(_name, _hint))
