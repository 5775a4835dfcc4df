"""Fixtures of the tests of faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ipcsync
from tests.faults.chain_line import Line, NewPeer
from tests.faults.fixtures import ForeignPeer


@pytest.fixture
def foreign() -> Iterator[ForeignPeer]:
    """A process in a pid namespace of its own."""
    why_not = ForeignPeer.why_not()
    if why_not:
        pytest.skip(why_not)
    peer = ForeignPeer()
    yield peer
    peer.kill()


@pytest.fixture
def line(coordinator: ipcsync.Coordinator, new_peer: NewPeer, engine: str) -> Line:
    """A chain whose events all use one engine."""
    return Line(coordinator.endpoint, new_peer, engine)


@pytest.fixture
def pending(coordinator: ipcsync.Coordinator, new_peer: NewPeer, engine: str) -> Line:
    """The same, with a driver that leaves a dead process's work pending for ever."""
    return Line(coordinator.endpoint, new_peer, engine, "pending")


@pytest.fixture
def timeline(coordinator: ipcsync.Coordinator, new_peer: NewPeer) -> Line:
    """A chain of timelines."""
    return Line(coordinator.endpoint, new_peer, "timeline")
