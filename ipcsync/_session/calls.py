"""Calls that a session's own threads make for others: how they are handed over, and how their end is awaited.

An exception that ends a caller never reaches these threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from ipcsync._worker import Latch

T = TypeVar("T")

# As `os.eventfd_write`, but it keeps the GIL: the thread that is woken would take it, and the caller, which is about to
# wait, have to be woken once more for that. No `argtypes`: they would be called, and near the limit of recursion ctypes
# turns what that raises into an error of its own.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_ONE = ctypes.c_uint64(1)


class Bell:
    """Wakes a thread that polls its descriptor for edges. Any thread may ring it; the last reference closes it."""

    def __init__(self) -> None:
        self._fd = -1
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._argument = ctypes.c_int(self._fd)

    def fileno(self) -> int:
        """For the poll."""
        return self._fd

    def ring(self) -> None:
        """Have the thread's poll return, or the next one."""
        _eventfd_write(self._argument, _ONE)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # also when this module is gone
        if self._fd >= 0:
            close(self._fd)


class Job(Latch, Generic[T]):
    """`function()`, which the owner of a session calls once, and for which one thread waits."""

    __slots__ = ("_error", "_function", "_value", "has_begun", "is_wanted")

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function: Callable[[], T] | None = function
        self._error: BaseException | None = None
        self._value: T | None = None
        self.has_begun: bool = False
        self.is_wanted: bool = True
        """False once the caller is gone."""

    def run(self) -> None:
        """Call it; raises nothing."""
        self.has_begun = True
        try:
            assert self._function is not None
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        self._function = None
        self.set()

    def result(self) -> T:
        """What the function returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)
