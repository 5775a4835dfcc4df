"""Reading trace files, also of processes that are dead or still write."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ipcsync._trace import layout
from ipcsync._trace.layout import ENTRIES, ENTRY, FILE_BYTES, NAME, NAMES, Kind, Outcome
from ipcsync._trace.writer import Use

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
    """The trace files there, by name."""
    return sorted(Path(directory).glob(f"*{layout.SUFFIX}"))


def read(path: Path) -> ProcessTrace:
    """What a file holds. TraceError if it is not a trace, OSError if it cannot be read."""
    data = _bytes_of(path)
    magic, version, size, pid, monotonic, realtime, count, boot, command = layout.HEADER.unpack_from(data)
    if (magic, version, size, count) != (layout.MAGIC, layout.VERSION, ENTRY.size, ENTRIES):
        raise TraceError(f"{path} is not a trace of version {layout.VERSION}")
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
    for place in range(NAMES):
        epoch, incarnation, slot, event_bytes, client_bytes, engine, event, client, number = NAME.unpack_from(
            data, layout.NAMES_AT + place * NAME.size
        )
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
    found = []
    view = memoryview(data)[layout.ENTRIES_AT :][: ENTRIES * ENTRY.size]
    for place, fields in enumerate(ENTRY.iter_unpack(view)):
        began, ended, generation, stream, thread, use, kind, outcome, _, number = fields
        if not number:
            continue
        if number % ENTRIES != place or kind not in _KINDS or outcome not in _OUTCOMES or ended < began:
            raise TraceError(f"{path} is damaged: its entry {place} is invalid")
        entry = Entry(Kind(kind), use, generation, stream, thread, began, ended, Outcome(outcome))
        found.append((number, entry))
    found.sort(key=lambda pair: pair[0])
    written = found[-1][0] if found else 0
    return [entry for _, entry in found if entry.use in uses], written
