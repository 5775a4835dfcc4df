"""What several of the unit tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcsync._board import Board

EPOCH = bytes(range(16))
SESSIONS, SLOTS = 40, 70


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    """A board of the test's own, made by this process."""
    board = Board.create(str(tmp_path / "board"), EPOCH, SESSIONS, SLOTS)
    yield board
    board.unlink()
    board.close()
