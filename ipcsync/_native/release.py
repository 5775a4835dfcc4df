"""Destroying driver objects in finalizers, which run at any instruction, and must neither raise nor hang.

A driver's call that destroys takes no lock of Python's and waits for no work, so a finalizer makes it at once, also one
that the garbage collector runs.
"""

from __future__ import annotations

import logging
import sys

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._native import fork

log = logging.getLogger("ipcsync")


def destroy(call: str, handle: DriverObject) -> None:
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
