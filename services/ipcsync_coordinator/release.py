"""Timeline words in the coordinator's hands: the release of those who wait for what will never be recorded."""

from __future__ import annotations

from ipcsync._board import INT64_MAX, SlotLine


class Releaser:
    """Keeps the words of finished timeline slots at INT64_MAX, which lets every queued wait pass.

    Once is not enough: writes that a living process still has queued would pull the word down again. So it is stored
    again every 50 ms until the slot is used anew, which it is only when nobody is left who could write it.
    """

    def __init__(self) -> None:
        self._held: dict[int, SlotLine] = {}

    def hold(self, index: int, line: SlotLine) -> None:
        """Release every waiter of the word of slot `index`, from now until `let_go`."""
        self._held[index] = line
        line.store_completed(INT64_MAX)

    def let_go(self, index: int, line: SlotLine, count: int) -> None:
        """Nobody can touch the word any more: set it to `count`, where the next use begins."""
        self._held.pop(index, None)
        if line.completed != count:
            line.store_completed(count)

    def holds_any(self) -> bool:
        """Whether there is anything to store again."""
        return bool(self._held)

    def reassert(self) -> None:
        """Store INT64_MAX again wherever it was pulled down."""
        for line in self._held.values():
            if line.completed != INT64_MAX:
                line.store_completed(INT64_MAX)
