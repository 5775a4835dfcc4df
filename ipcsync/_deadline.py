"""Until when a wait lasts, on the one clock that all waits use."""

from __future__ import annotations

import time
from collections.abc import Iterator

FOREVER = 1 << 62
FULL_NS = 100_000_000  # for which a record waits for room before that is logged
_LONGEST_S = 1e9  # 31 years: also what no float can hold is a timeout


def deadline_of(timeout: float | None, began: int = 0) -> int:
    """CLOCK_MONOTONIC in ns when `timeout` seconds are over, from `began` or now; raises as `bounded`."""
    if timeout is None:
        return FOREVER
    return (began or time.monotonic_ns()) + int(bounded(timeout, ", or None") * 1e9)


def bounded(timeout: float, or_else: str = "") -> float:
    """A timeout of any type of number as a float, and no longer than a wait may be.

    ValueError if it is negative or NaN, TypeError for a bool and for what is no number.
    """
    try:
        if isinstance(timeout, bool):
            raise TypeError
        if timeout >= 0:
            return float(min(timeout, _LONGEST_S))
    except TypeError:
        raise TypeError(f"timeout is a number of seconds from 0 up{or_else}, not {timeout!r}") from None
    raise ValueError(f"timeout is a number of seconds from 0 up{or_else}, not {timeout!r}")


def left_of(deadline: int) -> float:
    """The seconds until a deadline of `deadline_of`, 0 once it is over."""
    return max(0.0, (deadline - time.monotonic_ns()) / 1e9)


def pauses(timeout: float | None, first_s: float, longest_s: float) -> Iterator[float]:
    """Seconds to sleep behind each look that fits into `timeout`: twice as many, up to `longest_s`; at last 0."""
    deadline, pause_s = deadline_of(timeout), first_s
    while left_s := left_of(deadline):
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, longest_s)
    yield 0.0
