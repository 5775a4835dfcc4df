"""Release of timeline words: streams that wait for records which will never be made go on."""

from __future__ import annotations

from ipcsync._board import INT64_MAX, SlotLine
from ipcsync._linux.futex import Futex


class Releaser:
    """Keeps the words of finished timeline slots at INT64_MAX, which ends every queued wait.

    Storing it once is not enough: queued writes of a live process would lower the word again. So it is stored again
    every 50 ms until the slot is reused, which is only once no process can write it.
    """

    def __init__(self) -> None:
        self._held: dict[int, SlotLine] = {}

    def hold(self, index: int, line: SlotLine) -> None:
        """Release every waiter of the word of slot `index`, from now until `reset`."""
        self._held[index] = line
        _release(line)

    def reset(self, index: int, line: SlotLine, count: int) -> None:
        """Set the word to `count`, where the next use begins; no process can touch it any more."""
        self._held.pop(index, None)
        if line.completed != count:
            line.store_completed(count)

    def holds_any(self) -> bool:
        """Whether there is anything to store again."""
        return bool(self._held)

    def reassert(self) -> None:
        """Store INT64_MAX again where a write has lowered the word."""
        for line in self._held.values():
            if line.completed != INT64_MAX:
                _release(line)


def _release(line: SlotLine) -> None:
    """End the waits of streams, and wake the host's, which sleep on the word (so do a software driver's streams)."""
    line.store_completed(INT64_MAX)
    Futex(line.completed_address).wake()
