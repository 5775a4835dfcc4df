"""Timeline words in the coordinator's hands: whether they work here, and the release of waiters."""

from __future__ import annotations

import time
from typing import Any

from ipcsync import _drivers
from ipcsync._board import INT64_MAX, Board, SlotLine
from ipcsync._native import context, pinned
from ipcsync.errors import DriverError

_PROBE_S = 1.0


class Releaser:
    """Keeps the words of finished timeline slots at INT64_MAX, which lets every queued wait pass.

    Once is not enough: writes that a living process still has queued would pull the word down again. So it is stored
    again every 50 ms until the slot is used anew, which it is only when nobody is left who could write it.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._held: dict[int, SlotLine] = {}
        self._why_not: dict[int, str | None] = {}

    def hold(self, index: int, line: SlotLine) -> None:
        """Release every waiter of the word of slot `index`, from now until `let_go`."""
        self._held[index] = line
        line.store_completed(INT64_MAX)

    def let_go(self, index: int, line: SlotLine) -> None:
        """Nobody can touch the word any more: set it to where the next use begins."""
        self._held.pop(index, None)
        if line.completed != line.recorded:
            line.store_completed(line.recorded)

    def holds_any(self) -> bool:
        """Whether there is anything to store again."""
        return bool(self._held)

    def reassert(self) -> None:
        """Store INT64_MAX again wherever it was pulled down."""
        for line in self._held.values():
            if line.completed != INT64_MAX:
                line.store_completed(INT64_MAX)

    def why_not(self, ordinal: int) -> str | None:
        """Why a timeline word on the board does not work on this device, None if it does; tried once, for real."""
        if ordinal not in self._why_not:
            try:
                self._why_not[ordinal] = self._try(ordinal)
            except DriverError as error:
                self._why_not[ordinal] = str(error)
        return self._why_not[ordinal]

    def _try(self, ordinal: int) -> str | None:
        driver = _drivers.load()
        context.ensure_context(ordinal)
        pointer = pinned.page(self._board.address) + self._board.probe_offset
        stream: Any = _drivers.unwrap(driver.cuStreamCreate(1), "cuStreamCreate")
        try:
            value = (self._board.probe + 1) & 0xFFFFFFFF
            _drivers.unwrap(driver.cuStreamWriteValue64(stream, pointer, value, 0), "cuStreamWriteValue64")
            _drivers.unwrap(driver.cuStreamWaitValue64(stream, pointer, value, 0), "cuStreamWaitValue64")
            deadline = time.monotonic() + _PROBE_S
            while self._board.probe != value:
                if time.monotonic() > deadline:
                    return f"a stream's write to the board was not seen within {_PROBE_S} s"
        finally:
            _drivers.unwrap(driver.cuStreamDestroy(stream), "cuStreamDestroy")
        return None
