"""The control file of a segment: flat tables of 8-byte words that all its processes map.

Nothing in it can stay locked. A hot word is written with one aligned 8-byte store, a word that a thread sleeps on is a
futex on its low half, and what is rare (claiming, freeing, reaping) happens under a lock of the file that the kernel
releases when its holder dies. Within it, the order of the stores is such that a process killed between any two of them
leaves something that the next holder repairs.

A **record** is one word: stream slot << 48 | position. The positions of a slot never restart, also when another stream
uses the slot, so a record is complete if and only if the slot's `done` has reached its position.
"""

from __future__ import annotations

LAYOUT = 2  # bump with every change below: it is part of the file's name
MAGIC = 0x69706373_686F7374 ^ LAYOUT
MAX_DEVICES = 16
MAX_PROCESSES = 512
MAX_STREAMS = 16384
MAX_EVENTS = 32768

POSITION_BITS = 48
POSITION_MASK = (1 << POSITION_BITS) - 1

# Words of the header.
H_MAGIC = 0  # written last
H_NONCE = 1  # random: distinguishes this segment from an earlier one of its name
H_SERIAL = 2  # of the process that came last; a serial is never used again
H_STREAM_CURSOR = 3  # where the search for a free slot goes on, so that slots come again as late as possible
H_EVENT_CURSOR = 4

# A process: its life is the lock of a byte of the file (segment.py); pid and start time help where that one misleads.
# An exporter's mark tells importers, without a system call, that it lives. That the mark's thread died does not tell
# that the process has: its other threads may still run, and to who watches them the driver would fail for no reason.
PROCESSES = 512
PROCESS_WORDS = 32
P_SERIAL = 0  # 0: free. Written last
P_PID = 1
P_START = 2
P_NAMESPACE = 3  # inode of the pid namespace: only there the pid means anything
P_MARK = 4  # held by the process while it has exported events; if it is not held, check the lock
P_USED = 8  # bytes of device memory, one word a physical device

# A stream: one cache line.
STREAMS = PROCESSES + MAX_PROCESSES * PROCESS_WORDS
STREAM_WORDS = 8
STREAM_SHIFT = 3
S_DONE = 0  # position of the last finished operation; its low half is the futex word
S_TAIL = 1  # position of the last operation taken on
S_OWNER = 2  # serial of its process

# An interprocess event: one cache line.
EVENTS = STREAMS + MAX_STREAMS * STREAM_WORDS
EVENT_WORDS = 8
E_WORD = 0  # uses of the line << 1 | in use
E_OWNER = 1  # serial of the exporter
E_LATEST = 2  # the latest record, 0: never recorded. Written by the process that records
E_DEVICE = 3  # physical device
E_PROCESS = 4  # the exporter's line in the table of processes

# One byte a slot, searched by memchr: free, used, or retired with work that will never finish.
STREAM_MAP = (EVENTS + MAX_EVENTS * EVENT_WORDS) * 8
EVENT_MAP = STREAM_MAP + MAX_STREAMS
SIZE = EVENT_MAP + MAX_EVENTS
FREE, USED, RETIRED = 0, 1, 2


def process(line: int) -> int:
    """The first word of a line of the table of processes."""
    return PROCESSES + line * PROCESS_WORDS


LIFE = 1 << 40  # the byte after SIZE whose lock is the life of process line 0; the next one is line 1's
