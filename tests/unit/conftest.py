"""What several of the unit tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._board import Board
from ipcsync._engines import queued
from ipcsync.testing import StreamGate
from tests.kit import boards
from tests.unit.coordinator.coordinator_world import World
from tests.unit.engines.chain_row import Row
from tests.unit.session.attachment_scene import Scene

EPOCH = bytes(range(16))
SESSIONS, SLOTS = 40, 70


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    """A board of the test's own, made by this process."""
    board = Board.create(str(tmp_path / "board"), EPOCH, SESSIONS, SLOTS)
    yield board
    boards.end(board)


@pytest.fixture
def scene(board: Board) -> Iterator[Scene]:
    """A table of attachments on it; what a test opens there is released at its end."""
    one = Scene(board)
    yield one
    one.coordinator.refusal = None
    one.end()


@pytest.fixture
def row(board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[Row]:
    """Sessions and their events on it, as in a process that has queued no wait yet."""
    made: list[ipcsync.Stream] = []
    init = ipcsync.Stream.__init__

    def noted(stream: ipcsync.Stream, *args: Any, **settings: Any) -> None:
        init(stream, *args, **settings)
        made.append(stream)

    monkeypatch.setattr(ipcsync.Stream, "__init__", noted)
    queued.drop(queued.of(None))
    yield Row(board)
    for stream in made:  # they write the board, which ends next; an earlier test's may wait for a dead process for ever
        stream.synchronize()
    queued.drop(queued.of(None))


@pytest.fixture
def held() -> Iterator[tuple[ipcsync.Stream, StreamGate]]:
    """A stream whose work waits, and the gate that lets it go on."""
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        yield stream, gate
    stream.synchronize()


@pytest.fixture
def world() -> Iterator[World]:
    """A coordinator of the test's own, without a socket: what is counted begins at 0."""
    one = World()
    yield one
    one.close()
