"""A coordinator that dies at any step, and the next one: what was asked for is done once, and nothing is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from ipcsync import _drivers
from ipcsync._board import BROKEN, CLOSED, EXPIRED, FREE, LIVE, OPEN
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Message
from ipcsync.errors import QuotaExceeded
from ipcsync_coordinator import given, journal, records, recovery
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.journal import Journal, JournalError
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.sessions import SessionTable
from ipcsync_coordinator.transactions import Transactions
from ipcsync_holdings import journal_files
from tests.faults.restart_world import MISTAKES
from tests.unit.test_dispatcher import _SENDER, World

_STATES = {"free": FREE, "open": OPEN, "broken": BROKEN, "closed": CLOSED}
_LINES = {"live": LIVE, "expired": EXPIRED, "closed": EXPIRED}


class _Killed(BaseException):
    """The coordinator was killed here."""


class _Steps:
    """Kills at the `at`-th step of a coordinator; afterwards nothing of it does anything any more."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = self.count = 0
        self.is_dead = False
        for kind, name, is_before in (
            (Transactions, "commit", True),
            (Journal, "_write", False),
            (Journal, "append", False),
            (Effects, "_store", True),
            (Effects, "_store", False),
            (Journal, "carried_out", True),
            (Journal, "_compact", True),
            (Journal, "carried_out", False),
            (SessionTable, "keep", False),
        ):
            patch.setattr(kind, name, self._counted(getattr(kind, name), is_before))
        patch.setattr(Journal, "put_down", self._unless_dead(Journal.put_down))

    def _counted(self, call: Callable[..., Any], is_before: bool) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if is_before:
                self._step()
            result = call(*arguments, **named)
            if not is_before:
                self._step()
            return result

        return counted

    def _unless_dead(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: None if self.is_dead else call(*arguments)

    def _step(self) -> None:
        self.count += 1
        if self.is_dead or self.count == self.at:
            self.is_dead = True
            raise _Killed


class _Scene:
    """Two sessions that do what sessions do, one request after the other, over coordinators that die meanwhile."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self.world = World()
        self.restarts = 0
        self.tokens: dict[str, bytes] = {}
        self.serials: dict[int, str] = {}
        self.replies: list[object] = []
        self._ids = iter(range(1, 1000))

    def ask(self, who: str, body: Message) -> Any:
        """One request, sent again to the next coordinator if this one dies of it."""
        frame = codec.encode_request(next(self._ids), body, self.tokens.get(who, b""), 0)

        def handle() -> bytes | None:
            return self.world.dispatcher.handle(frame, _SENDER, time.monotonic_ns())

        reply = self._survive(handle)
        assert reply is not None
        _, answer = codec.decode_reply(reply)
        self.replies.append(self._plain(answer))
        assert self._survive(handle) == reply, "a request that comes again is not done again"
        return answer

    def _survive(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except _Killed:
            self.restart()
            return act()

    def restart(self) -> None:
        self.restarts += 1
        self._steps.is_dead, self._steps.at = False, 0
        self.world.begin(self.world.events.held())
        assert self.world.differing == []
        self.check()

    def hello(self, who: str) -> None:
        welcome = self.ask(who, messages.Hello(who.encode().ljust(16), _drivers.name(), who))
        self.tokens[who], self.serials[welcome.serial] = welcome.token, who

    def die(self, who: str) -> None:
        entry = self.world.sessions.find(self.tokens[who])
        if entry is not None:
            self._survive(lambda: self._lose(who))

    def _lose(self, who: str) -> None:
        entry = self.world.sessions.find(self.tokens[who])
        if entry is not None:
            self.world.handlers.lose(entry, "pidfd")

    def fall_silent(self, who: str) -> None:
        def expire() -> None:
            entry = self.world.sessions.find(self.tokens[who])
            assert entry is not None
            if entry.session.state == "live":
                entry.is_ready = True
                self.world.handlers.lose(entry, "ttl")

        self._survive(expire)

    def _plain(self, answer: Message) -> object:
        if isinstance(answer, messages.Attachment):
            return "attachment", answer.name, answer.incarnation, answer.base, answer.recorder, len(answer.handles)
        return "failure" if isinstance(answer, messages.Failure) else type(answer).__name__

    def state(self) -> object:
        """What sessions and slots are like, by names."""
        registry = self.world.registry
        slots = sorted(
            (
                slot.name,
                slot.state,
                slot.is_drained,
                slot.recorder.name if slot.recorder else "",
                sorted(self.serials[serial] for serial in slot.active),
                sorted(self.serials[serial] for serial in slot.lingering),
            )
            for slot in registry.slots.values()
            if slot.state != "free"
        )
        sessions = sorted(
            (session.name, session.state, len(session.attached)) for session in registry.sessions.values()
        )
        return slots, sessions, registry.streams, self.replies

    def check(self) -> None:
        """Journal, registry, board and CUDA events agree."""
        world = self.world
        for slot in world.registry.slots.values():
            line = world.board.slot(slot.index)
            assert (line.state, line.incarnation) == (_STATES[slot.state], slot.incarnation)
            assert slot.state != "broken" or line.watermark == slot.base, "nothing is ever complete here"
        for session in world.registry.sessions.values():
            assert world.board.session(session.line).state == _LINES[session.state]
        used = {shared.serial for slot in world.registry.slots.values() for shared in slot.ring or ()}
        spare = {shared.serial for device in world.pool._devices.values() for shared in device.spare}
        assert not used & spare
        assert used | spare == {shared.serial for shared in world.events.held()}
        read, is_carried_out = Journal(world.files, records.Record).read()
        assert is_carried_out
        held = {
            slot.index
            for slot in world.registry.slots.values()
            if slot.engine == "timeline" and (slot.state == "broken" or slot.is_drained)
        }
        assert set(world.effects.releaser._held) == held
        found = _folded(read)
        assert found == _folded([records.whole(world.registry, world.sessions)])

    def close(self) -> None:
        self.world.close()


def _folded(read: list[records.Record]) -> object:
    """What records come to, but for the replies: refusals are not in the journal."""
    slots: dict[int, object] = {}
    sessions: dict[int, object] = {}
    for record in read:
        slots.update((slot.index, slot) for slot in record.slots)
        sessions.update((each.serial, msgspec.structs.replace(each, forgotten=0)) for each in record.sessions)
        for serial in record.gone:
            sessions.pop(serial, None)
    for index, slot in slots.items():
        assert isinstance(slot, records.SlotRecord)
        slots[index] = [serial for serial in slot.left if serial in sessions], msgspec.structs.replace(slot, left=[])
    return slots, sessions, read[-1].count if read else 0


def _play(scene: _Scene) -> None:
    """Everything that changes something, twice over: the slots are used again."""
    for turn in range(2):
        for who in ("writer", "reader"):
            scene.hello(who)
            scene.ask(who, messages.Ready())
        made = scene.ask("writer", messages.Open("made", recorder=True, engine="event", depth=2))
        scene.ask("reader", messages.Open("made"))
        scene.ask("reader", messages.Open("made", recorder=True))  # refused
        ahead = scene.ask("writer", messages.Open("ahead", recorder=True, engine="timeline"))
        scene.ask("reader", messages.Attach(ahead.slot, ahead.incarnation))
        scene.ask("reader", messages.OpenStream("decode", priority=-1))
        scene.ask("reader", messages.Close(made.slot, made.incarnation, let_go=False))
        scene.ask("reader", messages.Close(made.slot, made.incarnation))
        scene.ask("reader", messages.Close(made.slot, made.incarnation))  # twice is nothing
        scene.world.board.slot(ahead.slot).publish(ahead.base + 1)
        scene.ask("writer", messages.Break(ahead.slot, ahead.incarnation))
        if turn:
            scene.fall_silent("writer")
            scene.ask("writer", messages.Close(made.slot, made.incarnation))
        scene.die("writer")
        scene.ask("reader", messages.Bye())
        scene.check()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> _Steps:
    return _Steps(monkeypatch)


def _count_and_state(steps: _Steps) -> tuple[int, object]:
    scene = _Scene(steps)
    try:
        _play(scene)
        return steps.count, scene.state()
    finally:
        scene.close()


@pytest.mark.parametrize("limit", [1 << 30, 0], ids=["appended", "compacted"])
def test_a_death_at_any_step_is_not_noticed(steps: _Steps, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(journal, "_LEAST_LIMIT", limit)
    total, undisturbed = _count_and_state(steps)
    assert total > 100
    _die_at_each_step(steps, total, undisturbed)


def _die_at_each_step(steps: _Steps, total: int, undisturbed: object, stride: int = 1) -> None:
    for at in sorted(range(1, total + 1), key=lambda at: at % stride):
        steps.count, steps.at = 0, at
        scene = _Scene(steps)
        try:
            _play(scene)
            assert scene.restarts == 1, f"killed at step {at}"
            assert scene.state() == undisturbed, f"killed at step {at}"
        finally:
            scene.close()


# Each of the model's mistakes (restart_world.MISTAKES) that can be made in this code, made in it.


def _reply_before_the_record(patch: pytest.MonkeyPatch) -> None:
    commit = Transactions.commit

    def commit_later(self: Transactions, reply: Any = None, *, is_refusal: bool = False) -> None:
        if self.__dict__.pop("put_off", False) or reply is None:
            commit(self, reply, is_refusal=is_refusal)
        else:
            self.__dict__["put_off"] = True

    patch.setattr(Transactions, "commit", commit_later)


def _read_the_watermark_when_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    store = Effects._store_break

    def store_anew(self: Effects, index: int, _: int, *rest: Any) -> None:
        store(self, index, self.line(index).recorded, *rest)

    patch.setattr(Effects, "_store_break", store_anew)


def _redo_what_was_carried_out(patch: pytest.MonkeyPatch) -> None:
    read = Journal.read
    patch.setattr(Journal, "read", lambda self: (read(self)[0], False))


def _take_the_base_from_the_board(patch: pytest.MonkeyPatch) -> None:
    make = recovery._slot

    def made(record: records.SlotRecord, known: Any, pool: Pool) -> Any:
        slot = make(record, known, pool)
        slot.base = _boards[-1].slot(slot.index).recorded
        return slot

    patch.setattr(recovery, "_slot", made)
    _note_boards(patch)


def _believe_the_board(patch: pytest.MonkeyPatch) -> None:
    make = recovery._slot
    names = {number: name for name, number in _STATES.items()}

    def made(record: records.SlotRecord, known: Any, pool: Pool) -> Any:
        slot = make(record, known, pool)
        slot.state = names[_boards[-1].slot(slot.index).state]  # type: ignore[assignment] # one of its values
        return slot

    patch.setattr(recovery, "_slot", made)
    _note_boards(patch)


_boards: list[Any] = []


def _note_boards(patch: pytest.MonkeyPatch) -> None:
    restore = recovery._restore

    def noted(registry: Any, pool: Any, board: Any, *rest: Any) -> None:
        _boards.append(board)
        restore(registry, pool, board, *rest)

    patch.setattr(recovery, "_restore", noted)


def _forget_what_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Effects, "resume", lambda *_: None)


def _sweep_what_is_in_quarantine(patch: pytest.MonkeyPatch) -> None:
    sweep = Pool.sweep
    patch.setattr(Pool, "sweep", lambda self, _: sweep(self, ()))


def _swap_logs_later(patch: pytest.MonkeyPatch) -> None:
    compact = Journal._compact

    def compact_unseen(self: Journal) -> None:
        current = self._words[journal_files.CURRENT]
        compact(self)
        self._words[journal_files.CURRENT] = current  # the other one's turn is told by a message that never comes

    patch.setattr(Journal, "_compact", compact_unseen)


def _skip_redo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Effects, "redo", lambda *_: None)


def _keep_replies_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    record = Transactions._record
    patch.setattr(Transactions, "_record", lambda self, _: record(self, None))


def _leave_what_no_slot_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "sweep", lambda *_: None)


def _mark_before_it_is_done(patch: pytest.MonkeyPatch) -> None:
    append = Journal.append

    def append_and_mark(self: Journal, record: records.Record) -> None:
        append(self, record)
        self._words[journal_files.CARRIED_OUT + self._which] = self._end

    patch.setattr(Journal, "append", append_and_mark)


def _append_last(patch: pytest.MonkeyPatch) -> None:
    carry_out = Effects.carry_out
    append = Journal.append
    pending: list[tuple[Journal, records.Record]] = []
    patch.setattr(Journal, "append", lambda *both: pending.append(both))

    def carry_out_and_append(self: Effects, steps: Any) -> None:
        carry_out(self, steps)
        for each, record in pending:
            append(each, record)
        pending.clear()

    patch.setattr(Effects, "carry_out", carry_out_and_append)


_PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "reply before append": _reply_before_the_record,
    "effect before append": _append_last,
    "watermark at the effect": _read_the_watermark_when_it_is_stored,
    "no carried-out mark": _redo_what_was_carried_out,
    "base at a redo": _take_the_base_from_the_board,
    "redo skipped": _skip_redo,
    "held not rebuilt": _forget_what_is_held,
    "reply not appended": _keep_replies_in_memory_only,
    "no sweep": _leave_what_no_slot_has,
    "sweep takes quarantined rings": _sweep_what_is_in_quarantine,
    "swap by message": _swap_logs_later,
    "journal from the board": _believe_the_board,
    "marked before it is done": _mark_before_it_is_done,
}

_FOUND_ELSEWHERE = {
    "ring decided at the effect": "a redo touches no ring: what no slot's record has is swept",
    "expiry not appended": "tests/faults/test_restart_model.py, by the order of a death's steps",
    "old one still writing": "test_no_two_coordinators_have_one_journal, below",
    "given up for good": "tests/faults/test_keeper.py, row 55, by a client that never asks",
    "late before kept": "test_a_reply_that_is_kept_is_given_also_past_the_deadline, below",
}


def test_every_mistake_of_the_model_is_looked_for_in_the_code() -> None:
    assert MISTAKES.keys() == (_PLANTED.keys() | _FOUND_ELSEWHERE.keys()) - {"marked before it is done"}


@pytest.mark.parametrize("mistake", _PLANTED)
def test_a_planted_mistake_is_found(steps: _Steps, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    monkeypatch.setattr(journal, "_LEAST_LIMIT", 0 if mistake == "swap by message" else 1 << 30)
    total, undisturbed = _count_and_state(steps)
    _PLANTED[mistake](monkeypatch)
    with pytest.raises((AssertionError, JournalError, KeyError, RuntimeError)):
        _die_at_each_step(steps, total, undisturbed, stride=7)


def test_no_two_coordinators_have_one_journal(world: World) -> None:
    words = world.files.descriptors[0]
    given._be_the_only_one(words)
    with pytest.raises(RuntimeError, match="another coordinator still has the journal"):
        given._be_the_only_one(words)


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.close()


def test_what_was_written_and_not_made_valid_did_not_happen(world: World) -> None:
    token = world.hello().token
    end = world.files.words[journal_files.VALID]
    os.pwrite(world.files.logs[0], os.urandom(100), end)
    world.begin(world.events.held())
    assert world.sessions.find(token) is not None


@pytest.mark.parametrize("damage", ["a byte", "the length", "the end"])
def test_a_damaged_journal_is_not_believed(world: World, damage: str) -> None:
    world.hello()
    words, log = world.files.words, world.files.logs[0]
    if damage == "the end":
        words[journal_files.VALID] -= 3
    else:
        at = 12 if damage == "a byte" else 0
        os.pwrite(log, bytes([os.pread(log, 1, at)[0] ^ 0x40]), at)
    with pytest.raises(JournalError, match=r"the record at byte 0 is damaged"):
        world.begin(world.events.held())


def test_a_request_that_two_coordinators_died_of_is_refused_and_no_other_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.hello().token
    poison = codec.encode_request(7, messages.Open("poison"), token, 0)
    other = codec.encode_request(8, messages.Open("other"), token, 0)
    monkeypatch.setattr(Journal, "put_down", lambda _: None)
    for _ in range(2):
        world.dispatcher.handle(poison, _SENDER, time.monotonic_ns())
        world.begin(world.events.held())
    reply = world.dispatcher.handle(poison, _SENDER, time.monotonic_ns())
    assert reply is not None
    number, body = codec.decode_reply(reply)
    assert number == 7
    assert isinstance(body, messages.Failure)
    assert body.attributes["code"] == "poison"
    reply = world.dispatcher.handle(other, _SENDER, time.monotonic_ns())
    assert reply is not None
    assert isinstance(codec.decode_reply(reply)[1], messages.Attachment)


def test_a_reply_that_is_kept_is_given_also_past_the_deadline(world: World) -> None:
    token = world.hello().token
    now = time.monotonic_ns()
    done = codec.encode_request(7, messages.Open("done"), token, now + 1_000_000_000)
    reply = world.dispatcher.handle(done, _SENDER, now)
    world.begin(world.events.held())
    late = now + 2_000_000_000
    assert world.dispatcher.handle(done, _SENDER, late) == reply
    not_done = codec.encode_request(8, messages.Open("not done"), token, now + 1_000_000_000)
    assert world.dispatcher.handle(not_done, _SENDER, late) is None


def test_without_memory_for_the_journal_what_changes_something_is_refused_and_nothing_is_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.hello().token

    def none_left(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none_left)
    monkeypatch.setattr(journal, "_LEAST_ROOM", 1 << 30)
    before = world.registry.in_use
    answer = world.ask(messages.Open("one"), token)
    assert isinstance(answer, messages.Failure)
    assert answer.kind == QuotaExceeded.__name__
    assert world.registry.in_use == before
    assert isinstance(world.ask(messages.ListEvents(), token), messages.EventList)


def test_a_log_does_not_grow_with_the_number_of_starts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_LEAST_LIMIT", 10_000)
    token = world.hello().token
    ids = iter(range(1, 10_000))

    def ask(body: Message) -> Message:
        frame = codec.encode_request(next(ids), body, token, 0)
        reply = world.dispatcher.handle(frame, _SENDER, time.monotonic_ns())
        assert reply is not None
        return codec.decode_reply(reply)[1]

    longest = 0
    for _ in range(20):
        for _ in range(20):
            opened = ask(messages.Open("one"))
            assert isinstance(opened, messages.Attachment)
            ask(messages.Close(opened.slot, opened.incarnation))
        longest = max(longest, *(world.files.words[journal_files.VALID + which] for which in (0, 1)))
        world.begin(world.events.held())
    assert longest < 50_000
