"""Fixtures of the tests of chains."""

from __future__ import annotations

import pytest

import ipcsync
from tests.faults.chain_line import Line, NewPeer


@pytest.fixture
def line(coordinator: ipcsync.Coordinator, new_peer: NewPeer, engine: str) -> Line:
    """A chain whose events all use one engine."""
    return Line(coordinator.endpoint, new_peer, engine)


@pytest.fixture
def timeline(coordinator: ipcsync.Coordinator, new_peer: NewPeer) -> Line:
    """A chain of timelines."""
    return Line(coordinator.endpoint, new_peer, "timeline")
