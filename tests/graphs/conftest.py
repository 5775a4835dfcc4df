"""Stages of replays: of one layer, and of two."""

from __future__ import annotations

import pytest

from ipcsync.typing import EngineName
from tests.graphs.stage import NewClient, Stage


@pytest.fixture
def one(new_client: NewClient, engine: EngineName) -> Stage:
    return Stage(new_client, engine)


@pytest.fixture
def two(new_client: NewClient, engine: EngineName) -> Stage:
    return Stage(new_client, engine, 2)
