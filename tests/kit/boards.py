"""Boards of a test's own."""

from __future__ import annotations

from ipcsync._board import Board, SlotLine
from ipcsync._native import pinned


def end(board: Board) -> None:
    """Remove the board; pages that an engine registered are unregistered first, as a client's own end does."""
    pinned.unpin(board.address, board.length)
    board.close()
    board.unlink()


def is_pinned(board: Board) -> bool:
    """Whether any page of it is registered with the driver, and so stays mapped."""
    found = [start for start in pinned._pages if board.address <= start < board.address + board.length]
    return bool(found)


def bits_of(line: SlotLine) -> int:
    """A bit for each session that the slot stands behind, as its recorder has stored them."""
    words = (line.words[place] for place in line._bits)
    return sum(word << 64 * place for place, word in enumerate(words))


def store_bits(line: SlotLine, bits: int) -> None:
    """As its recorder."""
    for place, index in enumerate(line._bits):
        line.words[index] = bits >> 64 * place & 0xFFFFFFFFFFFFFFFF


def enter(line: SlotLine, session: int) -> None:
    """Announce a hazard, as the session of that line."""
    line.announced = 1
    line._hazards[session] += 1
