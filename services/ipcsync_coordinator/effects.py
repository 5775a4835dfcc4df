"""What follows from a registry's change: on the board, in the pool, on the feed. In this order, everywhere:
state on the board, then the waiters woken, then the announcement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from ipcsync._board import BROKEN, CLOSED, EXPIRED, FREE, INT64_MAX, Board, SlotLine
from ipcsync._logs import fields
from ipcsync.errors import IpcSyncError
from ipcsync_coordinator.feed import Feed
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.registry import Change, ChangeKind, Session, Slot
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
        self._quarantined_ns: dict[int, int] = {}  # since when, by slot
        self._of_slot: dict[ChangeKind, Callable[[Slot], None]] = {
            "opened": self._opened,
            "recorder": self._recorder,
            "closed": self._closed,
            "broken": self._broken,
            "drained": self._drained,
            "freed": self._freed,
        }
        self._of_session: dict[ChangeKind, Callable[[Session], None]] = {
            "session_opened": self._session_opened,
            "session_closed": self._session_closed,
            "line_freed": self._line_freed,
        }

    def line(self, slot: Slot) -> SlotLine:
        """The slot's line on the board."""
        found = self._lines.get(slot.index)
        if found is None:
            found = self._lines[slot.index] = self._board.slot(slot.index)
        return found

    def carry_out(self, changes: Iterable[Change]) -> None:
        """Carry out changes in order. One that fails (in the driver) is logged, and keeps none of the others back."""
        for change in changes:
            self._carry_out_one(change)

    def _carry_out_one(self, change: Change) -> None:
        try:
            if change.slot is not None:
                self._of_slot[change.kind](change.slot)
            else:
                assert change.session is not None
                self._of_session[change.kind](change.session)
        except Exception:
            log.exception("change not carried out to its end", extra=fields(kind=change.kind))

    def why_not_event(self, device: str) -> str | None:
        """Why no event handle can be made on `device`, None if one can; tried for real.

        DeviceMismatch for one that is not served here.
        """
        self.pool.enter(device)
        try:
            self.pool.probe_handle(device)
        except IpcSyncError as error:
            return str(error)
        return None

    def why_not_timeline(self, device: str) -> str | None:
        """Why no timeline word works on `device`, None if one does; tried for real."""
        return self.releaser.why_not(self.pool.ordinal(device))

    # --- slots --------------------------------------------------------------------------------------------------------

    def _opened(self, slot: Slot) -> None:
        line = self.line(slot)
        slot.base = line.recorded
        line.open(slot.incarnation)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("event opened", extra=fields(name=slot.name, slot=slot.index, engine=slot.engine))
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
        self._quarantine(slot)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("event closed", extra=fields(name=slot.name, slot=slot.index))
        self._announce("closed", slot)

    def _broken(self, slot: Slot) -> None:
        line = self.line(slot)
        completed = line.completed
        # A released word says nothing; what was complete before it was released stands in the watermark already. And
        # what was not published was not recorded, though a GPU wrote its word.
        watermark = line.watermark if completed == INT64_MAX else min(max(completed, slot.base), line.recorded)
        recorder = slot.recorder
        line.break_at(watermark, has_expired=recorder is not None and recorder.state == "expired")
        if slot.engine == "timeline":
            self.releaser.hold(slot.index, line)
        self._announce("broken", slot)
        self._quarantine(slot)
        log.warning(
            "event broken",
            extra=fields(
                name=slot.name,
                slot=slot.index,
                recorder=recorder.name if recorder is not None else "",
                session=recorder.id if recorder is not None else "",
                generation=line.recorded - slot.base,
                good_to=max(line.watermark - slot.base, 0),
            ),
        )

    def _drained(self, slot: Slot) -> None:
        if slot.engine == "timeline":
            line = self.line(slot)
            line.set_watermark(line.recorded)  # all that was recorded is complete
            self.releaser.hold(slot.index, line)

    def _freed(self, slot: Slot) -> None:
        line = self.line(slot)
        # A recorder that died between its driver's call and publishing left a record that the board does not know.
        was_drained = line.state != BROKEN and line.completed >= line.recorded
        # On either engine: the next use begins where `recorded` stands, and has to find all before it complete.
        self.releaser.let_go(slot.index, line)
        line.finish(FREE)
        if was_drained:
            self.pool.give_back(slot.device, slot.ring)
        else:
            self.pool.destroy(slot.device, slot.ring)
        slot.ring = []
        self._quarantined_ns.pop(slot.index, None)

    def _quarantine(self, slot: Slot) -> None:
        self._quarantined_ns.setdefault(slot.index, time.monotonic_ns())

    def quarantine_oldest_s(self) -> float:
        """How long the slot that has waited longest has been in quarantine, in seconds; 0 if there is none."""
        oldest = min(self._quarantined_ns.values(), default=0)
        return (time.monotonic_ns() - oldest) / 1e9 if oldest else 0.0

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
