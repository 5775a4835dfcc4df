"""A slot's line of the board as an object: each word by its name, and the order of stores to several words."""

from __future__ import annotations

import ctypes

from ipcsync._board.fence import fence, full_fence
from ipcsync._board.layout import (
    BROKEN,
    L_AS_OF,
    L_AWAITED,
    L_BEHIND,
    L_COMPLETED,
    L_CULPRIT,
    L_EXPIRED,
    L_FOLLOWED,
    L_INCARNATION,
    L_LOST,
    L_REASON,
    L_RECORDED,
    L_RECORDER,
    L_STATE,
    L_VISITED,
    L_WATERMARK,
    OPEN,
    REASONS,
    WORDS,
)
from ipcsync._linux.futex import Futex


class SlotLine:
    """One slot's words, `offset` bytes into a board whose `words` lie at `address`.

    `futex` is on the low half of `recorded`; `bits` are the places of the slot's bits in those words; `visits` are
    bytes, one for each session line, which is odd during a visit of that session: from before its last look whether a
    generation is complete until a stream's wait for that one is queued in the driver.
    """

    __slots__ = ("_bits", "_board", "_first", "_visits", "_words", "address", "futex")

    def __init__(self, words: memoryview[int], address: int, offset: int, bits: range, visits: memoryview[int]) -> None:
        self._first = offset // 8
        self._words = words
        self._bits = bits
        self._visits = visits
        self._board = address
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
    def waiters_indices(self) -> tuple[int, int]:
        """The same of awaited and followed: whether a record is to wake anybody, asked behind a full fence."""
        return self._first + L_AWAITED, self._first + L_FOLLOWED

    @property
    def chain_indices(self) -> tuple[int, int, int]:
        """The same of behind, as_of and lost."""
        return self._first + L_BEHIND, self._first + L_AS_OF, self._first + L_LOST

    @property
    def bits_address(self) -> int:
        """Address of the first word of the slot's bits in this process; there are `bits_length` of them."""
        return self._board + self._bits.start * 8

    @property
    def bits_length(self) -> int:
        """How many words the slot's bits have."""
        return len(self._bits)

    @property
    def visits_address(self) -> int:
        """Address of the first of the slot's visits in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._visits))

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
        # The last recorder's: if it ended before it published a record, these are about one that the new use will make.
        for index in (L_BEHIND, L_AS_OF, L_LOST, L_CULPRIT, L_AWAITED, L_FOLLOWED, L_VISITED):
            words[first + index] = 0
        self.store_bits(0)
        self._visits[:] = bytes(len(self._visits))
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
        Futex(self.completed_address).wake()  # who waits for work sleeps there

    def wait_recorded(self, seen: int, timeout_ns: int) -> None:
        """Sleep while `recorded` still is `seen`, for at most `timeout_ns`.

        From then on each record of this use wakes its waiters: they are not counted, so one that dies leaves nothing
        to repair. The kernel compares the word behind a barrier, so of the recorder and the waiter one sees the other.
        """
        words, place = self._words, self._first + L_AWAITED
        if not words[place]:  # it stays 1: a store would take the cache line from the recorder
            words[place] = 1
        self.futex.wait(seen & 0xFFFFFFFF, timeout_ns)

    def enter(self, session: int) -> None:
        """Store that the session of that line begins a visit (waiter); then it looks what is complete."""
        words, place = self._words, self._first + L_VISITED
        if not words[place]:  # it stays 1, as `awaited`
            words[place] = 1
        self._visits[session] = (self._visits[session] + 1 | 1) & 0xFF  # never what an earlier visit had
        full_fence()

    def is_on_visit(self, session: int) -> bool:
        """Whether the session of that line is."""
        return bool(self._visits[session] & 1)

    def leave(self, session: int) -> None:
        """Store that its visit is over, if there is one (waiter)."""
        if fence:
            fence()
        visit = self._visits[session]
        if visit & 1:
            self._visits[session] = visit + 1 & 0xFF

    def visits(self) -> dict[int, int]:
        """Which sessions are on a visit, and the byte that tells this visit from others (recorder)."""
        full_fence()  # behind the store of `completed`: who enters later sees that
        if not self._words[self._first + L_VISITED]:
            return {}
        visits = self._visits.tobytes()
        if not int.from_bytes(visits, "little") & int.from_bytes(b"\1" * len(visits), "little"):
            return {}
        return {session: visit for session, visit in enumerate(visits) if visit & 1}

    @property
    def is_followed(self) -> bool:
        """Whether the bridge sleeps until the next record."""
        return bool(self._words[self._first + L_FOLLOWED])

    def follow(self, asleep: bool) -> None:
        """Store whether the bridge is about to sleep until the next record (bridge)."""
        self._words[self._first + L_FOLLOWED] = asleep
