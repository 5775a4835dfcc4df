"""How the host waits for this process's own work, which may wait for other processes.

The driver's wait cannot be bounded, and a stream that waits for the work of a dead process may never go on. So work
behind such waits is waited for in slices, with looks at these waits in between; all other work in the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ipcsync import _drivers
from ipcsync._drivers import ERROR_NOT_READY, SUCCESS, DriverObject, unwrap
from ipcsync._native.context import relaxed_call

_CHECK_NS = 50_000_000
_SPIN_NS = 20_000


class Behind(Protocol):
    """The waits for other processes that some work depends on."""

    def check(self, what: str) -> None:
        """RecorderLost if `what` may stand still behind one for ever."""

    def __str__(self) -> str:
        """Those that are not over, in a text; empty if there are none."""


def _behind_nothing(_handle: DriverObject | None, _ordinal: int) -> Behind | None:
    return None


behind: Callable[[DriverObject | None, int], Behind | None] = _behind_nothing
"""The waits that the work submitted so far to a stream of a device depends on; for None, to all its streams.

The engines, which know it, set it.
"""


def is_complete(event: DriverObject) -> bool:
    """Whether the driver's `event` is complete; True too if it was never recorded."""
    result = relaxed_call(_drivers.load().cuEventQuery, event)
    if result[0] is not SUCCESS:
        if result[0] == ERROR_NOT_READY:
            return False
        unwrap(result, "cuEventQuery")
    return True


def await_event(event: DriverObject, deadline_ns: int, check: Callable[[], object] = bool) -> bool:
    """Query for about 20 µs, then with sleeps of up to 1 ms, until `event` is complete; CUDA has no such wait.

    `check` is called at first, and then every 50 ms. False if CLOCK_MONOTONIC passes `deadline_ns` before.
    """
    start, next_check, pause_s = time.monotonic_ns(), 0, 10e-6
    while True:
        if is_complete(event):
            return True
        now = time.monotonic_ns()
        if now >= min(next_check, deadline_ns):
            check()
            next_check = now + _CHECK_NS
        if now >= deadline_ns:
            return False
        if now - start > _SPIN_NS:
            time.sleep(min(pause_s, (deadline_ns - now) / 1e9))
            pause_s = min(pause_s * 1.5, 1e-3)
