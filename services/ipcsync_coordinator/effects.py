"""The effects of a registry's changes on the board, in the pool and on the feed. The order is always: the state on the
board, then the waiters are woken, then the announcement, which the feed sends once the replies are sent.

`plan` reads what is to be stored, since the journal must have it before `carry_out` stores anything. A later
coordinator that finds an effect in the journal without a mark that it was done stores the same (`redo`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from ipcsync._board import CLOSED, EXPIRED, FREE, INT64_MAX, Board, SlotLine
from ipcsync._board.layout import REASONS
from ipcsync._logs import fields
from ipcsync._wire.messages import Remains, RemainsCause
from ipcsync_coordinator.feed import Feed
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.release import Releaser
from ipcsync_coordinator.state import Change, ChangeKind, Effect, Session, Slot
from ipcsync_coordinator.tombstones import Tombstone, Tombstones

log = logging.getLogger("ipcsync.coordinator")

_CAUSES: dict[str, RemainsCause] = {"expired": "expired", "behind": "behind"}


class Effects:
    """Carries out changes. `on_forget` is told of each session whose line is free; `tombstones` takes lost mirrors."""

    def __init__(
        self,
        board: Board,
        pool: Pool,
        feed: Feed,
        on_forget: Callable[[Session], None],
        tombstones: Tombstones,
        later: Callable[[float, Callable[[], None]], asyncio.TimerHandle | None] = lambda *_: None,
    ) -> None:
        self.pool = pool
        self.feed = feed
        self._tombstones = tombstones
        self.releaser = Releaser(later)
        self.board = board
        self._lines: dict[int, SlotLine] = {}
        self._plans: dict[ChangeKind, Callable[[Any], Effect | None]] = {
            "opened": lambda slot: Effect("open", slot.index, (slot.incarnation,)),
            "recorder": lambda slot: Effect("recorder", slot.index, (slot.recorder.serial,)),
            "closed": self._plan_close,
            "broken": self._plan_break,
            "drained": self._plan_drain,
            "kept": self._plan_keep,
            "session_opened": self._plan_assign,
            "session_closed": lambda session: Effect("expire", session.line),
            "line_freed": lambda session: Effect("forget", session.line),
            "unwanted": lambda _: None,
        }
        self._stores: dict[str, Callable[..., None]] = {
            "open": lambda index, incarnation: self.line(index).open(incarnation),
            "recorder": lambda index, serial: self.line(index).set_recorder(serial),
            "close": lambda index: self.line(index).finish(CLOSED),
            "break": self._store_break,
            "tombstone": self._store_tombstone,
            "drain": self._store_drain,
            "free": self._store_free,
            "assign": self._store_assign,
            "expire": lambda line: board.session(line).set_state(EXPIRED),
            "forget": self._store_forget,
        }
        self._consequences: dict[ChangeKind, Callable[[Any], None]] = {
            "opened": self._opened,
            "closed": self._closed,
            "broken": self._broken,
            "unwanted": self._unwanted,
            "session_opened": self._session_opened,
            "session_closed": self._session_closed,
            "line_freed": on_forget,
        }

    def line(self, index: int) -> SlotLine:
        """A slot's line on the board."""
        found = self._lines.get(index)
        if found is None:
            found = self._lines[index] = self.board.slot(index)
        return found

    # --- what is to be stored, read from the board --------------------------------------------------------------------

    def plan(self, changes: Iterable[Change]) -> None:
        """Fill in the effects of changes, in order; the slot of a `freed` change loses its ring."""
        for change in changes:
            if change.kind == "freed" and isinstance(change.of, Slot):
                self._plan_free(change, change.of)
            else:
                change.effect = self._plans[change.kind](change.of)

    def _plan_close(self, slot: Slot) -> Effect:
        slot.ended_ns = time.monotonic_ns()
        return Effect("close", slot.index)

    def _plan_break(self, slot: Slot) -> Effect:
        slot.ended_ns = slot.ended_ns or time.monotonic_ns()
        is_timeline, reason = slot.engine == "timeline", slot.reason if slot.reason in REASONS else ""
        if slot.is_tombstone:
            return Effect(
                "tombstone", slot.index, (slot.base + slot.good, slot.reason == "expired", is_timeline, reason)
            )
        good = _watermark(slot, self.line(slot.index))
        slot.good = max(good - slot.base, 0)
        if slot.origin is not None:
            return Effect("break", slot.index, (good, slot.reason == "expired", is_timeline, reason))
        has_expired = slot.reason == "expired" or (slot.recorder is not None and slot.recorder.end == "expired")
        if has_expired:
            slot.reason = "expired"
        return Effect("break", slot.index, (good, has_expired, is_timeline, ""))

    def _plan_drain(self, slot: Slot) -> Effect | None:
        # All that was recorded is complete.
        return Effect("drain", slot.index, (self.line(slot.index).recorded,)) if slot.engine == "timeline" else None

    def _plan_free(self, change: Change, slot: Slot) -> None:
        line = self.line(slot.index)
        # A recorder that died between the driver's call and the store left a record that is not on the board.
        recorded = line.recorded
        completed = line.completed
        change.is_reusable = completed >= recorded and not change.was_broken
        change.ring, slot.ring = slot.ring, []
        if slot.origin is not None and change.was_broken:
            self._tombstones.add(slot.origin, Tombstone(slot.node, slot.good, slot.reason))
        if slot.origin is None and slot.remains is None:
            slot.remains = self._remains(slot, recorded, completed, was_broken=change.was_broken)
        # On either engine: the next use begins at `recorded`, and must find everything before it complete.
        change.effect = Effect("free", slot.index, (recorded,))

    def _plan_keep(self, slot: Slot) -> None:
        slot.remains = self._remains(slot, self.line(slot.index).recorded, 0, was_broken=True)

    def _remains(self, slot: Slot, recorded: int, completed: int, *, was_broken: bool) -> Remains:
        cause: RemainsCause = "closed"
        good = min(recorded, completed) - slot.base  # a closed one is free once all its records are complete
        if was_broken:  # as the break was planned: the board may not have it yet
            good, cause = slot.good, _CAUSES.get(slot.reason, "died")
        who = slot.recorder if cause != "behind" else None  # its recorder lives; who ended is not known here
        serial, label, pid = (0, "", 0) if who is None else (who.serial, who.label, who.pid)
        recorded = max(recorded - slot.base, 0)
        good = min(max(good, 0), recorded)
        return Remains(slot.name, slot.index, slot.incarnation, slot.device, recorded, good, cause, serial, label, pid)

    def _plan_assign(self, session: Session) -> Effect:
        namespace = self.board.coordinator[2]
        # Without a start time the pid is useless to others, which then check the lifeline.
        pid = session.pid if session.started else 0
        values = (session.serial, pid, session.started, namespace, time.monotonic_ns(), session.label)
        return Effect("assign", session.line, values)

    # --- the stores ---------------------------------------------------------------------------------------------------

    def carry_out(self, changes: Iterable[Change]) -> None:
        """Carry out changes in order. One that fails (in the driver) is logged, and does not stop the others."""
        for change in changes:
            self._carry_out_one(change)

    def _carry_out_one(self, change: Change) -> None:
        try:
            if change.effect is not None:
                self._store(change.effect)
            if change.kind == "freed":
                (self.pool.give_back if change.is_reusable else self.pool.destroy)(change.ring)
            if change.kind in self._consequences:
                self._consequences[change.kind](change.of)
        except Exception:
            log.exception("change only partly carried out", extra=fields(kind=change.kind))

    def redo(self, effects: Iterable[Effect]) -> None:
        """Store the effect that an earlier coordinator was about to store, or did; storing it twice does no harm."""
        for effect in effects:
            self._store(effect)

    def _store(self, effect: Effect) -> None:
        self._stores[effect.kind](effect.index, *effect.values)

    def _store_tombstone(self, index: int, watermark: int, *values: Any) -> None:
        # It never gets a recorder: its good generations count as recorded, and no later ones.
        self.line(index).publish(watermark)
        self._store_break(index, watermark, *values)

    def _store_break(self, index: int, watermark: int, has_expired: bool, is_timeline: bool, reason: str) -> None:
        line = self.line(index)
        line.break_at(watermark, has_expired=has_expired, reason=reason)
        if is_timeline:
            self.releaser.hold(index, line)

    def _store_assign(self, index: int, serial: int, *values: Any) -> None:
        self.board.set_newest(max(serial >> 16, self.board.newest))
        self.board.session(index).assign(serial, *values)

    def _store_forget(self, index: int) -> None:
        self.board.end_visits(index)
        self.board.session(index).set_state(FREE)

    def _store_drain(self, index: int, watermark: int) -> None:
        line = self.line(index)
        line.watermark = watermark
        self.releaser.hold(index, line)

    def _store_free(self, index: int, recorded: int) -> None:
        line = self.line(index)
        self.releaser.reset(index, line, recorded)
        line.finish(FREE)

    def resume(self, slot: Slot) -> None:
        """Continue what an earlier coordinator began: the release of a slot's word."""
        if slot.engine == "timeline" and (slot.state in ("broken", "kept") or slot.is_drained):
            self.releaser.hold(slot.index, self.line(slot.index))

    def free_again(self, slot: Slot) -> None:
        """Store that a slot is free, where the board differs: a word still released lets a later use's waits pass."""
        self._store_free(slot.index, self.line(slot.index).recorded)

    # --- what others are told -----------------------------------------------------------------------------------------

    def _opened(self, slot: Slot) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("event opened", extra=fields(name=slot.name, slot=slot.index, engine=slot.engine))
        self.feed.announce(
            "opened",
            name=slot.name,
            slot=slot.index,
            incarnation=slot.incarnation,
            device=slot.device,
            engine=slot.engine,
            handles=self.pool.handles(slot.ring),
        )

    def _closed(self, slot: Slot) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("event closed", extra=fields(name=slot.name, slot=slot.index))
        self._announce("closed", slot)

    def _broken(self, slot: Slot) -> None:
        self._announce("broken", slot)
        recorder, line = slot.recorder, self.line(slot.index)
        log.warning(
            "event broken",
            extra=fields(
                name=slot.name,
                slot=slot.index,
                recorder=recorder.name if recorder is not None else "",
                session=recorder.id if recorder is not None else "",
                pid=recorder.pid if recorder is not None else 0,
                cause=cause_of_end(slot, "broken"),
                generation=line.recorded - slot.base,
                good_to=max(line.watermark - slot.base, 0),
            ),
        )

    def _unwanted(self, slot: Slot) -> None:
        if slot.is_unwanted:  # still; a session that wants it later finds it gone, and asks again
            self._announce("unwanted", slot)

    def _announce(self, kind: str, slot: Slot) -> None:
        recorder = slot.recorder if slot.origin is None else None  # a mirror's is the bridge, which has not ended
        who = {} if recorder is None else {"session": recorder.label, "pid": recorder.pid}
        self.feed.announce(
            kind, name=slot.name, slot=slot.index, incarnation=slot.incarnation, cause=cause_of_end(slot, kind), **who
        )

    def _session_opened(self, session: Session) -> None:
        self.feed.announce("session_opened", name=session.name, session=session.id)

    def _session_closed(self, session: Session) -> None:
        self.feed.announce("session_closed", name=session.name, session=session.id, pid=session.pid, cause=session.end)


def cause_of_end(slot: Slot, state: str) -> str:
    """Why a slot came into this state, as `Announcement` and `EventInfo` have it; empty for an open one.

    It may be free by the time that its end is announced.
    """
    recorder = slot.recorder
    if slot.origin is not None or slot.reason:
        return slot.reason
    if recorder is None or state not in ("closed", "broken"):
        return ""
    return recorder.end or ("closed" if state == "closed" else "behind")


def _watermark(slot: Slot, line: SlotLine) -> int:
    """Up to which count a slot stays good at a break."""
    completed = line.completed
    if completed == INT64_MAX:
        return line.watermark  # the word was released already, and the watermark stored before that
    # A record that was not published does not count, though a GPU may have written the word.
    count = min(max(completed, slot.base), line.recorded)
    if slot.engine == "timeline":
        # The GPU writes the word also after a lost wait: generations that the recorder did not settle do not count.
        for first in (line.first_dependent, line.lost):
            if first > slot.base:
                count = min(count, first - 1)
    return count
