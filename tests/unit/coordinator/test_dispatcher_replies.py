"""What the dispatcher answers, keeps and counts: each reply once, for whoever may have it, and under its own id."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given

from ipcsync import _drivers
from ipcsync._board import INT64_MAX
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Message
from ipcsync_coordinator.gate import Sender
from ipcsync_coordinator.state import Session, SessionTable
from tests.kit.examples import examples
from tests.unit.coordinator.coordinator_world import SENDER, SETTINGS, Frame, World
from tests.unit.wire import frames

_KEPT = SETTINGS.remembered_requests


def _send(world: World, number: int, body: Message, token: bytes = b"") -> tuple[int, Message]:
    """Whose reply it is, and what it says."""
    reply = world.dispatcher.handle(codec.encode_request(number, body, token, 0), SENDER, time.monotonic_ns())
    assert reply is not None
    return codec.decode_reply(reply)


def _entry(world: World, token: bytes) -> Session:
    entry = world.sessions.find(token)
    assert entry is not None
    return entry


def _refused(world: World, number: int, body: Message, token: bytes = b"") -> messages.Failure:
    answered, failure = _send(world, number, body, token)
    assert answered == number
    assert isinstance(failure, messages.Failure)
    return failure


def test_a_retry_gets_the_same_reply_and_does_and_counts_nothing(world: World) -> None:
    token = world.hello().token
    first = _send(world, 7, messages.Open("e", True), token)
    assert first[0] == 7
    assert isinstance(first[1], messages.Attachment)
    assert _send(world, 7, messages.Open("e", True), token) == first
    assert world.metrics.requests["open"] == 1
    assert world.metrics.results["open"] == {"ok": 1}
    assert world.registry.in_use == 1


def test_a_refusal_is_counted_under_its_name_and_its_retry_gets_it_again(world: World) -> None:
    token, other = world.hello().token, world.hello().token
    _send(world, 1, messages.Open("e", True), token)
    refusal = _refused(world, 2, messages.Open("e", True), other)
    assert refusal.kind == "RecorderTaken"
    assert _send(world, 2, messages.Open("e", True), other) == (2, refusal)
    assert world.metrics.refusals["RecorderTaken"] == world.metrics.results["open"]["RecorderTaken"] == 1


def test_what_only_asks_is_counted_and_not_kept(world: World) -> None:
    token = world.hello().token
    for _ in range(2):
        assert isinstance(_send(world, 1, messages.Stats(), token)[1], messages.Counters)
    assert world.metrics.requests["stats"] == 2
    assert world.metrics.results["stats"] == {"ok": 2}
    assert not _entry(world, token).replies


def test_a_question_needs_no_session_and_leaves_nothing(world: World) -> None:
    token = world.hello().token
    for _ in range(SETTINGS.max_sessions - 1):
        world.hello()
    _send(world, 1, messages.Open("e", True), token)
    before, strikes = world.written, world.dispatcher.strikes
    assert len(world.sessions) == SETTINGS.max_sessions, "none is left for who only asks"
    kinds = {
        messages.Stats(): messages.Counters,
        messages.ListEvents(): messages.EventList,
        messages.ListSessions(): messages.SessionList,
        messages.ListAttachments(): messages.AttachmentList,
    }
    for question, kind in kinds.items():
        assert isinstance(_send(world, 1, question)[1], kind)
    for what in ("bridge", "nodes", "events"):
        assert _refused(world, 1, messages.Remote(what, "n")).kind == "NoBridge"
        assert _refused(world, 2, messages.Remote(what, "n"), token).kind == "NoBridge"
    assert world.metrics.results["remote"] == {"NoBridge": 6}
    assert not world.metrics.refusals, "no answer to a question is a refusal"
    assert (world.written, strikes._counts) == (before, {})
    assert len(_entry(world, token).replies) == 1


@pytest.mark.parametrize("kind", [kind for kind in messages.REQUESTS.values() if kind is not messages.Hello])
def test_without_a_session_nothing_but_a_question_is_answered(world: World, kind: type[messages.RequestBody]) -> None:
    @examples(60)
    @given(frames.bodies_of[kind])
    def of(body: messages.RequestBody) -> None:
        if not messages.is_question(body):
            assert _refused(world, 1, body).kind == "SessionExpired"

    of()


def test_a_list_without_a_session_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipcsync_coordinator.requests.MOST_ROWS", 2)
    token = world.hello().token
    for number in range(3):
        _send(world, number + 1, messages.Open(f"e{number}", True), token)
        world.hello()
    for given_token, most in ((b"", 2), (token, None)):
        _, events = _send(world, 9, messages.ListEvents(), given_token)
        _, sessions = _send(world, 9, messages.ListSessions(), given_token)
        _, links = _send(world, 9, messages.ListAttachments(), given_token)
        assert isinstance(events, messages.EventList)
        assert isinstance(sessions, messages.SessionList)
        assert isinstance(links, messages.AttachmentList)
        assert len(events.events) == len(links.attachments) == (most or 3)
        assert len(sessions.sessions) == (most or 4)


def _event(world: World) -> messages.EventInfo:
    _, events = _send(world, 9, messages.ListEvents())
    assert isinstance(events, messages.EventList)
    (event,) = events.events
    return event


@pytest.mark.parametrize(
    ("completed", "behind", "lost", "known"),
    [(0, 0, 0, 0), (2, 0, 0, 2), (3, 0, 0, 3), (9, 0, 0, 3), (3, 2, 0, 1), (3, 1, 0, 0), (3, 0, 2, 1)],
)
@pytest.mark.parametrize("base", [0, 7])
def test_known_complete_is_what_counts_if_the_recorder_dies_then(
    world: World, base: int, completed: int, behind: int, lost: int, known: int
) -> None:
    """A GPU writes a timeline's word behind a lost wait too, and at a break it is no count any more."""
    token, waiter = world.hello().token, world.hello().token
    line = world.board.slot(0)
    line.publish(base)  # by earlier uses
    _, event = _send(world, 1, messages.Open("e", True, engine="timeline"), token)
    assert isinstance(event, messages.Attachment)
    assert (event.slot, event.base) == (0, base)
    _send(world, 1, messages.Attach(event.slot, event.incarnation), waiter)
    line.publish(base + 3)
    line.store_completed(base + completed)
    line.first_dependent, line.lost = (behind and base + behind), (lost and base + lost)
    assert (_event(world).state, _event(world).generation, _event(world).completed) == ("open", 3, known)
    world.handlers.lose(_entry(world, token), "pidfd")
    assert line.completed == INT64_MAX
    assert (_event(world).state, _event(world).generation, _event(world).completed) == ("broken", 3, known)


def test_all_of_an_event_that_was_closed_is_known_complete(world: World) -> None:
    token, waiter = world.hello().token, world.hello().token
    _, event = _send(world, 1, messages.Open("e", True, engine="timeline"), token)
    assert isinstance(event, messages.Attachment)
    _send(world, 1, messages.Attach(event.slot, event.incarnation), waiter)
    line = world.board.slot(event.slot)
    line.publish(2)
    for is_released, completed, known in ((False, 1, 1), (True, 2, 2)):
        line.store_completed(completed)
        _send(world, 2 + completed, messages.Close(event.slot, event.incarnation, released=is_released), token)
        assert (_event(world).state, _event(world).completed) == ("closed", known)
    assert line.completed == INT64_MAX


def test_root_may_ask_and_gets_no_session(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    roots = Sender(b"root's", Frame(1, uid=0))
    hello = messages.Hello(os.urandom(16), _drivers.name(), "root")
    frame = world.dispatcher.handle(codec.encode_request(1, hello, b"", 0), roots, time.monotonic_ns())
    assert frame is not None
    _, failure = codec.decode_reply(frame)
    assert isinstance(failure, messages.Failure)
    assert failure.kind == "ConnectError"
    assert failure.message.startswith("this is uid 0, and the coordinator is of uid 1000")
    assert len(world.sessions) == 0
    frame = world.dispatcher.handle(codec.encode_request(1, messages.Stats(), b"", 0), roots, time.monotonic_ns())
    assert frame is not None
    assert isinstance(codec.decode_reply(frame)[1], messages.Counters)


def test_a_reply_with_a_deep_ring_is_kept_short_and_comes_again_whole(world: World) -> None:
    token, other = world.hello().token, world.hello().token
    first = _send(world, 1, messages.Open("e", True, engine="event", depth=100), token)
    waits = _send(world, 1, messages.Open("e"), other)
    later = _send(world, 2, messages.Attach(first[1].slot, first[1].incarnation), other)  # type: ignore[attr-defined]
    kept = [reply for _, _, reply in world.sessions.replies()]
    assert len(kept) == 3
    assert all(len(msgspec.msgpack.encode(reply)) < 100 for reply in kept), "the ring's handles alone take 7 KB"
    for _ in ("this one", "one that goes on with the journal"):
        assert _send(world, 1, messages.Open("e", True, engine="event", depth=100), token) == first
        assert _send(world, 1, messages.Open("e"), other) == waits
        assert _send(world, 2, messages.Attach(waits[1].slot, 1), other) == later  # type: ignore[attr-defined]
        world.begin(held=world.events.held())
    assert world.registry.in_use == 1


def test_a_kept_attachment_that_was_closed_since_is_no_other_use_of_its_slot(world: World) -> None:
    token = world.hello().token
    _, opened = _send(world, 1, messages.Open("e", True), token)
    assert isinstance(opened, messages.Attachment)
    _send(world, 2, messages.Close(opened.slot, opened.incarnation), token)
    assert _refused(world, 1, messages.Open("e", True), token).kind == "EventClosed"
    _send(world, 3, messages.Open("other", True), token)
    assert _refused(world, 1, messages.Open("e", True), token).kind == "EventClosed"


def test_a_request_whose_reply_is_kept_no_more_is_never_done_again(world: World) -> None:
    token = world.hello().token
    for number in range(1, _KEPT + 3):
        _send(world, number, messages.Open(f"e{number}", True), token)
    assert _entry(world, token).forgotten == 2
    for number in (1, 2):
        failure = _refused(world, number, messages.Open(f"e{number}", True), token)
        assert (failure.kind, failure.attributes["code"]) == ("ProtocolError", "forgotten")
        assert failure.message == f"request {number} was answered too long ago"
    assert isinstance(_send(world, 3, messages.Open("e3", True), token)[1], messages.Attachment)
    assert world.registry.in_use == _KEPT + 2


def test_the_goodbye_can_be_said_again_when_the_session_is_gone_and_nothing_else(world: World) -> None:
    token = world.hello().token
    assert _send(world, 9, messages.Bye(), token) == _send(world, 9, messages.Bye(), token)
    assert world.sessions.find(token) is None
    failure = _refused(world, 8, messages.Bye(), token)
    assert failure.kind == "SessionExpired"
    assert failure.message.startswith("no such session: it expired, was closed, or is another coordinator's")
    assert _refused(world, 9, messages.Bye(), b"t" * 16).kind == "SessionExpired"


def test_what_has_no_session_is_held_against_its_connection_until_a_session_speaks_there(world: World) -> None:
    strikes, token = world.dispatcher.strikes, world.hello().token
    _refused(world, 1, messages.Stats(), b"t" * 16)
    assert strikes._counts == {SENDER.routing: 1}
    world.dispatcher.handle(b"\xc1", SENDER, time.monotonic_ns())
    assert strikes._counts == {SENDER.routing: 2}
    _send(world, 2, messages.Stats(), token)
    assert strikes._counts == {}


def test_a_session_that_fell_silent_may_release_and_nothing_else(world: World) -> None:
    token = world.hello().token
    _, opened = _send(world, 1, messages.Open("e", True), token)
    assert isinstance(opened, messages.Attachment)
    entry = _entry(world, token)
    entry.is_ready = True
    world.handlers.lose(entry, "ttl")
    for body in (messages.Stats(), messages.Open("f", True), messages.Attach(opened.slot, opened.incarnation)):
        failure = _refused(world, 2, body, token)
        assert failure.kind == "SessionExpired"
        assert failure.attributes["session"] == entry.label
        assert failure.message.endswith("expired: it was silent for longer than its lease's 5 s; connect again")
    for number, ending in enumerate((messages.Break, messages.Close), 3):
        _, done = _send(world, number, ending(opened.slot, opened.incarnation), token)
        assert not isinstance(done, messages.Failure), done
    assert world.registry.in_use == 0


def test_a_session_that_fell_silent_may_say_goodbye(world: World) -> None:
    token = world.hello().token
    entry = _entry(world, token)
    entry.is_ready = True
    world.handlers.lose(entry, "ttl")
    assert not isinstance(_send(world, 1, messages.Bye(), token)[1], messages.Failure)
    assert world.sessions.find(token) is None


def test_a_request_that_coordinators_died_of_is_refused_under_its_id_and_not_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.hello().token
    end_request: list[bytes] = []
    journal = SimpleNamespace(begin_request=lambda _frame: True, end_request=lambda: end_request.append(b""))
    monkeypatch.setattr(world.dispatcher, "_journal", journal)
    failure = _refused(world, 4711, messages.Open("e", True), token)
    assert (failure.kind, failure.attributes["code"]) == ("ProtocolError", "poison")
    assert failure.message == "coordinators died of this request: it is not tried again"
    assert world.metrics.refusals["poison"] == 1
    assert world.registry.in_use == 0
    assert end_request == [b""]


def test_each_frame_is_measured_whatever_becomes_of_it(world: World) -> None:
    before = sum(world.metrics._buckets)
    world.dispatcher.handle(b"\xc1", SENDER, time.monotonic_ns())
    began = time.monotonic_ns() - 2_000_000_000
    world.dispatcher.handle(b"\xc1", SENDER, began)
    assert sum(world.metrics._buckets) == before + 2
    assert world.metrics._buckets[-1] == 1
    assert 2 <= world.metrics._sum_s < 60


def test_a_late_hello_opens_no_session(world: World) -> None:
    hello = messages.Hello(os.urandom(16), _drivers.name())
    assert world.handle(codec.encode_request(1, hello, b"", time.monotonic_ns() - 1)) is None
    assert not world.sessions
    assert world.metrics.refusals["late"] == world.metrics.results["hello"]["late"] == 1
    assert isinstance(world.handle(codec.encode_request(2, hello, b"", time.monotonic_ns() + 10**10)), messages.Welcome)
    assert world.metrics.requests["hello"] == world.metrics.results["hello"]["ok"] == 1


def test_a_failure_inside_is_counted_under_its_operation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    token = world.hello().token
    monkeypatch.setitem(world.handlers.questions, "stats", lambda *_: 1 // 0)
    assert _refused(world, 1, messages.Stats(), token).kind == "IpcSyncError"
    assert world.metrics.results["stats"] == {"internal": 1}
    _refused(world, 2, messages.Stats(), b"t" * 16)
    assert world.metrics.results["stats"] == {"internal": 1, "SessionExpired": 1}


# --- the table --------------------------------------------------------------------------------------------------------


def _made(table: SessionTable, serial: int, role: str = "") -> Session:
    session = Session(serial, f"s{serial}", "", role=role, token=bytes([serial]) * 16, nonce=bytes([serial + 100]) * 16)
    table.add(session)
    return session


def test_the_bridge_is_the_live_session_of_that_role() -> None:
    table = SessionTable(2, 2)
    assert table.bridge() is None
    _made(table, 1)
    assert table.bridge() is None
    gone, here = _made(table, 2, "bridge"), _made(table, 3, "bridge")
    gone.state = "expired"
    assert table.bridge() is here


def test_the_last_replies_of_sessions_that_are_gone_are_kept_and_no_more_than_the_limit() -> None:
    table = SessionTable(2, 2)
    for serial in (1, 2, 3):
        table.forget(_made(table, serial))
        table.keep(bytes([serial]) * 16, serial, b"reply %d" % serial)
    assert [table.final_reply(bytes([serial]) * 16, serial) for serial in (1, 2, 3)] == [None, b"reply 2", b"reply 3"]
    assert table.final_reply(bytes([2]) * 16, 3) is None
    assert table.final_reply(b"x" * 16, 1) is None
    assert list(table.replies()) == [(bytes([2]) * 16, 2, b"reply 2"), (bytes([3]) * 16, 3, b"reply 3")]


def test_a_session_is_found_by_token_and_nonce_until_it_is_forgotten() -> None:
    table = SessionTable(2, 2)
    one, two = _made(table, 1), _made(table, 2)
    assert list(table) == [one, two]
    assert len(table) == 2
    assert table.find(one.token) is table.of_nonce(one.nonce) is one
    table.forget(one)
    assert (table.find(one.token), table.of_nonce(one.nonce)) == (None, None)
    assert list(table) == [two]


def test_replies_are_kept_in_their_order_and_what_falls_out_is_remembered_by_its_number() -> None:
    table = SessionTable(2, 2)
    one = _made(table, 1)
    for number in (5, 4, 6):
        table.keep(one.token, number, b"%d" % number)
    assert list(table.replies()) == [(one.token, 4, b"4"), (one.token, 6, b"6")]
    assert one.forgotten == 5
    table.keep(one.token, 7, b"7")
    assert one.forgotten == 5, "what falls out later may have the lower number"


def test_the_requests_of_one_call_are_known_by_their_deadline(world: World) -> None:
    tokens = [world.hello().token, world.hello().token]
    later = time.monotonic_ns() + 1_000_000_000_000
    found = []
    for who, deadline in ((0, later), (0, later), (1, later), (0, later), (0, later + 1), (0, 0), (0, 0)):
        world.handle(codec.encode_request(next(world.ids), messages.ListEvents(), tokens[who], deadline))
        found.append(world.dispatcher.is_one_of_many)
    assert found == [False, True, False, True, False, False, False]
    world.handle(b"malformed")
    assert not world.dispatcher.is_one_of_many


def test_a_point_of_an_earlier_use_is_refused_for_that_one_whatever_the_next_use_needs(world: World) -> None:
    token, other = world.hello().token, world.hello().token
    uses: Any = [world.ask(messages.Open(name, True, engine="timeline"), token) for name in ("a", "b")]
    for use in uses:
        world.ask(messages.Close(use.slot, use.incarnation, released=True, drained=True), token)
    following: Any = world.ask(messages.Open("c", True, engine="event"), token)
    assert following.slot == uses[0].slot
    _entry(world, other).why_not_event = "it has no /dev/shm"
    asked = [messages.Attach(each.slot, each.incarnation) for each in (uses[0], following)]
    failures = [_refused(world, number, body, other) for number, body in enumerate(asked, 1)]
    assert [failure.kind for failure in failures] == ["RecorderLost", "EngineMismatch"]
