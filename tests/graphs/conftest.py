"""Stages of replays: of one layer, and of two."""

from __future__ import annotations

import pytest

from ipcsync._engines.core import lanes_of_process
from ipcsync.client import graphs
from ipcsync.typing import EngineName
from tests.graphs.stage import NewClient, Stage


@pytest.fixture
def one(new_client: NewClient, engine: EngineName) -> Stage:
    return Stage(new_client, engine)


@pytest.fixture
def two(new_client: NewClient, engine: EngineName) -> Stage:
    return Stage(new_client, engine, 2)


@pytest.fixture
def lanes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's first replay takes any lane that is free; there is none of earlier tests."""
    monkeypatch.setattr(graphs, "_MANY_LANES", 1)
    for stream in set(lanes_of_process):
        monkeypatch.delitem(lanes_of_process, stream)
