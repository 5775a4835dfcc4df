"""Containers that are used without a lock: whatever changes them in the middle of a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ipcsync._shared import items_of


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """The garbage collector runs at nearly each allocation, where the version of Python lets it."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


class Finalized:
    """A piece of garbage that adds to a table when it is found."""

    def __init__(self, table: dict[int, object]) -> None:
        self._table = table
        self._cycle = self

    def __del__(self) -> None:
        self._table[len(self._table)] = None


def test_the_items_are_those_of_one_moment_though_a_finalizer_changes_the_table(eager_collector: None) -> None:
    table: dict[int, object] = {}
    for number in range(100):
        table[len(table)] = None
        Finalized(table)
        found = items_of(table)
        assert len(found) >= number
        assert [key for key, _ in found] == list(range(len(found)))
