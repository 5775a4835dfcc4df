"""Destroying driver objects in finalizers; and the streams that ipcsync has made, for calls that concern all of them.

A finalizer runs on any thread, at any instruction, and must neither raise nor hang. A driver's call that destroys takes
no lock of Python's and waits for no work, so a finalizer makes it at once, also one that the garbage collector runs.
But each use of the list of streams holds its lock, and a stream that is dropped meanwhile is destroyed when the lock is
free again.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._locks import CallLock, attempt, under
from ipcsync._native import fork

T = TypeVar("T")

log = logging.getLogger("ipcsync")

_lock = CallLock()
_streams: dict[int, tuple[DriverObject, int]] = {}  # handles and ordinals, by address
_dropped: deque[DriverObject] = deque()


def destroy_object(call: str, handle: DriverObject) -> None:
    """Destroy `handle` by the driver function named `call`; never raises.

    Does nothing in a forked child, whose parent still has the handle, nor while the interpreter exits: the driver
    releases everything with the process, and must not be waited for by then.
    """
    if sys.is_finalizing() or fork.is_in_bad_fork():
        return
    try:
        unwrap(getattr(_drivers.load(), call)(handle), call)
    except Exception:
        # The context may be gone already, and a finalizer cannot raise.
        log.debug("%s of %#x failed", call, int(handle), exc_info=True)


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
        destroy_object("cuStreamDestroy", _dropped.popleft())


def use(function: Callable[[list[tuple[DriverObject, int]]], T]) -> T:
    """Call `function` with (handle, ordinal) of each stream; none of them is destroyed before it returns."""
    try:
        return under(_lock, lambda: function(list(_streams.values())))
    finally:
        attempt(_lock, _destroy_dropped)
