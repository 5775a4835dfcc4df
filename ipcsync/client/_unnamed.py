"""A client's unnamed events: one for each stream that it records on, reused as streams come and go."""

from __future__ import annotations

import threading
from typing import TypeAlias

from ipcsync._deadline import deadline_of, left_of
from ipcsync._locks import CallLock, take
from ipcsync._session.references import Opening
from ipcsync._session.session import Session
from ipcsync.client._opening import OpenOptions, open_events
from ipcsync.client.event import SharedEvent
from ipcsync.errors import EventClosed, QuotaExceeded, Reentered, WaitTimeout
from ipcsync.typing import EngineChoice

StreamKey: TypeAlias = tuple[int, int, int, EngineChoice]
"""A stream's address; the thread's id if the address means another stream on each, else 0; device; engine."""

_MANY = 32
_LOOKS = 16  # how many events are looked at before another one is made


class UnnamedEvents:
    """The events behind `Client.record`: `events`, by stream."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.events: dict[StreamKey, SharedEvent] = {}
        self._look_from = 0
        self._lock = CallLock()

    def take(self, key: StreamKey, depth: int, timeout: float | None = None) -> SharedEvent:
        """The event of a stream: its own, another's whose work is complete, or a new one.

        `timeout` is that of a request, the session's by default.
        """
        lock = self._lock
        if lock.is_mine() and lock.is_held_below():
            raise Reentered("this client's first record on a stream is under way, and this first record interrupts it")
        self._session.check_not_below("a first record on a stream")
        seconds, openings = self._session.timeout if timeout is None else timeout, [Opening()]
        deadline = deadline_of(seconds)
        try:
            if not take(lock, min(seconds, threading.TIMEOUT_MAX)):
                raise WaitTimeout(
                    f"other threads' first records on streams took all of the {seconds} s", timeout=seconds
                )
            with lock:
                lock.release()
                return self._take(key, depth, openings, deadline)
        except BaseException:
            lock.unwind()
            if key not in self.events:
                self._session.abandon(openings)
            raise

    def _take(self, key: StreamKey, depth: int, openings: list[Opening], deadline: int) -> SharedEvent:
        event = self.events.get(key)
        if event is not None and event.is_lost:
            self._drop(key, event)
            event = None
        if event is None and len(self.events) >= _MANY:
            event = self._take_over(key, depth)
        return event if event is not None else self._open(key, openings, depth, left_of(deadline))

    def _open(self, key: StreamKey, openings: list[Opening], depth: int, left: float) -> SharedEvent:
        try:
            options = OpenOptions(recorder=True, device=key[2], engine=key[3], depth=depth, timeout=left)
            (event,) = open_events(self._session, [""], options, openings)
        except QuotaExceeded:
            idle = self._take_over(key, depth, looks=len(self.events))
            if idle is None:
                raise
            return idle
        self.events[key] = event
        return event

    def _drop(self, key: StreamKey, event: SharedEvent) -> None:
        event.close()  # first: an exception in between must leave it to be found again
        self.events.pop(key, None)

    def _take_over(self, key: StreamKey, depth: int, looks: int = _LOOKS) -> SharedEvent | None:
        """An event of the same kind whose work is complete, taken from its stream; None if there is none.

        Its points stay valid: a generation is complete once all before it are, on whichever stream it was recorded. The
        other stream's next record gets an event as a new stream does. Lost events are closed: nobody may ever record on
        their streams again.
        """
        others = list(self.events)
        # From another place each time, so that busy ones are not looked at again at once.
        self._look_from = (self._look_from + looks) % max(len(others), 1)
        for other in others[self._look_from :] + others[: self._look_from]:
            event = self.events[other]
            if event.is_lost:
                event._opening.close(wait=False)  # first, as in `_drop`
                self.events.pop(other, None)
                continue
            if not looks:
                break
            looks -= 1
            if other[2:] == key[2:] and _is_idle(event) and (event.depth == depth or event.engine == "timeline"):
                self.events[key] = event
                del self.events[other]
                return event
        return None


def _is_idle(event: SharedEvent) -> bool:
    """Whether all its records are complete, and more are possible."""
    try:
        return not event.is_lost and event.state == "open" and event.completed == event.generation
    except EventClosed:
        return False
