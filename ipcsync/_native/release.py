"""Giving driver objects back from finalizers, which run anywhere, and must neither raise nor hang.

The garbage collector may start in the middle of any Python code, that of the host driver with a lock held included; a
finalizer that calls the driver from there would wait for its own thread. So what the collector finalizes is put by, and
given back at this process's next use of the driver. What goes with its last reference is given back at once.
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
"""What the collector finalized: the driver function's name, and the handle."""


# In C, both of them: what a signal's handler raises within a hook of the collector's in Python is lost.
gc.callbacks.extend((_phases.pop, _phases.__setitem__))
_phases.update(start=None, stop=None)


def destroy(call: str, handle: DriverObject) -> None:
    """Give `handle` back by the driver function named `call`. Nothing is raised.

    Nothing is done in a forked child, whose parent still has it, nor while the interpreter exits: the driver lets go of
    everything with the process, and must not be waited for by then.
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
        # The context may be gone already; a finalizer has nobody to tell.
        log.debug("%s of %#x failed", call, int(handle), exc_info=True)


def destroy_postponed() -> None:
    """Give back what the collector left."""
    while postponed:
        try:
            call, handle = postponed.popleft()
        except IndexError:  # another thread took the last one
            return
        destroy(call, handle)
