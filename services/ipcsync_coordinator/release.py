"""Release of timeline words: streams that wait for records which will never be made go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ipcsync._board import INT64_MAX, SlotLine
from ipcsync._linux.futex import Futex

_SOON_S, _LATER_S = 0.001, 0.05
_FRESH_NS = 1_000_000_000


class Releaser:
    """Keeps the words of finished timeline slots at INT64_MAX, which ends every queued wait.

    Storing it once is not enough: queued writes of a live process, and of a dead one's work under way, lower the word
    again, and a wait that a stream reaches then would stand still. So it is stored again each millisecond in the first
    second, then every 50 ms, until the slot is reused, which is only once nothing can write it. `later` has a function
    called after so many seconds.
    """

    def __init__(
        self, later: Callable[[float, Callable[[], None]], asyncio.TimerHandle | None] = lambda *_: None
    ) -> None:
        self._later = later
        self._held: dict[int, SlotLine] = {}
        self._fresh_until = 0  # CLOCK_MONOTONIC in ns
        self._timer: asyncio.TimerHandle | None = None
        self._is_soon = False  # it ends within a millisecond

    def hold(self, index: int, line: SlotLine) -> None:
        """Release every waiter of the word of slot `index`, from now until `reset`."""
        self._held[index] = line
        _release(line)
        self._fresh_until = time.monotonic_ns() + _FRESH_NS
        if not self._is_soon:
            self._call_later()

    def _call_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()  # the slow one, of words that were released long ago
        self._is_soon = time.monotonic_ns() < self._fresh_until
        self._timer = self._later(_SOON_S if self._is_soon else _LATER_S, self._again)

    def _again(self) -> None:
        self._timer, self._is_soon = None, False
        self.reassert()
        if self._held:
            self._call_later()

    def reset(self, index: int, line: SlotLine, count: int) -> None:
        """Set the word to `count`, where the next use begins; no process can touch it any more."""
        self._held.pop(index, None)
        if line.completed != count:
            line.store_completed(count)

    def reassert(self) -> None:
        """Store INT64_MAX again where a write has lowered the word."""
        for line in self._held.values():
            if line.completed != INT64_MAX:
                _release(line)


def _release(line: SlotLine) -> None:
    """End the waits of streams, and wake the host's, which sleep on the word (so do a software driver's streams)."""
    line.store_completed(INT64_MAX)
    Futex(line.completed_address).wake()
