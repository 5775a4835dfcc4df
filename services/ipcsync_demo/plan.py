"""The pipeline's plan, shared by its processes: the places of the buffers, and each stage's work on a chunk.

Stages are numbered from 1. Link k is what stage k writes and stage k + 1 reads; the process that started them writes
link 0 and reads the last.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from ipcsync.typing import EngineChoice

STAMP = 4  # bytes that each stage adds to a chunk
LARGEST_CHUNK = 512 * 1024
_SMALLEST_CHUNK = 64
_CHUNKS = 64  # even a small file is cut into so many, so that every buffer is reused often
_GATE = 64  # a cache line for each stage's gate
_STAMPS = 199  # a prime: chunks that share a buffer have different stamps


@dataclass(frozen=True)
class Plan:
    """The parameters of a run. `chunk` is the most bytes of the file in a chunk."""

    workers: int
    chunk: int
    engine: EngineChoice
    without_waits: bool
    buffers: int = 4
    hold_every: int = 8
    depth: int = 16  # at least `buffers`, or a stage might wait for a place in its ring behind its own gate

    @property
    def capacity(self) -> int:
        """Bytes of one buffer: a chunk with all stamps, in whole pages."""
        return _pages(self.chunk + self.workers * STAMP)

    @property
    def first_buffer(self) -> int:
        """The end of the gates."""
        return _pages(self.workers * _GATE)

    @property
    def size(self) -> int:
        """Bytes of shared memory."""
        return self.first_buffer + (self.workers + 1) * self.buffers * self.capacity

    def gate_of(self, stage: int) -> int:
        """The offset of the 32-bit word that lets a stage's stream go on."""
        return (stage - 1) * _GATE

    def buffer(self, link: int, index: int) -> int:
        """The offset of a buffer of a link."""
        return self.first_buffer + (link * self.buffers + index) * self.capacity

    def hold(self, chunk: int) -> int:
        """Which hold of a stream a chunk is behind, counted from 1; 0 for none."""
        return chunk // self.hold_every + 1 if chunk % self.hold_every == 0 else 0

    def event_of(self, stage: int) -> str:
        """The name of the shared event on which a stage records."""
        return f"demo/stage-{stage}"


def chunk_size(file_size: int | None) -> int:
    """The bytes of a chunk for a file of that size, None if it is not known."""
    if file_size is None:
        return LARGEST_CHUNK
    return min(max(file_size // _CHUNKS, _SMALLEST_CHUNK), LARGEST_CHUNK)


def stamp(stage: int, chunk: int) -> int:
    """The byte of a stage's stamp on a chunk. Never 0, since new memory is zeros."""
    return 1 + (31 * chunk + 7 * stage) % _STAMPS


def turn(stage: int, length: int) -> int:
    """By how many bytes a stage rotates a stamped chunk of `length` bytes to the left."""
    return stage * 7919 % length


def work(data: bytes, stage: int, chunk: int) -> bytes:
    """A stage's work on a chunk: a stamp at its end, then a rotation. The stages do not commute.

    This is the work done in one process; `stage.py` does the same with copies and a fill on a stream.
    """
    stamped = data + bytes([stamp(stage, chunk)]) * STAMP
    first = turn(stage, len(stamped))
    return stamped[first:] + stamped[:first]


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
