"""A point that is sent before its record: for programs that name the end of work before it is submitted."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import NoReturn

from ipcsync._closing import Closing
from ipcsync._locks import CallLock, attempt
from ipcsync._native import fork
from ipcsync.client._twins import several
from ipcsync.client.event import SharedEvent
from ipcsync.client.point import Point
from ipcsync.errors import EventClosed
from ipcsync.typing import StreamLike

# One record, and room to repeat one that an exception interrupted: see `Engine._make_record`.
RING = 2


class Reservation(Closing):
    """One record that this session will make, on a stream that is not known yet. Made by `Client.reserve`.

    Its point may be sent at once. A wait for it blocks until the record is made, or goes `ahead` of it; it never ends
    because nothing was recorded so far. It raises RecorderLost if the reservation is closed, or its process dies,
    before the record.

    A context manager that closes it; close it once the record is made. A reservation that is dropped without being
    closed is closed with a ResourceWarning.
    """

    def __init__(self, event: SharedEvent) -> None:
        self._event = event
        self._point = event.at(1)
        self._lock = CallLock()
        self._finalizer = weakref.finalize(self, _drop, event)
        self._finalizer.atexit = False

    @property
    def point(self) -> Point:
        """The point of the record, made already or not."""
        return self._point

    def record(self, stream: StreamLike | None = None, *, after: Iterable[Point] = ()) -> Point:
        """Record after all work submitted to `stream` so far, and after the points `after`; the reserved point.

        Only once: another record, also of another thread while one is under way, raises EventClosed, and so does a
        closed reservation. Raises as `SharedEvent.record`; if nothing was recorded, it can be called again. On the
        timeline engine a record that an exception ended may have been made: a further one raises EventClosed.
        """
        self._event._check()
        points = several(after, "after", "points")  # before the lock: what gives them may call anything
        point = attempt(self._lock, self._record, stream, points)
        if point is None:
            raise EventClosed(
                f"a record of {self._event._engine.label}, a reservation, is under way: it allows one record"
            )
        return point

    def _record(self, stream: StreamLike | None, after: Sequence[Point]) -> Point:
        engine = self._event._engine
        if engine._recorded:
            raise EventClosed(
                f"this reservation ({engine.label}) was recorded: it is for one record; reserve a further one"
            )
        if engine.may_be_recorded:
            raise EventClosed(
                f"an exception ended the record of this reservation ({engine.label}), and the GPU may have it: "
                "its point then covers what was submitted before that; close it, and reserve a further one"
            )
        self._event.record(stream, after=after)
        return self._point

    def close(self) -> None:
        """End it: if it was not recorded, waiters for its point get RecorderLost. A second call does nothing.

        Its place with the coordinator is free once what was recorded is complete and no process is attached any more.
        """
        self._event.close()
        self._finalizer.detach()  # behind it: an exception in between leaves the rest to the finalizer

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reservation does not travel: send bytes(reservation.point)")

    def __repr__(self) -> str:
        if self._event._engine.is_closed or fork.is_in_bad_fork():
            return f"<ipcsync.Reservation slot {self._event._engine.slot} closed>"
        state = "recorded" if self._event._engine._recorded else "not recorded"
        return f"<ipcsync.Reservation slot {self._event._engine.slot} {state}>"


def _drop(event: SharedEvent) -> None:
    """The finalizer of a reservation that was not closed."""
    if fork.is_in_bad_fork() or event._engine.is_closed:
        return
    event._session.abandon([event._attached])  # the session's owner tells the coordinator
    warnings.warn(
        f"a reservation ({event._engine.label}) was dropped before it was closed", ResourceWarning, stacklevel=2
    )
