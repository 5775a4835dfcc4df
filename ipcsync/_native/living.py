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


_lock = CallLock()
_streams: dict[int, tuple[DriverObject, int]] = {}  # handles and ordinals, by address
_dropped: deque[DriverObject] = deque()


def add(handle: DriverObject, ordinal: int) -> None:
    """List a stream that was made."""
    _streams[int(handle)] = (handle, ordinal)


def destroy(handle: DriverObject) -> None:
    """Destroy a stream that was made here, now or as soon as the list is not in use. Raises nothing."""
    _streams.pop(int(handle), None)  # first, so that it is not found in the list from now on
    _dropped.append(handle)
    attempt(_lock, _destroy_dropped)


def _destroy_dropped() -> None:
    while _dropped:
        release.destroy("cuStreamDestroy", _dropped.popleft())


def use(function: Callable[[list[tuple[DriverObject, int]]], T]) -> T:
    """Call `function` with (handle, ordinal) of each stream; none of them is destroyed before it returns."""
    try:
        return under(_lock, lambda: function(list(_streams.values())))
    finally:
        attempt(_lock, _destroy_dropped)
