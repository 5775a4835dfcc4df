"""The streams that ipcsync has made and not destroyed yet, for calls that concern all of them.

A finalizer destroys a stream, and it may run on any thread, between any two steps. So each use of the list holds its
lock, and a stream that is dropped meanwhile is destroyed when the lock is free again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ipcsync._drivers import DriverObject
from ipcsync._locks import CallLock, attempt, under
from ipcsync._native import release

T = TypeVar("T")


class _Living:
    """Handles and ordinals, by address."""

    def __init__(self) -> None:
        self._lock = CallLock()
        self._streams: dict[int, tuple[DriverObject, int]] = {}
        self._dropped: deque[DriverObject] = deque()

    def add(self, handle: DriverObject, ordinal: int) -> None:
        """List a stream that was made."""
        self._streams[int(handle)] = (handle, ordinal)

    def destroy(self, handle: DriverObject) -> None:
        """Destroy a stream that was made here, now or as soon as the list is not in use. Raises nothing."""
        self._streams.pop(int(handle), None)  # first, so that it is not found in the list from now on
        self._dropped.append(handle)
        attempt(self._lock, self._destroy_dropped)

    def _destroy_dropped(self) -> None:
        while self._dropped:
            release.destroy("cuStreamDestroy", self._dropped.popleft())

    def use(self, function: Callable[[list[tuple[DriverObject, int]]], T]) -> T:
        """Call `function` with (handle, ordinal) of each stream; none of them is destroyed before it returns."""
        try:
            return under(self._lock, lambda: function(list(self._streams.values())))
        finally:
            attempt(self._lock, self._destroy_dropped)


_living = _Living()
add, destroy, use = _living.add, _living.destroy, _living.use
