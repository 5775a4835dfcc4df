"""Locks of a call: they are free once it has ended, also if an exception of a signal's handler ended it.

The garbage collector or a signal's handler may call any function of this package in the middle of any other one. So the
locks are reentrant: a call within one of its own thread that has the lock just runs. And who waits in such a call for
what another thread has does not wait for long, since that one may wait for it.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock as CallLock
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar, cast

from ipcsync.errors import Reentered

__all__ = ["CallLock", "attempt", "is_mine", "know_turns", "outer", "under", "under_within"]

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_turns: list[Callable[[], bool]] = []  # of the compiled core, which is imported later: whether this thread has one
_PATIENCE_S = 0.5  # of a call within one that has a lock: nobody has a lock for so long who waits for nothing

is_mine: Callable[[CallLock], bool] = CallLock._is_owned  # type: ignore[attr-defined] # noqa: SLF001 - as Condition
"""Whether the calling thread holds a lock."""

outer = CallLock()
"""It is taken before all others and held while functions of users run, which may wait for any other lock."""


def under(lock: CallLock, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args)` with the lock held; within a call that holds it, it just runs. Raises Reentered as `_take`."""
    return cast("T", under_within(lock, -1, function, *args, **kwargs))


def under_within(
    lock: CallLock, seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """As `under`; but None, and nothing is done, if another thread keeps the lock for `seconds` (below 0: for ever)."""
    if is_mine(lock):
        return function(*args, **kwargs)
    # A handler runs at the end of any call, so what raises may come while the lock is taken, or not. Whether it is, is
    # asked in the same call that releases it, all in C. Before that call, Python from 3.11 on runs no handler.
    release = map(CallLock.release, filter(is_mine, (lock,)))
    try:
        return function(*args, **kwargs) if _take(lock, seconds) else None
    finally:
        any(release)


def attempt(lock: CallLock, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """As `under`; but None, and nothing is done, while another thread or a call below this one has the lock."""
    return None if is_mine(lock) else under_within(lock, 0, function, *args, **kwargs)


def _take(lock: CallLock, seconds: float) -> bool:
    """Acquire the lock, for at most `seconds` (below 0: for ever); False if that was not enough.

    A finalizer's or a signal handler's call, within a call that has a lock, waits half a second at most, then raises
    Reentered: who has this lock may wait for that one.
    """
    if lock.acquire(False) or lock.acquire(timeout=_PATIENCE_S if seconds < 0 else min(seconds, _PATIENCE_S)):
        return True
    if 0 <= seconds <= _PATIENCE_S:
        return False
    if _interrupts_a_holder(sys._getframe(2)):  # noqa: SLF001 - the one way to it
        raise Reentered(
            "this call interrupts another one of its thread, which has a lock, and waits for one that another thread "
            f"has had for {_PATIENCE_S:g} s"
        )
    return lock.acquire(timeout=-1 if seconds < 0 else seconds - _PATIENCE_S)


def know_turns(has_turn: Callable[[], bool]) -> None:
    """How to learn whether this thread is in a compiled call that keeps others from the same event."""
    _turns.append(has_turn)


def _interrupts_a_holder(frame: FrameType | None) -> bool:
    """Whether a call of this package that has a lock or a turn runs below another frame, from `frame` down."""
    has_turn = any(asked() for asked in _turns)
    is_below = False
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_name == "__del__":
            is_below = True
        elif is_below and (has_turn or _holds(frame)):
            return True
        frame = frame.f_back
    return False


def _holds(frame: FrameType) -> bool:
    if frame.f_code is not under_within.__code__:
        return False
    lock = frame.f_locals["lock"]
    return is_mine(lock) and lock is not outer
