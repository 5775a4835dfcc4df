"""The fork guard: one place that knows whether this process was forked after ipcsync was used.

CUDA does not survive a fork, nor do sockets, threads and leases. So the first use of anything arms a mark that the
kernel wipes in every child, whoever called fork, and each call looks at it before it touches CUDA, a socket or the
board. A child forked before the first use has no mark to lose, and makes its own.

`check` is what hot paths call. It costs about 0.06 µs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from ipcsync._linux.fork import ForkMark
from ipcsync.errors import ForkedProcessError

__all__ = ["arm", "at_child", "check", "is_in_bad_fork", "mark"]

log = logging.getLogger("ipcsync")

_mark: ForkMark | None = None
_in_child: list[Callable[[], None]] = []


def check() -> None:
    """Return at once, or raise ForkedProcessError in a child (or its child) forked after first use."""
    if _mark is not None and _mark.in_child:
        raise ForkedProcessError


def arm() -> None:
    """Mark this process as one that has used ipcsync; the same check as `check` every later time.

    Raises ForkedProcessError in a child forked after first use.
    """
    global _mark  # noqa: PLW0603 - one mark a process, for its whole life
    if _mark is None:
        # No lock: of two threads that come first together the later mark wins, and either tells the truth. A lock could
        # be forked while it is held.
        _mark = ForkMark()
    elif _mark.in_child:
        raise ForkedProcessError


def mark() -> ForkMark:
    """The mark itself, armed: its one byte is 0 in a child forked after this. For hot paths that look themselves."""
    arm()
    assert _mark is not None
    return _mark


def is_in_bad_fork() -> bool:
    """Whether this process was forked after ipcsync was used, so that nothing of it works here. Touches no driver."""
    return _mark is not None and _mark.in_child


def at_child(function: Callable[[], None]) -> Callable[[], None]:
    """Have `function` called in each child that Python forks, to let go there of what only the parent may hold.

    It must touch neither CUDA nor a socket nor the board's words. A fork made by C code calls nothing. Returns a
    function that takes the request back; taking it back twice does nothing.
    """
    _in_child.append(function)

    def forget() -> None:
        if function in _in_child:
            _in_child.remove(function)

    return forget


def _run_in_child() -> None:
    for function in tuple(_in_child):
        try:
            function()
        except Exception:  # noqa: PERF203 - one that fails must not keep the others from letting go
            log.exception("%r failed in a forked child", function)


os.register_at_fork(after_in_child=_run_in_child)
