"""A bridge's answers, to other nodes and to this node's sessions, over a real coordinator."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

import ipcsync
from ipcsync._wire import messages
from ipcsync._wire.codec import Origin, PointKey, pack
from ipcsync_bridge import wire
from ipcsync_bridge.answers import Answers
from ipcsync_bridge.config import Settings
from ipcsync_bridge.exports import Exports
from ipcsync_bridge.remote_requests import RemoteRequests
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.store import Claim, Identity
from ipcsync_bridge.subscriber import Mirrors
from ipcsync_bridge.wire import UNSURE, Counters

pytestmark = pytest.mark.process

WAIT_S = 20.0


class _Host:
    """What answers need of a bridge; it also is the node that is sent news."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.rows: list[wire.Row] = []

    async def ask(self, _to: str, data: bytes, _timeout: float) -> bytes:
        news = wire.decode(data)
        assert isinstance(news, wire.News)
        self.rows += news.rows
        return wire.encode(wire.Ack())

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


@pytest.fixture
def client() -> Iterator[ipcsync.Client]:
    with ipcsync.launch(log_level="warning") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        yield client


def on_a_session(client: ipcsync.Client, work: Callable[[BridgeSession], Coroutine[Any, Any, None]]) -> None:
    """Run something with a bridge's session."""

    async def run() -> None:
        session = BridgeSession.opened(client.endpoint, "bridge a", WAIT_S)
        try:
            await asyncio.wait_for(work(session), WAIT_S)
        finally:
            session.close(says_goodbye=True)

    asyncio.run(run())


def test_what_nobody_follows_is_closed_once_no_question_can_be_for_it(client: ipcsync.Client) -> None:
    event = client.event("kv", recorder=True, engine="timeline")

    async def scenario(session: BridgeSession) -> None:
        host: Any = _Host()
        answers, exports = _answers(session, host)
        said: asyncio.Queue[bytes] = asyncio.Queue()
        answers.asked("b", wire.Open("kv"), said.put, 1.0)
        state = wire.decode(await said.get())
        assert isinstance(state, wire.State)
        row = state.row
        assert await _follow(answers, [], time.monotonic()) == UNSURE
        await answers.close_unused()
        assert len(exports) == 1, "the answer may not have come before it said so"
        assert await _follow(answers, [], time.monotonic() + 60) == 7  # it wants none of them
        answers.hold([(row.slot + 100, 1)])
        await session.pause(0.0)  # so that the next question does not end
        answers.asked("b", wire.Open("other"), said.put, 1.0)
        await asyncio.sleep(0)
        host.begin(answers.close_unused())
        await asyncio.sleep(0)
        assert len(exports) == 1, "the question may be for it"
        answers.asked("b", wire.Open("later"), said.put, 1.0)
        session._goes_on.set()
        while math.inf not in answers.held.values():  # one is being closed
            await asyncio.sleep(0)
        assert len(exports) == 1, "that of the first question; the second one waits"
        assert set(answers.held) > {row.key, (row.slot + 100, 1)}, "other code is told of closes that are not made"
        while host.tasks:
            await asyncio.sleep(0.001)
        assert len(exports) == 2
        assert set(answers.held) == set(exports)
        uses = await asyncio.to_thread(client.list_attachments)
        assert {use.event for use in uses if use.session == "bridge a"} == {"other", "later"}
        exports.close()

    on_a_session(client, scenario)
    event.close()


def test_what_was_missed_is_asked_for(client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[tuple[int, int]] = []
    event = client.event("kv", recorder=True, engine="timeline")

    async def scenario(session: BridgeSession) -> None:
        asked: list[messages.Message] = []
        ask = session.ask

        async def ask_noting(body: messages.Message) -> messages.Message:
            asked.append(body)
            return await ask(body)

        async def release(key: tuple[int, int]) -> None:
            assert names.over == {(3, 7)}, "a claim on its name may come before it is released"
            released.append(key)

        monkeypatch.setattr(session, "ask", ask_noting)
        host = _Host()
        use = await _attached(ask)
        names = SimpleNamespace(claims={(3, 7): None, use: None}, over=set(), release=release)
        requests = _requests(session, host, names)
        while not released or host.tasks:
            await asyncio.sleep(0.001)
        assert asked == [messages.ListWants()]
        requests.close()

    on_a_session(client, scenario)
    assert released == [(3, 7)], "of the two the one that is not open"
    event.close()


def _requests(session: BridgeSession, host: _Host, names: Any = None, serve: Any = None) -> RemoteRequests:
    """What hears of what sessions want, and answers by `serve`."""
    other: Any = SimpleNamespace(claims={}, over=set(), release=None, drop_unwanted=lambda: None, kick=lambda: None)
    other.exports = other.mirrors = other.transport = other.settings = other
    if names is not None:
        names.transport = other
    requests = RemoteRequests(session, names or other, other, other, Counters(), host.begin)
    requests.serve = serve  # type: ignore[method-assign]
    requests.listen()
    return requests


def _answers(session: BridgeSession, host: Any, **settings: Any) -> tuple[Answers, Exports]:
    host.settings = Settings("a", ("nats://127.0.0.1:4222",), **settings)
    me = Identity("a", b"o" * 16, session.epoch)
    answers = Answers(session, host, me, Counters(), host.begin, lambda _: None)
    return answers, answers.exports


async def _attached(ask: Callable[[messages.Message], Awaitable[messages.Message]]) -> wire.Key:
    """What the session is attached to by now: the event `kv`."""
    attached = await ask(messages.Open("kv", engine="timeline"))
    assert isinstance(attached, messages.Attachment)
    return attached.slot, attached.incarnation


async def _follow(answers: Answers, keys: list[wire.Key], now: float, *, is_afresh: bool = False) -> int:
    """Want these, as node `b`, under the version 7; which version it is sent the news of."""
    said: asyncio.Queue[bytes] = asyncio.Queue()
    answers.asked("b", wire.Follow(answers.session.epoch, 7, is_afresh, keys), said.put, now)
    pong = wire.decode(await said.get())
    assert isinstance(pong, wire.Pong)
    return pong.version


def test_what_a_node_wants_is_attached_to_and_its_news_are_sent(client: ipcsync.Client) -> None:
    event = client.event("kv", recorder=True, engine="timeline")

    async def scenario(session: BridgeSession) -> None:
        host = _Host()
        answers, exports = _answers(session, host)
        use = await _attached(session.ask)
        key, over = use, (use[0], use[1] + 5)
        for is_afresh, rows in ((False, {key, over}), (False, set()), (True, {key, over})):
            host.rows.clear()
            assert await _follow(answers, [key, over], time.monotonic(), is_afresh=is_afresh) == 7
            while host.tasks:
                await asyncio.sleep(0)
            assert {row.key for row in host.rows} == rows
        assert {row.state for row in host.rows} == {"open", "gone"}
        assert [each.node for export in exports.values() for each in export.followers] == ["b"]
        exports.close()

    on_a_session(client, scenario)
    event.close()


def test_a_node_beyond_the_limit_hears_of_what_it_follows_and_opens_nothing(client: ipcsync.Client) -> None:
    """A bridge that is started again may have a lower limit: no use that is waited for already is lost by that."""
    events = [client.event(name, recorder=True, engine="timeline") for name in ("kv", "other")]

    async def scenario(session: BridgeSession) -> None:
        host = _Host()
        answers, exports = _answers(session, host, max_nodes=1)
        use = await _attached(session.ask)
        said: asyncio.Queue[bytes] = asyncio.Queue()
        answers.asked("c", wire.Open("other"), said.put, 1.0)
        assert isinstance(wire.decode(await said.get()), wire.State)
        assert await _follow(answers, [use], time.monotonic()) == 7
        await asyncio.to_thread(events[0].record, ipcsync.Stream())
        while (use, 1) not in [(row.key, row.completed) for row in host.rows]:
            await asyncio.sleep(0.001)
        answers.asked("d", wire.Open("kv"), said.put, 1.0)
        refused = wire.decode(await said.get())
        assert isinstance(refused, wire.Refused)
        assert refused.kind == "QuotaExceeded"
        exports.close()

    on_a_session(client, scenario)
    for event in events:
        event.close()


@pytest.mark.parametrize("why", ["its engine", "the limit"])
def test_a_use_that_a_node_cannot_follow_any_more_is_gone_and_keeps_no_other_from_it(
    client: ipcsync.Client, why: str
) -> None:
    """A bridge that is started again may have other limits; what it refused before would be waited for for ever."""
    events = [client.event("kv", recorder=True, engine="timeline")]
    events += [client.event("other", recorder=True, engine="event" if why == "its engine" else "timeline")]

    async def scenario(session: BridgeSession) -> None:
        host = _Host()
        answers, exports = _answers(session, host, max_links=2 if why == "its engine" else 1)
        keys = []
        for name in ("other", "kv"):
            attached = await session.ask(messages.Open(name))
            assert isinstance(attached, messages.Attachment)
            keys.append((attached.slot, attached.incarnation))
        assert await _follow(answers, keys, time.monotonic()) == 7
        while host.tasks:
            await asyncio.sleep(0)
        assert sorted(row.state for row in host.rows) == ["gone", "open"]
        assert len({row.key for row in host.rows}) == 2
        exports.close()

    on_a_session(client, scenario)
    for event in events:
        event.close()


def test_a_use_that_the_coordinator_has_no_room_for_is_asked_for_again(client: ipcsync.Client) -> None:
    """Its journal may have no memory for a moment; the event is there all the same."""
    event = client.event("kv", recorder=True, engine="timeline")

    async def scenario(session: BridgeSession) -> None:
        host = _Host()
        answers, exports = _answers(session, host)
        use = await _attached(session.ask)
        ask = session.ask

        async def refuse(body: messages.Message) -> messages.Message:
            session.ask = ask  # type: ignore[method-assign]
            raise ipcsync.QuotaExceeded("no memory for the journal", limit=1)

        session.ask = refuse  # type: ignore[method-assign]
        for version, states in ((UNSURE, []), (7, ["open"])):
            assert await _follow(answers, [use], time.monotonic()) == version
            while host.tasks:
                await asyncio.sleep(0)
            assert [row.state for row in host.rows] == states
        exports.close()

    on_a_session(client, scenario)
    event.close()


def test_a_word_of_what_is_wanted_does_not_count_if_an_earlier_one_has_dropped_some_meanwhile(
    client: ipcsync.Client,
) -> None:
    """That one comes late, while what is new in the other is attached to."""
    events = [client.event(name, recorder=True, engine="timeline") for name in ("kv", "other")]

    async def scenario(session: BridgeSession) -> None:
        host = _Host()
        answers, exports = _answers(session, host)
        known = await _attached(session.ask)
        other = await session.ask(messages.Open("other"))
        assert isinstance(other, messages.Attachment)
        wanted, later = [known, (other.slot, other.incarnation)], time.monotonic() + 60
        assert await _follow(answers, [known], time.monotonic()) == 7
        word = asyncio.ensure_future(_follow(answers, wanted, later))
        while answers._opening == 0:
            await asyncio.sleep(0)
        assert await _follow(answers, [], later) == 7
        assert not word.done()
        assert await word == UNSURE
        assert await _follow(answers, wanted, later) == 7
        assert [each.node for export in exports.values() for each in export.followers] == ["b", "b"]
        exports.close()

    on_a_session(client, scenario)
    for event in events:
        event.close()


def test_a_node_that_is_forgotten_while_its_question_waits_follows_nothing(client: ipcsync.Client) -> None:
    """Else what it has asked for would be kept for ever."""
    event = client.event("kv", recorder=True, engine="timeline")

    async def scenario(session: BridgeSession) -> None:
        host = _Host()
        answers, exports = _answers(session, host)
        use = await _attached(session.ask)
        said: asyncio.Queue[bytes] = asyncio.Queue()
        await session.pause(0.0)  # so that the question does not end
        answers.asked("b", wire.Follow(session.epoch, 7, False, [use]), said.put, 1.0)
        while "b" not in answers.followers:
            await asyncio.sleep(0)
        answers.forget(answers.followers["b"])
        session._goes_on.set()
        pong = wire.decode(await said.get())
        assert isinstance(pong, wire.Pong)
        assert pong.version == 0
        assert [export.followers for export in exports.values()] == [set()]
        await answers.close_unused()
        while host.tasks:
            await asyncio.sleep(0.001)
        assert not exports
        exports.close()

    on_a_session(client, scenario)
    event.close()


@pytest.mark.parametrize("what", ["open", "attach"])
def test_who_is_asked_second_has_only_the_time_that_is_left(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the session's timeout is over before it is told why."""
    left: list[float] = []

    async def find(_what: object, timeout: float) -> object:
        left.append(timeout)
        await asyncio.sleep(0.1)
        return Claim("b", "0" * 32, "0" * 32, 3, 1) if what == "open" else "b"

    async def ask(*arguments: Any) -> None:
        left.append(arguments[-1])
        raise ipcsync.NodeLost("it does not answer", node="b")

    async def run() -> None:
        other: Any = SimpleNamespace(settings=SimpleNamespace(node="a"), with_epoch=lambda _: None)
        names: Any = SimpleNamespace(transport=other, find=find, nodes=SimpleNamespace(node_of=find))
        requests = RemoteRequests(other, names, other, other, Counters(), other)
        with pytest.raises(ipcsync.NodeLost):
            await requests.serve(messages.Want(1, what, 0, name="kv", epoch=b"e" * 16), WAIT_S)
        requests.close()

    monkeypatch.setattr(wire, "ask", ask)
    asyncio.run(run())
    assert left[1] <= left[0] - 0.1


def test_an_event_of_this_node_is_not_closed_while_it_is_opened_for_a_session(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = client.event("kv", recorder=True, engine="timeline")

    async def scenario(session: BridgeSession) -> None:
        host, asked, ask = _Host(), list[str](), session.ask

        async def ask_noting(body: messages.Message) -> messages.Message:
            asked.append(type(body).__name__)
            return await ask(body)

        answers, exports = _answers(session, host)
        use = await _attached(ask)
        answers.hold([use])
        monkeypatch.setattr(session, "ask", ask_noting)
        names: Any = SimpleNamespace(transport=host)
        other: Any = None
        requests = RemoteRequests(session, names, other, answers, Counters(), host.begin)
        await session.pause(0.0)
        host.begin(requests.serve(messages.Want(1, "open", 0, node="a", name="kv"), WAIT_S))
        await asyncio.sleep(0)
        host.begin(answers.close_unused())
        await asyncio.sleep(0)
        session._goes_on.set()
        while host.tasks:
            await asyncio.sleep(0.001)
        assert asked == ["Open", "Import", "Close"]
        requests.close()
        exports.close()

    on_a_session(client, scenario)
    event.close()


def test_a_node_at_its_limit_still_hears_of_what_it_follows(client: ipcsync.Client) -> None:
    event = client.event("kv", recorder=True, engine="timeline")

    async def scenario(session: BridgeSession) -> None:
        answers, exports = _answers(session, _Host(), max_links=1)
        said: asyncio.Queue[bytes] = asyncio.Queue()
        answers.asked("b", wire.Open("kv"), said.put, 1.0)
        state = wire.decode(await said.get())
        assert isinstance(state, wire.State)
        row = state.row
        answers.asked("b", wire.Attach(session.epoch, row.key), said.put, 1.0)
        assert isinstance(wire.decode(await said.get()), wire.State)
        answers.asked("b", wire.Open("another"), said.put, 1.0)
        assert isinstance(wire.decode(await said.get()), wire.Refused)
        exports.close()

    on_a_session(client, scenario)
    event.close()


def test_a_question_for_a_mirror_does_not_end_it(client: ipcsync.Client) -> None:
    """Any member may ask for any slot; the mirror of another node's event is none of its business."""

    async def scenario(session: BridgeSession) -> None:
        host = _Host()
        answers, exports = _answers(session, host)
        mirror = await session.ask(messages.Import(0, b"z" * 16, 7, 1, "b", "kv"))
        assert isinstance(mirror, messages.Attachment)
        said: asyncio.Queue[bytes] = asyncio.Queue()
        key = (mirror.slot, mirror.incarnation)
        answers.asked("c", wire.Attach(session.epoch, key), said.put, 1.0)
        state = wire.decode(await said.get())
        assert isinstance(state, wire.State)
        assert state.row.state == "gone"
        await answers.close_unused()
        while host.tasks:
            await asyncio.sleep(0.001)
        assert session.is_open(key)
        exports.close()

    on_a_session(client, scenario)


def test_new_code_releases_a_mirror_that_the_coordinator_has_finished(client: ipcsync.Client) -> None:
    async def scenario(session: BridgeSession) -> None:
        host, origin = _Host(), Origin(b"z" * 16, 7, 1)
        mirror = await session.ask(messages.Import(0, *origin, "b", "kv"))
        assert isinstance(mirror, messages.Attachment)
        await session.ask(messages.Finish(mirror.slot, mirror.incarnation, "broken", "silent"))
        mirrors = Mirrors(session, host.begin)
        mirrors.put(origin, mirror, wire.Row(*origin.key))
        mirrors.store(origin)
        while host.tasks:
            await asyncio.sleep(0.001)
        assert origin not in mirrors
        assert not await asyncio.to_thread(client.list_attachments)

    on_a_session(client, scenario)


def test_a_mirror_that_is_to_be_kept_is_not_closed_before_its_last_records_are_stored(client: ipcsync.Client) -> None:
    """They come while the coordinator is asked to end it, as unwanted; a session wants it."""

    async def scenario(session: BridgeSession) -> None:
        host, origin, ask, recorded = _Host(), Origin(b"z" * 16, 7, 1), session.ask, list[int]()

        async def ask_noting(body: messages.Message) -> messages.Message:
            if isinstance(body, messages.Finish) and body.state == "closed":
                recorded.append(session.board.slot(body.slot).recorded)
            return await ask(body)

        session.ask = ask_noting  # type: ignore[method-assign]
        attached = await ask(messages.Import(0, *origin, "b", "kv"))
        assert isinstance(attached, messages.Attachment)
        mirrors = Mirrors(session, host.begin)
        mirrors.put(origin, attached, wire.Row(*origin.key))
        point = await asyncio.to_thread(client.point, pack(PointKey(*origin, 1)))
        mirrors.drop_unwanted()
        await asyncio.sleep(0)  # it is asked
        for completed in (0, 1):
            mirrors.store(origin, wire.Row(*origin.key, 1, completed, state="closed"))
            while host.tasks:
                await asyncio.sleep(0.001)
        assert recorded == 2 * [attached.base + 1]
        await asyncio.to_thread(point.synchronize, WAIT_S)

    on_a_session(client, scenario)


def test_a_failure_of_the_bridge_itself_answers_who_waits(client: ipcsync.Client) -> None:
    async def scenario(session: BridgeSession) -> None:
        async def serve(_want: object, _timeout: float) -> None:
            raise KeyError("a mistake")

        requests = _requests(session, _Host(), serve=serve)
        outcome: list[BaseException] = []

        def ask() -> None:
            try:
                client.event("kv", node="b", timeout=WAIT_S)
            except ipcsync.IpcSyncError as error:
                outcome.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not outcome:
            await asyncio.sleep(0.001)
        thread.join()
        while requests._handled:  # the client may hear of it before the bridge goes on
            await asyncio.sleep(0.001)
        requests.close()
        assert "the bridge failed: KeyError" in str(outcome[0])

    on_a_session(client, scenario)


def test_a_close_that_the_coordinator_did_not_take_is_asked_for_again(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: object) -> messages.Message:
        raise ipcsync.QuotaExceeded("no memory")

    async def scenario(session: BridgeSession) -> None:
        answers, _ = _answers(session, _Host())
        monkeypatch.setattr(session, "ask", refuse)
        answers.hold([(3, 1)])
        await answers.close_unused()
        assert list(answers.held) == [(3, 1)]

    on_a_session(client, scenario)


@pytest.mark.parametrize("question", ["by name", "by key"])
def test_what_is_being_closed_is_attached_to_again_by_a_question_for_it(client: ipcsync.Client, question: str) -> None:
    event = client.event("kv", recorder=True, engine="timeline")

    async def scenario(session: BridgeSession) -> None:
        answers, exports = _answers(session, host := _Host())
        said: asyncio.Queue[bytes] = asyncio.Queue()
        answers.asked("b", wire.Open("kv"), said.put, 1.0)
        state = wire.decode(await said.get())
        assert isinstance(state, wire.State)
        row = state.row
        assert await _follow(answers, [], time.monotonic() + 60) == 7  # it wants none of them
        host.begin(answers.close_unused())
        while not session._unanswered:
            await asyncio.sleep(0)
        if question == "by key":
            body: wire.Message = wire.Attach(session.epoch, row.key)
        else:
            body = wire.Open("kv")
        answers.asked("c", body, said.put, 2.0)
        assert isinstance(wire.decode(await said.get()), wire.State)
        while host.tasks:
            await asyncio.sleep(0.001)
        assert list(exports) == [row.key]
        uses = await asyncio.to_thread(client.list_attachments)
        assert any(use.slot == row.slot and use.session == "bridge a" for use in uses)
        exports.close()

    on_a_session(client, scenario)
    event.close()


def test_an_answer_that_no_message_holds_is_a_refusal(client: ipcsync.Client) -> None:
    events = [client.event(f"{number:0200}", recorder=True) for number in range(250)]

    async def scenario(session: BridgeSession) -> None:
        async def serve(want: messages.Want, _timeout: float) -> messages.Message:
            return await session.ask(messages.ListEvents(want.name))

        host = _Host()
        requests = _requests(session, host, serve=serve)
        while host.tasks:
            await asyncio.sleep(0.001)
        with pytest.raises(ipcsync.QuotaExceeded, match="of events, ask for those with a longer prefix"):
            await asyncio.to_thread(client.list_events, node="b")
        found = await asyncio.to_thread(client.list_events, f"{7:0200}", node="b")
        assert [row.name for row in found] == [f"{7:0200}"]
        requests.close()

    on_a_session(client, scenario)
    for event in events:
        event.close()


def test_a_node_whose_coordinator_ends_amid_a_question_is_lost() -> None:
    error = wire.refusal("a", wire.Refused("CoordinatorLost", "the coordinator has died: connect again"))
    assert isinstance(error, ipcsync.NodeLost)
    assert (error.node, error.reason) == ("a", "restarted")
    assert "connect again" not in str(error)
