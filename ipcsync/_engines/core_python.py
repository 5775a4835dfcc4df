"""The core in Python: what runs where the compiled one is not, and what that one is the shorthand of."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING

from ipcsync._board.lines import words

if TYPE_CHECKING:
    from ipcsync._board import Board, SessionLine
    from ipcsync._linux.fork import ForkMark

INTERFACE = 1
"""What the modules around the core expect of it; raised with any change that an older binary does not know."""


class Look:
    """Whether a session can be used: not forked, the line still `serial`'s and `live`, the header as it was, in time.

    `good_until` is CLOCK_MONOTONIC in ns; the session's lease writes it, and -1 once there is a problem.
    """

    __slots__ = ("_fork_mark", "_header", "_live", "_running_header", "_slowly", "_standing", "good_until")

    def __init__(
        self, fork_mark: ForkMark, board: Board, line: SessionLine, serial: int, live: int, slowly: Callable[[], None]
    ) -> None:
        self._fork_mark = fork_mark.byte
        self._header, self._running_header = board.header, board.running_header
        self._standing, self._live = line.standing, words(live, serial)
        self._slowly = slowly
        self.good_until = -1

    def check(self) -> None:
        """Call `slowly` unless all is well. Costs about 0.3 µs, compiled 0.05."""
        if (
            self._fork_mark[0]
            and self._standing == self._live
            and self._header == self._running_header
            and monotonic_ns() <= self.good_until
        ):
            return
        self._slowly()
