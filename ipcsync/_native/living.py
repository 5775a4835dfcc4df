"""Destroying driver objects in finalizers.

A finalizer runs on any thread, at any instruction, and must neither raise nor hang. A driver's call that destroys takes
no lock of Python's and waits for no work, so a finalizer makes it at once, also one that the garbage collector runs.
"""

from __future__ import annotations

import logging
import sys

from ipcsync import _drivers
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._native import fork

log = logging.getLogger("ipcsync")


class Owner:
    """Destroys `handle` by the driver function named `call` when its last reference goes; never raises.

    It does nothing in a forked child, whose parent still has the handle, nor while the interpreter exits: the driver
    releases everything with the process, and must not be waited for by then.
    """

    _call = ""  # until it has the handle: an exception may end the constructor anywhere

    def __init__(self, call: str, handle: DriverObject) -> None:
        self._handle = handle
        self._call = call

    def __del__(self) -> None:
        if not self._call or sys.is_finalizing() or fork.is_in_bad_fork():
            return
        try:
            unwrap(getattr(_drivers.load(), self._call)(self._handle), self._call)
        except Exception:
            # The context may be gone already, and a finalizer cannot raise.
            log.debug("%s of %#x failed", self._call, int(self._handle), exc_info=True)
