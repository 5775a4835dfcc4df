"""The waits that this process has queued, by the users' streams; the lists themselves are the compiled core's.

Work of this process depends on some of them. Of a lost one, the coordinator releases the streams on the `timeline`
engine. On the `event` engine a driver may never let them go on, and then no wait in the driver for such a stream ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from ipcsync._drivers import STREAM_NON_BLOCKING, DriverObject
from ipcsync._engines.core import Wait, add, drop, latest, of
from ipcsync._engines.loss import Loss
from ipcsync._native import context, fork
from ipcsync._native.context import OnDevice, call, refuse_capturing
from ipcsync._native.stream import wrap
from ipcsync.errors import Reentered, StreamCapturing

__all__ = ["add", "await_passed", "drop", "latest", "list_of", "log_at_exit", "lost_on", "of"]

log = logging.getLogger("ipcsync")

_PAUSE_S = 0.001


def lost_on(handle: DriverObject, ordinal: int) -> list[Wait]:
    """The lost waits that were queued on a stream of device `ordinal`."""
    return [wait for wait in of(list_of(handle, ordinal)) if isinstance(wait.known_outcome(), Loss)]


def list_of(handle: DriverObject, ordinal: int, what: str = "resume") -> int:
    """The key of the list of a stream of device `ordinal`. StreamCapturing, for `what`, if it captures.

    The legacy default stream and the blocking streams of its device wait for each other, so they share one list.
    """
    with OnDevice(ordinal) as inside, inside:
        refuse_capturing(handle, what)  # asking for the id would invalidate the capture
        stream_id, flags = int(call("cuStreamGetId", handle)), int(call("cuStreamGetFlags", handle))
        return stream_id if flags & STREAM_NON_BLOCKING else -1 - ordinal


def await_passed(
    waits: Iterable[Wait], handle: DriverObject, ordinal: int, deadline_ns: int, check: Callable[[], None]
) -> bool:
    """Block until a stream has finished all that is queued there now; False if `deadline_ns` passes before.

    And until every other one that has queued one of `waits` is past it: blocking streams do not wait for each other.
    """
    with OnDevice(ordinal) as inside, inside:
        refuse_capturing(handle, "resume")  # the event would go into the graph, and a question about it spoil that
        mine = int(call("cuStreamGetId", handle))
    stream = wrap(handle, ordinal)
    # First: a stream that stands may be full; the driver takes in no event then, nor returns. An idle one is past all.
    waits = [wait for wait in waits if wait.stream != mine or wait.view.kind == "event"]
    while not all(wait.has_passed() or (wait.stream == mine and stream.query()) for wait in waits):
        check()
        stream.query()  # which raises in a context that is broken
        if time.monotonic_ns() >= deadline_ns:
            return False
        time.sleep(_PAUSE_S)
    event = stream.record_event()
    return context.await_event(event.cuda_event, deadline_ns, check)


# --- what waits on the host for this process's own work ---------------------------------------------------------------


def _look_at(waits: list[Wait], what: str) -> str:
    for wait in waits:
        outcome = wait.resolved()
        if isinstance(outcome, Loss) and _holds_up(wait, outcome):
            raise outcome.error_behind(wait.label, what, wait.view.name, wait.generation)
    return ", ".join(sorted({wait.label for wait in waits if wait.known_outcome() is not True}))


def _holds_up(wait: Wait, loss: Loss) -> bool:
    """Whether the wait's stream may stand still for ever, by this loss: nobody releases it; asks the driver.

    This session's own record ends, unless it depends on something itself, which may be lost.
    """
    is_own = wait.view.is_recorder and loss.cause != "behind" and not (wait.view.chain and wait.view.chain.is_needed)
    if wait.view.kind != "event" or not wait.stream or is_own:
        return False
    try:
        return not wait.has_passed()
    except Reentered:  # within a call of this thread for the same event, which may end or not
        return False


def behind(handle: DriverObject | None, ordinal: int) -> context.Behind | None:
    """The waits queued so far on a stream of device `ordinal`, for None on all its streams; None if there are none."""
    if not latest(None):
        return None
    waits: list[Wait] = []
    if handle is None:
        waits = [wait for wait in latest(None) if wait.ordinal == ordinal]
    else:
        with suppress(StreamCapturing):  # what goes into a graph does not run now
            waits = latest(list_of(handle, ordinal))
    return partial(_look_at, waits) if waits else None


def log_at_exit() -> None:
    """Log which streams stand still for ever. The exit may do so too, in the driver."""
    stuck: dict[str, set[int]] = {}
    if fork.is_in_bad_fork():
        return
    for wait in latest(None):
        outcome = wait.known_outcome()
        if isinstance(outcome, Loss) and _holds_up(wait, outcome):
            stuck.setdefault(outcome.behind(wait.label).root, set()).add(wait.stream)
    for what, streams in stuck.items():
        ids = ", ".join(map(str, sorted(streams)))
        log.warning(
            "at exit, the stream with the id %s stands still behind %s; whether the exit waits for it is the driver's",
            ids,
            what,
        )


context.behind = behind
