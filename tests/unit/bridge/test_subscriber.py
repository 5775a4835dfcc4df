"""What a node knows of the events that it mirrors, whatever comes first: the answer or the news."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

from ipcsync._wire import messages
from ipcsync._wire.codec import Origin
from ipcsync.errors import NodeLost, QuotaExceeded
from ipcsync_bridge import bridge, subscriber, wire
from ipcsync_bridge.bridge import Bridge
from ipcsync_bridge.config import Settings
from ipcsync_bridge.exports import Follower
from ipcsync_bridge.remote_requests import RemoteRequests
from ipcsync_bridge.subscriber import Mirrors, Subscriber
from ipcsync_bridge.transport import Unavailable
from ipcsync_bridge.wire import UNSURE, Counters

_EPOCH = b"e" * 16


def _subscriber(transport: Any = None, link_ttl: float = 5.0) -> Subscriber:
    none: Any = None
    transport = transport or SimpleNamespace()
    transport.settings = Settings("b", ("nats://127.0.0.1:4222",), link_ttl=link_ttl)
    return Subscriber(transport, Mirrors(none, none), Counters(), lambda work: work.close())


class _Peer:
    """A node that answers pings, and what it was told that is wanted. The first `lost` such words are."""

    settings: Settings

    def __init__(self, lost: int = 0) -> None:
        self._lost = lost
        self._version = UNSURE  # it has answered an open
        self.told: list[wire.Follow] = []

    async def ask(self, _to: str, data: bytes, *_times: float) -> bytes:
        body = wire.decode(data)
        if isinstance(body, wire.Follow):
            self.told.append(body)
            if len(self.told) > self._lost:
                self._version = body.version
        return wire.encode(wire.Pong(1, _EPOCH, b"o" * 16, self._version))

    def restart(self) -> None:
        """Begin as another bridge, which knows of nobody."""
        self._version = 0


def _state(row: wire.Row) -> wire.State:
    return wire.State(1, _EPOCH, row)


def test_a_node_is_told_with_each_ping_that_nothing_is_wanted_until_it_knows() -> None:
    async def scenario() -> None:
        peer = _Peer(lost=2)
        one = _subscriber(peer)
        source = one.source_of("a", _state(wire.Row(1, 2)), time.monotonic())
        for told in (1, 2):
            await one._ping(source)
            assert (len(peer.told), list(one.sources)) == (told, ["a"])
        await one._ping(source)
        assert not one.sources

    asyncio.run(scenario())


def test_a_node_is_told_what_is_wanted_once_and_again_after_each_change_and_by_whom_it_was_not_told() -> None:
    async def scenario() -> None:
        peer, row = _Peer(), wire.Row(1, 2)
        one = _subscriber(peer)
        source = one.source_of("a", _state(row), time.monotonic())
        one.link(source, row)

        async def told() -> list[tuple[bool, list[wire.Key]]]:
            peer.told.clear()
            for _ in range(3):
                await one._ping(source)
            return [(each.is_afresh, each.keys) for each in peer.told]

        assert await told() == [(False, [(1, 2)])]
        one.link(source, wire.Row(3, 4))
        assert await told() == [(False, [(1, 2), (3, 4)])]
        peer.restart()
        assert await told() == [(False, [(1, 2), (3, 4)])]
        assert one.counters.resyncs == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("link_ttl", [1.0, 5.0])
def test_a_node_that_takes_long_to_follow_is_pinged_in_time(link_ttl: float) -> None:
    """An answer to what is wanted of thousands of events may take seconds, in which the node must not be lost."""
    waits: list[float] = []

    class Busy(_Peer):
        async def ask(self, to: str, data: bytes, *times: float) -> bytes:
            if isinstance(wire.decode(data), wire.Follow):
                waits.append(times[0])
            return await super().ask(to, data, *times)

    async def scenario() -> None:
        one = _subscriber(Busy(), link_ttl)
        source = one.source_of("a", _state(wire.Row(1, 2)), time.monotonic())
        one.link(source, wire.Row(1, 2))
        await one._ping(source)
        assert waits[0] <= link_ttl / 4

    asyncio.run(scenario())


class _VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only when nothing else is to be done, and at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def pass_time(timeout: float | None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = pass_time  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def test_a_round_trip_may_take_most_of_the_ttl_and_silence_is_noticed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Far(_Peer):
        is_silent = False

        async def ask(self, to: str, data: bytes, *times: float) -> bytes:
            await asyncio.sleep(3.5)
            if self.is_silent or times[0] < 3.5:
                raise TimeoutError
            return await super().ask(to, data, *times)

    async def scenario() -> None:
        peer, tasks = Far(), set()
        one = _subscriber(peer)
        one.begin = lambda work: tasks.add(asyncio.ensure_future(work))
        source = one.source_of("a", _state(wire.Row(1, 2)), loop.now - 3.5)
        one.link(source, wire.Row(1, 2))
        for _ in range(100):
            await asyncio.sleep(0.5)
            one.lose_silent(loop.now)
            assert one.sources == {"a": source}
        peer.is_silent, since = True, loop.now
        while one.lose_silent(loop.now) < math.inf:
            await asyncio.sleep(0.1)
        assert loop.now - since <= 5.0
        for task in tasks:
            task.cancel()

    loop = _VirtualLoop()
    for module in (subscriber, wire):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    loop.run_until_complete(scenario())
    loop.close()


@pytest.mark.parametrize("stood_s", [0.8, 1.0])
@pytest.mark.parametrize("since_tick", [0.05, 0.2])
def test_a_bridge_that_stood_still_loses_nobody_as_silent(
    monkeypatch: pytest.MonkeyPatch, since_tick: float, stood_s: float
) -> None:
    async def scenario() -> None:
        peer: Any = _Peer()
        peer.settings = Settings("b", ("nats://127.0.0.1:4222",), link_ttl=1.0)
        session: Any = SimpleNamespace(epoch=b"b" * 16, board=None, lease=SimpleNamespace(check=lambda: None))
        one = Bridge(session, peer, b"o" * 16)
        ticks: list[float] = []
        lose = one.subscriber.lose_silent

        def noting(now: float) -> float:
            ticks.append(now)
            return lose(now)

        monkeypatch.setattr(one.subscriber, "lose_silent", noting)
        source = one.subscriber.source_of("a", _state(wire.Row(1, 2)), loop.now)
        one.subscriber.link(source, wire.Row(1, 2))
        one.begin(one._tick_until_done())
        for count in (3, 6):
            while len(ticks) < count:
                await asyncio.sleep(0.01)
            assert one.subscriber.sources == {"a": source}
            await asyncio.sleep(since_tick)
            loop.now += stood_s  # in which it stands still
        while len(ticks) < 9:
            await asyncio.sleep(0.01)
        assert one.subscriber.sources == {"a": source}
        for task in one._tasks:
            task.cancel()
        await asyncio.wait(one._tasks)
        one.remote_requests.close()

    loop = _VirtualLoop()
    for module in (bridge, subscriber, wire):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    loop.run_until_complete(scenario())
    loop.close()


def test_a_bridge_that_fails_as_it_starts_does_not_say_that_its_events_are_over() -> None:
    """It is started again, and other nodes go on with what they mirror: the coordinator has no other epoch."""
    said: list[str] = []

    class Leaving(_Peer):
        async def listen(self, bridge: Bridge) -> None:
            bridge.answers.followers["a"] = Follower("a", 0.0)  # which asks as soon as it can
            raise Unavailable("the store is away")

        async def send(self, to: str, _data: bytes) -> None:
            said.append(to)

        async def close(self) -> None:
            said.append("closed")

    async def scenario() -> None:
        peer: Any = Leaving()
        peer.settings = Settings("b", ("nats://127.0.0.1:4222",))
        session: Any = SimpleNamespace(epoch=_EPOCH, board=None, lease=SimpleNamespace(check=lambda: None))
        with pytest.raises(Unavailable):
            await Bridge(session, peer, b"o" * 16).run()

    asyncio.run(scenario())
    assert said == ["closed"]


def _news(*rows: wire.Row) -> wire.News:
    return wire.News(1, _EPOCH, list(rows))


def test_news_that_overtake_the_answer_that_makes_their_use_known_count() -> None:
    one, row = _subscriber(), wire.Row(1, 2)
    one.receive("a", _news(wire.Row(1, 2, 7, 7), wire.Row(3, 4, 9, 9)))
    one.receive("a", _news(wire.Row(1, 2, 5, 5)))
    source = one.source_of("a", _state(row), 0.0)
    one.link(source, row)
    assert source.links == {(1, 2): wire.Row(1, 2, 7, 7)}


def test_of_news_that_nobody_has_asked_for_only_the_newest_uses_are_kept() -> None:
    one = _subscriber()
    for slot in range(3_000):
        one.receive("a", _news(wire.Row(slot, 1, 7, 7)))
    assert len(one._early) == 1_000
    source = one.source_of("a", _state(wire.Row(2_999, 1)), 0.0)
    one.link(source, wire.Row(2_999, 1))
    assert source.links == {(2_999, 1): wire.Row(2_999, 1, 7, 7)}


def test_news_that_were_dropped_before_their_use_was_known_are_asked_for_again() -> None:
    one, row = _subscriber(), wire.Row(1, 2)
    one.receive("a", _news(wire.Row(1, 2, 7, 7)))
    for slot in range(3_000):
        one.receive("b", _news(wire.Row(slot, 1)))
    source = one.source_of("a", _state(row), time.monotonic())
    one.link(source, row)
    assert source.links == {(1, 2): row}
    assert source.has_missed


def test_news_of_what_an_answer_has_told_already_are_stored_on_the_mirror_all_the_same() -> None:
    """It may be there from an earlier opening, and the answer's own end it never."""
    one, stored = _subscriber(), list[wire.Row]()
    one.mirrors = SimpleNamespace(store=lambda _, row: stored.append(row))  # type: ignore[assignment]
    rows = [wire.Row(1, 2, 1), wire.Row(1, 2, 1, 0, 0, "closed"), wire.Row(1, 2, 1, 1, 0, "closed")]
    source = one.source_of("a", _state(rows[0]), 0.0)
    one.link(source, rows[0])
    one.receive("a", _news(rows[1]))
    one.link(source, rows[2])  # another session's answer, whose import the coordinator refuses
    one.receive("a", _news(rows[2]))
    assert stored == rows[1:]


def test_a_use_that_its_node_does_not_know_is_gone_for_good() -> None:
    one, row = _subscriber(), wire.Row(1, 2, 3, 3)
    source = one.source_of("a", _state(row), 0.0)
    one.link(source, row)
    for news in (wire.Row(1, 2, state="gone"), wire.Row(1, 2, 5, 5)):
        one.receive("a", _news(news))
        assert source.links[1, 2].state == "gone"


def test_what_another_node_says_of_a_use_counts_nothing() -> None:
    one, row = _subscriber(), wire.Row(1, 2)
    one.receive("evil", _news(wire.Row(1, 2, 7, 7)))
    source = one.source_of("a", _state(row), 0.0)
    one.link(source, row)
    assert source.links == {(1, 2): row}


def test_new_code_asks_for_all_news_again_though_its_peer_has_not_noticed() -> None:
    async def scenario() -> None:
        peer, mirrors = _Peer(), SimpleNamespace(put=lambda *_: None, store=lambda *_: None)
        await peer.ask("a", wire.encode(wire.Follow(_EPOCH, 77, False, [(1, 2)])))
        one = _subscriber(peer)
        one.mirrors = mirrors  # type: ignore[assignment] # as much of them as is used
        origin = messages.Origin(_EPOCH, 1, 2, "a")
        mirror = messages.Attachment("kv", 3, 7, 100, "gpu", "timeline", 1, True, [], origin)
        one.resume(SimpleNamespace(lost={}, mirrors=[mirror]))  # type: ignore[arg-type] # as above
        for _ in range(3):
            await one._ping(one.sources["a"])
        assert [(each.is_afresh, each.keys) for each in peer.told[1:]] == [(True, [(1, 2)])]

    asyncio.run(scenario())


def test_new_code_goes_on_with_the_present_epoch_of_a_node_though_a_mirror_of_an_earlier_one_is_being_ended() -> None:
    one = _subscriber()
    ended: list[Origin] = []
    one.mirrors = SimpleNamespace(  # type: ignore[assignment] # as much of them as is used
        put=lambda *_: None, store=lambda *_: None, end=lambda origin, *_: ended.append(origin)
    )
    mirrors = [
        messages.Attachment("kv", slot, 7, 100, "gpu", "timeline", 1, True, [], messages.Origin(epoch, 1, 2, "a"))
        for slot, epoch in ((3, b"p" * 16), (4, _EPOCH))
    ]
    one.resume(SimpleNamespace(lost={}, mirrors=mirrors))  # type: ignore[arg-type] # as above
    assert (one.sources["a"].epoch, ended) == (_EPOCH, [Origin(b"p" * 16, 1, 2)])


def test_names_that_are_opened_at_once_do_not_exceed_the_limit_together() -> None:
    class Far(_Peer):
        async def ask(self, _to: str, data: bytes, *_times: float) -> bytes:
            body = wire.decode(data)
            assert isinstance(body, wire.Open)
            return wire.encode(_state(wire.Row(int(body.name), 1)))

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        far: Any = Far()
        one = _subscriber(far)
        far.settings = one.settings = Settings("b", ("nats://127.0.0.1:4222",), max_links=2)
        none: Any = None
        session: Any = SimpleNamespace(ask=never, epoch=bytes(16))
        names: Any = SimpleNamespace(transport=far)
        requests = RemoteRequests(session, names, one, none, one.counters, none)
        wants = [messages.Want(slot, "open", 0, node="a", name=str(slot)) for slot in range(5)]
        opening = [asyncio.ensure_future(requests.serve(want, 1.0)) for want in wants]
        while sum(task.done() for task in opening) < 3:
            await asyncio.sleep(0)
        refused = [task.exception() for task in opening if task.done()]
        assert [type(error) for error in refused] == 3 * [QuotaExceeded]
        assert len(one.sources["a"].links) == 2
        for task in opening:
            task.cancel()
        requests.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_node_that_answers_with_this_nodes_own_epoch_is_refused_and_leaves_no_link() -> None:
    async def scenario() -> None:
        state = _state(wire.Row(1, 1))

        class Far(_Peer):
            async def ask(self, _to: str, _data: bytes, *_times: float) -> bytes:
                return wire.encode(state)

        far: Any = Far()
        one = _subscriber(far)
        far.settings = one.settings
        none: Any = None
        session: Any = SimpleNamespace(ask=none, epoch=state.epoch)
        names: Any = SimpleNamespace(transport=far)
        requests = RemoteRequests(session, names, one, none, one.counters, none)
        with pytest.raises(NodeLost, match="the epoch of this very node"):
            await requests.serve(messages.Want(1, "open", 0, node="a", name="e"), 1.0)
        assert not one.sources
        requests.close()

    asyncio.run(scenario())


def test_what_was_told_of_a_use_that_is_closed_and_opened_at_once_is_known_and_told_again() -> None:
    one, row = _subscriber(), wire.Row(1, 2)
    one.mirrors = SimpleNamespace(put=lambda *_: None, store=lambda *_: None)  # type: ignore[assignment]
    source = one.source_of("a", _state(row), 0.0)
    one.link(source, row)
    one.receive("a", _news(wire.Row(1, 2, 7, 7)))
    origin = messages.Origin(_EPOCH, 1, 2, "a")
    one.unlink(Origin(_EPOCH, 1, 2))  # the mirror before has ended
    one.mirror(messages.Attachment("kv", 3, 7, 100, "gpu", "timeline", 1, True, [], origin), row)
    assert source.links == {(1, 2): wire.Row(1, 2, 7, 7)}
    assert source.has_missed
