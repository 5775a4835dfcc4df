"""What all tests share: the driver of the run, coordinators and processes of their own, and a look at what is left."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything of ipcsync is imported. Each worker of a run has a segment of its own, so that no two tests meet.
_RUN = os.environ.setdefault("IPCSYNC_TEST_RUN", uuid.uuid4().hex[:8])
_SEGMENT = f"{_RUN}-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
os.environ.setdefault("IPCSYNC_DRIVER", "host")
os.environ["IPCSYNC_HOST_SEGMENT"] = _SEGMENT
os.environ["SIMCUDA_SEGMENT"] = _SEGMENT
os.environ.pop("IPCSYNC_ENDPOINT", None)
os.environ.pop("IPCSYNC_RUNTIME_DIR", None)

import ipcsync
from tests.peer import Peer


@pytest.fixture
def new_coordinator() -> Iterator[Callable[..., ipcsync.Coordinator]]:
    """Starts coordinators, with settings named like the flags; all are stopped after the test."""
    running: list[ipcsync.Coordinator] = []

    def start(**settings: Any) -> ipcsync.Coordinator:
        running.append(ipcsync.launch(**settings))
        return running[-1]

    yield start
    for coordinator in running:
        coordinator.stop()


@pytest.fixture
def coordinator(new_coordinator: Callable[..., ipcsync.Coordinator]) -> ipcsync.Coordinator:
    """A coordinator of the test's own."""
    return new_coordinator()


@pytest.fixture
def new_client(coordinator: ipcsync.Coordinator) -> Iterator[Callable[..., ipcsync.Client]]:
    """Connects clients of this process to the test's coordinator; all are closed after the test."""
    clients: list[ipcsync.Client] = []
    numbers = itertools.count()

    def connect(name: str | None = None, **options: Any) -> ipcsync.Client:
        clients.append(ipcsync.connect(coordinator.endpoint, name=name or f"client-{next(numbers)}", **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(new_client: Callable[..., ipcsync.Client]) -> ipcsync.Client:
    """One client of this process."""
    return new_client("main")


@pytest.fixture
def new_peer() -> Iterator[Callable[..., Peer]]:
    """Starts real processes that run what they are told, with the environment given; none outlives the test."""
    peers: list[Peer] = []

    def start(**env: str) -> Peer:
        peers.append(Peer(env))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(new_peer: Callable[..., Peer]) -> Peer:
    """One process beside this one."""
    return new_peer()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """At the end of a run nothing of ours may lie in shared memory."""
    before = set(Path("/dev/shm").iterdir())
    yield
    left = [path.name for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("ipcsync-board")]
    left = [name for name in left if _is_abandoned(name)]
    assert not left, f"left in /dev/shm: {left}"


def _is_abandoned(name: str) -> bool:
    from ipcsync._board.board import is_abandoned

    return is_abandoned(f"/dev/shm/{name}")
