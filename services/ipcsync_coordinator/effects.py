"""What follows from the rows that a transition touched: on the board, in the pool and on the feed, in this order.

`fill_in` completes the rows by what only the board says, since the journal must have that before `carry_out` stores
anything. A later coordinator stores rows without a mark that they were carried out again (`redo`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias

import zmq

from ipcsync._board import CLOSED, EXPIRED, FREE, INT64_MAX, LIVE, Board, SlotLine
from ipcsync._board.layout import REASONS
from ipcsync._linux.futex import Futex
from ipcsync._logs import fields
from ipcsync._wire import codec
from ipcsync._wire.messages import Announcement
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.state import UNREAD, Recorder, Session, Slot, Tombstone, Tombstones, Touched

log = logging.getLogger("ipcsync.coordinator")

_Later: TypeAlias = Callable[[float, Callable[[], None]], asyncio.TimerHandle | None]
# How often a released word is stored again: soon, while it is fresh.
_SOON_S, _LATER_S = 0.001, 0.05
_FRESH_NS = 1_000_000_000

MAX_SUBSCRIPTION = 512  # bytes that a subscriber may send; ZeroMQ's own greeting needs some 300
# Of one connection. While it finds one ZeroMQ reads on, before it gives any to us: with 16 that cost up to 300 MB.
UNREAD_SUBSCRIPTIONS = 1
_BUDGET = 256
_SUBSCRIBES = b"\x01"


class Effects:
    """Carries out transitions. `on_forget` is told of each session that is gone; `tombstones` takes lost mirrors."""

    def __init__(
        self,
        board: Board,
        pool: Pool,
        feed: Feed,
        on_forget: Callable[[Session], None],
        tombstones: Tombstones,
        later: _Later = lambda *_: None,
    ) -> None:
        self.board = board
        self.pool = pool
        self.feed = feed
        self.releaser = Releaser(later)
        self._on_forget = on_forget
        self._tombstones = tombstones
        self.line: Callable[[int], SlotLine] = cache(board.slot)
        self._rings: list[tuple[Callable[[list[int]], None], list[int]]] = []  # that slots left, and what takes them

    # --- what only the board says -------------------------------------------------------------------------------------

    def fill_in(self, slots: Iterable[Slot]) -> None:
        """Complete the rows of slots that ended or became free; a free one loses its ring. A second call adds nothing.

        It comes before anything of the transition is stored.
        """
        for slot in sorted(slots, key=attrgetter("index")):
            line = self.line(slot.index)
            if slot.ended:
                slot.ended_ns = slot.ended_ns or time.monotonic_ns()
            if slot.good == UNREAD:
                # All that was recorded is complete, or else the recorder is lost.
                good = line.recorded if slot.ended == "closed" else watermark(slot, line)
                slot.good = max(good - slot.base, 0)
            if slot.is_over and slot.ended == "broken" and slot.origin is not None:
                self._tombstones.add(slot.origin, Tombstone(slot.node, slot.good, slot.reason))
            if slot.state == "free" and slot.ring:
                # A recorder that died between the driver's call and the store left a record that is not on the board.
                is_reusable = line.recorded <= line.completed and slot.ended != "broken"
                self._rings.append((self.pool.give_back if is_reusable else self.pool.destroy, slot.ring))
                slot.ring = []

    # --- the stores ---------------------------------------------------------------------------------------------------

    def carry_out(self, touched: Touched) -> None:
        """Carry out a transition. What fails (in the driver) is logged, and does not stop the rest."""
        if not (touched.slots or touched.sessions or touched.unwanted):
            return  # attachments alone: many, as processes attach to the same events
        rings, self._rings = self._rings, []
        steps: list[tuple[Callable[[Any], None], object]] = [
            *((self._store, row) for row in _in_order(touched.sessions, touched.slots)),
            *rings,
            *((self._announce_session, session) for session in sorted(touched.sessions, key=attrgetter("serial"))),
            *((self._announce_slot, slot) for slot in sorted(touched.slots, key=attrgetter("index"))),
        ]
        for step, of in steps:
            try:
                step(of)
            except Exception:  # noqa: PERF203 - the rest is carried out
                log.exception("change only partly carried out", extra=fields(step=step.__name__))
        for slot in touched.unwanted:
            if slot.is_unwanted:  # still; a session that wants it later finds it gone, and asks again
                self._announce("unwanted", slot)

    def redo(self, sessions: Iterable[Session], slots: Iterable[Slot]) -> None:
        """Store what an earlier coordinator was about to store, or has stored: twice does no harm."""
        for row in _in_order(sessions, slots):
            self._store(row)

    def _store(self, row: Session | Slot) -> None:
        if isinstance(row, Slot):
            self.store_slot(row)
        else:
            self._store_session(row)

    def _store_session(self, session: Session) -> None:
        line = self.board.session(session.line)
        if session.state == "gone":
            self.board.end_visits(session.line)
            if line.serial == session.serial:
                line.state = FREE
        elif session.state != "live":
            line.state = EXPIRED
        elif line.serial != session.serial or line.state != LIVE:
            self.board.newest = max(session.serial >> 16, self.board.newest)
            # Without a start time the pid is useless to others, which then check the lifeline.
            pid, namespace = session.pid if session.started else 0, self.board.coordinator[2]
            line.assign(session.serial, pid, session.started, namespace, time.monotonic_ns(), session.label)

    def store_slot(self, slot: Slot) -> None:
        line = self.line(slot.index)
        if line.incarnation != slot.incarnation or (line.state == FREE and slot.state != "free"):
            if line.state != FREE:  # that it was free is in the same record
                self.releaser.reset(slot.index, line, line.recorded)
            line.open(slot.incarnation)
        if slot.recorder is not None and line.recorder != slot.recorder.serial:
            line.recorder = slot.recorder.serial
        good = slot.base + slot.good
        if slot.state == "closed":
            line.finish(CLOSED)
        elif slot.state in ("broken", "kept"):
            if slot.origin is not None and slot.recorder is None:
                # It never gets a recorder: its good generations count as recorded, no later ones.
                line.publish(good)
            reason = slot.reason if slot.reason in REASONS else ""
            line.break_at(good, has_expired=slot.reason == "expired", reason=reason)
        elif slot.state == "free":
            # On either engine: the next use begins at `recorded`, and must find everything before it complete.
            self.releaser.reset(slot.index, line, line.recorded)
            line.finish(FREE)
        if slot.is_released:
            if slot.state == "closed":
                line.watermark = good
            self.releaser.hold(slot.index, line)

    # --- what others are told -----------------------------------------------------------------------------------------

    def _announce_session(self, session: Session) -> None:
        was_told, session.told = session.told, session.state
        if not was_told:
            self.feed.announce("session_opened", name=session.name, session=session.id)
        if session.state != "live" and was_told in ("", "live"):
            self.feed.announce(
                "session_closed", name=session.name, session=session.id, pid=session.pid, cause=session.end
            )
        if session.state == "gone":
            self._on_forget(session)

    def _announce_slot(self, slot: Slot) -> None:
        was_told, slot.told = slot.told, slot.ended or "opened"
        if slot.told == was_told:
            return
        if slot.told == "opened":
            log.debug("event opened", extra=fields(name=slot.name, slot=slot.index, engine=slot.engine))
            more = {"device": slot.device, "engine": slot.engine, "handles": self.pool.handles(slot.ring)}
            self.feed.announce("opened", name=slot.name, slot=slot.index, incarnation=slot.incarnation, **more)
            return
        self._announce(slot.told, slot)
        if slot.told == "closed":
            log.debug("event closed", extra=fields(name=slot.name, slot=slot.index))
            return
        recorder = slot.recorder or Recorder(0, "", "")
        log.warning(
            "event broken",
            extra=fields(
                name=slot.name,
                slot=slot.index,
                recorder=recorder.name,
                session=recorder.id,
                pid=recorder.pid,
                cause=slot.cause,
                generation=self.line(slot.index).recorded - slot.base,
                good_to=slot.good,
            ),
        )

    def _announce(self, kind: str, slot: Slot) -> None:
        recorder = slot.recorder if slot.origin is None else None  # a mirror's is the bridge, which has not ended
        who = {} if recorder is None else {"session": recorder.label, "pid": recorder.pid}
        self.feed.announce(kind, name=slot.name, slot=slot.index, incarnation=slot.incarnation, cause=slot.cause, **who)


def _in_order(sessions: Iterable[Session], slots: Iterable[Slot]) -> Iterator[Session | Slot]:
    """The order of the stores: that a session ended, then what became of its slots, then that its line is free."""
    ordered = sorted(sessions, key=attrgetter("serial"))
    yield from (session for session in ordered if session.state != "gone")
    yield from sorted(slots, key=attrgetter("index"))
    yield from (session for session in ordered if session.state == "gone")


def watermark(slot: Slot, line: SlotLine) -> int:
    """Up to which count a slot stays good at a break, and up to which it is known complete before that."""
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


# --- words that stay released -----------------------------------------------------------------------------------------


class Releaser:
    """Keeps the words of finished timeline slots at INT64_MAX, which ends every queued wait.

    Storing it once is not enough: queued writes of a live process, and of a dead one's work under way, lower the word
    again, and a wait that a stream reaches then would stand still. So it is stored again each millisecond in the first
    second, then every 50 ms, until the slot is reused, which is only once nothing can write it. `later` has a function
    called after so many seconds.
    """

    def __init__(self, later: _Later) -> None:
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


# --- the feed's socket ------------------------------------------------------------------------------------------------


class Feed:
    """The XPUB socket of the announcements: each change has the next number, which is repeated every second.

    A subscriber that stops reading loses announcements, sees the gap, and asks for a snapshot. They go out after the
    replies to the requests that they follow from, and many together: a subscriber wakes once for them, and who waits
    for a reply does not compete with it for the processor. `soon` is given `flush` to call it once the replies are
    sent, unless something else does so before. `on_topic` is called for a subscription to a topic, with its frame:
    there are none, and ZeroMQ keeps some memory for each.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        number: int,
        soon: Callable[[Callable[[], None]], object],
        on_topic: Callable[[zmq.Frame], object],
    ) -> None:
        self.socket = socket
        self.number = number
        self._soon = soon
        self._on_topic = on_topic
        self._frames: list[bytes] = []

    def announce(self, kind: str, **fields: object) -> None:
        """Have the next change sent soon."""
        self.number += 1
        self._put(Announcement(number=self.number, kind=kind, **fields))  # type: ignore[arg-type] # checked by msgspec

    def tick(self) -> None:
        """Repeat the current number, so that a subscriber that lost the last change learns of it."""
        self._put(Announcement(number=self.number, kind="tick"))

    def _put(self, announcement: Announcement) -> None:
        self._frames.append(codec.encode_announcement(announcement))
        if len(self._frames) == 1:
            self._soon(self.flush)

    def has_any(self) -> bool:
        return bool(self._frames)

    def flush(self) -> None:
        frames, self._frames = self._frames, []
        for frame in frames:
            self.socket.send(frame, zmq.NOBLOCK)  # XPUB drops, it never blocks

    def close(self) -> None:
        """Send what was announced, and nothing more."""
        self.flush()
        self._soon = lambda _: None
        self.socket.close()

    def drain(self) -> None:
        """Take in subscriptions. Who subscribes is sent the number at once, and from then on every change."""
        subscribed = False
        with suppress(zmq.Again):  # there are no more
            for _ in range(_BUDGET):  # the rest waits for the next tick, so that no subscriber keeps the loop busy
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
                if frame.bytes[:1] == _SUBSCRIBES:
                    subscribed = True
                    if len(frame) > 1:
                        self._on_topic(frame)
        if subscribed:
            self.tick()
