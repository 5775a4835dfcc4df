"""The dispatcher without a socket: any frame gets a reply or none, never an exception, and nothing grows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ipcsync import _drivers
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Message
from ipcsync_coordinator.gate import Sender
from tests.kit.examples import examples
from tests.unit.coordinator.coordinator_world import SETTINGS, Frame, World
from tests.unit.wire import frames

_CODES = {
    "malformed", "version", "unknown_op", "invalid", "too_large", "name", "ttl", "engine", "forgotten",
    "late", "ConnectError", "SessionExpired", "QuotaExceeded", "EventClosed", "RecorderLost", "RecorderTaken",
    "DeviceMismatch", "EngineMismatch", "role", "epoch", "wanted", "NoBridge", "StalePoint", "NodeLost", "NotRecorder",
}  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One for all: what grows, grows from test to test."""
    one = World()
    yield one
    one.close()


_TOKENS = [bytes([number]) * 16 for number in range(6)]


def _with_real_tokens(world: World, frame: bytes) -> bytes:
    """The frame with the tokens of sessions that are there: those it was made with stand for their places."""
    known = [entry.token for entry in world.sessions]
    for index, place in enumerate(_TOKENS[:-1] if known else []):
        frame = frame.replace(place, known[index % len(known)])
    return frame


@examples(150)
@given(st.lists(frames.anything(st.sampled_from(_TOKENS)), min_size=5, max_size=25), st.integers(1, 3))
def test_any_frames_in_any_order_get_replies_and_leave_nothing_behind(
    world: World, sent: list[bytes], sessions: int
) -> None:
    for _ in range(min(sessions, SETTINGS.max_sessions - len(world.sessions))):
        world.hello()
    for frame in sent:
        world.handle(_with_real_tokens(world, frame))  # raises for a reply that is none
        _assert_bounded(world)
    world.release_all()
    assert world.metrics.refusals["internal"] == 0
    assert set(world.metrics.refusals) - {"internal"} <= _CODES
    assert world.registry.in_use == 0
    assert not world.registry.sessions
    assert not world.registry.names
    assert not world.registry.streams
    assert not world.sessions
    assert not world.sessions._by_nonce


def _assert_bounded(world: World) -> None:
    sessions, registry = world.sessions, world.registry
    assert len(sessions) == len(sessions._by_nonce) <= SETTINGS.max_sessions
    assert len(sessions._final_replies) <= SETTINGS.max_sessions
    assert all(len(entry.replies) <= SETTINGS.remembered_requests for entry in sessions)
    assert len(registry.slots) <= SETTINGS.pool
    assert len(registry.streams) <= SETTINGS.max_streams
    assert len(registry.sessions) <= SETTINGS.max_sessions
    assert not registry.touched
    assert world.pool.made <= 200
    assert set(world.metrics.requests) <= set(messages.REQUESTS)


def test_who_records_on_a_timeline_leaves_nothing_behind_either(world: World) -> None:
    world.ask(messages.Open("e", True, engine="timeline"), world.hello().token)
    world.release_all()
    assert world.registry.in_use == 0


def test_every_request_has_a_handler_and_is_among_the_frames_that_are_tried(world: World) -> None:
    # hello has no session yet, and the reply to remote is owed until the bridge answers
    assert {*world.handlers.table, *world.handlers.questions, "hello", "remote"} == set(messages.REQUESTS)
    assert set(frames.bodies_of) == set(messages.REQUESTS.values())


@examples(100)
@given(st.lists(frames.bodies, min_size=5, max_size=25))
def test_only_a_request_that_says_so_leaves_something_in_the_journal(
    world: World, bodies: list[messages.RequestBody]
) -> None:
    token = world.hello().token
    own = world.ask(messages.Open("own", True), token)
    assert isinstance(own, messages.Attachment)
    for drawn in bodies:
        is_of_a_slot = type(drawn) in (messages.Attach, messages.Close, messages.Break)
        body = replace(drawn, slot=own.slot, incarnation=own.incarnation) if is_of_a_slot else drawn
        before = world.written
        world.handle(codec.encode_request(next(world.ids), body, token, 0))  # the reply to remote is owed
        leaves_something = body.effect != "none" and not messages.is_question(body)
        assert leaves_something or world.written == before, body
    world.release_all()


def test_a_request_past_its_deadline_is_dropped_and_counted(world: World) -> None:
    token = world.hello().token
    before = world.metrics.refusals["late"]
    late = codec.encode_request(5, messages.Open("late", True), token, time.monotonic_ns() - 1)
    assert world.handle(late) is None
    assert world.metrics.refusals["late"] == before + 1
    assert world.registry.names.get("late") is None
    world.release_all()


def test_an_exception_inside_is_a_reply_and_counted_and_nothing_of_it_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.hello().token

    def fail(*_: object) -> Message:
        raise ZeroDivisionError("secret")

    monkeypatch.setitem(world.handlers.questions, "stats", fail)
    reply = world.ask(messages.Stats(), token)
    assert isinstance(reply, messages.Failure)
    assert reply.kind == "IpcSyncError"
    assert "secret" not in reply.message
    assert world.metrics.refusals.pop("internal") == 1
    assert isinstance(world.ask(messages.ListSessions(), token), messages.SessionList)
    world.release_all()


def test_a_change_that_fails_in_the_driver_keeps_no_other_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    token = world.hello().token
    for number in range(3):
        opened = world.ask(messages.Open(f"e{number}", True, engine="event", depth=1), token)
        assert isinstance(opened, messages.Attachment)

    def fail(*_: object) -> None:
        raise _drivers.describe(999, "cuEventDestroy")

    monkeypatch.setattr(world.pool, "destroy", fail)
    monkeypatch.setattr(world.pool, "give_back", fail)
    world.release_all()
    assert world.registry.in_use == 0
    assert not world.sessions


def test_a_hello_when_descriptors_are_short_leaves_no_session_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("ipcsync_coordinator.handlers.start_time", fail)
    hello = messages.Hello(os.urandom(16), _drivers.name())
    frame = codec.encode_request(1, hello, b"", 0)
    sender = Sender(b"r", Frame(os.getpid()))
    reply = world.dispatcher.handle(frame, sender, time.monotonic_ns())
    assert reply is not None
    _, welcome = codec.decode_reply(reply)
    assert isinstance(welcome, messages.Welcome)
    # Nobody can ask the kernel of a pid without its start time: others are pointed to the lifeline.
    assert world.board.session(welcome.line).process[0] == 0
    world.release_all()
    assert not world.registry.sessions
