"""Markers: an event of this process on each stream, recorded behind the last work that one use queued there.

The use's slot may be reused once they are complete. An exception may end a call between the work and its marker: the
stream is then in doubt until the marker is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from ipcsync._drivers import SUCCESS, DriverObject, unwrap
from ipcsync._drivers.constants import EVENT_DISABLE_TIMING
from ipcsync._engines.compiled import is_parked
from ipcsync._native.context import LEGACY, OnDevice
from ipcsync._shared import items_of

_MANY = 16


class Use(Protocol):
    """The part of a use that its markers need."""

    @property
    def unmarked_stream(self) -> int:
        """The id of a stream that may have work and no marker behind it; 0 if there is none."""

    def settle_unmarked(self) -> None:
        """That stream has a marker behind its work now."""

    def is_done(self, event: DriverObject) -> bool:
        """Whether an event is complete; asks the driver."""

    def unwrap(self, result: tuple[Any, ...], call: str) -> DriverObject:
        """The value of a driver's result; raises for a failure."""

    def keep_marker(self, stream: int, address: DriverObject) -> None:
        """Remember the marker of a stream; 0: it is about to be destroyed."""


class Markers:
    """The markers of one use, by stream id. All calls are made with the use's lock held."""

    def __init__(self, driver: DriverObject, use: Use) -> None:
        self._driver = driver
        self._reference = weakref.ref(use)  # weak, since the use holds this: a cycle would wait for the collector
        self._events: dict[int, Any] = {}
        self._ordinals: dict[int, int] = {}
        self.doubtful: dict[int, tuple[Any, int]] = {}
        """Handles and devices of streams, by id, on which an interrupted call may have queued work without a marker."""

    @property
    def _use(self) -> Use:
        use = self._reference()
        assert use is not None, "the markers are their use's, and called by it alone"
        return use

    def __len__(self) -> int:
        return len(self._events)

    def get(self, stream_id: int) -> DriverObject | None:
        """The stream's marker; None if it has none, or if that was found complete."""
        return self._events.get(stream_id)

    def ordinal_of(self, stream_id: int) -> int:
        """The device of a stream that has a marker; -1 for another one. Without the lock."""
        return self._ordinals.get(stream_id, -1)

    def add(self, handle: DriverObject, stream_id: int, ordinal: int) -> None:
        """Record the stream's marker behind the work just queued."""
        marker = self._events.get(stream_id)
        if marker is None:
            if len(self._events) >= _MANY:
                self.drop_complete()  # a program may make a stream for each piece of work
            with OnDevice(ordinal) as inside, inside:
                marker = unwrap(self._driver.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")
            self._ordinals[stream_id] = ordinal
            marker = self._events.setdefault(stream_id, marker)
            self._use.keep_marker(stream_id, marker)
        doubt, was_unmarked = self.doubtful.get(stream_id), self._use.unmarked_stream == stream_id
        result = self._driver.cuEventRecord(marker, handle)
        if result[0] is not SUCCESS:
            self._use.unwrap(result, "cuEventRecord")
        if doubt is not None and self.doubtful.get(stream_id) is doubt:  # a handler may have left a newer one
            self.doubtful.pop(stream_id, None)
        if was_unmarked:
            self._use.settle_unmarked()

    def add_doubtful(self) -> bool:
        """Record the markers that an exception prevented; whether every stream has its marker now."""
        for stream_id, (handle, ordinal) in items_of(self.doubtful):
            if int(handle) in LEGACY:
                return False  # the handle may mean another stream on this thread
            self.add(handle, stream_id, ordinal)
        return True

    def has_passed(self, stream_id: int) -> bool:
        """Whether the stream is past all that the use queued there; asks the driver."""
        marker = self._events.get(stream_id)
        return stream_id not in self.doubtful and (marker is None or self._use.is_done(marker))

    def give_pending(self, stream_ids: Iterable[int]) -> dict[int, Any]:
        """Of these streams' markers, those that are not complete; the caller destroys them."""
        found = {}
        for stream_id in stream_ids:
            marker = self._events.get(stream_id)
            if marker is not None and not self._use.is_done(marker):
                self._use.keep_marker(stream_id, 0)
                found[stream_id] = self._events.pop(stream_id)
                self._ordinals.pop(stream_id, None)
        return found

    def has_any_parked(self) -> bool:
        """Whether a thread is in the driver's wait for one of them, which may not be destroyed then."""
        return any(map(is_parked, list(self._events.values())))

    def drop_complete(self) -> bool:
        """Destroy those that are complete, unless their streams may have later work; whether none is left."""
        kept = {*self.doubtful, self._use.unmarked_stream}
        for stream_id, marker in items_of(self._events):
            if stream_id not in kept and self._use.is_done(marker) and not is_parked(marker):
                self._destroy(stream_id)
        return not self._events

    def destroy(self) -> None:
        """Destroy all, complete or not: CUDA keeps a pending event until it is complete."""
        for stream_id in list(self._events):
            self._destroy(stream_id)

    def _destroy(self, stream_id: int) -> None:
        # Forgotten first: an exception in between may leak an event, but never destroys one twice.
        self._use.keep_marker(stream_id, 0)
        marker = self._events.pop(stream_id)
        self._ordinals.pop(stream_id, None)
        unwrap(self._driver.cuEventDestroy(marker), "cuEventDestroy")
