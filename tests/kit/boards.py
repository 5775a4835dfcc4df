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
    return int.from_bytes(_bits(line).tobytes(), "little")


def store_bits(line: SlotLine, bits: int) -> None:
    """As its recorder."""
    row = _bits(line)
    row[:] = memoryview(bits.to_bytes(row.nbytes, "little")).cast("Q")


def _bits(line: SlotLine) -> memoryview[int]:
    first = line.first + (line.bits_address - line.address) // 8
    return line.words[first : first + line._at.bit_words]


def enter(line: SlotLine, session: int) -> None:
    """Announce a hazard, as the session of that line."""
    line.announced = 1
    line._hazards[session] += 1
