"""Locks that belong to a call: they are free once it has ended, also if an exception ended it at any instruction.

An exception may come between any two instructions, and the garbage collector or a signal's handler may call any
function of this package there. A real signal leaves a `with` block over a lock written in C only with the lock
released; but an exception raised at the very end of the block (by a trace function, or by a signal on Python 3.10)
leaves it held. So each block stands in a function of this shape, which costs about 0.05 µs more than the block alone:

    lock = self._lock                                       # a local: how a call within this one finds it held
    within = lock.is_mine() and lock.is_held_below()
    try:
        with lock:
            …
    except BaseException:
        if not within:
            lock.unwind()
        raise

`within` says that this call interrupts another one of its own thread that holds the lock; the function decides what it
may do then. `under`, `under_within` and `attempt` are the same as functions, `holding` and `trying` as decorators. The
block has no `try` of its own: CPython covers the first instruction of one by no handler, so what a trace function
raises there would pass both.

A call that cannot wait for the lock in `with`, since it has a timeout, takes it before, and hands it over to the block:

    if not take(lock, seconds):
        raise …
    with lock:
        lock.release()                                      # the one above
        …

If the call raises an exception of its own, the block's end has released the lock when the handler above begins, where
a signal's handler may raise another one before `unwind`.
"""

from __future__ import annotations

import functools
import os
import sys
from _thread import RLock
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from ipcsync.errors import Reentered

__all__ = [
    "CallLock",
    "HeldBelow",
    "OuterLock",
    "attempt",
    "holding",
    "take",
    "trying",
    "under",
    "under_within",
]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

Method = Callable[Concatenate[S, P], T]

_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_turns: list[Callable[[], bool]] = []  # of the compiled core, which is imported later: whether this thread has one
_PATIENCE_S = 0.5  # of a call within one that has a lock: nobody has a lock for so long who waits for nothing


class HeldBelow(Exception):  # noqa: N818 - it is turned into an error that says what was called
    """A call further down this thread's stack holds the lock, and this call cannot run before that one ends."""


class Unwinding:
    """What a reentrant lock needs to be free once no call that took it runs any more."""

    __slots__ = ()

    is_outermost = False  # who has it may wait for any other

    if TYPE_CHECKING:

        def is_mine(self) -> bool:
            """Whether the calling thread holds it."""

        def release(self) -> None: ...

    def is_held_below(self) -> bool:
        """Whether a call further down this thread's stack has the lock, which this thread owns, in a local variable.

        If there is none, an exception has left it held, and it is released here. Only a function that has the lock in a
        local variable itself may ask. It is conservative: a call that is about to take the lock counts.
        """
        frame = sys._getframe(1).f_back  # noqa: SLF001 - the one way to it
        while frame is not None:
            if any(value is self for value in frame.f_locals.values()):
                return True
            frame = frame.f_back
        self.unwind()
        return False

    def unwind(self) -> None:
        """Release the lock as often as this thread holds it."""
        while self.is_mine():
            self.release()


class CallLock(Unwinding, RLock):  # type: ignore[misc] # final for typeshed alone
    """A reentrant lock that is free once no call that took it runs any more."""

    __slots__ = ()

    if not TYPE_CHECKING:
        is_mine = RLock._is_owned  # noqa: SLF001 - the C method that Condition uses too


class OuterLock(CallLock):  # type: ignore[misc] # final for typeshed alone
    """One that is taken before all others and held while functions of users run, which may wait for any other lock."""

    __slots__ = ()

    is_outermost = True


def take(lock: CallLock, seconds: float = -1.0) -> bool:
    """Acquire the lock for a call that may wait, for at most `seconds` (-1: for ever); False if that was not enough.

    A finalizer's or a signal handler's call, within a call that has a lock, waits half a second at most, then raises
    Reentered: who has this lock may wait for that one.
    """
    if lock.acquire(False) or lock.acquire(timeout=_PATIENCE_S if seconds < 0 else min(seconds, _PATIENCE_S)):
        return True
    if 0 <= seconds <= _PATIENCE_S:
        return False
    if _interrupts_a_holder(sys._getframe(1)):  # noqa: SLF001 - the one way to it
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

    def is_held(value: object) -> bool:
        return isinstance(value, Unwinding) and not value.is_outermost and value.is_mine()

    is_below = False
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_name == "__del__":
            is_below = True
        elif is_below and (has_turn or any(map(is_held, frame.f_locals.values()))):
            return True
        frame = frame.f_back
    return False


def under(lock: CallLock, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args)` with the lock held, as `take` takes it; within a call that holds it, it just runs."""
    if lock.is_mine() and lock.is_held_below():
        return function(*args, **kwargs)
    try:
        if not lock.acquire(False):
            take(lock)
        with lock:
            lock.release()
            return function(*args, **kwargs)
    except BaseException:
        lock.unwind()
        raise


def under_within(
    lock: CallLock, seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """As `under`; but None, and nothing is done, if another thread keeps the lock for `seconds`."""
    if lock.is_mine() and lock.is_held_below():
        return function(*args, **kwargs)
    try:
        if not lock.acquire(timeout=seconds):
            return None
        with lock:
            lock.release()
            return function(*args, **kwargs)
    except BaseException:
        lock.unwind()
        raise


def attempt(lock: CallLock, seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """As `under_within`; but None also within a call that holds the lock."""
    if lock.is_mine() and lock.is_held_below():
        return None
    return under_within(lock, seconds, function, *args, **kwargs)


def holding(name: str) -> Callable[[Method[S, P, T]], Method[S, P, T]]:
    """Make a method that holds the CallLock `self.<name>` while it runs; within a call that does, it just runs."""

    def wrap(method: Method[S, P, T]) -> Method[S, P, T]:
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            lock: CallLock = getattr(self, name)
            within = lock.is_mine() and lock.is_held_below()
            try:
                with lock:
                    return method(self, *args, **kwargs)
            except BaseException:
                if not within:
                    lock.unwind()
                raise

        return functools.update_wrapper(call, method)

    return wrap


def trying(name: str) -> Callable[[Method[S, P, T]], Method[S, P, T | None]]:
    """As `holding`, but the method does nothing and returns None while another thread or a call below has the lock."""

    def wrap(method: Method[S, P, T]) -> Method[S, P, T | None]:
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
            lock: CallLock = getattr(self, name)
            if lock.is_mine() and lock.is_held_below():
                return None
            try:
                if not lock.acquire(False):
                    return None
                with lock:
                    lock.release()
                    return method(self, *args, **kwargs)
            except BaseException:
                lock.unwind()
                raise

        return functools.update_wrapper(call, method)

    return wrap
