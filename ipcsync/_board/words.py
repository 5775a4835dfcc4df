"""Words of the board: each a descriptor of the line that has it, by its index there."""

from __future__ import annotations

import struct
from typing import Protocol


class Line(Protocol):
    """What has words: `words` are the board's, `first` is the index of the line's own first one."""

    words: memoryview[int]
    first: int


class Word:
    """A word of 8 bytes, read and stored by its name; a store orders nothing."""

    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, line: Line, owner: object = None) -> int:
        return line.words[line.first + self._index]

    def __set__(self, line: Line, value: int) -> None:
        line.words[line.first + self._index] = value


def words(*values: int) -> memoryview:
    """Words to compare with the board's: one comparison costs as much as reading a single word."""
    return memoryview(struct.pack(f"={len(values)}Q", *values)).cast("Q")
