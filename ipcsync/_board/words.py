"""Words of the board: each a descriptor of the line that has it, by its index there; and the fence between two."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from _thread import allocate_lock
from collections.abc import Callable
from typing import Protocol

_SEQ_CST = 5


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


def _choose() -> Callable[[], object]:
    if platform.machine() == "x86_64":
        return lambda: None
    library = ctypes.CDLL(ctypes.util.find_library("atomic") or "libatomic.so.1")
    return lambda: library.atomic_thread_fence(ctypes.c_int(_SEQ_CST))


fence = _choose()
"""Called between two steps of which other processes may see the second only behind the first.

Nothing on x86-64, which keeps loads in order and stores in order. It may reorder a store with a later load of another
word: where something depends on that pair, and the other side is not woken to read again, there is `full_fence`.
"""


def full_fence() -> None:
    """Between a store and a later load: who stores and looks the other way round sees that store, or is seen."""
    fence()
    allocate_lock().acquire()  # an atomic exchange, which is a full fence on x86-64; no other thread has this lock
