"""A slot's line of the board as an object: each word by its name, and the order of stores to several words."""

from __future__ import annotations

import ctypes

from ipcsync._board import layout
from ipcsync._board.words import Word, fence, full_fence
from ipcsync._linux.futex import Futex


class SlotLine:
    """One slot's words, `offset` bytes into a board whose `words` lie at `address`.

    `futex` is on the low half of `recorded`; `bits` are the places of the slot's bits in those words; `hazards` are
    bytes, one for each session line, which is odd while that session has announced one: from before
    its last look whether a generation is complete until a stream's wait for that one is queued in the driver.

    The compiled core does what recorders and waiters do, over the same words.
    """

    __slots__ = (
        *("_bits", "_hazards", "bits_length", "first", "futex", "words"),
        *("address", "bits_address", "completed_address", "hazards_address"),
    )

    # Of the coordinator.
    incarnation: Word = Word(layout.L_INCARNATION)  # how many uses the slot has had
    state: Word = Word(layout.L_STATE)  # FREE, OPEN, BROKEN or CLOSED
    recorder: Word = Word(layout.L_RECORDER)  # the serial of the session that records, 0 while there is none
    # Once BROKEN: all up to here was complete before the break, and nothing later ever counts. It is stored before
    # `completed` itself is used to release waiters.
    watermark: Word = Word(layout.L_WATERMARK)
    _expired = Word(layout.L_EXPIRED)
    _reason = Word(layout.L_REASON)
    # Of the recorder. `completed` is the GPU's on the timeline engine, and at a timeline's break the coordinator's.
    recorded: Word = Word(layout.L_RECORDED)  # base + last generation published
    completed: Word = Word(layout.L_COMPLETED)  # everything up to here is complete
    # base + first generation that depends on an open wait; up to base: none
    first_dependent: Word = Word(layout.L_FIRST_DEPENDENT)
    valid_as_of: Word = Word(layout.L_VALID_AS_OF)  # count of sessions when the bits were last found good
    lost: Word = Word(layout.L_LOST)  # base + first lost generation; up to base: none. Never taken back
    root_cause: Word = Word(layout.L_ROOT_CAUSE)  # serial of the session whose end caused the loss, 0 if it is unknown
    # Of who waits for a record.
    awaited: Word = Word(layout.L_AWAITED)  # 1: a record is to wake those who sleep on it
    announced: Word = Word(layout.L_ANNOUNCED)  # 1: a recorder is to look at the hazards before its ring goes round
    followed: Word = Word(layout.L_FOLLOWED)  # 1: the bridge sleeps until the next record

    def __init__(
        self, words: memoryview[int], address: int, offset: int, bits: range, hazards: memoryview[int]
    ) -> None:
        self.first: int = offset // 8
        self.words: memoryview[int] = words
        self._bits = bits
        self._hazards = hazards
        self.address: int = address + offset
        self.futex: Futex = Futex(self.address + layout.L_RECORDED * 8)
        self.completed_address: int = self.address + layout.L_COMPLETED * 8  # for a GPU to write
        # A bit for each session that the slot depends on, at any remove; its recorder's own: ask that one.
        self.bits_address: int = address + bits.start * 8
        self.bits_length: int = len(bits)  # in words
        self.hazards_address: int = ctypes.addressof(ctypes.c_char.from_buffer(hazards))

    @property
    def all_words(self) -> memoryview:
        """All words of the line, unbuffered: one comparison shows whether any has changed."""
        return self.words[self.first : self.first + layout.WORDS]

    @property
    def has_expired(self) -> bool:
        """Once BROKEN: whether the recorder's session expired; else its process died."""
        return bool(self._expired)

    @property
    def reason(self) -> str:
        """Once BROKEN, of a mirror: why its node is lost; "" if only its recorder is, and for other slots."""
        code = self._reason
        return layout.REASONS[code] if code < len(layout.REASONS) else ""

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
        for place in self._bits:
            self.words[place] = 0
        self._hazards[:] = bytes(len(self._hazards))
        self.incarnation = incarnation
        fence()
        self.state = layout.OPEN

    def set_recorder(self, serial: int) -> None:
        """Store which session records (coordinator)."""
        self.recorder = serial

    def break_at(self, watermark: int, *, has_expired: bool = False, reason: str = "") -> None:
        """End the use by the recorder's death or expiry: only what is up to `watermark` stays good (coordinator).

        `reason`: of a mirror, why the whole node is lost.
        """
        self.watermark = watermark
        self._expired, self._reason = has_expired, layout.REASONS.index(reason)
        self.finish(layout.BROKEN)

    def finish(self, state: int) -> None:
        """Store a final state, then wake every waiter (coordinator)."""
        fence()
        self.state = state
        fence()
        self.futex.wake()
        Futex(self.completed_address).wake()  # who waits for work sleeps there
