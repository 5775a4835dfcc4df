"""From other threads to an asyncio loop, which is woken once for all that has come.

A loop is woken by a byte in a socket pair that holds some 280 of them, and learns of signals from the same socket. So a
thread that has the loop called for each of a thousand things may fill it, and the loop never learns of a SIGTERM.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Inbox(Generic[T]):
    """Has the running loop call `take` for each thing that a thread puts in, in their order."""

    def __init__(self, take: Callable[[T], object]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._things: deque[T] = deque()
        self._is_called = False  # the loop will empty it, and has not begun

    def put(self, thing: T) -> None:
        """Put it in, on any thread; without effect once the loop is closed."""
        self._things.append(thing)
        if not self._is_called:
            self._call()

    def call_anyway(self) -> None:
        """On the loop's thread: have it emptied though that was asked for.

        An exception of a signal's handler may have ended the loop just then, and the program may run it again.
        """
        if self._is_called:
            self._loop.call_soon(self._empty)

    def _call(self) -> None:
        self._is_called = True
        try:
            self._loop.call_soon_threadsafe(self._empty)
        except BaseException as error:
            self._is_called = False
            if not (isinstance(error, RuntimeError) and self._loop.is_closed()):
                raise
            self._things.clear()

    def _empty(self) -> None:
        self._is_called = False  # first: what comes from here on calls again
        try:
            while self._things:
                self._take(self._things.popleft())
        finally:
            if self._things:  # an exception ends this call
                self._call()


class LoopCalls:
    """Has the running loop call functions on behalf of any thread, in their order, with the present context."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        # It lives as long as anybody may use it.
        self._inbox: Inbox[Callable[[], object]] = _inboxes.setdefault(self._loop, Inbox(lambda call: call()))
        self._inbox.call_anyway()

    def soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Have the loop call `fn(*args)`, on any thread; without effect once the loop is closed."""
        # An exception of it is for the loop's handler.
        self._inbox.put(partial(self._loop.call_soon, fn, *args, context=self._context))


_inboxes: WeakValueDictionary[asyncio.AbstractEventLoop, Inbox[Callable[[], object]]] = WeakValueDictionary()
