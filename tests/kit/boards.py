"""Boards of a test's own."""

from __future__ import annotations

from ipcsync._board import Board
from ipcsync._native import pinned


def end(board: Board) -> None:
    """Remove the board; pages that an engine registered are unregistered first, as a client's own end does."""
    is_unpinned = pinned.unpin(board.address, board.length)
    board.close(keep_mapping=not is_unpinned)
    board.unlink()
