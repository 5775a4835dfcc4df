"""Containers that threads, finalizers and signals' handlers use at once, without a lock."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


def items_of(table: dict[K, V]) -> list[tuple[K, V]]:
    """The items of a table at one moment.

    `list(table.items())` is none: up to Python 3.11 each tuple that it makes may start the garbage collector, whose
    finalizers may change the table, and then it raises RuntimeError.
    """
    return list(table.copy().items())


class WeakList(Generic[T]):
    """Objects that others keep alive.

    Every step is one of a list. A WeakSet iterates in Python, and has callbacks that an exception may keep from their
    work.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, thing: T) -> None:
        """Add it, and forget those that are gone."""
        self._forget(None)
        self._references.append(weakref.ref(thing))

    def remove(self, thing: T) -> None:
        """Take it out, if it is in."""
        self._forget(thing)

    def living(self) -> list[T]:
        """Those that are not gone, in the order in which they were added."""
        found = [reference() for reference in list(self._references)]
        return [thing for thing in found if thing is not None]

    def _forget(self, thing: T | None) -> None:
        for reference in list(self._references):
            known = reference()
            if known is None or known is thing:
                with suppress(ValueError):  # another thread was first
                    self._references.remove(reference)
