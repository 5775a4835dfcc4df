"""The journal: what counts of it, who may write it, and what is refused because of it."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from ipcsync import _drivers
from ipcsync._board import BROKEN, FREE, OPEN
from ipcsync._deadline import FOREVER
from ipcsync._session.attachments import AttachmentTable, Life, Use
from ipcsync._session.connection import Request
from ipcsync._session.waits import Waits
from ipcsync._wire import codec, messages
from ipcsync._wire.codec import Origin
from ipcsync._wire.messages import Message
from ipcsync.errors import QuotaExceeded
from ipcsync_coordinator import journal, startup
from ipcsync_coordinator.journal import Journal, JournalError
from ipcsync_coordinator.state import Tombstone
from ipcsync_keeper import resources
from ipcsync_keeper.link import Link
from tests.unit.coordinator import coordinator_world
from tests.unit.coordinator.coordinator_world import SENDER, SETTINGS, World


def test_no_two_coordinators_have_one_journal(world: World) -> None:
    words = world.files.descriptors[0]
    startup._be_the_only_one(words)
    with pytest.raises(RuntimeError, match="another coordinator still has the journal"):
        startup._be_the_only_one(words)


def test_a_journal_for_inspection_takes_an_earlier_ones_place_and_follows_no_link(world: World, tmp_path: Path) -> None:
    before = world.files.save(str(tmp_path))
    world.hello()
    kept = world.files.save(str(tmp_path))
    assert (before, os.listdir(tmp_path)) == (kept, ["journal"])
    assert os.stat(kept).st_size == world.files.words[resources.VALID]
    os.rename(kept, tmp_path / "other")
    os.symlink(tmp_path / "other", kept)
    assert "not kept" in world.files.save(str(tmp_path))


def test_what_was_written_and_not_made_valid_did_not_happen(world: World) -> None:
    token = world.hello().token
    end = world.files.words[resources.VALID]
    os.pwrite(world.files.logs[0], os.urandom(100), end)
    world.begin(world.events.held())
    assert world.sessions.find(token) is not None


@pytest.mark.parametrize("damage", ["a byte", "the length", "the end"])
def test_a_damaged_journal_is_not_believed(world: World, damage: str) -> None:
    world.hello()
    words, log = world.files.words, world.files.logs[0]
    if damage == "the end":
        words[resources.VALID] -= 3
    else:
        at = 12 if damage == "a byte" else 0
        os.pwrite(log, bytes([os.pread(log, 1, at)[0] ^ 0x40]), at)
    with pytest.raises(JournalError, match=r"the record at byte 0 is damaged"):
        world.begin(world.events.held())


@pytest.mark.parametrize(("killed_from_outside", "deaths"), [(False, 2), (True, 4)])
def test_a_request_that_coordinators_died_of_is_refused_and_no_other_is(
    world: World, monkeypatch: pytest.MonkeyPatch, killed_from_outside: bool, deaths: int
) -> None:
    world.files.words[resources.KILLED_FROM_OUTSIDE] = killed_from_outside
    token = world.hello().token
    poison = codec.encode_request(7, messages.Open("poison"), token, 0)
    other = codec.encode_request(8, messages.Open("other"), token, 0)
    monkeypatch.setattr(Journal, "end_request", lambda _: None)
    for _ in range(deaths):
        reply = world.dispatcher.handle(poison, SENDER, time.monotonic_ns())
        assert reply is not None
        assert isinstance(codec.decode_reply(reply)[1], messages.Attachment)
        world.begin(world.events.held())
    reply = world.dispatcher.handle(poison, SENDER, time.monotonic_ns())
    assert reply is not None
    number, body = codec.decode_reply(reply)
    assert number == 7
    assert isinstance(body, messages.Failure)
    assert body.attributes["code"] == "poison"
    reply = world.dispatcher.handle(other, SENDER, time.monotonic_ns())
    assert reply is not None
    assert isinstance(codec.decode_reply(reply)[1], messages.Attachment)


def test_a_reply_that_is_kept_is_given_also_past_the_deadline(world: World) -> None:
    token = world.hello().token
    now = time.monotonic_ns()
    done = codec.encode_request(7, messages.Open("done"), token, now + 1_000_000_000)
    reply = world.dispatcher.handle(done, SENDER, now)
    world.begin(world.events.held())
    late = now + 2_000_000_000
    assert world.dispatcher.handle(done, SENDER, late) == reply
    not_done = codec.encode_request(8, messages.Open("not done"), token, now + 1_000_000_000)
    assert world.dispatcher.handle(not_done, SENDER, late) is None


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
        reply = world.dispatcher.handle(frame, SENDER, time.monotonic_ns())
        assert reply is not None
        return codec.decode_reply(reply)[1]

    longest = 0
    for _ in range(20):
        for _ in range(20):
            opened = ask(messages.Open("one"))
            assert isinstance(opened, messages.Attachment)
            ask(messages.Close(opened.slot, opened.incarnation))
        longest = max(longest, *(world.files.words[resources.VALID + which] for which in (0, 1)))
        world.begin(world.events.held())
    assert longest < 50_000


def test_what_an_attachment_adds_does_not_grow_with_the_number_of_sessions(world: World) -> None:
    first = world.hello()
    opened = world.ask(messages.Open("one", engine="timeline"), first.token)
    assert isinstance(opened, messages.Attachment)
    sizes = set()
    for _ in range(5):
        token = world.hello().token
        for body in (messages.Open("one"), messages.Close(opened.slot, opened.incarnation, released=False)):
            before = world.files.words[resources.VALID]
            assert not isinstance(world.ask(body, token), messages.Failure)
            sizes.add((type(body), world.files.words[resources.VALID] - before))
    assert len(sizes) == 2, sizes


def _no_memory(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_a_close_and_a_break_that_found_no_memory_are_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.hello().token
    opened = world.ask(messages.Open("held", recorder=True, engine="timeline"), token)
    assert isinstance(opened, messages.Attachment)

    def exchange(requests: list[Request], *_: object) -> None:
        for request in requests:
            request.reply = world.ask(request.body, token)

    def result_of(request: Request, _: float) -> None:
        if isinstance(request.reply, messages.Failure):
            raise codec.error_of(request.reply)

    lease: Any = SimpleNamespace(
        board=world.board, welcome=SimpleNamespace(token=token), beat=lambda: None, check_coordinator=lambda: None
    )
    connection: Any = SimpleNamespace(exchange=exchange, result_of=result_of)
    table = AttachmentTable(lease, connection, Waits())
    engine: Any = SimpleNamespace(slot=opened.slot, incarnation=opened.incarnation, is_recorder=True, ordinal=0)
    engine.chain = SimpleNamespace(has_asked=False, wants_break=True)
    table.give_back(opened)
    table.ending.append(use := Use(engine, Waits()))
    table.advance(use, Life.RELEASED)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _no_memory)
        patch.setattr(journal, "_LEAST_ROOM", 1 << 30)
        table.beat()
        with pytest.raises(QuotaExceeded):
            table.tell_all(5.0, FOREVER)
        assert not engine.chain.has_asked
        assert table.has_closes
    table.beat()
    assert engine.chain.has_asked
    assert not table.has_closes
    assert world.registry.in_use == 0


def test_a_death_for_which_the_journal_has_no_memory_keeps_no_question_from_its_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, token = world.hello().token, world.hello().token
    opened = world.ask(messages.Open("e", recorder=True, engine="timeline"), victim)
    assert isinstance(opened, messages.Attachment)
    assert isinstance(world.ask(messages.Open("e"), token), messages.Attachment)
    entry = world.sessions.find(victim)
    assert entry is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _no_memory)
        patch.setattr(os, "posix_fallocate", _no_memory)
        world.handlers.bury(entry)
        assert isinstance(world.ask(messages.ListEvents(), token), messages.EventList)
        close = codec.encode_request(99, messages.Close(opened.slot, opened.incarnation), token, 0)
        assert world.dispatcher.handle(close, SENDER, time.monotonic_ns()) is None, "what is in no journal has no reply"
        patch.setattr(journal, "_LEAST_ROOM", 1 << 30)
        refused = world.ask(messages.Open("other"), token)
        assert isinstance(refused, messages.Failure)
        assert refused.kind == QuotaExceeded.__name__
        assert world.board.slot(opened.slot).state == OPEN
    world.transactions.commit()
    assert world.board.slot(opened.slot).state == BROKEN
    _, again = codec.decode_reply(world.dispatcher.handle(close, SENDER, time.monotonic_ns()) or b"")
    assert isinstance(again, messages.Done)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()], ids=["disk", "heap"])
def test_what_finds_no_memory_for_its_record_has_no_reply_and_is_done_once(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    token = world.hello().token
    frame = codec.encode_request(7, messages.Open("e", recorder=True, engine="timeline"), token, 0)

    def fail(*_: object) -> NoReturn:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write", fail)
        for _ in range(2):
            assert world.handle(frame) is None
    assert world.board.slot(0).state == FREE
    for _ in range(2):
        assert isinstance(world.handle(frame), messages.Attachment)
        assert (world.board.slot(0).state, world.registry.in_use) == (OPEN, 1)
    world.begin(world.events.held())
    assert isinstance(world.handle(frame), messages.Attachment)
    assert world.registry.in_use == 1
    assert world.metrics.refusals.get("internal", 0) == 0


def test_a_goodbye_that_finds_no_memory_is_refused_and_keeps_no_other_from_its_replies(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def write_what_is_reserved(log: int, data: bytes, at: int) -> int:
        return write(log, data, at) if at + len(data) <= os.fstat(log).st_size else _no_memory()

    monkeypatch.setattr(journal, "_LEAST_ROOM", 700)  # as all of it and thousands of events
    leaving, other = world.hello().token, world.hello().token
    for number in range(SETTINGS.max_attachments):
        opened = world.ask(messages.Open(f"{number}" * 200, recorder=True, engine="timeline"), leaving)
        assert isinstance(opened, messages.Attachment)
    world.transactions.journal.make_room()  # for one more request of any other kind
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_what_is_reserved)
        patch.setattr(os, "posix_fallocate", _no_memory)
        refused = world.ask(messages.Bye(), leaving)
        assert isinstance(refused, messages.Failure)
        assert refused.kind == QuotaExceeded.__name__
        assert world.registry.in_use == SETTINGS.max_attachments
        assert isinstance(world.ask(messages.OpenStream("s"), other), messages.StreamSpec)
    assert isinstance(world.ask(messages.Bye(), leaving), messages.Done)
    assert world.registry.in_use == 0


def test_how_long_a_slot_has_been_in_quarantine_is_known_to_the_next_coordinator(world: World) -> None:
    recorder, waiter = world.hello().token, world.hello().token
    opened = world.ask(messages.Open("e", recorder=True, engine="timeline"), recorder)
    assert isinstance(opened, messages.Attachment)
    assert isinstance(world.ask(messages.Open("e"), waiter), messages.Attachment)
    assert world.handlers.stats()["quarantine_oldest_s"] == 0.0
    world.ask(messages.Close(opened.slot, opened.incarnation), recorder)
    ended_ns = world.registry.slots[opened.slot].ended_ns
    assert 0 < ended_ns <= time.monotonic_ns()
    world.begin(world.events.held())
    assert world.registry.slots[opened.slot].ended_ns == ended_ns
    assert world.handlers.stats()["quarantine_oldest_s"] > 0.0  # type: ignore[operator] # a float


def test_that_a_bridge_was_here_is_known_to_the_coordinators_after_its_end(world: World) -> None:
    assert not world.registry.has_had_bridge
    bridge = world.ask(messages.Hello(os.urandom(16), _drivers.name(), "bridge a", role="bridge"))
    assert isinstance(bridge, messages.Welcome)
    world.ask(messages.Bye(), bridge.token)
    world.release_all()
    for _ in range(2):  # by its records, then by one that they come to
        world.begin(world.events.held())
        assert not world.registry.sessions
        assert world.registry.has_had_bridge


def test_what_was_lost_of_other_nodes_is_in_one_record(world: World) -> None:
    token = world.hello().token
    world.registry.tombstones.add(Origin(b"e" * 16, 1, 1), Tombstone("n", 1, "silent"))
    for name in ("a", "b"):
        assert isinstance(world.ask(messages.Open(name, engine="timeline"), token), messages.Attachment)
    records, _ = world.transactions.journal.read()
    assert [len(record.tombstones) for record in records if record.tombstones] == [1]


def test_a_journal_that_finds_no_memory_for_a_shorter_one_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, files = world.hello().token, world.files
    write, current = os.pwrite, files.words[resources.CURRENT]

    def write_the_current(log: int, data: bytes, at: int) -> int:
        return write(log, data if log == files.logs[current] else data[:-1], at)

    world.transactions.journal._limit = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_the_current)
        first = world.ask(messages.Open("first", engine="timeline"), token)
    assert isinstance(first, messages.Attachment), "what was done is answered as that"
    assert files.words[resources.CURRENT] == current
    assert os.fstat(files.logs[1 - current]).st_blocks == 0
    world.transactions.journal._limit = 0
    assert isinstance(world.ask(messages.Open("second", engine="timeline"), token), messages.Attachment)
    assert files.words[resources.CURRENT] != current, "it is tried again"
    world.begin(world.events.held())
    assert isinstance(world.ask(messages.Attach(first.slot, first.incarnation), token), messages.Attachment)


def test_a_shorter_journal_is_gone_on_with_though_there_is_no_memory_for_deaths(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, files = world.hello().token, world.files
    reserve, current = os.posix_fallocate, files.words[resources.CURRENT]

    def reserve_in_the_current(log: int, at: int, size: int) -> None:
        if log != files.logs[current]:
            _no_memory()
        reserve(log, at, size)

    world.transactions.journal._limit = 0
    monkeypatch.setattr(os, "posix_fallocate", reserve_in_the_current)
    assert isinstance(world.ask(messages.Open("one", engine="timeline"), token), messages.Attachment)
    assert files.words[resources.CURRENT] != current
    assert os.fstat(files.logs[current]).st_blocks == 0


@pytest.mark.process
def test_a_keeper_of_another_version_is_told_the_versions() -> None:
    """Such a one passes other descriptors."""
    ours, theirs = socket.socketpair()
    script = f"from ipcsync_coordinator import startup; startup.inherit('{os.getpid()},{theirs.fileno()},1,2', {{}})"
    with ours, theirs, subprocess.Popen([sys.executable, "-c", script], pass_fds=[theirs.fileno()]) as process:
        message = Link(ours).receive(30)
        assert message is not None
        assert message[1] == [startup.versions(), {}]
        ours.shutdown(socket.SHUT_RDWR)
        assert process.wait(30) == 0


def test_a_shorter_journal_has_memory_for_deaths(world: World) -> None:
    world.transactions.journal._limit = 0
    world.hello()
    log = world.files.logs[world.files.words[resources.CURRENT]]
    valid = world.files.words[resources.VALID + world.files.words[resources.CURRENT]]
    assert os.fstat(log).st_blocks * 512 >= valid + journal._LEAST_ROOM


def test_a_coordinator_set_to_fewer_replies_keeps_as_many_as_sessions_were_granted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.hello().token
    frames = [codec.encode_request(number, messages.Open(f"e{number}"), token, 0) for number in (7, 8)]
    replies = [world.dispatcher.handle(frame, SENDER, time.monotonic_ns()) for frame in frames]
    fewer = dataclasses.replace(coordinator_world.SETTINGS, remembered_requests=1)
    monkeypatch.setattr(coordinator_world, "SETTINGS", fewer)
    for _ in range(2):
        world.begin(world.events.held())
        assert [world.dispatcher.handle(frame, SENDER, time.monotonic_ns()) for frame in frames] == replies
