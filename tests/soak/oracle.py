"""How far the work behind each record really is, told by nothing of ipcsync's.

One anonymous shared mapping, inherited by the processes of a soak. Each use of an event has a cell of its own in it,
for the whole soak: no two uses ever share one. The recorder has its stream write (tag of the use, generation) into the
cell *before* each record; so whoever is told that the generation is complete must find the cell there already.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from typing import Any

from ipcsync import _drivers
from ipcsync._drivers import unwrap
from tests.soak.history import generation_of, tag_of, truth_word

_PAGE = 4096
_PORTABLE_MAPPED = 1 | 2
STREAMS = 2
CELL_WORDS = STREAMS
CELLS = _PAGE // 8 // CELL_WORDS  # that one life has
SLOTS = 4096
_SLOT_WORDS = 4
_TAG = 1 << 39  # no tag is 0
_ONE_STREAM = 1 << 38
_DIRECTORY = _PAGE // 8
_CELLS = _DIRECTORY + SLOTS * _SLOT_WORDS


class Truth:
    """The mapping: a word that ends the soak, a directory of slots, and a page of cells for each life."""

    def __init__(self, lives: int) -> None:
        self.lives = lives
        self._map = mmap.mmap(-1, _CELLS * 8 + lives * _PAGE)
        self._words = memoryview(self._map).cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pages: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether the soak is to end."""
        return bool(self._words[0])

    def end(self) -> None:
        """Have every worker come to its end."""
        self._words[0] = 1

    def cell(self, life: int, number: int) -> int:
        """The cell for a life's use number `number`, below CELLS."""
        assert life < self.lives
        assert number < CELLS
        return _CELLS + (life * CELLS + number) * CELL_WORDS

    def read(self, cell: int) -> int:
        """What a cell says, as one word."""
        return combined(self._words[cell], self._words[cell + 1])

    def publish(self, slot: int, incarnation: int, tag: int, cell: int) -> None:
        """Say which use an incarnation of a slot is, before its first record: for those who open it by name."""
        first = _DIRECTORY + slot * _SLOT_WORDS
        words = self._words
        words[first] = 0
        words[first + 1], words[first + 2] = tag, cell
        words[first] = incarnation

    def find(self, slot: int, incarnation: int) -> tuple[int, int] | None:
        """(tag, cell) of an incarnation of a slot; None while no recorder has come."""
        first = _DIRECTORY + slot * _SLOT_WORDS
        words = self._words
        found = words[first + 1], words[first + 2]
        return found if words[first] == incarnation else None

    # --- for streams --------------------------------------------------------------------------------------------------

    def address(self, cell: int) -> int:
        """Where a cell lies in this process; its page is registered with the driver, whose context must be current."""
        address = self._address + cell * 8
        page = address & ~(_PAGE - 1)
        if page not in self._pages:
            unwrap(_drivers.load().cuMemHostRegister(page, _PAGE, _PORTABLE_MAPPED), "cuMemHostRegister")
            self._pages.add(page)
        return address

    def write_behind(self, handle: Any, cell: int, tag: int, generation: int) -> None:
        """Have the stream of this generation say that it is done, when it gets there."""
        driver = _drivers.load()
        address = self.address(cell) + 8 * stream_of(tag, generation)
        pointer = unwrap(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer")
        word = truth_word(tag, generation)
        unwrap(driver.cuStreamWriteValue64(handle, pointer, word, 0), "cuStreamWriteValue64")

    def copy_behind(self, handle: Any, cell: int, destination: int) -> None:
        """Have a stream copy a cell's words to pinned memory when it gets there."""
        copy = _drivers.load().cuMemcpyAsync
        unwrap(copy(destination, self.address(cell), 8 * CELL_WORDS, handle), "cuMemcpyAsync")


def stream_of(tag: int, generation: int) -> int:
    """Which of its two streams the recorder of a use has for a generation: as good as random, and known to all."""
    return 0 if tag & _ONE_STREAM else tag >> generation % 32 & 1


def new_tag(source: random.Random, *, one_stream: bool) -> int:
    """A tag, random but for whether the use is recorded on two streams or on one."""
    return _TAG | source.getrandbits(38) | (_ONE_STREAM if one_stream else 0)


def combined(first: int, second: int) -> int:
    """Both words of a cell as one: the use has come to the last generation up to which each stream has done its own."""
    tag = tag_of(first or second)
    done = generation_of(first), generation_of(second)
    if second and tag_of(second) != tag:
        return first ^ second ^ 1  # two uses in one cell: nobody's word
    generation = 0
    while generation < max(done) and done[stream_of(tag, generation + 1)] > generation:
        generation += 1
    return truth_word(tag, generation)
