"""Containers that are used without a lock: whatever changes them in the middle of a step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from ipcsync._shared import WeakList, items_of


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


class Thing:
    """What may be referred to weakly."""


def test_what_is_gone_or_taken_out_is_not_in_a_weak_list() -> None:
    things = [Thing() for _ in range(3)]
    weak: WeakList[Thing] = WeakList()
    for thing in things:
        weak.add(thing)
    weak.remove(things[1])
    weak.remove(Thing())
    assert weak.living() == [things[0], things[2]]
    del thing, things[0]
    gc.collect()
    assert weak.living() == things[1:]
    weak.add(things[0])
    assert len(weak._references) == 2


def test_a_weak_list_is_read_while_other_threads_add_to_it() -> None:
    weak: WeakList[Thing] = WeakList()
    kept: list[Thing] = []

    def add() -> None:
        for _ in range(300):
            kept.append(Thing())
            weak.add(kept[-1])
            weak.add(Thing())

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert all(isinstance(thing, Thing) for thing in weak.living())
    assert len(weak.living()) == len(kept) == 1200
