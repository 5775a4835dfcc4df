"""How the host waits for this process's own work, which may wait for other processes.

The driver's wait cannot be bounded, and a stream that waits for the work of a dead process may never go on. So work
behind such waits is waited for in slices, with looks at these waits in between; all other work in the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ipcsync import _drivers
from ipcsync._deadline import deadline_of
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._native.capture import relaxed_call
from ipcsync.errors import WaitTimeout

_SLICE_NS = 50_000_000


class Behind(Protocol):
    """The waits for other processes that some work depends on."""

    def are_over(self, what: str) -> bool:
        """Whether all of them are known good. RecorderLost if `what` may stand still behind one for ever."""

    def __str__(self) -> str:
        """Those that are not over, in a text; empty if there are none."""


def _behind_nothing(handle: DriverObject | None, ordinal: int) -> Behind | None:  # noqa: ARG001 - the engines'
    return None


behind: Callable[[DriverObject | None, int], Behind | None] = _behind_nothing
"""The waits that the work submitted so far to a stream of a device depends on; for None, to all its streams.

The engines, which know it, set it.
"""


def await_event(event: DriverObject, what: str, timeout: float | None, waits: Behind | None) -> None:
    """Block until `event`, recorded behind `what`, is complete, at most `timeout` seconds.

    Raises WaitTimeout, and RecorderLost if `what` may stand still for ever behind one of `waits`.
    """
    deadline, until = deadline_of(timeout), 0
    while not relaxed_call(_drivers.wait_event, event, until):
        if waits is not None and waits.are_over(what):
            waits = None
        now = time.monotonic_ns()
        if now >= deadline:
            left = "" if waits is None else str(waits)
            reason = f": it stands behind {left}" if left else ""
            raise WaitTimeout(f"{what} was not done within {timeout} s{reason}", timeout=timeout)
        if waits is None and timeout is None:
            unwrap(relaxed_call(_drivers.load().cuEventSynchronize, event), "cuEventSynchronize")
            return
        until = min(deadline, now + _SLICE_NS)
