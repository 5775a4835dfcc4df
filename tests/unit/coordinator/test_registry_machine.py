"""The registry against a small model of what is promised, by machine: names, roles, leases, slots, and the feed.

The registry runs with its real effects, on a real board, so that what stands there and what the feed says is compared
with the model too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ipcsync import errors
from ipcsync._board import BROKEN, CLOSED, EXPIRED, FREE, LIVE, OPEN, Board
from ipcsync._session.feed import Replay
from ipcsync._wire import codec, messages
from ipcsync_coordinator.effects import Effects, Feed
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import Session, Slot, Touched
from ipcsync_keeper.config import Settings
from tests.kit.examples import examples
from tests.unit.coordinator.registry_model import Key, Model, Use

_Row = TypeVar("_Row", Session, Slot)

_LIMITS = Settings(pool=3, max_sessions=3, max_attachments=2, max_streams=2)
_LINES = _LIMITS.pool + 2 * _LIMITS.kept_slots
_LOCK = 17
_NAMES = ("", "a", "b")
_STATES = {"free": FREE, "open": OPEN, "broken": BROKEN, "closed": CLOSED, "kept": BROKEN}


class _Wire:
    """Stands for the feed's socket, and keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[messages.Announcement] = []

    def send(self, frame: bytes, _flags: int) -> None:
        self.sent.append(codec.decode_announcement(frame))


class Machine(RuleBasedStateMachine):
    """Sessions come, open, attach, close, say goodbye, fall silent and die, in any order."""

    registry_type: type[Registry] = Registry

    def __init__(self) -> None:
        super().__init__()
        self._path = f"/dev/shm/ipcsync-board-{os.getuid()}-{os.urandom(16).hex()}"
        self.board = Board.create(self._path, os.urandom(16), _LIMITS.max_sessions, _LINES)
        self.registry = self.registry_type(_LIMITS)
        self.wire = _Wire()
        self.forgotten: set[int] = set()
        feed: Any = Feed(self.wire, 0, lambda flush: flush(), lambda _: None)  # type: ignore[arg-type] # all that it does is send
        pool = Pool(["gpu"], None, 10)  # type: ignore[arg-type] # a timeline needs no events
        self.effects = Effects(
            self.board, pool, feed, lambda session: self.forgotten.add(session.serial), self.registry.tombstones
        )
        self.feed = feed
        self.model = Model()
        self.sessions: dict[int, Session] = {}
        self.points: set[Key] = set()  # every use there ever was
        self.recorders: dict[Key, int] = {}
        self.replay = Replay("")
        self.replay.resync(messages.SnapshotReply(0, [], []))
        self.late: Replay | None = None
        self.numbers = itertools.count()

        self.journal: dict[tuple[str, int], Any] = {}  # each slot and session as it was when it was touched last

    def teardown(self) -> None:
        self.board.close()
        self.board.unlink()

    def _pick(self, among: set[int], at: int) -> Session:
        return self.sessions[sorted(among)[at % len(among)]]

    def _point(self, at: int) -> Key:
        """Any use there ever was, most often one that still is."""
        among = sorted(self.model.uses) * 3 + sorted(self.points - self.model.uses.keys())
        return among[at % len(among)]

    def _settle(self) -> None:
        """Carry out what followed, and check it where it happens: nothing is freed that somebody may touch."""
        touched = self.registry.touched
        for slot in touched.slots:
            if slot.state == "free":
                key = (slot.index, slot.incarnation)
                assert key not in self.model.uses, f"{key} was freed while {self.model.uses[key].holders} may touch it"
                assert key not in self.model.kept, f"{key} was freed while GPU work may touch it"
        self.effects.fill_in(touched.slots)
        self.effects.carry_out(touched)

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule()
    def connect(self) -> None:
        try:
            session = self.registry.open_session(f"s{next(self.numbers)}", "")
        except errors.QuotaExceeded as error:
            refusal = error
        else:
            self._take_in(session)
            return
        assert refusal.limit == _LIMITS.max_sessions == len(self.model.there)

    def _take_in(self, session: Session) -> None:
        assert len(self.model.there) < _LIMITS.max_sessions
        assert session.serial not in self.sessions
        assert session.line not in {self.sessions[serial].line for serial in self.model.there}
        self.sessions[session.serial] = session
        self.model.live.add(session.serial)
        self.model.there.add(session.serial)
        self._settle()

    @precondition(lambda self: self.model.live)
    @rule(at=st.integers(0, 5), name=st.sampled_from(_NAMES), recorder=st.booleans())
    def open(self, at: int, name: str, recorder: bool) -> None:
        session = self._pick(self.model.live, at)
        me, key = session.serial, self.model.named(name)
        known = self.registry.names.get(name)
        assert (known is None) == (key is None)
        full = key not in self.model.held(me) and len(self.model.held(me)) >= _LIMITS.max_attachments
        try:
            slot = self._open(session, known, name, recorder)
        except errors.RecorderTaken:
            assert key is not None
            assert recorder
            assert self.model.uses[key].recorder not in (None, me)
            return
        except errors.QuotaExceeded:
            assert full or (key is None and self._in_pool() >= _LIMITS.pool)
            return
        assert not full
        found = (slot.index, slot.incarnation)
        if key is None:
            assert found not in self.points, "the same use of a slot was handed out twice"
            others = [*self.model.uses, *self.model.kept]
            assert all(index != slot.index for index, _ in others), "a slot was handed out that is in use"
            self.model.uses[found] = Use(name)
            self.points.add(found)
        else:
            assert found == key
        self.model.take(me, found)
        if recorder:
            self.model.uses[found].recorder = me
        self._settle()

    def _open(self, session: Session, known: Slot | None, name: str, recorder: bool) -> Slot:
        if known is not None:
            self.registry.join(session, known, recorder=recorder, device="", engine="auto")
            return known
        return self.registry.create(session, name, recorder=recorder, device="gpu", engine="timeline", depth=1, ring=[])

    @precondition(lambda self: self.model.live and self.points)
    @rule(at=st.integers(0, 5), which=st.integers(0, 50))
    def attach_by_point(self, at: int, which: int) -> None:
        self._attach(self._pick(self.model.live, at), self._point(which))

    @precondition(lambda self: self.model.draining())
    @rule(at=st.integers(0, 5))
    def attach_again_to_what_was_closed_and_is_held_still(self, at: int) -> None:
        draining = self.model.draining()
        serial, key = draining[at % len(draining)]
        self._attach(self.sessions[serial], key)

    def _attach(self, session: Session, key: Key) -> None:
        held = self.model.held(session.serial)
        try:
            slot = self.registry.attach(session, *key)
        except errors.RecorderLost:
            assert key not in self.model.uses
            return
        except errors.QuotaExceeded:
            assert key not in held
            assert len(held) >= _LIMITS.max_attachments
            return
        assert (slot.index, slot.incarnation) == key
        self.model.take(session.serial, key)
        self._settle()

    @precondition(lambda self: self.model.there and self.points)
    @rule(at=st.integers(0, 5), which=st.integers(0, 50), released=st.booleans(), drained=st.booleans())
    def close(self, at: int, which: int, released: bool, drained: bool) -> None:
        session = self._pick(self.model.there, at)
        key = self._point(which)
        has_it = key in self.model.held(session.serial)
        try:
            self.registry.close(session, *key, released=released, drained=drained)
        except errors.EventClosed:
            assert not has_it
            assert key in self.model.uses
            return
        assert has_it or key not in self.model.uses
        if has_it:
            self.model.leave(session.serial, key, broke=False, released=released, drained=drained)
            self.model.settle(session.serial)
        self._settle()

    @precondition(lambda self: self.model.there and self.points)
    @rule(at=st.integers(0, 5), which=st.integers(0, 50), is_own=st.booleans())
    def say_that_it_is_lost(self, at: int, which: int, is_own: bool) -> None:
        session = self._pick(self.model.there, at)
        key = self._point(which)
        use = self.model.uses.get(key)
        if is_own and use is not None and use.recorder in self.model.there:
            session = self.sessions[use.recorder]
        is_over = use is None or use.state == "broken" or use.is_drained
        try:
            self.registry.break_event(session, *key)
        except errors.EventClosed:
            assert not is_over
            assert use is not None
            assert use.recorder != session.serial
            return
        if not is_over:
            assert use is not None
            assert use.recorder == session.serial
            use.state = "broken"
        self._settle()

    @precondition(lambda self: self.model.there)
    @rule(at=st.integers(0, 5), released=st.booleans())
    def goodbye(self, at: int, released: bool) -> None:
        session = self._pick(self.model.there, at)
        self.registry.end_session(session, released=released)
        self.model.end(session.serial, broke=False, released=released)
        self._settle()

    @precondition(lambda self: self.model.live)
    @rule(at=st.integers(0, 5))
    def fall_silent(self, at: int) -> None:
        session = self._pick(self.model.live, at)
        self.registry.lose(session, "expired")
        self.model.silent.add(session.serial)
        self.model.end(session.serial, broke=True, released=False)
        self._settle()

    @precondition(lambda self: self.model.there)
    @rule(at=st.integers(0, 5))
    def be_marked_as_dead(self, at: int) -> None:
        session = self._pick(self.model.there, at)
        self.registry.lose(session, "died")
        self.model.silent.add(session.serial)
        self.model.end(session.serial, broke=True, released=False)
        self._settle()

    @precondition(lambda self: self.model.there)
    @rule(at=st.integers(0, 5), works_on=st.booleans())
    def be_gone(self, at: int, works_on: bool) -> None:
        session = self._pick(self.model.there, at)
        self.registry.release_dead(session, held=_LOCK if works_on else 0)
        self.model.end(session.serial, broke=True, released=True, held=works_on)
        self._settle()

    @precondition(lambda self: self.model.working())
    @rule(at=st.integers(0, 5))
    def end_its_work(self, at: int) -> None:
        working = self.model.working()
        assert sorted(self.registry.kept.by_recorder) == working
        serial = working[at % len(working)]
        self.registry.end_held(serial)
        self.model.work_ends(serial)
        self._settle()

    def _in_pool(self) -> int:
        return len(self.model.uses) + max(len(self.model.kept) - _LIMITS.kept_slots, 0)

    @precondition(lambda self: self.sessions)
    @rule(at=st.integers(0, 50))
    def be_told_twice_of_a_death(self, at: int) -> None:
        gone = set(self.sessions) - self.model.there
        if gone:
            self.registry.release_dead(self._pick(gone, at))
            self.registry.lose(self._pick(gone, at), "expired")
            assert not self.registry.touched

    @precondition(lambda self: self.model.live)
    @rule(at=st.integers(0, 5), name=st.sampled_from(("x", "y", "z")))
    def name_a_stream(self, at: int, name: str) -> None:
        with suppress(errors.QuotaExceeded):
            self.registry.stream(self._pick(self.model.live, at), name, "", "gpu", 0)
        assert len(self.registry.streams) <= _LIMITS.max_streams

    @precondition(lambda self: self.late is None)
    @rule()
    def subscribe_late(self) -> None:
        self.late = Replay("")
        self.late.resync(self._snapshot())

    @rule()
    def be_replaced(self) -> None:
        """By another registry, which goes on with what this one had."""
        old, new = self.registry, self.registry_type(_LIMITS)
        known = {serial: _as_read(session) for serial, session in old.sessions.items()}
        self.sessions.update(known)
        slots = [_as_read(slot) for slot in old.slots.values()]
        new.restore(list(known.values()), slots, list(old._free_lines))
        new.count, new.high_water = old.count, old.high_water
        new.touched.slots.update(slots)
        new.touched.sessions.update(known.values())
        for slot in slots:
            slot.told = slot.ended or "opened"
        for session in known.values():
            session.told = session.state
        for serial, session in known.items():
            assert session.attached == old.sessions[serial].attached
        self.registry = new

    # --- what always holds --------------------------------------------------------------------------------------------

    def _snapshot(self) -> messages.SnapshotReply:
        events = [
            messages.EventInfo(
                slot.name, slot.device, "timeline", slot.state, 0, 0, 0, "", slot.index, slot.incarnation
            )
            for slot in self._in_use()
            if slot.state != "free"
            if slot.state != "kept"
        ]
        rows = [
            messages.SessionInfo(session.id, "", 0, 0, 0.0, 0.0)
            for session in self.registry.sessions.values()
            if session.state == "live"
        ]
        return messages.SnapshotReply(self.feed.number, events, rows)

    def _in_use(self) -> Iterator[Slot]:
        return (slot for slot in self.registry.slots.values() if not slot.is_over)

    @invariant()
    def every_use_is_as_the_model_says(self) -> None:
        found = {}
        for slot in self._in_use():
            recorder = slot.recorder.serial if slot.recorder is not None else None
            holders = slot.active | slot.draining
            use = Use(slot.name, slot.state, recorder, slot.is_drained, bool(slot.held), set(slot.active), holders)
            found[slot.index, slot.incarnation] = use
        assert found == self.model.uses
        kept = {(slot.index, slot.incarnation) for slot in self.registry.slots.values() if slot.state == "kept"}
        assert kept == self.model.kept.keys()
        assert self.registry.in_use == self._in_pool() <= _LIMITS.pool
        assert set(self.registry.sessions) == self.model.there == set(self.sessions) - self.forgotten
        assert self.registry.names == {
            use.name: self.registry.slots[key[0]]
            for key, use in self.model.uses.items()
            if use.name and use.state == "open"
        }

    @invariant()
    def a_use_has_one_recorder_at_most_for_its_whole_life(self) -> None:
        for slot in self._in_use():
            if slot.recorder is not None:
                known = self.recorders.setdefault((slot.index, slot.incarnation), slot.recorder.serial)
                assert known == slot.recorder.serial

    @invariant()
    def a_session_that_ended_holds_no_name_and_no_role(self) -> None:
        for slot in self._in_use():
            if slot.state == "open":
                assert slot.recorder is None or slot.recorder.serial in self.model.live
                assert slot.active <= self.model.live
                assert slot.active
        assert set(self.registry.streams) == {name for s in self.registry.sessions.values() for name in s.streams}

    @invariant()
    def the_feed_replayed_gives_the_state(self) -> None:
        for announcement in self.wire.sent:
            for replay in (self.replay, self.late):
                if replay is not None:
                    assert not replay.is_behind(announcement)
                    replay.apply(announcement)
        self.wire.sent.clear()
        events: set[object] = {key for key, use in self.model.uses.items() if use.state == "open"}
        live = {self.sessions[serial].id for serial in self.model.live}
        for replay in (self.replay, self.late):
            if replay is not None:
                assert set(replay._known) == events | live

    @invariant()
    def the_board_says_the_same(self) -> None:
        for slot in self.registry.slots.values():
            line = self.board.slot(slot.index)
            assert (line.incarnation, line.state) == (slot.incarnation, _STATES[slot.state])
            if slot.state != "free":
                assert line.recorder == (slot.recorder.serial if slot.recorder is not None else 0)
        lines = {session.line: session for session in self.registry.sessions.values()}
        for index in range(_LIMITS.max_sessions):
            state = self.board.session(index).state
            session = lines.get(index)
            assert state == (FREE if session is None else LIVE if session.state == "live" else EXPIRED)

    @invariant()
    def what_is_not_touched_is_as_it_was(self) -> None:
        touched = self.registry.touched
        for slot, serial in touched.attachments:
            if slot not in touched.slots:
                *rest, active, draining = self.journal["slot", slot.index]
                sets = zip((active, draining), (slot.active, slot.draining), strict=True)
                changed = ((was - {serial}) | (now & {serial}) for was, now in sets)
                self.journal["slot", slot.index] = (*rest, *changed)
        self.journal.update((("slot", slot.index), _slot_as_it_is(slot)) for slot in touched.slots)
        for session in touched.sessions:
            if session.serial in self.registry.sessions:
                self.journal["session", session.serial] = (session.state, frozenset(session.streams))
            else:
                self.journal.pop(("session", session.serial), None)
        now: dict[tuple[str, int], Any] = {}
        for index, slot in self.registry.slots.items():
            now["slot", index] = _slot_as_it_is(slot)
        for session in self.registry.sessions.values():
            now["session", session.serial] = (session.state, frozenset(session.streams))
        assert self.journal == now
        self.registry.touched = Touched()
        assert not self.registry.touched

    @invariant()
    def nothing_grows_that_should_not(self) -> None:
        assert len(self.registry.slots) <= _LINES
        assert len(self.registry.sessions) <= _LIMITS.max_sessions


def _as_read(row: _Row) -> _Row:
    """A row of the journal as another coordinator reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=type(row))


def _slot_as_it_is(slot: Slot) -> Any:
    recorder = None if slot.recorder is None else slot.recorder.serial
    sets = frozenset(slot.active), frozenset(slot.draining)
    return slot.state, slot.incarnation, slot.name, recorder, slot.is_drained, slot.held, *sets


SETTINGS = examples(120, stateful_step_count=30)


def test_the_registry_keeps_what_is_promised() -> None:
    run_state_machine_as_test(Machine, settings=SETTINGS)
