"""What follows from a registry's change: on the board, in the pool, on the feed. In this order, everywhere:
state on the board, then the waiters woken, then the announcement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ipcsync._board import CLOSED, EXPIRED, FREE, INT64_MAX, Board, SlotLine
from ipcsync.errors import IpcSyncError
from ipcsync_coordinator.feed import Feed
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.registry import Change, Session, Slot
from ipcsync_coordinator.release import Releaser

log = logging.getLogger("ipcsync.coordinator")


class Effects:
    """Carries out changes. `on_forget` is told of each session whose line is free again."""

    def __init__(self, board: Board, pool: Pool, feed: Feed, on_forget: Callable[[Session], None]) -> None:
        self.pool = pool
        self.feed = feed
        self.releaser = Releaser(board)
        self._board = board
        self._on_forget = on_forget
        self._lines: dict[int, SlotLine] = {}

    def line(self, slot: Slot) -> SlotLine:
        """The slot's line on the board."""
        found = self._lines.get(slot.index)
        if found is None:
            found = self._lines[slot.index] = self._board.slot(slot.index)
        return found

    def carry_out(self, changes: Iterable[Change]) -> None:
        """Carry out changes in order."""
        for change in changes:
            if change.slot is not None:
                getattr(self, f"_{change.kind}")(change.slot)
            if change.session is not None:
                getattr(self, f"_{change.kind}")(change.session)

    def why_not_event(self, device: str) -> str:
        """Why no event handle can be made on `device`, empty if one can; tried for real."""
        try:
            self.pool.probe_handle(device)
        except IpcSyncError as error:
            return str(error)
        return ""

    def why_not_timeline(self, device: str) -> str:
        """Why no timeline word works on `device`, empty if one does; tried for real."""
        return self.releaser.why_not(self.pool.ordinal(device))

    # --- slots --------------------------------------------------------------------------------------------------------

    def _opened(self, slot: Slot) -> None:
        line = self.line(slot)
        slot.base = line.recorded
        line.open(slot.incarnation)
        self.feed.announce(
            "opened",
            name=slot.name,
            slot=slot.index,
            incarnation=slot.incarnation,
            device=slot.device,
            engine=slot.engine,
            handles=[shared.handle for shared in slot.ring],
        )

    def _recorder(self, slot: Slot) -> None:
        assert slot.recorder is not None
        self.line(slot).set_recorder(slot.recorder.serial)

    def _closed(self, slot: Slot) -> None:
        self.line(slot).finish(CLOSED)
        self._announce("closed", slot)

    def _broken(self, slot: Slot) -> None:
        line = self.line(slot)
        completed = line.completed
        # A released word says nothing; what was complete before it was released stands in the watermark already.
        line.break_at(line.watermark if completed == INT64_MAX else max(completed, slot.base))
        if slot.engine == "timeline":
            self.releaser.hold(line)
        self._announce("broken", slot)
        log.warning("event broken name=%s slot=%d recorder=%s", slot.name, slot.index, slot.recorder and slot.recorder.id)

    def _drained(self, slot: Slot) -> None:
        if slot.engine == "timeline":
            line = self.line(slot)
            line.set_watermark(line.recorded)  # the recorder let go: all that it recorded is complete
            self.releaser.hold(line)

    def _freed(self, slot: Slot) -> None:
        line = self.line(slot)
        was_drained = slot.engine == "timeline" or line.completed >= line.recorded
        if slot.engine == "timeline":
            self.releaser.let_go(line)
        line.finish(FREE)
        if was_drained:
            self.pool.give_back(slot.device, slot.ring)
        else:
            self.pool.destroy(slot.device, slot.ring)
        slot.ring = []

    def _announce(self, kind: str, slot: Slot) -> None:
        self.feed.announce(kind, name=slot.name, slot=slot.index, incarnation=slot.incarnation)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _session_opened(self, session: Session) -> None:
        self.feed.announce("session_opened", name=session.name, session=session.id)

    def _session_closed(self, session: Session) -> None:
        self._board.session(session.line).set_state(EXPIRED)
        self.feed.announce("session_closed", name=session.name, session=session.id)

    def _line_freed(self, session: Session) -> None:
        self._board.session(session.line).set_state(FREE)
        self._on_forget(session)


