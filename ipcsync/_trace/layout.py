"""The trace file of one process: a header, a ring of names, a ring of entries. All numbers are little-endian.

An entry is 64 bytes and ends with its number, counted from 1: entry n stands at place n mod `ENTRIES`, over an older
one. `struct` clears the place first and writes the number last, so an entry in which its process was killed counts as
not written. A name says what the `use` of an entry means: one attachment to one shared event. Names are a ring too.
"""

from __future__ import annotations

import struct
from enum import IntEnum

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
