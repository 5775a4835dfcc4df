"""Giving driver objects back from finalizers, which run anywhere, and must neither raise nor hang.

The garbage collector may start in the middle of any Python code, that of the host driver with a lock held included; a
finalizer that calls the driver from there would wait for its own thread. So what the collector finalizes is put by, and
given back at this process's next use of the driver. What goes with its last reference is given back at once.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections import deque
from typing import Any

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._native import fork

__all__ = ["destroy", "destroy_postponed", "postponed"]

log = logging.getLogger("ipcsync")

_collecting = 0  # the thread in which the garbage collector runs

postponed: deque[tuple[str, Any]] = deque()
"""What the collector finalized: the driver function's name, and the handle."""


def _watch(phase: str, _info: dict[str, int]) -> None:
    global _collecting  # noqa: PLW0603 - the collector is one for the whole process
    _collecting = threading.get_ident() if phase == "start" else 0


gc.callbacks.append(_watch)


def destroy(call: str, handle: DriverObject) -> None:
    """Give `handle` back by the driver function named `call`. Nothing is raised.

    Nothing is done in a forked child, whose parent still has it, nor while the interpreter exits: the driver lets go of
    everything with the process, and must not be waited for by then.
    """
    if sys.is_finalizing() or fork.is_in_bad_fork():
        return
    if _collecting and _collecting == threading.get_ident():
        postponed.append((call, handle))
        return
    try:
        unwrap(getattr(_drivers.load(), call)(handle), call)
    except Exception:
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
