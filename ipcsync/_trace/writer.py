"""Writing a trace: one file for each process and directory, created at the process's first attachment."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

from ipcsync._linux.process import ForkMark
from ipcsync._locks import CallLock, under
from ipcsync._trace import layout
from ipcsync._trace.layout import ENTRIES, ENTRIES_AT, ENTRY, FILE_BYTES, NAME, NAMES, Outcome
from ipcsync.errors import IpcSyncError

_CLIENT_ROOM = 160
_OK = int(Outcome.OK)

_pack = ENTRY.pack_into

_writers: dict[Path, Writer] = {}
_opening = CallLock()


class TraceDirError(IpcSyncError, OSError):
    """There can be no trace in the directory that `connect` was given."""


class Use(NamedTuple):
    """One attachment of one client to one shared event."""

    epoch: bytes
    slot: int
    incarnation: int
    event: str
    engine: str
    client: str


def prepare(directory: str | os.PathLike[str]) -> Path:
    """The directory, made if it was not there (mode 0700). TraceDirError if it cannot be, or cannot be written to."""
    path = Path(directory).absolute()
    try:
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
    if writer is None or writer.is_of_parent:
        writer = _writers[directory] = Writer(directory)
    return writer


class Writer:
    """A trace file of this process. Thread-safe; in a forked child it writes nothing.

    The file is allocated in full at once: a disk that fills up later cannot end the process by SIGBUS. It stays as it
    is when the process ends, however it does.
    """

    def __init__(self, directory: Path) -> None:
        self.path: Path = directory / f"{os.getpid()}-{os.urandom(4).hex()}{layout.SUFFIX}"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, FILE_BYTES)
            self._map = mmap.mmap(fd, FILE_BYTES)
        except BaseException:
            self.path.unlink()
            raise
        finally:
            os.close(fd)
        self._fork_mark = ForkMark()
        self._is_mine = self._fork_mark.byte
        self._numbers = itertools.count(1)
        self._uses = itertools.count(1)
        about = ENTRY.size, os.getpid(), time.monotonic_ns(), time.time_ns(), ENTRIES
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").strip()
        layout.HEADER.pack_into(self._map, 0, layout.MAGIC, layout.VERSION, *about, boot, command)

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked after it was made."""
        return self._fork_mark.in_child

    def put(
        self, kind: int, use: int, generation: int, stream: int, began: int, ended: int, outcome: int = _OK
    ) -> None:
        """Write an entry, over the oldest if there is no room.

        It says what was done with which use, from when to when (CLOCK_MONOTONIC, ns), and how it ended.
        """
        if self._is_mine[0]:
            number = next(self._numbers)
            place = ENTRIES_AT + number % ENTRIES * ENTRY.size
            _pack(self._map, place, began, ended, generation, stream, get_ident(), use, kind, outcome, 0, number)

    def name(self, use: Use) -> int:
        """The number of a use in the entries."""
        number = next(self._uses)
        place = layout.NAMES_AT + number % NAMES * NAME.size
        event, client = use.event.encode(), use.client.encode()[:_CLIENT_ROOM]
        about = use.epoch, use.incarnation, use.slot, len(event), len(client), use.engine.encode()
        NAME.pack_into(self._map, place, *about, event, client, number)
        return number
