"""One wait for many points, for example of all readers of a buffer, where dead readers may count as done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

from ipcsync._deadline import deadline_of, left_of
from ipcsync.client.point import Point
from ipcsync.errors import RecorderLost, WaitTimeout
from ipcsync.typing import StreamLike

_SLICE_S = 0.05


def synchronize_all(
    points: Iterable[Point], *, timeout: float | None = None, lost: Literal["raise", "skip"] = "raise"
) -> list[Point]:
    """Block until every point is complete, at most `timeout` seconds in all (None: as long as that can be).

    `lost="raise"` raises RecorderLost as soon as one of them can never be complete, whichever it is; `lost="skip"`
    leaves such points out. Returns the points that were left out, in order. Their recorder's work may still be under
    way: see `RecorderLost.over` before you reuse its memory.

    Raises as `Point.synchronize`, WaitTimeout for the first that is not complete, ValueError for another `lost`
    or a timeout that is negative or NaN.
    """
    return _each(points, lambda point, seconds: point.synchronize(seconds), timeout, lost)


def wait_all(
    points: Iterable[Point],
    stream: StreamLike | None = None,
    *,
    timeout: float | None = None,
    lost: Literal["raise", "skip"] = "raise",
) -> list[Point]:
    """Have all work submitted to `stream` from now on wait for every point.

    The host blocks only until each record is made, at most `timeout` seconds in all. `lost` and the result are as in
    `synchronize_all`. If it raises, the stream may wait for some of the points already. If a recorder dies once the
    driver has the wait, also with `lost="skip"`, the stream waits for lost work: its next record raises
    RecorderLost, until `Client.resume`. Wait for such points on the host instead, by `synchronize_all`.

    Raises as `Point.wait`, WaitTimeout for the first that is not recorded, ValueError for another `lost` or a
    timeout that is negative or NaN.
    """
    return _each(points, lambda point, seconds: point.wait(stream, timeout=seconds), timeout, lost)


def _each(
    points: Iterable[Point], wait: Callable[[Point, float], object], timeout: float | None, lost: str
) -> list[Point]:
    if lost not in ("raise", "skip"):
        raise ValueError(f"lost is 'raise' or 'skip', but got {lost!r}")
    deadline = deadline_of(timeout)
    waiting = list(points)
    for point in waiting:
        if not isinstance(point, Point):
            hint = ": an asynchronous client has methods of the same name"
            name = type(point).__name__
            raise TypeError(f"points are ipcsync.Points, but got {name}{hint if name == 'AsyncPoint' else ''}")
    asked, skipped = waiting.copy(), set[int]()  # by their ids

    def ends(point: Point, ask: Callable[[], bool]) -> bool:
        try:
            return ask()
        except RecorderLost:
            if lost == "raise":
                raise
            skipped.add(id(point))
            return True

    while waiting:
        first = waiting[0]
        left_s = left_of(deadline)
        if ends(first, partial(_within, wait, first, min(_SLICE_S, left_s), timeout, is_last=left_s <= _SLICE_S)):
            del waiting[0]
        else:  # another may be lost while the first is still to come
            waiting[1:] = _others(waiting[1:], ends, deadline)
    return [point for point in asked if id(point) in skipped]


def _within(
    wait: Callable[[Point, float], object], point: Point, seconds: float, timeout: float | None, *, is_last: bool
) -> bool:
    """Whether the wait ended within `seconds`; raises its WaitTimeout if there is no time for another one."""
    try:
        wait(point, seconds)
    except WaitTimeout as error:
        if not is_last:
            return False
        text = str(error).replace(f"within {seconds} s", f"within {timeout} s")
        raise WaitTimeout(text, event=error.event, generation=error.generation, timeout=timeout) from None
    return True


def _others(points: list[Point], ends: Callable[[Point, Callable[[], bool]], bool], deadline_ns: int) -> list[Point]:
    """Those that are not over. Once the coordinator is silent, no further point is attached to in this round."""
    left, answers = [], True
    for point in points:
        if point._attached is not None or (answers and left_of(deadline_ns)):
            if ends(point, partial(_is_lost, point, deadline_ns)):
                continue
            answers = answers and point._attached is not None
        left.append(point)
    return left


def _is_lost(point: Point, deadline_ns: int) -> bool:
    """Raise if the point can never be complete; else False: that it may still be recorded does not end the wait."""
    try:
        point._bound(min(_SLICE_S, left_of(deadline_ns)))
    except WaitTimeout:
        return False  # its first use, and the coordinator does not answer yet
    error = point.exception()
    if error is not None:
        raise error
    return False
