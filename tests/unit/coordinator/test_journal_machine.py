"""The journal beside the live registry, by machine: at each record both say the same, and so does a recovered one.

A record says only what changed. So whatever a transition changes and its record leaves out, or a start puts together
otherwise, is found at that record, and not only once somebody misses it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec.structs import asdict

from ipcsync import _drivers
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Message
from ipcsync_coordinator import journal
from ipcsync_coordinator.journal import Journal, Record, Transactions
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import Session, Touched
from tests.kit.examples import examples
from tests.unit.coordinator.coordinator_world import SENDER, World

_NAMES = ("a", "a", "b", "")  # most events have several sessions
_OTHER_NODE = bytes(range(16))


def _plain(record: Record) -> object:
    """A whole record, but for its replies: refusals, and the reply of the record itself, are kept after it.

    A session that is gone has left nothing, whatever a slot's record says; `forgotten` follows from the replies.
    """
    sessions = {each.serial: asdict(each) | {"forgotten": 0} for each in record.sessions}
    slots = {
        slot.index: asdict(slot)
        | {
            "recorder": slot.recorder and asdict(slot.recorder),
            "active": set(slot.active),
            "draining": set(slot.draining),
        }
        for slot in record.slots
    }
    return slots, sessions, sorted(record.tombstones), record.count, record.high_water


class Checked(Journal):
    """Compares, at each record and after each compaction, what the log comes to with what the coordinator has."""

    def append(self, record: Record) -> None:
        """Append, and compare."""
        super().append(record)
        self._compare()

    def _compact(self) -> None:
        super()._compact()
        self._compare()

    def _compare(self) -> None:
        assert _plain(journal.folded(self.read()[0])) == _plain(self._whole())


class Machine(RuleBasedStateMachine):
    """Sessions, and a bridge, do all that a record is made for; the coordinator cannot append, or dies."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.tokens: list[bytes] = []
        self.points: list[tuple[int, int]] = []
        self.answered: dict[bytes, tuple[bytes, bytes]] = {}  # by token: the last request and its reply

    def teardown(self) -> None:
        self.world.close()

    def _ask(self, token: bytes, body: Message) -> Message | None:
        frame = codec.encode_request(next(self.world.ids), body, token, 0)
        reply = self.world.dispatcher.handle(frame, SENDER, time.monotonic_ns())
        if reply is None:
            return None
        _, answer = codec.decode_reply(reply)
        self.answered.pop(token, None)
        if token and not isinstance(answer, messages.Failure):
            self.answered[token] = frame, reply
        if isinstance(answer, messages.Attachment) and (point := (answer.slot, answer.incarnation)) not in self.points:
            self.points.append(point)
        return answer

    def _pick(self, at: int) -> bytes:
        return self.tokens[at % len(self.tokens)]

    def _point(self, at: int) -> tuple[int, int]:
        """Any use there ever was, most often a late one."""
        return self.points[-1 - at % len(self.points)]

    def _uses(self, *, recorders: bool = False) -> list[tuple[bytes, int, int]]:
        """Who may touch what, or records there: token, slot and incarnation."""
        slots = self.world.registry.slots
        return [
            (entry.token, index, slots[index].incarnation)
            for entry in self.world.sessions
            for index in sorted(entry.attached)
            if not recorders or slots[index].is_recorded_by(entry)
        ]

    def _lose(self, at: int, how: str, is_wanted: Callable[[Session], bool]) -> None:
        entry = self.world.sessions.find(self._pick(at))
        if entry is not None and is_wanted(entry):
            self.answered.pop(entry.token, None)
            self.world.handlers.lose(entry, how)

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(is_ready=st.booleans(), role=st.sampled_from(("", "", "bridge")))
    def connect(self, is_ready: bool, role: str) -> None:
        answer = self._ask(b"", messages.Hello(os.urandom(16), _drivers.name(), role=role))
        if isinstance(answer, messages.Welcome):
            self.tokens.append(answer.token)
            if is_ready:
                self._ask(answer.token, messages.Ready())

    @precondition(lambda self: self.tokens)
    @rule(
        at=st.integers(0, 7),
        name=st.sampled_from(_NAMES),
        recorder=st.booleans(),
        engine=st.sampled_from(("event", "timeline")),
    )
    def open(self, at: int, name: str, recorder: bool, engine: str) -> None:
        self._ask(self._pick(at), messages.Open(name, recorder=recorder, engine=engine, depth=1))

    @precondition(lambda self: self.tokens and self.points)
    @rule(at=st.integers(0, 7), which=st.integers(0, 9))
    def attach(self, at: int, which: int) -> None:
        self._ask(self._pick(at), messages.Attach(*self._point(which)))

    @precondition(lambda self: self._uses())
    @rule(at=st.integers(0, 30), released=st.booleans(), drained=st.booleans())
    def close(self, at: int, released: bool, drained: bool) -> None:
        uses = self._uses()
        token, slot, incarnation = uses[at % len(uses)]
        self._ask(token, messages.Close(slot, incarnation, released=released, drained=drained))

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 30), released=st.booleans())
    def close_and_be_drained_later(self, at: int, released: bool) -> None:
        if not self._uses(recorders=True):
            self._ask(self._pick(at), messages.Open("", recorder=True, engine="timeline"))
        uses = self._uses(recorders=True)
        if not uses:
            return
        token, slot, incarnation = uses[at % len(uses)]
        self._ask(token, messages.Close(slot, incarnation, released=False))
        self._ask(token, messages.Close(slot, incarnation, released=released, drained=True))

    @precondition(lambda self: self.points)
    @rule(which=st.integers(0, 9), count=st.integers(1, 3))
    def record(self, which: int, count: int) -> None:
        line = self.world.board.slot(self._point(which)[0])
        line.publish(line.recorded + count)

    @precondition(lambda self: self.tokens and self.points)
    @rule(at=st.integers(0, 7), which=st.integers(0, 9))
    def break_event(self, at: int, which: int) -> None:
        self._ask(self._pick(at), messages.Break(*self._point(which)))

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 7), name=st.sampled_from(("x", "y", "z")), priority=st.integers(-1, 1))
    def name_a_stream(self, at: int, name: str, priority: int) -> None:
        self._ask(self._pick(at), messages.OpenStream(name, priority=priority))

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 7), slot=st.integers(0, 2))
    def mirror(self, at: int, slot: int) -> None:
        self._ask(self._pick(at), messages.Import(0, _OTHER_NODE, slot, 1, "other"))

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 7), slot=st.integers(0, 2))
    def attach_to_a_mirror(self, at: int, slot: int) -> None:
        self._ask(self._pick(at), messages.Remote("attach", epoch=_OTHER_NODE, slot=slot, incarnation=1))

    @precondition(lambda self: self.tokens and self.points)
    @rule(at=st.integers(0, 7), which=st.integers(0, 9), state=st.sampled_from(("broken", "closed", "unwanted")))
    def finish_a_mirror(self, at: int, which: int, state: messages.MirrorEnd) -> None:
        self._ask(self._pick(at), messages.Finish(*self._point(which), state, "silent"))

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 7), released=st.booleans())
    def goodbye(self, at: int, released: bool) -> None:
        self._ask(self._pick(at), messages.Bye(released))

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 7))
    def be_marked_as_dead(self, at: int) -> None:
        self._lose(at, "pidfd", lambda entry: entry.is_ready)

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 7))
    def be_gone(self, at: int) -> None:
        entry = self.world.sessions.find(self._pick(at))
        if entry is not None:
            self.answered.pop(entry.token, None)
            self.world.handlers.bury(entry)

    @rule()
    def end_what_is_kept(self) -> None:
        for serial in list(self.world.registry.kept.by_recorder):
            self.world.registry.end_held(serial)
        self.world.transactions.commit()

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 7))
    def fall_silent(self, at: int) -> None:
        self._lose(at, "ttl", lambda entry: entry.is_ready and entry.state == "live")

    @precondition(lambda self: self.tokens)
    @rule(at=st.integers(0, 7), name=st.sampled_from(_NAMES), failures=st.integers(1, 2), ends=st.booleans())
    def find_no_memory_for_a_record(self, at: int, name: str, failures: int, ends: bool) -> None:
        """What could not be appended is in the next record, which a tick appends."""
        with pytest.MonkeyPatch.context() as patch:
            left = iter([OSError("no memory")] * failures)
            write = Journal._write

            def written(*arguments: Any) -> int:
                for error in left:
                    raise error
                return write(*arguments)

            patch.setattr(Journal, "_write", written)
            self._ask(self._pick(at), messages.Bye() if ends else messages.Open(name))
        self.answered.pop(self._pick(at), None)
        self.world.transactions.commit()

    @rule()
    def compact(self) -> None:
        self.world.transactions.journal._compact()

    @precondition(lambda self: self.answered)
    @rule(at=st.integers(0, 7))
    def ask_again(self, at: int) -> None:
        frame, reply = list(self.answered.values())[at % len(self.answered)]
        assert self.world.dispatcher.handle(frame, SENDER, time.monotonic_ns()) == reply

    @rule()
    def be_replaced(self) -> None:
        """By another coordinator, which goes on with what this one left."""
        before = _plain(journal.whole(self.world.registry, self.world.sessions))
        self.world.begin(self.world.events.held())
        assert self.world.differing == []
        assert _plain(journal.whole(self.world.registry, self.world.sessions)) == before

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_touched_that_no_record_has(self) -> None:
        assert not self.world.registry.touched


SETTINGS = examples(60, stateful_step_count=50)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("ipcsync_coordinator.journal.Journal", Checked)
    return monkeypatch


@pytest.mark.parametrize("limit", [1 << 30, 2_000], ids=["appended", "compacted"])
def test_at_each_record_the_journal_says_what_the_coordinator_has(checked: pytest.MonkeyPatch, limit: int) -> None:
    checked.setattr(journal, "_LEAST_LIMIT", limit)
    run_state_machine_as_test(Machine, settings=SETTINGS)


# What goes wrong if a record says too little, or a start puts records together otherwise.


def _leave_out(patch: pytest.MonkeyPatch, name: str, *, slots: bool) -> None:
    """Records have no slot, or no attachment, that this transition alone touched."""
    transition = getattr(Registry, name)

    def left_out(self: Registry, *arguments: Any, **named: Any) -> None:
        touched = self.touched.slots if slots else self.touched.attachments
        before = set(touched)
        transition(self, *arguments, **named)
        touched &= before

    patch.setattr(Registry, name, left_out)


def _forget_what_could_not_be_appended(patch: pytest.MonkeyPatch) -> None:
    commit = Transactions.commit

    def committed(self: Transactions, *arguments: Any, **named: Any) -> bool:
        is_done = commit(self, *arguments, **named)
        if not is_done:
            self.registry.touched = Touched()
        return is_done

    patch.setattr(Transactions, "commit", committed)


def _fold(patch: pytest.MonkeyPatch, change: Callable[[list[Record]], list[Record]]) -> None:
    folded = journal.folded
    patch.setattr(journal, "folded", lambda read: folded(change(list(read))))


def _without_attachments(read: list[Record]) -> list[Record]:
    return [msgspec.structs.replace(record, attachments=[]) for record in read]


def _attachments_last(read: list[Record]) -> list[Record]:
    attachments = [each for record in read for each in record.attachments]
    return [*_without_attachments(read), msgspec.structs.replace(read[-1], attachments=attachments)]


_PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "who attaches is left out": lambda patch: _leave_out(patch, "_attach", slots=False),
    "who leaves is left out": lambda patch: _leave_out(patch, "_leave", slots=False),
    "a creation is left out": lambda patch: _leave_out(patch, "create", slots=True),
    "a recorder is left out": lambda patch: _leave_out(patch, "join", slots=True),
    "a drain is left out": lambda patch: _leave_out(patch, "_drain", slots=True),
    "an end is left out": lambda patch: _leave_out(patch, "_finish", slots=True),
    "a release is left out": lambda patch: _leave_out(patch, "_release", slots=True),
    "what could not be appended is forgotten": _forget_what_could_not_be_appended,
    "attachments are not read": lambda patch: _fold(patch, _without_attachments),
    "attachments are read after all slots": lambda patch: _fold(patch, _attachments_last),
}


_LONG_SEARCHES = {"a recorder is left out"}


@pytest.mark.planted
@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=pytest.mark.thorough) if each in _LONG_SEARCHES else each for each in _PLANTED]
)
def test_a_planted_mistake_is_found(checked: pytest.MonkeyPatch, mistake: str) -> None:
    checked.setattr(journal, "_LEAST_LIMIT", 1 << 30)
    _PLANTED[mistake](checked)
    once = settings(SETTINGS, max_examples=2000, derandomize=True, phases=[Phase.generate], print_blob=False)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Machine, settings=once)
