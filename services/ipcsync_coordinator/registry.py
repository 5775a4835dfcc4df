"""The registry: sessions, names, slots, and when a slot may be used again. A pure state machine.

It uses no socket, clock, board or driver. Each method is one transition, and notes in `touched` which rows it changed:
what follows outside is derived from these.

What it promises, and the tests check against a model:
- a name belongs to at most one slot in use, and a slot has at most one recorder in its whole use;
- a session that ended holds no name and no role;
- a slot is reused only once every session that attached has released it or is dead;
- the announcements, replayed, give the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ipcsync._wire import names
from ipcsync._wire.codec import Origin
from ipcsync.errors import (
    DeviceMismatch,
    EngineMismatch,
    EventClosed,
    ProtocolError,
    QuotaExceeded,
    RecorderLost,
    RecorderTaken,
)
from ipcsync_coordinator.state import (
    UNREAD,
    FinishedState,
    KeptSlots,
    Recorder,
    Session,
    SessionEnd,
    SessionState,
    Slot,
    Tombstone,
    Tombstones,
    Touched,
)
from ipcsync_keeper.config import Settings

_MOST_UNUSED = 256  # free slots that are not used again yet
_MOST_BASE = 1 << 62  # of a use: its own generations, and all sums with them, are to fit into the words of a slot


class Registry:
    """All sessions, names and slots of one epoch. Each refusal names its limit, which is a setting.

    `base_of` has the count at which a free slot's next use begins.
    """

    def __init__(self, limits: Settings, base_of: Callable[[int], int] = lambda _: 0) -> None:
        self.limits = limits
        self._base_of = base_of
        self.sessions: dict[int, Session] = {}
        self.names: dict[str, Slot] = {}
        self.mirrors: dict[Origin, Slot] = {}
        self.tombstones = Tombstones()
        self.slots: dict[int, Slot] = {}
        self.touched = Touched()  # since the journal was last appended to
        self.high_water = 0
        self.kept = KeptSlots(limits)
        # The longest free first, and not at once: a point of its last use may be on its way to who sees it first.
        self._free: deque[int] = deque()
        self._unused = min(limits.pool // 8, _MOST_UNUSED)
        self._frees = 0  # how often a slot became free
        # The longest free first: a closed session's process may still hold the lock of its line.
        self._free_lines = deque(range(limits.max_sessions))
        self.count = 0  # of sessions there ever were
        self.has_had_bridge = False

    def restore(self, sessions: list[Session], slots: list[Slot], free_lines: Iterable[int]) -> None:
        """Fill this empty registry with another one's sessions and slots; the rest is derived from them."""
        self.sessions = {session.serial: session for session in sessions}
        self.slots = {slot.index: slot for slot in slots}
        self.names = {slot.name: slot for slot in slots if slot.name and slot.state == "open" and slot.origin is None}
        self.mirrors = {slot.origin: slot for slot in slots if slot.origin is not None and slot.state != "free"}
        for slot in slots:
            if slot.held:
                self.kept.hold(slot)
            if slot.state == "kept":
                self.kept.count(slot, 1)
            for serial in slot.active | slot.draining:
                self.sessions[serial].attached.add(slot.index)
        free = sorted((slot for slot in slots if slot.state == "free"), key=lambda slot: slot.freed)
        self._free = deque(slot.index for slot in free)
        self._frees = max((slot.freed for slot in slots), default=0)
        self._free_lines = deque(free_lines)

    def break_slot(self, slot: Slot) -> None:
        """Break a use whose state is unknown, as its recorder's expiry would: that session ends first.

        As long as it lives, others count what is recorded behind this use, though waits for it were released. It does
        not end if all was complete, nor if it is a bridge: what stands behind a mirror is judged by its word alone.
        """
        recorder = None if slot.recorder is None else self.sessions.get(slot.recorder.serial)
        if recorder is not None and recorder.state == "live" and not slot.is_drained and slot.origin is None:
            self.lose(recorder, "expired")
        self._finish(slot, "broken")

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open_session(
        self, session_id: str, name: str, role: str = "", is_held: Callable[[int], bool] = lambda _: False
    ) -> Session:
        """A new live session; QuotaExceeded if there are too many.

        `is_held`: whether a process still has the lock of a free line. Such a line is given only if there is no other.
        """
        if name:
            self.check_name(name, "a session's name")
        if not self._free_lines:
            most = self.limits.max_sessions
            raise QuotaExceeded(f"there are {most} sessions already (--max-sessions)", limit=most)
        self.count += 1
        for _ in range(len(self._free_lines)):
            if not is_held(self._free_lines[0]):
                break
            self._free_lines.rotate(-1)
        line = self._free_lines.popleft()
        session = Session((self.count << 16) | line, session_id, name, role=role)
        self.sessions[session.serial] = session
        self.has_had_bridge = self.has_had_bridge or role == "bridge"
        self.touched.sessions.add(session)
        return session

    def end_session(self, session: Session, *, released: bool) -> None:
        """End a session that said goodbye. Without `released` its slots stay until its process is dead."""
        self._end(session, "closed", "closed", released=released)

    def lose(self, session: Session, end: SessionEnd) -> None:
        """End a session that expired, or whose process died. Names and roles are free.

        Slots and line stay until it releases them, or its process is gone.
        """
        self._end(session, "expired", end, released=False)

    def drained_by(self, session: Session) -> list[Slot]:
        """The slots that it closed with its goodbye, before its last records were known complete: they may count."""
        if session.state != "closed":
            return []
        slots = (self.slots[index] for index in sorted(session.attached))
        recorded = (slot for slot in slots if slot.is_recorded_by(session))
        return [slot for slot in recorded if slot.state == "closed" and not slot.is_drained]

    def break_drained(self, session: Session) -> None:
        """Break the events of a session that drains and was silent for a TTL: no other one may judge its records."""
        for slot in self.drained_by(session):
            slot.reason = "expired"
            self._finish(slot, "broken")

    def release_dead(self, session: Session, *, held: int = 0) -> None:
        """End a session whose process is gone, and so cannot touch any slot.

        `held`: what it submitted to a GPU may go on, as in `Slot`. What this may touch is kept, until `end_held`.
        """
        self._end(session, "closed", "died", released=True, held=held)

    def end_held(self, serial: int) -> None:
        """Free what a recorder left: nothing of its work can run any more."""
        for slot in self.kept.by_recorder.pop(serial, ()):
            slot.held = 0
            self.touched.slots.add(slot)
            if slot.state == "kept":
                self.kept.count(slot, -1)
                self._free_slot(slot)

    @property
    def streams(self) -> dict[str, tuple[str, int]]:
        return {name: spec for session in self.sessions.values() for name, spec in session.streams.items()}

    @property
    def in_use(self) -> int:
        """How many slots count for the pool: all but the free ones, and those kept within their own limit."""
        return len(self.slots) - len(self._free) - self.kept.within_limits

    def _end(self, session: Session, state: SessionState, end: SessionEnd, *, released: bool, held: int = 0) -> None:
        if self.sessions.get(session.serial) is not session:
            return
        session.end = session.end or end
        if session.state == "live":
            session.state = state
            self.touched.sessions.add(session)
        for index in sorted(session.attached):
            slot = self.slots[index]
            # Of a drained slot it is known how its use ended, and nothing writes its word any more.
            if slot.recorder is not None and slot.is_recorded_by(session) and not slot.is_drained:
                slot.recorder.end = session.end
                self.touched.slots.add(slot)
                if held and slot.origin is None:  # the bridge itself writes a mirror's word
                    slot.held = held
                    self.kept.hold(slot)
            self._leave(slot, session, breaks=end != "closed", released=released)
        session.streams.clear()
        if not session.attached and (released or session.state != "expired"):
            del self.sessions[session.serial]
            self._free_lines.append(session.line)
            session.state = "gone"
            self.touched.sessions.add(session)

    # --- events -------------------------------------------------------------------------------------------------------

    def join(self, session: Session, slot: Slot, *, recorder: bool, device: str, engine: str) -> None:
        """Attach to an existing event.

        Raises DeviceMismatch or EngineMismatch if another one was asked for, RecorderTaken if the role is taken.
        """
        if device and device != slot.device:
            raise DeviceMismatch(f"the event {slot.name!r} is on device {slot.device}, not {device}")
        if engine not in ("auto", slot.engine):
            raise EngineMismatch(f"the event {slot.name!r} has engine {slot.engine!r}, not {engine!r}: ask for none")
        taken = slot.recorder
        if recorder and taken is not None and taken.serial != session.serial:
            raise RecorderTaken(
                f"the session {taken.who} records on {slot.name!r}, and an event has one recorder for its whole life: "
                "give each producer a name of its own, or wait until that one has closed it",
                event=slot.name,
                recorder=taken.label,
                pid=taken.pid,
            )
        self._attach(session, slot)
        if recorder and slot.recorder is None:
            slot.recorder = Recorder(session.serial, session.id, session.name, session.pid)
            self.touched.slots.add(slot)

    def create(
        self,
        session: Session,
        name: str,
        *,
        recorder: bool,
        device: str,
        engine: str = "timeline",
        depth: int = 1,
        ring: Sequence[int] = (),
        origin: Origin | None = None,
        node: str = "",
    ) -> Slot:
        """A new event, attached to by `session`; an empty name makes an unnamed one, an `origin` a mirror.

        Raises QuotaExceeded if every slot is in use (also in quarantine) or the session has too many.
        """
        self.check_room(session, name)
        assert origin is not None or not (name and name in self.names)
        index = len(self.slots)
        if len(self._free) > self._unused or (self._free and index >= self.limits.most_slots):
            index = self._free.popleft()
        slot = self.slots.setdefault(index, Slot(index))
        slot.incarnation += 1
        slot.state, slot.name, slot.device, slot.engine = "open", name, device, engine
        slot.depth, slot.ring, slot.base = depth, list(ring), self._base_of(index)
        slot.recorder, slot.is_drained = None, False
        slot.origin, slot.node, slot.reason, slot.good = origin, node, "", 0
        slot.ended, slot.ended_ns, slot.told = "", 0, ""
        self.high_water = max(self.high_water, self.in_use)
        if origin is not None:
            self.mirrors[origin] = slot
        elif name:
            self.names[name] = slot
        self.touched.slots.add(slot)
        self.join(session, slot, recorder=recorder, device="", engine="auto")
        return slot

    def check_room(self, session: Session, name: str) -> None:
        """Raise QuotaExceeded if `session` cannot have another event, ProtocolError if `name` is invalid."""
        if name:
            self.check_name(name, "an event's name")
        while self._free and self._base_of(self._free[0]) > _MOST_BASE:
            self._free.popleft()  # its numbers are used up, so it counts as in use from now on
        if self.in_use >= self.limits.pool:
            raise QuotaExceeded(f"all {self.limits.pool} shared events are in use (--pool)", limit=self.limits.pool)
        self._check_attachments(session)

    def attach(self, session: Session, index: int, incarnation: int) -> Slot:
        """Attach to the use of a slot that a point names; RecorderLost if it is over, else as `check_usable`."""
        slot = self.slots.get(index)
        if slot is None or slot.incarnation != incarnation or slot.is_over:
            raise RecorderLost(
                f"the event of this point (slot {index}, use {incarnation}) is gone: its recorder has closed it or "
                "died, and its slot has been used for another event since, so whether the work was complete is not "
                "known any more; wait for a point while its sender lives, or soon after",
                cause="gone",
            )
        check_usable(session, slot)
        self._attach(session, slot)
        return slot

    def close(self, session: Session, index: int, incarnation: int, *, released: bool, drained: bool = False) -> None:
        """End a session's use of a slot, unless that use is over. EventClosed if the session is not attached to it.

        `drained`: the session recorded here, and all its records are complete, though it has not released the slot.
        """
        slot = self._used(index, incarnation)
        if slot is None:
            return
        if index not in session.attached:
            raise EventClosed(f"this session is not attached to slot {index}: it cannot close it for others")
        self._leave(slot, session, breaks=False, released=released, drained=drained)
        if session.state != "live" and not session.attached:
            self._end(session, session.state, session.end, released=True)

    # --- mirrors ------------------------------------------------------------------------------------------------------

    def restore_from_tombstone(
        self, session: Session, origin: Origin, tombstone: Tombstone, device: str, name: str = ""
    ) -> Slot:
        """A new mirror of a lost use, for a session that asks for it: broken, and good as far as the tombstone says.

        `name`: by which it asks; empty, if by a point.
        """
        slot = self.create(session, name, recorder=False, device=device, origin=origin, node=tombstone.node)
        slot.reason = tombstone.reason
        self._finish(slot, "broken")
        slot.good = tombstone.good
        return slot

    def finish_mirror(self, session: Session, index: int, incarnation: int, state: str, reason: str) -> None:
        """End a mirror, for the bridge. Does nothing for one that is over.

        ProtocolError, `code` "wanted", if it is to end as unwanted and is used again; EventClosed if not the bridge's.
        """
        slot = self._used(index, incarnation)
        if slot is None or (slot.state == "broken" and state != "unwanted"):
            return
        if slot.origin is None or not slot.is_recorded_by(session):
            raise EventClosed(f"this session is not the bridge that mirrors on slot {index}")
        if state == "unwanted":
            if not slot.is_unwanted:
                raise ProtocolError(f"the mirror on slot {index} is used again", code="wanted")
            self._leave(slot, session, breaks=False, released=True, drained=True)
        elif state == "broken":
            slot.reason = reason
            self._finish(slot, "broken")
        elif slot.state == "open":
            self._finish(slot, "closed")

    def break_event(self, session: Session, index: int, incarnation: int) -> None:
        """Break an event, for its recorder, part of whose records is lost. Does nothing for a use that is over.

        EventClosed for a session that does not record there.
        """
        slot = self._used(index, incarnation)
        if slot is None or slot.state == "broken" or slot.is_drained:
            return
        if not slot.is_recorded_by(session):
            raise EventClosed(f"this session does not record on slot {index}: it cannot break it")
        slot.reason = "behind"
        self._finish(slot, "broken")

    def stream(self, session: Session, name: str, device: str, default_device: str, priority: int) -> tuple[str, int]:
        """The (device, priority) of a named stream; the first to name it decides. DeviceMismatch for another device."""
        self.check_name(name, "a stream's name")
        known = next((other.streams[name] for other in self.sessions.values() if name in other.streams), None)
        if known is None:
            if len(self.streams) >= (most := self.limits.max_streams):
                raise QuotaExceeded(f"there are {most} named streams already (--max-streams)", limit=most)
            known = device or default_device, priority
        if device and device != known[0]:
            raise DeviceMismatch(f"the stream {name!r} is on device {known[0]}, not {device}")
        session.streams[name] = known
        self.touched.sessions.add(session)
        return known

    # --- inside -------------------------------------------------------------------------------------------------------

    def _used(self, index: int, incarnation: int) -> Slot | None:
        """The slot that has that use, None if the use is over; EventClosed if there was none."""
        slot = self.slots.get(index)
        if slot is None or incarnation > slot.incarnation:
            raise EventClosed(f"no slot {index} with incarnation {incarnation}")
        return slot if incarnation == slot.incarnation and not slot.is_over else None

    def check_name(self, name: str, what: str) -> None:
        """Raise ProtocolError for an invalid name of `what`."""
        reason = names.why_not(name, self.limits.max_name)
        if reason:
            raise ProtocolError(f"{what} {reason}", code="name")

    def _check_attachments(self, session: Session) -> None:
        if len(session.attached) >= (most := self.limits.max_attachments):
            raise QuotaExceeded(f"this session is attached to {most} events already (--max-attachments)", limit=most)

    def _attach(self, session: Session, slot: Slot) -> None:
        if slot.index not in session.attached:
            self._check_attachments(session)
        session.attached.add(slot.index)
        self.touched.attachments.add((slot, session.serial))
        slot.draining.discard(session.serial)
        slot.active.add(session.serial)

    def _leave(self, slot: Slot, session: Session, *, breaks: bool, released: bool, drained: bool = False) -> None:
        """End a use. `breaks`: whether a recorder that leaves breaks the event, or only finishes it.

        A bridge that leaves a mirror breaks it, unless all its records are complete.
        """
        breaks = breaks or (slot.origin is not None and not drained)
        self.touched.attachments.add((slot, session.serial))
        slot.active.discard(session.serial)
        if released:
            slot.draining.discard(session.serial)
            session.attached.discard(slot.index)
        else:
            slot.draining.add(session.serial)
        if slot.is_recorded_by(session):
            # A recorder that closed, and dies before its last work was known complete, breaks the event.
            if breaks and slot.state in ("open", "closed") and not slot.is_drained:
                self._finish(slot, "broken")
            elif slot.state == "open":
                self._finish(slot, "closed")
            if (released or drained) and slot.state == "closed":
                self._drain(slot)
        elif slot.state == "open" and not slot.active:
            self._finish(slot, "closed")
            if slot.recorder is None and slot.draining:
                self._drain(slot)  # there will be no record: waiters ahead are released
        if not slot.active and not slot.draining:
            self._release(slot)
        elif slot.is_unwanted and not slot.is_recorded_by(session):
            self.touched.unwanted.add(slot)

    def _drain(self, slot: Slot) -> None:
        if not slot.is_drained:
            slot.is_drained, slot.good = True, UNREAD
            self.touched.slots.add(slot)

    def _finish(self, slot: Slot, state: FinishedState) -> None:
        self.touched.slots.add(slot)
        slot.state = slot.ended = state
        if state == "broken":
            slot.good = UNREAD
            if slot.origin is not None:
                slot.reason = slot.reason or "bridge"
            elif slot.recorder is not None and slot.recorder.end == "expired":
                slot.reason = "expired"
        if self.names.get(slot.name) is slot:
            del self.names[slot.name]

    def _release(self, slot: Slot) -> None:
        slot.active, slot.draining = set(), set()  # new ones, since an emptied set keeps its memory
        if slot.held:
            slot.state = "kept"
            self.kept.count(slot, 1)
            self.touched.slots.add(slot)
        else:
            self._free_slot(slot)

    def _free_slot(self, slot: Slot) -> None:
        slot.state = "free"
        if slot.origin is not None:
            self.mirrors.pop(slot.origin, None)
        self._frees += 1
        slot.freed = self._frees
        self._free.append(slot.index)
        self.touched.slots.add(slot)


def check_usable(session: Session, slot: Slot, why_not_timeline: str = "") -> None:
    """Raise EngineMismatch if the session's process cannot use the engine of the event; it names both sides."""
    why_not = session.why_not_event if slot.engine == "event" else why_not_timeline
    if why_not:
        recorder = f", recorded by the session {slot.recorder.who}," if slot.recorder is not None else ""
        other = "timeline" if slot.engine == "event" else "event"
        raise EngineMismatch(
            f"the event {slot.name!r}{recorder} uses the engine {slot.engine!r}, which the session {session.who} "
            f"cannot use: {why_not}; have whoever opens it first ask for engine={other!r}"
        )
