"""Where each word of the board lies, and who writes it.

The file is a header page and five tables, each on pages of its own: session lines, slot lines, the slots' bits, the
slots' hazards, and the sessions' names. A line is 128 bytes: the coordinator writes the first half, a client or the GPU
the second, so that the two never share a cache line. (Two words of the slot's first half change so seldom that they may
stand there too: by them a waiter asks to be woken.) All words are 8 bytes, aligned, native-endian.

Counts never go back: a generation g of a slot's present use stands in `recorded` and `completed` as base + g, where
base is what `recorded` held when that use began. So a count goes on from use to use, and a timeline word only
grows while its use is open.
"""

MAGIC = 0x31_44_52_41_4F_42_49_50  # "PIBOARD1"
VERSION = 4
LINE = 128
HEADER = 4096
PAGE = 4096
LABEL = 64  # bytes of a session's name

# A session's state.
LIVE, EXPIRED = 1, 2
# A slot's state. FREE is also the state of an unused session line.
FREE, OPEN, BROKEN, CLOSED = 0, 1, 2, 3
# The coordinator's.
RUNNING, STOPPED = 1, 2

# Why the node of a broken mirror is lost: a slot's `reason` is the index here.
REASONS = ("", "silent", "restarted", "bridge", "replaced", "stopped")

INT64_MAX = (1 << 63) - 1  # releases every waiter of a timeline word: CUDA compares cyclically, as signed

# Header words.
H_MAGIC, H_VERSION, H_EPOCH, H_EPOCH_2, H_PID, H_START = range(6)
H_NAMESPACE, H_OWNER, H_STATE, H_HEARTBEAT, H_SESSIONS, H_SLOTS = range(6, 12)
H_NEWEST = 12  # the count of the newest session, stored before its line is given to it
H_STARTS = 15  # how many coordinators have served with this board
# Session words: the coordinator's, then the client's.
S_STATE, S_SERIAL, S_PID, S_START, S_NAMESPACE = range(5)
S_HEARTBEAT, S_OWNER, S_DOORBELL = 8, 9, 10  # `doorbell` is never stored to: a futex that wakes the client's thread
S_SHOWS_END = 11  # the session's serial, if a lock shows its process's end
S_LOCK = 12  # the inode of the socket that keeps that lock, which forked children have too
S_PROBE = 13  # a stream of the client writes it, to test that streams can
S_GOODBYE = 14  # the session's serial, once it is closed and touches no slot
# Slot words: the coordinator's, then the recorder's (on the timeline engine the GPU writes `completed`).
L_INCARNATION, L_STATE, L_RECORDER, L_WATERMARK, L_EXPIRED, L_REASON = range(6)
L_AWAITED, L_FOLLOWED = 6, 7  # 1: a record is to wake who waits, or the bridge; the waiters' and the bridge's
L_RECORDED, L_COMPLETED, L_FIRST_DEPENDENT, L_VALID_AS_OF, L_LOST, L_ROOT_CAUSE = range(8, 14)
L_ANNOUNCED = 14  # 1: a recorder is to look at the hazards before its ring goes round; stored by those who announce one

WORDS = LINE // 8


class Layout:
    """Where the tables of a board begin, in bytes, each on pages of its own, and how long one slot's rows are."""

    def __init__(self, sessions: int, slots: int) -> None:
        self.slots: int = HEADER + _pages(sessions * LINE)
        self.bits: int = self.slots + _pages(slots * LINE)  # no GPU writes these pages
        self.bits_row: int = -(-sessions // 512) * 64  # one bit a session line, in whole cache lines
        self.bit_words: int = -(-sessions // 64)  # those of a row that are used
        self.hazards: int = self.bits + _pages(slots * self.bits_row)
        self.hazards_row: int = -(-sessions // 64) * 64  # one byte a session line, in whole cache lines
        self.labels: int = self.hazards + _pages(slots * self.hazards_row)
        self.size: int = self.labels + _pages(sessions * LABEL)


def _pages(length: int) -> int:
    return -(-length // PAGE) * PAGE
