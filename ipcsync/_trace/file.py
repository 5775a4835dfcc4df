"""The trace file of one process: a header, a ring of names, a ring of entries. All numbers are little-endian.

An entry is 64 bytes and ends with its number, counted from 1: entry n stands at place n mod `ENTRIES`, over an older
one. `struct` clears the place first and writes the number last, so an entry in which its process was killed counts as
not written. A name says what the `use` of an entry means: one attachment to one shared event. Names are a ring too.
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

from ipcsync._linux.process import ForkMark
from ipcsync._threads import CallLock, under
from ipcsync.errors import IpcSyncError

MAGIC = b"ipctrace"
VERSION = 1
SUFFIX = ".ipctrace"

HEADER = struct.Struct("<8sIIQQQQ36s1024s")
"""Magic, version, size of an entry, pid, CLOCK_MONOTONIC and CLOCK_REALTIME at its opening (ns), number of entries,
the boot that CLOCK_MONOTONIC counts from, and the command line."""

NAME = struct.Struct("<16sQIHH8s256s160s48xQ")
"""Epoch, incarnation, slot, lengths of the event's name and the client's, engine, the two names, number of the use."""

ENTRY = struct.Struct("<QQQQQIHHQQ")
"""Began, ended (CLOCK_MONOTONIC, ns), generation, the stream's id if known, thread, use, kind, outcome, 0, number."""

FILE_BYTES = 16 << 20
NAMES = 4096
NAMES_AT = 4096
ENTRIES_AT = NAMES_AT + NAMES * NAME.size
ENTRIES = (FILE_BYTES - ENTRIES_AT) // ENTRY.size


class Kind(IntEnum):
    """What an entry is about."""

    RECORD = 1
    """A record was made; its call."""
    WAIT = 2
    """A wait was queued on a stream; its call."""
    PASSED = 3
    """A wait found its point complete, and queued nothing; its call."""
    RELEASED = 4
    """The process learned at `ended` that the point of a queued wait is complete; `began` is when it was queued."""
    SYNCHRONIZE = 5
    """The host waited for a point; its call."""


class Outcome(IntEnum):
    """How it ended."""

    OK = 0
    FAILED = 1
    """The call raised: a timeout, a lost recorder, … Of a queued wait: its point can never be complete."""
    UNSEEN = 2
    """Of a queued wait: it is over, but the coordinator or the recorder was lost first, so the result is unknown."""


class Use(NamedTuple):
    """One attachment of one client to one shared event."""

    epoch: bytes
    slot: int
    incarnation: int
    event: str
    engine: str
    client: str


# --- writing ----------------------------------------------------------------------------------------------------------


_pack = ENTRY.pack_into
_writers: dict[Path, Writer] = {}
_opening = CallLock()


class TraceDirError(IpcSyncError, OSError):
    """There can be no trace in the directory that `connect` was given."""


def prepare(directory: str | os.PathLike[str]) -> Path:
    """The directory, made if it was not there (mode 0700). TraceDirError if it cannot be, or cannot be written to."""
    path = Path(directory)
    try:
        path = path.absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise TraceDirError(f"there can be no traces in {path}: {getattr(error, 'strerror', None) or error}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise TraceDirError(f"nothing can be written to the trace's directory {path}")
    return path


def writer_in(directory: Path) -> Writer:
    """This process's writer for a directory. OSError if the file cannot be made, or there is no room for all of it."""
    return under(_opening, _writer_in, directory)


def _writer_in(directory: Path) -> Writer:
    writer = _writers.get(directory)
    if writer is None or not writer.is_mine[0]:
        writer = _writers[directory] = Writer(directory)
    return writer


class Writer:
    """A trace file of this process. Thread-safe; in a forked child it writes nothing.

    The file is allocated in full at once: a disk that fills up later cannot end the process by SIGBUS. It stays as it
    is when the process ends, however it does.
    """

    def __init__(self, directory: Path) -> None:
        self.path: Path = directory / f"{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, FILE_BYTES)
            self._map = mmap.mmap(fd, FILE_BYTES)
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(fd)
        self.is_mine: memoryview[int] = ForkMark().byte  # 0 in a process that was forked since
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)
        about = ENTRY.size, os.getpid(), time.monotonic_ns(), time.time_ns(), ENTRIES
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").strip()
        HEADER.pack_into(self._map, 0, MAGIC, VERSION, *about, boot, command)

    def put(
        self, kind: int, use: int, generation: int, stream: int, began: int, ended: int, outcome: int = Outcome.OK
    ) -> None:
        """Write an entry, over the oldest if there is no room.

        It says what was done with which use, from when to when (CLOCK_MONOTONIC, ns), and how it ended.
        """
        if self.is_mine[0]:
            number = next(self._numbers)
            place = ENTRIES_AT + number % ENTRIES * ENTRY.size
            _pack(self._map, place, began, ended, generation, stream, get_ident(), use, kind, outcome, 0, number)

    def name(self, use: Use) -> int:
        """The number of a use in the entries."""
        number = next(self._uses)
        place = NAMES_AT + number % NAMES * NAME.size
        event, client = use.event.encode(), use.client.encode()[:160]  # the room that a NAME has
        about = use.epoch, use.incarnation, use.slot, len(event), len(client), use.engine.encode()
        NAME.pack_into(self._map, place, *about, event, client, number)
        return number


# --- reading, also of processes that are dead or still write ----------------------------------------------------------


_KINDS = frozenset(Kind)
_OUTCOMES = frozenset(Outcome)


class TraceError(Exception):
    """A file is not a trace, or cannot be merged with the others; the message says which file and why."""


class Entry(NamedTuple):
    """One thing that a process did. Times are CLOCK_MONOTONIC in ns."""

    kind: Kind
    use: int
    generation: int
    stream: int
    thread: int
    began: int
    ended: int
    outcome: Outcome


@dataclass(frozen=True)
class ProcessTrace:
    """What one file holds."""

    path: Path
    pid: int
    command: str
    boot: str
    monotonic_ns: int
    realtime_ns: int
    uses: dict[int, Use]
    entries: list[Entry]
    lost: int
    """How many entries were written over, or not to their end, or are of a use whose name was written over."""


def files_in(directory: str | os.PathLike[str]) -> list[Path]:
    return sorted(Path(directory).glob(f"*{SUFFIX}"))


def read(path: Path) -> ProcessTrace:
    """What a file holds. TraceError if it is not a trace, OSError if it cannot be read."""
    data = _bytes_of(path)
    magic, version, size, pid, monotonic, realtime, count, boot, command = HEADER.unpack_from(data)
    if (magic, version, size, count) != (MAGIC, VERSION, ENTRY.size, ENTRIES):
        raise TraceError(f"{path} is not a trace of version {VERSION}")
    uses = _uses(path, data)
    entries, written = _entries(path, data, uses)
    lost = written - len(entries)
    return ProcessTrace(path, pid, _text(command), _text(boot), monotonic, realtime, uses, entries, lost)


def _bytes_of(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a FIFO would block the open
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise TraceError(f"{path} is not a trace: not a regular file")
        if status.st_size == 0:
            raise TraceError(f"{path} is not a trace: it is empty, since its process ended before it wrote anything")
        if status.st_size != FILE_BYTES:
            raise TraceError(f"{path} is not a trace: it has {status.st_size} bytes, and not {FILE_BYTES}")
        return file.read(FILE_BYTES).ljust(FILE_BYTES, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def _uses(path: Path, data: bytes) -> dict[int, Use]:
    uses = {}
    for place, fields in enumerate(NAME.iter_unpack(memoryview(data)[NAMES_AT:ENTRIES_AT])):
        epoch, incarnation, slot, event_bytes, client_bytes, engine, event, client, number = fields
        if not number:
            continue
        if number % NAMES != place or event_bytes > len(event) or client_bytes > len(client):
            raise TraceError(f"{path} is damaged: its name {place} is invalid")
        uses[number] = Use(
            epoch, slot, incarnation, _text(event[:event_bytes]), _text(engine), _text(client[:client_bytes])
        )
    return uses


def _entries(path: Path, data: bytes, uses: dict[int, Use]) -> tuple[list[Entry], int]:
    """The entries in the order of their numbers, and how many were ever written."""
    found: dict[int, Entry] = {}
    view = memoryview(data)[ENTRIES_AT:][: ENTRIES * ENTRY.size]
    for place, fields in enumerate(ENTRY.iter_unpack(view)):
        began, ended, generation, stream, thread, use, kind, outcome, _, number = fields
        if not number:
            continue
        if number % ENTRIES != place or kind not in _KINDS or outcome not in _OUTCOMES or ended < began:
            raise TraceError(f"{path} is damaged: its entry {place} is invalid")
        found[number] = Entry(Kind(kind), use, generation, stream, thread, began, ended, Outcome(outcome))
    return [entry for _, entry in sorted(found.items()) if entry.use in uses], max(found, default=0)
