"""The driver of real GPUs: `cuda.bindings.driver`, and a wait with a deadline, which CUDA does not have.

In a process that has NumPy, the calls of the hot path are those of `cuda_v2`, if the binding has what these need.
"""

from __future__ import annotations

import logging
import sys
import time

from cuda.bindings import driver as _bindings
from cuda.bindings.driver import *  # noqa: F403 - this module is that one, plus the bounded wait

from ipcsync._drivers.results import unwrap
from ipcsync.errors import ForkedProcessError

_SPIN_NS = 20_000
_NOT_READY = _bindings.CUresult.CUDA_ERROR_NOT_READY
_SUCCESS = _bindings.CUresult.CUDA_SUCCESS
_NOT_INITIALIZED = _bindings.CUresult.CUDA_ERROR_NOT_INITIALIZED

log = logging.getLogger("ipcsync")

if sys.modules.get("numpy"):  # else `_v2` would import it, where it is installed: 50 ms and 17 MB for the two
    try:
        from ipcsync._drivers.cuda_v2 import *  # noqa: F403
    except Exception as error:  # noqa: BLE001 - an older binding, or a newer one: the underscore promises nothing
        log.debug("driver calls are those of cuda.bindings.driver: %s: %s", type(error).__name__, error)


def probe() -> str | None:
    """Initialise the CUDA driver; returns why it does not work here, or None if it does.

    Raises ForkedProcessError if any library used CUDA before a fork: then it works in the parent alone.
    """
    try:
        (code,) = _bindings.cuInit(0)
    except Exception as error:  # noqa: BLE001 - the binding raises its own types, one a missing library
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if code == _NOT_INITIALIZED:
        raise ForkedProcessError
    return None if code == _SUCCESS else f"cuInit: {code.name} ({int(code)})"


def wait_event(event: object, deadline_ns: int) -> bool:
    """Query for about 20 µs, then with sleeps of up to 1 ms, until `event` is complete or `deadline_ns` has passed."""
    query = _bindings.cuEventQuery
    start = time.monotonic_ns()
    pause = 10e-6
    while True:
        result = query(event)
        if result[0] is not _NOT_READY and result[0] != _NOT_READY:
            unwrap(result, "cuEventQuery")
            return True
        now = time.monotonic_ns()
        if now >= deadline_ns:
            return False
        if now - start > _SPIN_NS:
            time.sleep(min(pause, (deadline_ns - now) / 1e9))
            pause = min(pause * 1.5, 1e-3)
