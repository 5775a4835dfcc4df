"""How the host waits for this process's own work, which may wait for other processes.

The driver's wait cannot be bounded, and a stream that waits for the work of a dead process may never go on. So work
behind such waits is waited for in slices, with looks at these waits in between; all other work in the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ipcsync import _drivers
from ipcsync._drivers import DriverObject
from ipcsync._native.capture import relaxed_call

_SLICE_NS = 50_000_000


class Behind(Protocol):
    """The waits for other processes that some work depends on."""

    def check(self, what: str) -> None:
        """RecorderLost if `what` may stand still behind one for ever."""

    def __str__(self) -> str:
        """Those that are not over, in a text; empty if there are none."""


def _behind_nothing(handle: DriverObject | None, ordinal: int) -> Behind | None:  # noqa: ARG001 - the engines'
    return None


behind: Callable[[DriverObject | None, int], Behind | None] = _behind_nothing
"""The waits that the work submitted so far to a stream of a device depends on; for None, to all its streams.

The engines, which know it, set it.
"""


def await_event(event: DriverObject, deadline_ns: int, check: Callable[[], object]) -> bool:
    """Block until `event` is complete, with a `check` in each slice; False if `deadline_ns` passes before."""
    until = 0
    while not relaxed_call(_drivers.wait_event, event, until):
        check()
        now = time.monotonic_ns()
        if now >= deadline_ns:
            return False
        until = min(deadline_ns, now + _SLICE_NS)
    return True
