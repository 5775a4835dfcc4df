"""Where each word of the board lies, and who writes it.

The file is a header page and five tables, each on pages of its own: session lines, slot lines, the slots' bits, the
slots' hazards, and the sessions' names. A line is 128 bytes: the coordinator writes the first half, a client or the GPU
the second, so that the two never share a cache line. (Two words of the slot's first half change so seldom that they may
stand there too: by them a waiter asks to be woken.) All words are 8 bytes, aligned, native-endian.

Counts never go back: a generation g of a slot's present use stands in `recorded` and `completed` as base + g, where
base is what `recorded` held when that use began. So a timeline word only grows while its use is open.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from _thread import allocate_lock
from collections.abc import Callable

from ipcsync._linux.futex import Futex

MAGIC = 0x31_44_52_41_4F_42_49_50  # "PIBOARD1"
VERSION = 4
LINE = 128
WORDS = LINE // 8
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
H_NEWEST, H_STARTS = 12, 15
# Session words: the coordinator's, then the client's.
S_STATE, S_SERIAL, S_PID, S_START, S_NAMESPACE = range(5)
S_HEARTBEAT, S_OWNER, S_DOORBELL, S_SHOWS_END, S_LOCK, S_PROBE, S_GOODBYE = range(8, 15)
# Slot words: the coordinator's, then the recorder's (on the timeline engine the GPU writes `completed`).
L_INCARNATION, L_STATE, L_RECORDER, L_WATERMARK, L_EXPIRED, L_REASON = range(6)
L_AWAITED, L_FOLLOWED = 6, 7  # the waiters' and the bridge's
L_RECORDED, L_COMPLETED, L_FIRST_DEPENDENT, L_VALID_AS_OF, L_LOST, L_ROOT_CAUSE = range(8, 14)
L_ANNOUNCED = 14  # stored by those who announce a hazard


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


# --- the lines as objects: each word by its name, and the order of stores to several words ----------------------------


class Line:
    """A line `offset` bytes into a board whose `words` lie at `address` in this process; or all of the board."""

    __slots__ = ("address", "first", "words")

    def __init__(self, words: memoryview[int], address: int, offset: int = 0) -> None:
        self.words: memoryview[int] = words
        self.first: int = offset // 8
        self.address: int = address + offset


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
    return lambda: library.atomic_thread_fence(ctypes.c_int(5))  # seq_cst


fence = _choose()
"""Called between two steps of which other processes may see the second only behind the first.

Nothing on x86-64, which keeps loads in order and stores in order. It may reorder a store with a later load of another
word: where something depends on that pair, and the other side is not woken to read again, there is `full_fence`.
"""


def full_fence() -> None:
    """Between a store and a later load: who stores and looks the other way round sees that store, or is seen."""
    fence()
    allocate_lock().acquire()  # an atomic exchange, which is a full fence on x86-64; no other thread has this lock


class SessionLine(Line):
    """One session's words; its name is `label` bytes into the board.

    `serial` is (count << 16) | line number, and never reused. `doorbell`, never stored to, wakes the session's client.
    """

    __slots__ = ("_label", "doorbell", "offset", "owner_address", "probe_address", "state_and_serial_address")

    state: Word = Word(S_STATE)  # FREE, LIVE or EXPIRED; the coordinator's
    serial: Word = Word(S_SERIAL)  # which session has the line; the coordinator's
    heartbeat: Word = Word(S_HEARTBEAT)  # CLOCK_MONOTONIC in ns at the last beat; of the client's thread
    # A robust futex: the id of the client's thread that holds it, marked OWNER_DIED by the kernel; 0: not held.
    owner: Word = Word(S_OWNER)
    # The inode of the socket that keeps the lock, which forked children have too, if `end_is_shown`; the client's.
    lock: Word = Word(S_LOCK)
    _pid, _started, _namespace = Word(S_PID), Word(S_START), Word(S_NAMESPACE)
    _shows_end, _goodbye = Word(S_SHOWS_END), Word(S_GOODBYE)  # the session's serial, once that is so

    def __init__(self, words: memoryview[int], address: int, offset: int, label: int) -> None:
        super().__init__(words, address, offset)
        self._label = label // 8
        self.offset: int = offset
        self.doorbell: Futex = Futex(self.address + S_DOORBELL * 8)
        self.state_and_serial_address: int = self.address + S_STATE * 8  # of both words
        self.owner_address: int = self.address + S_OWNER * 8
        # For trying whether a stream's write arrives; the client's, and whatever the last left.
        self.probe_address: int = self.address + S_PROBE * 8

    @property
    def process(self) -> tuple[int, int, int]:
        """(pid, start time, pid namespace) as the coordinator sees them; pid 0 if it cannot see the process."""
        return self._pid, self._started, self._namespace

    @property
    def end_is_shown(self) -> bool:
        """Whether a lock shows the end of the process whose session has the line."""
        return self._shows_end == self.serial

    def shows_end(self, lock: int) -> None:
        """Store that it does (client), once the lock is held by the socket of that inode."""
        self.lock = lock
        fence()
        self._shows_end = self.serial

    @property
    def has_said_goodbye(self) -> bool:
        """Whether the session that has the line is closed, and touches no slot."""
        return self._goodbye == self.serial

    def say_goodbye(self, serial: int) -> None:
        """Store that session `serial` is (client), for a coordinator that gets no message of it."""
        fence()
        self._goodbye = serial  # its own: the line may be another session's by now

    @property
    def label(self) -> str:
        """The session's name (at most 64 bytes of it), else its public id."""
        label = self.words[self._label : self._label + LABEL // 8]
        return label.tobytes().rstrip(b"\0").decode(errors="replace")

    def assign(self, serial: int, pid: int, started: int, namespace: int, now_ns: int, label: str = "") -> None:
        """Give the line to a session (coordinator), which stores the first heartbeat for it."""
        self.serial = 0  # a process that asks for the last session meanwhile must not find this one's
        fence()
        self.heartbeat, self.owner = now_ns, 0
        self._pid, self._started, self._namespace = pid, started, namespace
        data = label.encode()[:LABEL].decode(errors="ignore").encode()  # cut between two characters
        self.words[self._label : self._label + LABEL // 8] = memoryview(data.ljust(LABEL, b"\0")).cast("Q")
        self.serial = serial
        fence()
        self.state = LIVE


class SlotLine(Line):
    """The words of slot `index`, of a board whose `data` in bytes are as `at` says.

    `futex` is on the low half of `recorded`. The compiled core does what recorders and waiters do, over the same words.
    """

    __slots__ = ("_at", "_data", "_index", "futex")  # few: a coordinator has a line for each slot

    # Of the coordinator.
    incarnation: Word = Word(L_INCARNATION)  # how many uses the slot has had
    state: Word = Word(L_STATE)  # FREE, OPEN, BROKEN or CLOSED
    recorder: Word = Word(L_RECORDER)  # the serial of the session that records, 0 while there is none
    # Once BROKEN: all up to here was complete before the break, and nothing later ever counts. It is stored before
    # `completed` itself is used to release waiters.
    watermark: Word = Word(L_WATERMARK)
    has_expired: Word = Word(L_EXPIRED)  # once BROKEN: 1 if the recorder's session expired, 0 if its process died
    _reason = Word(L_REASON)
    # Of the recorder. `completed` is the GPU's on the timeline engine, and at a timeline's break the coordinator's.
    recorded: Word = Word(L_RECORDED)  # base + last generation published
    completed: Word = Word(L_COMPLETED)  # everything up to here is complete
    # base + first generation that depends on an open wait; up to base: none
    first_dependent: Word = Word(L_FIRST_DEPENDENT)
    valid_as_of: Word = Word(L_VALID_AS_OF)  # count of sessions when the bits were last found good
    lost: Word = Word(L_LOST)  # base + first lost generation; up to base: none. Never taken back
    root_cause: Word = Word(L_ROOT_CAUSE)  # serial of the session whose end caused the loss, 0 if it is unknown
    # Of who waits for a record.
    awaited: Word = Word(L_AWAITED)  # 1: a record is to wake those who sleep on it
    announced: Word = Word(L_ANNOUNCED)  # 1: a recorder is to look at the hazards before its ring goes round
    followed: Word = Word(L_FOLLOWED)  # 1: the bridge sleeps until the next record

    def __init__(self, words: memoryview[int], address: int, data: memoryview[int], at: Layout, index: int) -> None:
        super().__init__(words, address, at.slots + index * LINE)
        self._data = data
        self._at = at
        self._index = index
        self.futex: Futex = Futex(self.address + L_RECORDED * 8)

    @property
    def completed_address(self) -> int:
        return self.address + L_COMPLETED * 8

    @property
    def bits_address(self) -> int:
        """Where the bits are, one for each session that the slot depends on, at any remove, but its recorder's own."""
        return self.address - self.first * 8 + self._at.bits + self._index * self._at.bits_row

    @property
    def _hazards(self) -> memoryview[int]:
        """A byte for each session line, which is odd while that session has announced a hazard.

        From before its last look at a generation until a stream's wait for that one is queued in the driver.
        """
        first = self._at.hazards + self._index * self._at.hazards_row
        return self._data[first : first + self._at.hazards_row]

    @property
    def hazards_address(self) -> int:
        return self.address - self.first * 8 + self._at.hazards + self._index * self._at.hazards_row

    @property
    def all_words(self) -> memoryview:
        """All words of the line, unbuffered: one comparison shows whether any has changed."""
        return self.words[self.first : self.first + WORDS]

    @property
    def reason(self) -> str:
        """Once BROKEN, of a mirror: why its node is lost; "" if only its recorder is, and for other slots."""
        code = self._reason
        return REASONS[code] if code < len(REASONS) else ""

    def hazards(self) -> dict[int, int]:
        """Which sessions have announced a hazard, and the byte that tells this one from others (recorder)."""
        full_fence()  # behind the store of `completed`: who announces later sees that
        if not self.announced:
            return {}
        return {session: hazard for session, hazard in enumerate(self._hazards.tobytes()) if hazard & 1}

    def lose(self, count: int, root_cause: int) -> None:
        """Store that everything from `count` on is lost, and by whose end; then wake the waiters (recorder)."""
        self.root_cause = root_cause
        fence()
        self.lost = count
        fence()
        self.futex.wake()

    def publish(self, count: int) -> None:
        """Store that everything up to `count` is recorded (recorder, after the driver's call)."""
        fence()
        self.recorded = count
        fence()  # before the caller looks at `state`

    def store_completed(self, count: int) -> None:
        """Store that everything up to `count` is complete (recorder; at a timeline's break, the coordinator)."""
        fence()
        self.completed = count

    def open(self, incarnation: int) -> None:
        """Begin a new use (coordinator, once no process of the last one is left)."""
        self.recorder = self.watermark = self._reason = 0
        # The last recorder's: if it ended before it published a record, these are about one that the new use will make.
        self.first_dependent = self.valid_as_of = self.lost = self.root_cause = 0
        self.awaited = self.followed = self.announced = 0
        bits = self._at.bits + self._index * self._at.bits_row
        self._data[bits : bits + self._at.bits_row] = bytes(self._at.bits_row)
        self._hazards[:] = bytes(self._at.hazards_row)
        self.incarnation = incarnation
        fence()
        self.state = OPEN

    def break_at(self, watermark: int, *, has_expired: bool = False, reason: str = "") -> None:
        """End the use with its recorder; what is up to `watermark` stays good (coordinator). `reason`: of a mirror."""
        self.watermark = watermark
        self.has_expired, self._reason = has_expired, REASONS.index(reason)
        self.finish(BROKEN)

    def finish(self, state: int) -> None:
        """Store a final state, then wake every waiter (coordinator)."""
        fence()
        self.state = state
        fence()
        self.futex.wake()
        Futex(self.completed_address).wake()  # who waits for work sleeps there
