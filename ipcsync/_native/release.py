"""Destroying driver objects in finalizers, which run at any instruction, and must neither raise nor hang.

The garbage collector may start within any Python code, also within the host driver's while it holds a lock: a finalizer
that then calls the driver would wait for its own thread. So handles that the collector finalizes are queued, and
destroyed at this process's next driver call. A handle that goes with its last reference is destroyed at once.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from typing import Any

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._native import fork

__all__ = ["destroy", "destroy_postponed", "postponed"]

log = logging.getLogger("ipcsync")

_NOT_PERMITTED = 800  # of the host driver: its lock is held by the call that the finalizer interrupts
_phases: dict[str, object] = {}  # the collector's, the last one last

postponed: deque[tuple[str, Any]] = deque()
"""Handles that the collector finalized: the driver function's name, and the handle."""


# Both are written in C: an exception of a signal's handler within a Python hook of the collector would be lost.
gc.callbacks.extend((_phases.pop, _phases.__setitem__))
_phases.update(start=None, stop=None)


def destroy(call: str, handle: DriverObject) -> None:
    """Destroy `handle` by the driver function named `call`; never raises.

    Does nothing in a forked child, whose parent still has the handle, nor while the interpreter exits: the driver
    releases everything with the process, and must not be waited for by then.
    """
    if sys.is_finalizing() or fork.is_in_bad_fork():
        return
    if next(reversed(_phases), "") == "start":  # the collector runs: here, or on another thread
        postponed.append((call, handle))
        return
    try:
        unwrap(getattr(_drivers.load(), call)(handle), call)
    except Exception as error:
        if getattr(error, "code", 0) == _NOT_PERMITTED:
            postponed.append((call, handle))
            return
        # The context may be gone already, and a finalizer cannot raise.
        log.debug("%s of %#x failed", call, int(handle), exc_info=True)


def destroy_postponed() -> None:
    """Destroy the queued handles."""
    while postponed:
        try:
            call, handle = postponed.popleft()
        except IndexError:  # another thread took the last one
            return
        destroy(call, handle)
