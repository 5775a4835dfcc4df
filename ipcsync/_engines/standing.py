"""What this process's own work stands behind, for who waits for that work on the host.

Of a lost wait, the coordinator releases the streams on the `timeline` engine. On the `event` engine a driver may never
let them go on, and then no wait in the driver for such a stream ends.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from ipcsync._drivers import DriverObject
from ipcsync._engines import queued
from ipcsync._engines.core import Wait
from ipcsync._engines.loss import Loss
from ipcsync._native import fork, host_wait
from ipcsync.errors import Reentered, StreamCapturing

log = logging.getLogger("ipcsync")


class Standing:
    """The queued waits that some work stands behind."""

    def __init__(self, waits: list[Wait]) -> None:
        self._waits = waits

    def are_over(self, what: str) -> bool:
        """Whether all of them are known good. RecorderLost if `what` may stand still behind one for ever."""
        is_over = True
        for wait in self._waits:
            fate = wait.judged()
            if isinstance(fate, Loss) and _holds_up(wait, fate):
                raise fate.error_behind(wait.label, what, wait.view.name, wait.generation)
            is_over = is_over and fate is True
        return is_over

    def __str__(self) -> str:
        """Those that are not over, in a text; empty if there are none."""
        return ", ".join(sorted({wait.label for wait in self._waits if wait.known() is not True}))


def _holds_up(wait: Wait, loss: Loss) -> bool:
    try:
        return wait.holds_up(loss)
    except Reentered:  # within a call of this thread for the same event, which may end or not
        return False


def behind(handle: DriverObject | None, ordinal: int) -> Standing | None:
    """The waits queued so far on a stream of device `ordinal`, for None on all its streams; None if there are none."""
    if not queued.has_any():
        return None
    waits: list[Wait] = []
    if handle is None:
        waits = [wait for wait in queued.latest(None) if wait.is_on(ordinal)]
    else:
        with suppress(StreamCapturing):  # what goes into a graph does not run now
            waits = queued.latest(queued.list_of(handle, ordinal))
    return Standing(waits) if waits else None


def tell_at_exit() -> None:
    """Log which streams stand still for ever. The exit may do so too, in the driver."""
    stuck: dict[str, set[int]] = {}
    if fork.is_in_bad_fork():
        return
    for wait in queued.latest(None):
        fate = wait.known()
        if isinstance(fate, Loss) and _holds_up(wait, fate):
            stuck.setdefault(fate.behind(wait.label).root, set()).add(wait.stream)
    for what, streams in stuck.items():
        ids = ", ".join(map(str, sorted(streams)))
        log.warning(
            "at exit, the stream with the id %s stands still behind %s; whether the exit waits for it is the driver's",
            ids,
            what,
        )


host_wait.behind = behind
