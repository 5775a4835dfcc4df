"""What the bridge stores of another node's event: on a slot of its own coordinator, on which it is the recorder."""

from __future__ import annotations

from ipcsync._board import CLOSED, OPEN, Board
from ipcsync._linux.futex import Futex
from ipcsync._wire.messages import Attachment
from ipcsync_bridge.links import Link


class Mirror:
    """One mirror: `recorded`, then `completed`, then who waits is woken; a final word only after that.

    `is_new`: nothing was stored for this use so far.
    """

    def __init__(self, board: Board, attachment: Attachment, link: Link, *, is_new: bool = True) -> None:
        self.link = link
        self.attachment = attachment
        self.slot = attachment.slot
        self.incarnation = attachment.incarnation
        self.ending: tuple[str, str] | None = None
        """With which state and reason the coordinator is being asked to finish it."""
        self.has_told_closed = False
        self._base = attachment.base
        self._line = board.slot(attachment.slot)
        self._word = Futex(self._line.completed_address)
        self._recorded = self._completed = self._lost = 0
        if is_new:
            self._line.store_behind(0)  # an earlier recorder's; what is lost of a mirror, its own node tells
            self._line.lose(self._base, 0)

    def store(self) -> None:
        """Store what the link knows and the board does not. Nothing once the coordinator has finished the use."""
        link, line = self.link, self._line
        if self.ending is not None or line.incarnation != self.incarnation or (not self._is_open()):
            return
        if link.recorded > self._recorded:
            line.publish(self._base + link.recorded)
            self._recorded = link.recorded
        if link.completed > self._completed:
            line.store_completed(self._base + link.completed)
            self._completed = link.completed
        line.futex.wake()
        self._word.wake()
        if link.lost and link.lost != self._lost:
            line.lose(self._base + link.lost, 0)
            self._lost = link.lost

    def _is_open(self) -> bool:
        """Whether the coordinator has not finished the use otherwise than it was asked to."""
        state = self._line.state
        return state == OPEN or (state == CLOSED and self.has_told_closed)
