"""What the observer's tests begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ipcsync
from tests.observer.observing import Observer, running


@pytest.fixture
def new_observer(tmp_path: Path) -> Iterator[Callable[..., Observer]]:
    """Starts observers; none outlives the test."""
    with running(tmp_path) as start:
        yield start


@pytest.fixture
def observer(coordinator: ipcsync.Coordinator, new_observer: Callable[..., Observer]) -> Observer:
    """One that looks at the test's coordinator, and has seen it."""
    one = new_observer("--endpoint", coordinator.endpoint)
    one.until_ready()
    return one
