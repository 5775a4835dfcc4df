"""Mirrors of other nodes' events: what is asked of the bridge, what it answers, and what stays lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync._board import BROKEN, INT64_MAX, OPEN
from ipcsync._wire import codec, messages
from ipcsync._wire.codec import Origin
from ipcsync.errors import EventClosed, NoBridge, NodeLost, ProtocolError, QuotaExceeded, RecorderLost, StalePoint
from ipcsync_bridge import subscriber as mirrors_of_bridges
from ipcsync_bridge.session import BridgeSession as BridgesDesk
from ipcsync_bridge.wire import Row
from ipcsync_coordinator import fleet, state
from ipcsync_coordinator.state import Tombstone, Tombstones
from ipcsync_keeper.resources import SharedCudaEvent
from tests.kit.until import until
from tests.unit.coordinator.coordinator_world import World

_EPOCH = b"far away epoch.."
_ATTACH = messages.Remote("attach", epoch=_EPOCH, slot=3, incarnation=7)


class Desk(World):
    """A coordinator with sessions that ask by number, and what was delivered to them late."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[messages.Message] = []

    def begin(self, held: list[SharedCudaEvent]) -> None:
        ids = getattr(self, "ids", None)
        super().begin(held)
        self.ids = ids or self.ids
        self.handlers.fleet.deliver = lambda _routing, frame: self.late.append(codec.decode_reply(frame)[1])

    def session(self, role: str = "", **hello: Any) -> messages.Welcome:
        reply = self.ask(messages.Hello(os.urandom(16), "" if role else ipcsync.driver_name(), role=role, **hello))
        assert isinstance(reply, messages.Welcome), reply
        return reply

    def put(self, body: messages.Message, who: messages.Welcome) -> messages.Message | None:
        return self.handle(codec.encode_request(next(self.ids), body, who.token, 0))

    def failure(self, body: messages.Message, who: messages.Welcome) -> Exception:
        reply = self.put(body, who)
        assert isinstance(reply, messages.Failure), reply
        return codec.error_of(reply)

    def wants(self, bridge: messages.Welcome) -> list[messages.Want]:
        reply = self.put(messages.ListWants(), bridge)
        assert isinstance(reply, messages.WantList)
        return reply.wants

    def linked(self, asker: messages.Welcome, bridge: messages.Welcome) -> messages.Attachment:
        """A mirror that `asker` attached to by a point, with the bridge as its recorder."""
        assert self.put(_ATTACH, asker) is None
        (want,) = self.wants(bridge)
        body = messages.Import(want.number, want.epoch, want.slot, want.incarnation, "a", "kv")
        assert isinstance(self.put(body, bridge), messages.Attachment)
        reply = self.late.pop()
        assert isinstance(reply, messages.Attachment)
        return reply


@pytest.fixture
def desk() -> Iterator[Desk]:
    one = Desk()
    yield one
    one.close()


def test_for_a_mirror_the_driver_is_asked_nothing(desk: Desk) -> None:
    desk.pool._driver = None  # type: ignore[assignment] # any use of it is an internal error
    bridge, asker = desk.session("bridge"), desk.session()
    assert desk.linked(asker, bridge).engine == "timeline"


def test_a_point_of_another_epoch_is_asked_of_the_bridge_and_answered_by_its_import(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    assert mirror.origin == messages.Origin(_EPOCH, 3, 7, "a")
    assert (mirror.name, mirror.engine, mirror.recorder) == ("kv", "timeline", False)
    assert desk.wants(bridge) == []
    again = desk.put(_ATTACH, desk.session())  # of a mirror that there is, nobody has to be asked
    assert isinstance(again, messages.Attachment)
    assert again.slot == mirror.slot


async def _done(work: Coroutine[Any, Any, object]) -> None:
    await work


class _Asks(BridgesDesk):
    """What a bridge asks its coordinator, which first refuses with `errors`, one for each time."""

    def __init__(self, desk: Desk, *errors: ipcsync.IpcSyncError) -> None:
        self.board = desk.board
        self.asked: list[messages.Message] = []
        self._errors = [*errors]

    async def ask(self, body: messages.Message) -> messages.Message:
        if self._errors:
            raise self._errors.pop(0)
        self.asked.append(body)
        return messages.Done()


def _mirrors(asks: _Asks) -> mirrors_of_bridges.Mirrors:
    return mirrors_of_bridges.Mirrors(asks, lambda work: asyncio.run(_done(work)))


def test_the_end_of_a_mirror_that_is_refused_for_now_is_asked_for_again(desk: Desk) -> None:
    error = QuotaExceeded("no memory for the journal")
    attached = desk.linked(desk.session(), desk.session("bridge"))
    asks, origin, link = _Asks(desk, error, error), Origin(_EPOCH, 3, 7), Row(3, 7)
    mirrors = _mirrors(asks)
    mirrors.put(origin, attached, link)
    mirrors.end(origin, "broken", "silent")
    finish = messages.Finish(attached.slot, attached.incarnation, "broken", "silent")
    assert asks.asked == [finish, messages.Close(attached.slot, attached.incarnation, drained=False)]
    assert len(mirrors) == 0


def test_a_mirror_that_the_coordinator_has_no_more_is_forgotten(desk: Desk) -> None:
    attached = desk.linked(desk.session(), desk.session("bridge"))
    origin = Origin(_EPOCH, 3, 7)
    mirrors = _mirrors(_Asks(desk, EventClosed("there is no such slot")))
    mirrors.put(origin, attached, Row(3, 7))
    mirrors.end(origin, "broken", "silent")
    assert len(mirrors) == 0


def test_a_mirror_that_is_unwanted_before_the_bridge_knows_it_is_let_go_of(desk: Desk) -> None:
    attached = desk.linked(desk.session(), desk.session("bridge"))
    asks = _Asks(desk)
    mirrors = _mirrors(asks)
    mirrors.unwanted((attached.slot, attached.incarnation))
    mirrors.put(Origin(_EPOCH, 3, 7), attached, Row(3, 7))
    assert asks.asked == [messages.Finish(attached.slot, attached.incarnation, "unwanted")]
    assert len(mirrors) == 0


def test_a_lost_nodes_mirror_breaks_though_it_is_called_unwanted_again_before_the_answer(desk: Desk) -> None:
    attached = desk.linked(desk.session(), desk.session("bridge"))
    asks, origin = (
        _Asks(desk, ProtocolError("a session wants it", code="wanted")),
        Origin(_EPOCH, 3, 7),
    )
    begun: list[Coroutine[Any, Any, object]] = []
    mirrors = mirrors_of_bridges.Mirrors(asks, begun.append)
    mirrors.put(origin, attached, Row(3, 7))
    mirrors.drop_unwanted()
    mirrors.end(origin, "broken", "silent")
    mirrors.drop_unwanted()
    while begun:
        asyncio.run(_done(begun.pop()))
    finish = messages.Finish(attached.slot, attached.incarnation, "broken", "silent")
    assert asks.asked == [finish, messages.Close(attached.slot, attached.incarnation, drained=False)]


@pytest.mark.parametrize("last", ["closed", "broken"])
def test_what_was_complete_before_a_last_word_counts_though_the_mirror_was_called_unwanted(
    desk: Desk, last: str
) -> None:
    """It is not stored while the coordinator is asked to drop the mirror, which a session turns out to want."""
    attached = desk.linked(desk.session(), desk.session("bridge"))
    asks = _Asks(desk, ProtocolError("a session wants it", code="wanted"))
    origin, line = Origin(_EPOCH, 3, 7), desk.board.slot(attached.slot)
    begun: list[Coroutine[Any, Any, object]] = []
    mirrors = mirrors_of_bridges.Mirrors(asks, begun.append)
    mirrors.put(origin, attached, Row(3, 7))
    mirrors.drop_unwanted()
    mirrors.store(origin, Row(3, 7, 2, 2, state="closed" if last == "closed" else "open"))
    if last == "broken":
        mirrors.end(origin, "broken", "silent")
    while begun:
        asyncio.run(_done(begun.pop()))
    assert [body.state for body in asks.asked if isinstance(body, messages.Finish)] == [last]
    assert (line.recorded - attached.base, line.completed - attached.base) == (2, 2)


def test_the_mirrors_name_is_not_one_of_this_coordinator(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    own = desk.put(messages.Open("kv", recorder=True, engine="timeline"), asker)
    assert isinstance(own, messages.Attachment)
    assert own.slot != mirror.slot
    assert own.origin is None


def test_a_mirror_is_no_event_of_this_node_for_a_bridge_that_asks_for_another_one(desk: Desk) -> None:
    """Nothing would ever close what it attached to by that."""
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    use = (mirror.slot, mirror.incarnation)
    assert isinstance(desk.put(messages.Finish(*use, "broken", "silent"), bridge), messages.Done)
    assert isinstance(desk.put(messages.Close(*use), bridge), messages.Done)
    slot = desk.registry.slots[mirror.slot]
    error = desk.failure(messages.Attach(*use), bridge)
    assert isinstance(error, RecorderLost)
    assert error.cause == "gone"
    assert slot.active == {asker.serial}
    assert isinstance(desk.put(messages.Attach(*use), asker), messages.Attachment), "for a session of this node it is"
    assert isinstance(desk.put(messages.Close(*use), asker), messages.Done)
    assert slot.state == "free"


def test_without_a_bridge_it_is_another_coordinators_and_after_one_there_is_none(desk: Desk) -> None:
    asker = desk.session()
    assert isinstance(desk.failure(_ATTACH, asker), StalePoint)
    assert isinstance(desk.failure(messages.Remote("open", "a", "kv"), asker), NoBridge)
    bridge = desk.session("bridge")
    assert desk.put(_ATTACH, asker) is None
    desk.put(messages.Bye(), bridge)
    desk.handlers.fleet.tick(time.monotonic_ns())
    (told,) = desk.late
    assert isinstance(told, messages.Failure)
    assert told.kind == "NoBridge"
    assert isinstance(desk.failure(_ATTACH, asker), NoBridge)


@pytest.mark.parametrize("left", ["the bridge's session", "a mirror", "a lost mirror"])
def test_that_there_was_a_bridge_is_known_to_the_next_coordinator(desk: Desk, left: str) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    if left == "a mirror":
        desk.linked(asker, bridge)
    elif left == "a lost mirror":
        mirror = desk.linked(asker, bridge)
        desk.put(messages.Finish(mirror.slot, mirror.incarnation, "broken", "silent"), bridge)
    if left != "the bridge's session":
        desk.put(messages.Bye(), bridge)
    desk.begin(held=[])
    if left == "the bridge's session":
        desk.put(messages.Bye(), bridge)
    unknown = messages.Remote("attach", epoch=b"another epoch...", slot=1, incarnation=1)
    assert isinstance(desk.failure(unknown, asker), NoBridge)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (messages.Remote("dance"), "Invalid enum value 'dance'"),  # type: ignore[arg-type] # as a stranger's
        (messages.Remote("attach", epoch=b"short", slot=3, incarnation=7), "another epoch"),
        (messages.Remote("events", "a b"), "a node's name is 1 to"),
        (messages.Remote("events", ""), "a node's name is 1 to"),
        (messages.Remote("open", "a.>", "kv"), "a node's name is 1 to"),
        (messages.Remote("open", "a", "\U0001f40d" * 255), "an event's name has 1020 bytes"),
        (messages.Remote("open", "a", ""), "an event's name has 0 bytes"),
    ],
)
def test_a_question_to_other_nodes_that_means_nothing_is_invalid(desk: Desk, body: messages.Remote, says: str) -> None:
    desk.session("bridge")
    error = desk.failure(body, desk.session())
    assert isinstance(error, ProtocolError)
    assert says in str(error)


def test_a_point_of_this_very_coordinator_is_not_asked_of_other_nodes(desk: Desk) -> None:
    desk.session("bridge")
    own = messages.Remote("attach", epoch=desk.board.epoch, slot=3, incarnation=7)
    assert "another epoch" in str(desk.failure(own, desk.session()))


def test_a_mirror_ends_as_the_protocol_says_and_in_no_other_way(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    finish = messages.Finish(mirror.slot, mirror.incarnation, "tired")  # type: ignore[arg-type] # as a stranger's
    error = desk.failure(finish, bridge)
    assert isinstance(error, ProtocolError)
    assert "Invalid enum value 'tired'" in str(error)


def test_questions_that_nobody_answers_are_limited(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST_WANTS", 2)
    desk.session("bridge")
    for name in ("one", "two"):
        assert desk.put(messages.Remote("open", "a", name), desk.session()) is None
    error = desk.failure(messages.Remote("open", "a", "three"), desk.session())
    assert isinstance(error, QuotaExceeded)
    assert error.limit == 2


def test_one_session_does_not_take_the_places_of_all_questions(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST_IN_FLIGHT", 2)
    bridge, greedy = desk.session("bridge"), desk.session()
    for name in ("one", "two"):
        assert desk.put(messages.Remote("open", "a", name), greedy) is None
    error = desk.failure(messages.Remote("open", "a", "three"), greedy)
    assert isinstance(error, QuotaExceeded)
    assert error.limit == 2
    assert desk.put(messages.Remote("open", "a", "three"), desk.session()) is None
    (first, *_) = desk.wants(bridge)
    desk.put(messages.Answer(first.number, codec.encode_reply(1, codec.failure_of(NodeLost("gone")))), bridge)
    assert desk.put(messages.Remote("open", "a", "three"), greedy) is None, "an answer makes room"


def test_what_a_session_gave_up_takes_none_of_its_places(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST_IN_FLIGHT", 1)
    desk.session("bridge")
    asker, soon = desk.session(), time.monotonic_ns() + 50_000_000
    assert desk.handle(codec.encode_request(5, _ATTACH, asker.token, soon)) is None
    until(lambda: time.monotonic_ns() > soon, "its deadline to pass")
    assert desk.handle(codec.encode_request(6, _ATTACH, asker.token, 0)) is None


def test_a_second_bridge_is_refused_while_one_lives(desk: Desk) -> None:
    desk.session("bridge")
    second = desk.ask(messages.Hello(os.urandom(16), "", role="bridge"))
    assert isinstance(second, messages.Failure)
    assert "has one" in second.message


def test_only_a_bridge_says_what_a_bridge_says(desk: Desk) -> None:
    asker = desk.session()
    bodies = (
        messages.Import(0, _EPOCH, 1, 1, "a"), messages.Answer(0, b""), messages.Finish(0, 1, "broken"),
        messages.ListWants(),
    )  # fmt: skip
    for body in bodies:
        error = desk.failure(body, asker)
        assert isinstance(error, ProtocolError)
        assert error.code == "role"


def test_no_use_of_another_node_has_the_number_by_which_tombstones_are_of_whole_epochs(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    error = desk.failure(messages.Import(0, _EPOCH, 9, 0, "a"), bridge)
    assert isinstance(error, ProtocolError)
    assert error.code == "invalid"
    assert desk.registry.tombstones.everything() == []
    desk.linked(asker, bridge)


def test_a_question_that_nobody_waits_for_any_more_is_forgotten(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    deadline = time.monotonic_ns() + 60_000_000_000
    assert desk.handle(codec.encode_request(5, _ATTACH, asker.token, deadline)) is None
    assert len(desk.wants(bridge)) == 1
    desk.handlers.fleet.tick(deadline + 1)
    assert desk.wants(bridge) == []
    assert desk.late == []


def test_a_question_that_comes_again_is_asked_once(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    frame = codec.encode_request(5, _ATTACH, asker.token, 0)
    assert [desk.handle(frame) for _ in range(3)] == [None] * 3
    assert len(desk.wants(bridge)) == 1


@pytest.mark.parametrize("reason", ["silent", "restarted", "replaced", "stopped", "died", "expired"])
def test_a_lost_mirror_is_good_as_far_as_it_was_complete_and_so_is_its_tombstone(desk: Desk, reason: str) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    line = desk.board.slot(mirror.slot)
    line.publish(mirror.base + 5)
    line.store_completed(mirror.base + 3)
    desk.put(messages.Finish(mirror.slot, mirror.incarnation, "broken", reason), bridge)
    as_lost = (BROKEN, mirror.base + 3, "" if reason in ("died", "expired") else reason, reason == "expired", INT64_MAX)
    assert (line.state, line.watermark, line.reason, line.has_expired, line.completed) == as_lost
    for who in (asker, bridge):
        desk.put(messages.Close(mirror.slot, mirror.incarnation), who)
    assert not desk.registry.mirrors
    later = desk.session()
    tombstone = desk.put(_ATTACH, later)
    assert isinstance(tombstone, messages.Attachment), "nobody is asked: lost once, lost for good"
    line = desk.board.slot(tombstone.slot)
    found = (line.state, line.watermark - tombstone.base, line.recorded - tombstone.base, line.reason, line.has_expired)
    assert found == (BROKEN, 3, 3, as_lost[2], as_lost[3])
    refused = desk.failure(messages.Import(0, _EPOCH, 3, 7, "a"), bridge)
    assert isinstance(refused, NodeLost)


def test_a_lost_use_that_is_opened_again_by_its_name_has_the_name(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    desk.put(messages.Finish(mirror.slot, mirror.incarnation, "broken", "stopped"), bridge)
    for who in (asker, bridge):
        desk.put(messages.Close(mirror.slot, mirror.incarnation), who)
    assert desk.put(messages.Remote("open", "a", "kv"), asker) is None
    (want,) = desk.wants(bridge)
    assert isinstance(desk.failure(messages.Import(want.number, _EPOCH, 3, 7, "a", "kv"), bridge), NodeLost)
    again = desk.late.pop()
    assert isinstance(again, messages.Attachment)
    assert (again.name, desk.board.slot(again.slot).state) == ("kv", BROKEN)


@pytest.mark.parametrize("how", ["bye", "pidfd", "ttl"])
def test_a_bridge_that_ends_in_whatever_way_breaks_what_it_mirrors(desk: Desk, how: str) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    line = desk.board.slot(mirror.slot)
    line.publish(mirror.base + 2)
    line.store_completed(mirror.base + 1)
    if how == "bye":
        desk.put(messages.Bye(), bridge)
    else:
        entry = desk.sessions.find(bridge.token)
        assert entry is not None
        desk.handlers.lose(entry, how)
    assert (line.state, line.watermark, line.reason) == (BROKEN, mirror.base + 1, "bridge")


def test_a_mirror_that_nobody_uses_leaves_no_tombstone_and_one_that_is_used_again_stays(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    finish = messages.Finish(mirror.slot, mirror.incarnation, "unwanted")
    error = desk.failure(finish, bridge)
    assert isinstance(error, ProtocolError)
    assert error.code == "wanted"
    assert desk.board.slot(mirror.slot).state == OPEN
    desk.put(messages.Close(mirror.slot, mirror.incarnation), asker)
    assert isinstance(desk.put(finish, bridge), messages.Done)
    assert (desk.registry.in_use, desk.registry.tombstones.everything()) == (0, [])
    desk.linked(asker, bridge)


def test_what_a_fleets_name_stands_for_at_home_is_attached_to_as_any_event(desk: Desk) -> None:
    bridge, recorder, asker = desk.session("bridge"), desk.session(), desk.session()
    own = desk.put(messages.Open("w", recorder=True, engine="timeline"), recorder)
    assert isinstance(own, messages.Attachment)
    assert desk.put(messages.Remote("open", "", "w"), asker) is None
    (want,) = desk.wants(bridge)
    answer = messages.Import(want.number, desk.board.epoch, own.slot, own.incarnation, "here", "w")
    assert isinstance(desk.put(answer, bridge), messages.Done)
    (given,) = desk.late
    assert isinstance(given, messages.Attachment)
    assert (given.slot, given.origin) == (own.slot, None)


_NO_HANDLES: list[dict[str, Any]] = [{"shm": "0:0"}, {"namespace": 1, "pid": os.getpid()}]
"""Of a process that can open no handle of the coordinator's: it sees another /dev/shm, or is called as the keeper."""


def _by_its_nodes_name(desk: Desk, bridge: messages.Welcome, asker: messages.Welcome) -> messages.Message:
    """The reply to who opens the event "ring" as one of this very node."""
    assert desk.put(messages.Remote("open", "here", "ring"), asker) is None
    (want,) = desk.wants(bridge)
    known: Any = desk.put(messages.Open("ring"), bridge)
    assert isinstance(known, messages.Attachment), known
    use = known.slot, known.incarnation
    desk.put(messages.Import(want.number, desk.board.epoch, *use, "here", "ring"), bridge)
    desk.put(messages.Close(*use), bridge)
    return desk.late.pop()


@pytest.mark.parametrize("hello", _NO_HANDLES, ids=["shm", "pid"])
def test_a_ring_of_the_own_node_is_not_for_who_can_open_no_handle_by_the_nodes_name_either(
    desk: Desk, hello: dict[str, Any]
) -> None:
    bridge, recorder, asker = desk.session("bridge"), desk.session(), desk.session(**hello)
    desk.put(messages.Open("ring", recorder=True, engine="event"), recorder)
    refused = _by_its_nodes_name(desk, bridge, asker)
    assert isinstance(refused, messages.Failure), refused
    assert refused == desk.put(messages.Open("ring"), asker)
    assert refused.kind == "EngineMismatch"
    (slot,) = desk.registry.slots.values()
    assert slot.active == {recorder.serial}, "and nothing is left of it"


@pytest.mark.parametrize("hello", _NO_HANDLES, ids=["shm", "pid"])
def test_a_bridge_that_can_open_no_handle_finds_a_ring_for_who_can(desk: Desk, hello: dict[str, Any]) -> None:
    bridge, recorder = desk.session("bridge", **hello), desk.session()
    own = desk.put(messages.Open("ring", recorder=True, engine="event"), recorder)
    assert isinstance(own, messages.Attachment)
    given = _by_its_nodes_name(desk, bridge, desk.session())
    assert isinstance(given, messages.Attachment), given
    assert (given.slot, given.handles) == (own.slot, own.handles)


def test_an_answer_goes_on_to_who_asked_and_only_answers_do(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    assert desk.put(messages.Remote("nodes"), asker) is None
    (want,) = desk.wants(bridge)
    strange = codec.encode_reply(0, messages.Counters({}))
    assert isinstance(desk.failure(messages.Answer(want.number, strange), bridge), ProtocolError)
    nodes = messages.NodeList([messages.NodeInfo("here", b"e" * 16, "known", 0)])
    assert isinstance(desk.put(messages.Answer(want.number, codec.encode_reply(0, nodes)), bridge), messages.Done)
    assert desk.late == [nodes]


def test_mirrors_and_tombstones_outlive_a_coordinator(desk: Desk) -> None:
    bridge, asker = desk.session("bridge"), desk.session()
    mirror = desk.linked(asker, bridge)
    lost = messages.Import(0, _EPOCH, 9, 1, "a")
    other = desk.put(lost, bridge)
    assert isinstance(other, messages.Attachment)
    desk.put(messages.Finish(other.slot, other.incarnation, "broken", "silent"), bridge)
    desk.put(messages.Close(other.slot, other.incarnation), bridge)
    desk.begin(held=[])
    assert desk.registry.mirrors[Origin(_EPOCH, 3, 7)].index == mirror.slot
    assert desk.registry.names == {}
    assert desk.registry.tombstones.find(Origin(_EPOCH, 9, 1)) == Tombstone("a", 0, "silent")
    assert isinstance(desk.failure(lost, bridge), NodeLost)
    again = desk.put(_ATTACH, asker)
    assert isinstance(again, messages.Attachment)
    assert again.slot == mirror.slot


def test_beyond_their_bound_tombstones_are_of_whole_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST_TOMBSTONES", 2)
    tombstones = Tombstones()
    other = Origin(b"o" * 16, 1, 1)
    tombstones.add(other, Tombstone("o", 4, "silent"))
    tombstones.add(Origin(_EPOCH, 1, 1), Tombstone("a", 7, "silent"))
    tombstones.add(Origin(_EPOCH, 2, 1), Tombstone("a", 8, "silent"))
    assert tombstones.find(Origin(_EPOCH, 5, 5)) == Tombstone("a", 0, "silent")
    assert tombstones.find(other) == Tombstone("o", 4, "silent")
    again = Tombstones()
    for origin, tombstone in tombstones.everything():
        again.add(origin, tombstone)
    assert again.everything() == tombstones.everything()


def test_a_claim_is_of_what_the_session_itself_records_on_the_timeline_engine(desk: Desk) -> None:
    desk.session("bridge")
    asker, other = desk.session(), desk.session()
    own = desk.put(messages.Open("w", recorder=True, engine="timeline"), asker)
    ring = desk.put(messages.Open("r", recorder=True, engine="event"), asker)
    assert isinstance(own, messages.Attachment)
    assert isinstance(ring, messages.Attachment)
    claim = messages.Remote("claim", "", "w", slot=own.slot, incarnation=own.incarnation)
    assert desk.put(claim, asker) is None
    assert "does not record" in str(desk.failure(claim, other))
    of_ring = messages.Remote("claim", "", "r", slot=ring.slot, incarnation=ring.incarnation)
    assert "engine='timeline'" in str(desk.failure(of_ring, asker))
    gone = messages.Remote("claim", "", "w", slot=own.slot, incarnation=own.incarnation + 1)
    assert isinstance(desk.failure(gone, asker), EventClosed)
