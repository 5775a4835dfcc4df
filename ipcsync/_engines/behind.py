"""What a slot's generations stand behind: the waiters' view of the words on the board.

B's stream waited for A's point, and B recorded n behind it: n counts only if A's point counts. Only the recorder knows
what it queued, so it alone judges its event. Waiters read here whether all is well. If they cannot see that, they
decide nothing, and wake the recorder to judge.

The slot's bits name the sessions that it stands behind, directly or through others; the recorder's own bit says that
only the recorder can judge. The kernel marks a session, or its state is not LIVE any more, before a driver reports its
work wrongly and before its words are released. So bits that are found good *after* n was found complete prove that no
wait before n ended wrongly.
"""

from __future__ import annotations

import time

from ipcsync._board import LIVE, Board, SlotLine, layout
from ipcsync._board.fence import fence
from ipcsync._linux.robust import OWNER_DIED

_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 50_000, 50_000_000
_SHORTEST_SLICE_NS = 1_000_000


class Behind:
    """One attachment's view of these words. Thread-safe; generations are counted from `base`."""

    __slots__ = (
        "_as_of_index",
        "_base",
        "_behind_index",
        "_board",
        "_line",
        "_lost_index",
        "_next_ns",
        "_pause_ns",
        "_words",
        "slice_ns",
    )

    def __init__(self, board: Board, line: SlotLine, base: int) -> None:
        self._board = board
        self._line = line
        self._words = board.words
        self._base = base
        self._behind_index, self._as_of_index, self._lost_index = line.chain_indices
        self._next_ns = 0
        self.slice_ns: int = _LONGEST_PAUSE_NS
        """How long a wait may sleep without a look: shorter while a judgement is awaited."""
        self._pause_ns = _FIRST_PAUSE_NS

    def stands(self, generation: int) -> bool:
        """Whether `generation` stands behind something that its recorder has not settled."""
        return 0 < self._words[self._behind_index] - self._base <= generation

    @property
    def first(self) -> int:
        """The first such generation, 0 for none."""
        first: int = self._words[self._behind_index] - self._base
        return first if first > 0 else 0  # `max` would take longer than the rest

    def is_lost(self, generation: int) -> bool:
        """Whether the recorder has said that `generation` is lost."""
        return 0 < self._words[self._lost_index] - self._base <= generation

    @property
    def lost_from(self) -> int:
        """The first lost generation, 0 for none."""
        return max(int(self._words[self._lost_index]) - self._base, 0)

    def good_bits(self, own: int) -> int | None:
        """The slot's bits if every session that they name lives; None if not, or if the bit of line `own` is set."""
        as_of = self._words[self._as_of_index]
        if fence:
            fence()
        bits = rest = self._line.bits
        if fence:
            fence()
        while rest:
            low = rest & -rest
            index = low.bit_length() - 1
            if index == own or not session_is_good(self._words, index, as_of):
                return None
            rest ^= low
        return bits

    def is_clear(self, recorder: int) -> bool:
        """Whether all is well with what the slot stands behind; `recorder` is the recorder's serial."""
        if self.good_bits(recorder & 0xFFFF) is None:
            return False
        self._pause_ns = _FIRST_PAUSE_NS
        self.slice_ns = _LONGEST_PAUSE_NS
        return True

    def nudge(self, recorder: int) -> None:
        """Wake the recorder to judge: at once, then at growing intervals until it has."""
        now = time.monotonic_ns()
        if now < self._next_ns:
            return
        if now - self._next_ns > _LONGEST_PAUSE_NS:  # for another judgement than the last time
            self._pause_ns = _FIRST_PAUSE_NS
        self._next_ns = now + self._pause_ns
        self.slice_ns = max(self._pause_ns, _SHORTEST_SLICE_NS)
        self._pause_ns = min(2 * self._pause_ns, _LONGEST_PAUSE_NS)
        self._board.session(recorder & 0xFFFF).nudge.wake()

    def await_answer(self, deadline_ns: int) -> None:
        """Sleep until the next look is due; a loss wakes at once."""
        pause = min(self._next_ns, deadline_ns) - time.monotonic_ns()
        if pause > 0:
            self._line.wait_recorded(self._line.recorded, pause)


def session_is_good(words: memoryview, index: int, as_of: int) -> bool:
    """Whether the session of line `index` lives, and is among the first `as_of` sessions."""
    first = layout.session_offset(index) // 8
    owner = words[first + layout.S_OWNER]  # in this order: a later session of the line has a larger count
    if not owner or owner & OWNER_DIED or words[first + layout.S_STATE] != LIVE:
        return False
    return int(words[first + layout.S_SERIAL]) >> 16 <= as_of
