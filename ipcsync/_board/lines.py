"""The lines of the board as objects: each word by its name, and the order of stores to several words."""

from __future__ import annotations

import ctypes
import struct

from ipcsync._board.fence import fence
from ipcsync._board.layout import (
    BROKEN,
    L_AS_OF,
    L_BEHIND,
    L_COMPLETED,
    L_CULPRIT,
    L_EXPIRED,
    L_INCARNATION,
    L_LOST,
    L_REASON,
    L_RECORDED,
    L_RECORDER,
    L_STATE,
    L_WATERMARK,
    LABEL,
    LIVE,
    OPEN,
    REASONS,
    S_HEARTBEAT,
    S_NAMESPACE,
    S_NUDGE,
    S_OWNER,
    S_PID,
    S_SERIAL,
    S_SHOWS_END,
    S_START,
    S_STATE,
    WORDS,
)
from ipcsync._linux.futex import Futex


class SessionLine:
    """One session's words, `offset` bytes into a board whose `words` lie at `address`; its name is `label` bytes in.

    `serial` is (count << 16) | line number, and is never reused. `nudge` is a futex that wakes the session's client.
    """

    __slots__ = ("_address", "_first", "_label", "_words", "nudge", "offset")

    def __init__(self, words: memoryview, address: int, offset: int, label: int) -> None:
        self._label = label // 8
        self.offset: int = offset
        self.nudge: Futex = Futex(address + offset + S_NUDGE * 8)
        self._first = offset // 8
        self._words = words
        self._address = address + offset

    @property
    def state(self) -> int:
        """FREE, LIVE or EXPIRED; written by the coordinator."""
        return self._words[self._first + S_STATE]

    @property
    def standing(self) -> memoryview:
        """The words of state and serial, to compare with the expected ones."""
        return self._words[self._first + S_STATE : self._first + S_SERIAL + 1]

    @property
    def standing_address(self) -> int:
        """Address of those words in this process."""
        return self._address + S_STATE * 8

    @property
    def serial(self) -> int:
        """Which session has the line; written by the coordinator."""
        return self._words[self._first + S_SERIAL]

    @property
    def process(self) -> tuple[int, int, int]:
        """(pid, start time, pid namespace) as the coordinator sees them; pid 0 if it cannot see the process."""
        first = self._first
        return self._words[first + S_PID], self._words[first + S_START], self._words[first + S_NAMESPACE]

    @property
    def heartbeat(self) -> int:
        """CLOCK_MONOTONIC in ns at the last beat; written by the client's thread."""
        return self._words[self._first + S_HEARTBEAT]

    @heartbeat.setter
    def heartbeat(self, now_ns: int) -> None:
        self._words[self._first + S_HEARTBEAT] = now_ns

    @property
    def owner(self) -> int:
        """A robust futex: the id of the client's thread that holds it, marked OWNER_DIED by the kernel; 0: not held."""
        return self._words[self._first + S_OWNER]

    @property
    def nudge_address(self) -> int:
        """Address of `nudge`."""
        return self._address + S_NUDGE * 8

    @property
    def owner_address(self) -> int:
        """Address of that word in this process."""
        return self._address + S_OWNER * 8

    @property
    def end_is_shown(self) -> bool:
        """Whether a lock shows the end of the process whose session has the line."""
        return bool(self._words[self._first + S_SHOWS_END] == self.serial)

    def shows_end(self) -> None:
        """Store that it does (client), once the lock is held."""
        self._words[self._first + S_SHOWS_END] = self.serial

    @property
    def indices(self) -> tuple[int, int]:
        """The indices of serial and owner in the board's words, for hot paths that read them directly."""
        return self._first + S_SERIAL, self._first + S_OWNER

    @property
    def label(self) -> str:
        """The session's name (at most 64 bytes of it), else its public id."""
        return self._words[self._label : self._label + LABEL // 8].tobytes().rstrip(b"\0").decode(errors="replace")

    def assign(self, serial: int, pid: int, started: int, namespace: int, now_ns: int, label: str = "") -> None:
        """Give the line to a session (coordinator), which stores the first heartbeat for it."""
        words, first = self._words, self._first
        words[first + S_SERIAL] = 0  # a process that asks for the last session meanwhile must not find this one's
        if fence:
            fence()
        words[first + S_HEARTBEAT] = now_ns
        words[first + S_OWNER] = 0
        words[first + S_PID] = pid
        words[first + S_START] = started
        words[first + S_NAMESPACE] = namespace
        for index, word in enumerate(_label_words(label), self._label):
            words[index] = word
        words[first + S_SERIAL] = serial
        if fence:
            fence()
        words[first + S_STATE] = LIVE

    def set_state(self, state: int) -> None:
        """Store the session's state (coordinator)."""
        self._words[self._first + S_STATE] = state


class SlotLine:
    """One slot's words, `offset` bytes into a board whose `words` lie at `address`.

    `futex` is on the low half of `recorded`; `bits` are the places of the slot's bits in those words.
    """

    __slots__ = ("_bits", "_first", "_words", "address", "futex")

    def __init__(self, words: memoryview, address: int, offset: int, bits: range) -> None:
        self._first = offset // 8
        self._words = words
        self._bits = bits
        self.address: int = address + offset
        self.futex: Futex = Futex(self.address + L_RECORDED * 8)

    @property
    def completed_address(self) -> int:
        """Address of the `completed` word in this process, for a GPU to write."""
        return self.address + L_COMPLETED * 8

    @property
    def all_words(self) -> memoryview:
        """All words of the line, unbuffered: one comparison shows whether any has changed."""
        return self._words[self._first : self._first + WORDS]

    @property
    def coordinators_indices(self) -> tuple[int, int, int]:
        """The indices of incarnation, state and recorder in the board's words, for hot paths that read them."""
        return self._first + L_INCARNATION, self._first + L_STATE, self._first + L_RECORDER

    @property
    def recorders_indices(self) -> tuple[int, int]:
        """The same of recorded and completed."""
        return self._first + L_RECORDED, self._first + L_COMPLETED

    @property
    def chain_indices(self) -> tuple[int, int, int]:
        """The same of behind, as_of and lost."""
        return self._first + L_BEHIND, self._first + L_AS_OF, self._first + L_LOST

    @property
    def incarnation(self) -> int:
        """How many uses the slot has had; written by the coordinator."""
        return self._words[self._first + L_INCARNATION]

    @property
    def state(self) -> int:
        """FREE, OPEN, BROKEN or CLOSED; written by the coordinator."""
        return self._words[self._first + L_STATE]

    @property
    def recorder(self) -> int:
        """Serial of the session that records, 0 while there is none; written by the coordinator."""
        return self._words[self._first + L_RECORDER]

    @property
    def watermark(self) -> int:
        """Once BROKEN: everything up to here was complete before the break, and nothing later ever counts."""
        return self._words[self._first + L_WATERMARK]

    @property
    def recorded(self) -> int:
        """Base + last generation published; written by the recorder."""
        return self._words[self._first + L_RECORDED]

    @property
    def completed(self) -> int:
        """Everything up to here is complete; written by the recorder (event) or the GPU (timeline)."""
        return self._words[self._first + L_COMPLETED]

    @property
    def behind(self) -> int:
        """Base + first generation that stands behind a wait and is not settled; up to base: none (recorder)."""
        return self._words[self._first + L_BEHIND]

    @property
    def as_of(self) -> int:
        """Count of sessions when the bits were last found good; written by the recorder."""
        return self._words[self._first + L_AS_OF]

    @property
    def lost(self) -> int:
        """Base + first lost generation; up to base: none. Never taken back; written by the recorder."""
        return self._words[self._first + L_LOST]

    @property
    def culprit(self) -> int:
        """Serial of the session whose end caused the loss, 0 if it is unknown; written by the recorder."""
        return self._words[self._first + L_CULPRIT]

    @property
    def bits(self) -> int:
        """A bit for each session that the slot stands behind, at any remove; its recorder's own: ask that one."""
        words, bits = self._words, 0
        for place in reversed(self._bits):
            bits = bits << 64 | words[place]
        return bits

    def store_bits(self, bits: int) -> None:
        """Store which sessions the slot stands behind (recorder)."""
        words = self._words
        for place in self._bits:
            word = bits & 0xFFFFFFFFFFFFFFFF
            bits >>= 64
            if words[place] != word:
                words[place] = word

    def store_as_of(self, count: int) -> None:
        """Store up to which session the bits were found good (recorder, after the bits)."""
        if fence:
            fence()
        self._words[self._first + L_AS_OF] = count

    def store_behind(self, count: int) -> None:
        """Store the first generation that stands behind a wait (recorder, after the bits, before its record)."""
        if fence:
            fence()
        self._words[self._first + L_BEHIND] = count
        if fence:
            fence()

    def lose(self, count: int, culprit: int) -> None:
        """Store that everything from `count` on is lost, and by whose end; then wake the waiters (recorder)."""
        self._words[self._first + L_CULPRIT] = culprit
        if fence:
            fence()
        self._words[self._first + L_LOST] = count
        if fence:
            fence()
        self.futex.wake()

    def publish(self, count: int) -> None:
        """Store that everything up to `count` is recorded (recorder, after the driver's call)."""
        if fence:
            fence()
        self._words[self._first + L_RECORDED] = count
        if fence:  # before the caller looks at `state`
            fence()

    def store_completed(self, count: int) -> None:
        """Store that everything up to `count` is complete (recorder; at a timeline's break, the coordinator)."""
        if fence:
            fence()
        self._words[self._first + L_COMPLETED] = count

    def open(self, incarnation: int) -> None:
        """Begin a new use (coordinator, once no process of the last one is left)."""
        words, first = self._words, self._first
        words[first + L_RECORDER] = 0
        words[first + L_WATERMARK] = 0
        words[first + L_REASON] = 0
        words[first + L_INCARNATION] = incarnation
        if fence:
            fence()
        words[first + L_STATE] = OPEN

    def set_recorder(self, serial: int) -> None:
        """Store which session records (coordinator)."""
        self._words[self._first + L_RECORDER] = serial

    def set_watermark(self, watermark: int) -> None:
        """Store how far the event is complete, before `completed` itself is used to release waiters (coordinator)."""
        self._words[self._first + L_WATERMARK] = watermark

    @property
    def has_expired(self) -> bool:
        """Once BROKEN: whether the recorder's session expired; else its process died."""
        return bool(self._words[self._first + L_EXPIRED])

    @property
    def reason(self) -> str:
        """Once BROKEN, of a mirror: why its node is lost; "" if only its recorder is, and for other slots."""
        code = self._words[self._first + L_REASON]
        return REASONS[code] if code < len(REASONS) else ""

    def break_at(self, watermark: int, *, has_expired: bool = False, reason: str = "") -> None:
        """End the use by the recorder's death or expiry: only what is up to `watermark` stays good (coordinator).

        `reason`: of a mirror, why the whole node is lost.
        """
        self._words[self._first + L_WATERMARK] = watermark
        self._words[self._first + L_EXPIRED] = has_expired
        self._words[self._first + L_REASON] = REASONS.index(reason)
        self.finish(BROKEN)

    def finish(self, state: int) -> None:
        """Store a final state, then wake every waiter (coordinator)."""
        if fence:
            fence()
        self._words[self._first + L_STATE] = state
        if fence:
            fence()
        self.futex.wake()

    def wait_recorded(self, seen: int, timeout_ns: int) -> None:
        """Sleep while `recorded` still is `seen`, for at most `timeout_ns`."""
        self.futex.wait(seen & 0xFFFFFFFF, timeout_ns)


def _label_words(label: str) -> tuple[int, ...]:
    """A session's name as words, truncated between two characters if it is too long."""
    data = label.encode()[:LABEL].decode(errors="ignore").encode()
    return struct.unpack(f"={LABEL // 8}Q", data.ljust(LABEL, b"\0"))


def words(*values: int) -> memoryview:
    """Words to compare with the board's: one comparison costs as much as reading a single word."""
    return memoryview(struct.pack(f"={len(values)}Q", *values)).cast("Q")


def word_at(address: int) -> ctypes.c_uint64:
    """The 8-byte word at `address`, for plain loads and stores."""
    return ctypes.c_uint64.from_address(address)
