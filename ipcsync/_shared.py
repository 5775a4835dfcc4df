"""Containers that threads, finalizers and signals' handlers use at once, without a lock."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def items_of(table: dict[K, V]) -> list[tuple[K, V]]:
    """The items of a table at one moment.

    `list(table.items())` is none: up to Python 3.11 each tuple that it makes may start the garbage collector, whose
    finalizers may change the table, and then it raises RuntimeError.
    """
    return list(table.copy().items())
