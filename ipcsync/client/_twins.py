"""What an object and its asynchronous twin have in common."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ipcsync._deadline import bounded
from ipcsync._native import fork
from ipcsync._native.device import Device
from ipcsync.errors import EngineMismatch, EventClosed
from ipcsync.typing import EngineName, EventState

if TYPE_CHECKING:
    from typing_extensions import Self

    from ipcsync._engines import Engine
    from ipcsync._session.attachments import AttachmentRef
    from ipcsync._session.session import Session

T = TypeVar("T")
PointT = TypeVar("PointT")


class ClientView:
    """What a client knows of its session, without a request."""

    _session: Session
    _prefix: str

    @property
    def endpoint(self) -> str:
        """The coordinator's endpoint."""
        return self._session.endpoint

    @property
    def epoch(self) -> bytes:
        """The 16 bytes that name one life of the keeper, or of a coordinator without one."""
        return self._session.epoch

    @property
    def name(self) -> str:
        """The session's name for others."""
        return self._session.name

    @property
    def prefix(self) -> str:
        """The prefix before this client's names of events and streams; "" by default."""
        return self._prefix

    @property
    def session_id(self) -> str:
        """The session's public id."""
        return self._session.lease.welcome.session

    @property
    def lease_ttl(self) -> float:
        """The lease's TTL in seconds, as granted."""
        return self._session.lease.welcome.lease_ttl

    @property
    def is_connected(self) -> bool:
        """Whether the session lives, as far as this process knows; sends nothing."""
        return self._session.is_connected

    @property
    def timeout(self) -> float:
        """The default timeout of requests to the coordinator, in seconds; 5 at first, and may be set."""
        return self._session.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        bounded(seconds)  # raises for what is no timeout
        self._session.timeout = seconds

    @property
    def messages_sent(self) -> int:
        """How many requests this client has sent to the coordinator."""
        return self._session.connection.sent

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "closed"
        return f"<ipcsync.{type(self).__name__} {self.name!r} {state} {self.endpoint}>"


def warn_if_dropped(client: object, session: Session) -> weakref.finalize[[Session], Any]:
    """Have a client that is dropped warn, if its session lives."""
    finalizer = weakref.finalize(client, _dropped, session)
    finalizer.atexit = False
    return finalizer


def _dropped(session: Session) -> None:
    if session.is_connected:
        who = f"the client {session.name!r}" if session.name else "a client"
        warnings.warn(
            f"{who} of {session.endpoint} was dropped before it was closed: its session, with three threads and some "
            "descriptors, stays until this process ends",
            ResourceWarning,
            stacklevel=2,
        )


def several(given: Iterable[T], name: str, what: str) -> list[T]:
    """The argument `name` of a call, as a list. TypeError for one thing in place of several, which are `what`."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} takes {what}, in a list or another iterable, but got {type(given).__name__}")
    return list(given)


class EventView(Generic[PointT]):
    """What an event object knows without a request; `PointT` are its points."""

    __slots__ = ()

    _engine: Engine
    _attached: AttachmentRef
    _is_open: bool

    @abstractmethod
    def _point(self, generation: int) -> PointT: ...

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
        return Device(self._engine.ordinal)

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
        fork.check()
        if self._engine.kind == "timeline":
            raise EngineMismatch(
                f"{self._engine.title} uses the engine 'timeline', and has no CUDA event whose handle "
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
                f"{self._engine.title} has a ring of {len(handles)} CUDA events, and one handle would wait "
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
        """One of "open", "broken" (its recorder, or what its work depended on, was lost) and "closed"."""
        fork.check()
        return self._engine.state if self._is_open else "closed"

    @property
    def is_lost(self) -> bool:
        """Whether a record of this process depended on a lost wait: then no further record is possible."""
        fork.check()
        return self._engine.chain.loss is not None

    def at(self, generation: int) -> PointT:
        """The point of a generation, recorded or not; ValueError below 1 and above 2**62 - 1, TypeError for no int."""
        self._check()
        if isinstance(generation, bool) or not isinstance(generation, int):
            raise TypeError(f"a generation is an int, but got {type(generation).__name__}")
        if not 1 <= generation < 1 << 62:
            raise ValueError(f"generations are counted from 1 to 2**62 - 1, but got {generation}")
        return self._point(generation)

    @property
    def latest(self) -> PointT | None:
        """The point of the last record, None if there is none yet."""
        generation = self.generation
        return self._point(generation) if generation else None

    def _check(self) -> None:
        self._engine.check()
        if not self._is_open:
            raise EventClosed(f"this object of {self._engine.title} was closed", event=self.name)

    def __repr__(self) -> str:
        is_closed = not self._is_open or fork.is_in_bad_fork()
        told = "closed" if is_closed else f"{self.state} generation={self._engine.generation}"
        return f"<ipcsync.{type(self).__name__} {self.name!r} {self.engine} {told}>"


class PointView:
    """What a point knows without a wait."""

    __slots__ = ()

    _generation: int

    @abstractmethod
    def _bound(self) -> AttachmentRef:
        """The attachment."""

    @property
    def generation(self) -> int:
        """Which record of the event it is, from 1 up."""
        return self._generation

    @property
    def event_name(self) -> str:
        """The event's name; empty for a client's unnamed ones."""
        return self._bound().engine.name

    @property
    def node(self) -> str:
        """The name of the node on which the event is recorded; "" for the node of this process."""
        return self._bound().engine.node

    @property
    def device(self) -> Device:
        """The event's device, by this process's ordinals; of another node's event, the device that was current here."""
        return Device(self._bound().engine.ordinal)

    @property
    def is_recorded(self) -> bool:
        """Whether the record was made; `query` says whether it is complete."""
        fork.check()
        engine = self._bound().engine
        is_recorded = engine.generation >= self._generation
        engine.check()  # after the read: it proves that the word was this event's
        return is_recorded

    def __copy__(self) -> Self:
        return self  # it is immutable; an unpickled one may be of another client of the process

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        return self
