"""What one process of a soak did and saw, in a form that survives SIGKILL.

A history is a file of records of 64 bytes, each appended by one `write`. 64 divides a page, so a kill between two
writes, or inside one, costs at most the record under way: never one that was written, never the rest of the file.

Each life of a worker has a history `life-<number>.history`; the process that starts and kills them keeps
`deeds.history` (spawn, kill, stop, continue, exit). All times are CLOCK_MONOTONIC in ns, one clock for all processes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ipcsync import errors

_RECORD = struct.Struct("<BBHIIIQQQQIIB7x")
SIZE = _RECORD.size
DEEDS = "deeds.history"
NO_NAME = 0xFFFF

# A truth is a 64-bit word: the tag of one use of one event, and how far its work has really come.
GENERATION_BITS = 24
_GENERATION_MASK = (1 << GENERATION_BITS) - 1


class Op(IntEnum):
    """What was done. The first group is of workers, the second of whoever starts and kills them."""

    CONNECT = 1
    OPEN_RECORDER = 2  # gives the tag of this use
    OPEN_WAITER = 3
    ATTACH = 4  # by the bytes of a point that came from a peer
    RECORD = 5
    WAIT = 6  # a stream's wait: the host's part of it
    STREAM = 7  # the copy behind a stream's wait was done: `truth` is what the stream itself saw
    STUCK = 8  # a stream did not get past a wait; the result is what the point says of itself then
    SYNCHRONIZE = 9
    QUERY = 10
    CLOSE_RECORDER = 11
    CLOSE_WAITER = 12
    DISCONNECT = 13
    DESCRIPTORS = 14  # open file descriptors with no client: `generation` now, `slot` at the beginning
    END = 15  # the life came to its end in order
    LATE = 16  # a thread of this process was due at `start` and ran at `end`: the machine is overloaded

    SPAWN = 64  # of deeds, `slot` is the life
    KILL = 65
    STOP = 66
    CONTINUE = 67
    EXIT = 68  # `generation` is the exit status, 256 + n after signal n


class Result(IntEnum):
    """How it ended. BEGUN is written before whatever may block, and a record of the same start when it is over."""

    BEGUN = 0
    OK = 1
    NOT_YET = 2  # query said False
    RECORDER_LOST = 16
    EVENT_CLOSED = 17
    SESSION_EXPIRED = 18
    TIMEOUT = 19
    RECORDER_TAKEN = 20
    CLIENT_CLOSED = 21
    COORDINATOR_LOST = 22
    QUOTA = 23
    CONNECT_ERROR = 24
    OTHER = 31  # nothing that these calls may raise here


_RESULTS: tuple[tuple[type[BaseException], Result], ...] = (
    (errors.RecorderLost, Result.RECORDER_LOST),
    (errors.EventClosed, Result.EVENT_CLOSED),
    (errors.SessionExpired, Result.SESSION_EXPIRED),
    (errors.WaitTimeout, Result.TIMEOUT),
    (errors.RecorderTaken, Result.RECORDER_TAKEN),
    (errors.ClientClosed, Result.CLIENT_CLOSED),
    (errors.CoordinatorLost, Result.COORDINATOR_LOST),
    (errors.QuotaExceeded, Result.QUOTA),
    (errors.ConnectError, Result.CONNECT_ERROR),
)


class Record(NamedTuple):
    """One record. `slot`, `incarnation` and `generation` are the point's; `tag` 0 where the use's tag is not known."""

    op: int
    result: int
    name: int = NO_NAME
    slot: int = 0
    incarnation: int = 0
    generation: int = 0
    start: int = 0
    end: int = 0
    tag: int = 0
    truth: int = 0
    timeout_ms: int = 0
    held: int = 0  # of an unbroken hold of one point by one process: the same number, never 0
    engine: int = 0  # 1 on the timeline engine; of ATTACH 2: the use had ended, and what became of it was told

    def __str__(self) -> str:
        name = "" if self.name == NO_NAME else f" e{self.name}"
        done = generation_of(self.truth) if tag_of(self.truth) == self.tag else f"of another use ({self.truth:#x})"
        return (
            f"{Op(self.op).name.lower()} → {Result(self.result).name.lower()}{name} slot {self.slot}"
            f".{self.incarnation} generation {self.generation}, really done: {done},"
            f" {self.start / 1e9:.6f} to {self.end / 1e9:.6f} s"
        )


class History:
    """The writing end. Threads of one process may share it: each record is one append."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, record: Record) -> None:
        """Append one record."""
        os.write(self._fd, _RECORD.pack(*record))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read(path: Path) -> Iterator[Record]:
    """The records of a history in the order of writing, a torn one at the end left out."""
    data = path.read_bytes()
    whole = len(data) - len(data) % SIZE
    for fields in _RECORD.iter_unpack(memoryview(data)[:whole]):
        yield Record._make(fields)


def result_of(error: BaseException) -> Result:
    """The result that stands for an exception."""
    return next((result for kind, result in _RESULTS if isinstance(error, kind)), Result.OTHER)


def truth_word(tag: int, generation: int) -> int:
    """The word that says that the use `tag` has come to `generation`."""
    return tag << GENERATION_BITS | generation


def tag_of(truth: int) -> int:
    """The use that a word is of."""
    return truth >> GENERATION_BITS


def generation_of(truth: int) -> int:
    """How far a word says that its use has come."""
    return truth & _GENERATION_MASK


def path_of(directory: Path, life: int) -> Path:
    """Where the history of a life lies."""
    return directory / f"life-{life:06d}.history"


def life_of(path: Path) -> int:
    """Whose history a file is."""
    return int(path.stem.removeprefix("life-"))
