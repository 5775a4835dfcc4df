"""What a node knows of the events that it mirrors, whatever comes first: the answer or the news."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")

from ipcsync_bridge import wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.mirrors import Mirrors
from ipcsync_bridge.subscriber import Subscriber

_EPOCH, _LIFE = b"e" * 16, b"l" * 16


def _subscriber(transport: Any = None) -> Subscriber:
    none: Any = None
    begin: Any = asyncio.create_task
    settings = Settings("b", ("nats://127.0.0.1:4222",))
    return Subscriber(settings, transport, none, Mirrors(none, none), Counters(), begin, lambda: None)


class _Peer:
    """A node that sends the news of so many uses, until it is told that none is wanted. The first such word is lost."""

    def __init__(self, links: int) -> None:
        self.links = links
        self.kept = 0

    async def ask(self, _to: str, data: bytes, _timeout: float) -> bytes:
        assert isinstance(wire.decode(data), wire.Ping)
        return wire.encode(wire.Pong(1, _EPOCH, b"o" * 16, _LIFE, self.links))

    async def send(self, _to: str, data: bytes) -> bool:
        assert wire.decode(data) == wire.Keep(_EPOCH, [])
        self.kept += 1
        if self.kept > 1:
            self.links = 0
        return True


def test_a_node_is_asked_until_it_sends_no_news_of_what_is_not_wanted_any_more() -> None:
    async def scenario() -> None:
        peer = _Peer(2)
        one = _subscriber(peer)
        source = one.source_of("a", wire.State(1, _EPOCH, _LIFE, []), time.monotonic())
        for kept in (1, 2):
            await one._ping(source, time.monotonic())
            await asyncio.sleep(0)
            assert (peer.kept, list(one.sources)) == (kept, ["a"])
        await one._ping(source, time.monotonic())
        assert not one.sources

    asyncio.run(scenario())


def _news(*rows: wire.Row) -> wire.News:
    return wire.News(1, _EPOCH, list(rows))


def test_news_that_overtake_the_answer_that_makes_their_use_known_count() -> None:
    one, row = _subscriber(), wire.Row(1, 2)
    with one.linking():
        one.receive("a", _news(wire.Row(1, 2, 7, 7), wire.Row(3, 4, 9, 9)))
        one.receive("a", _news(wire.Row(1, 2, 5, 5)))
        source = one.source_of("a", wire.State(1, _EPOCH, _LIFE, [row]), 0.0)
        one.link(source, row)
    assert source.links == {(1, 2): wire.Row(1, 2, 7, 7)}


def test_news_of_a_use_that_is_not_being_linked_are_forgotten() -> None:
    one = _subscriber()
    one.receive("a", _news(wire.Row(1, 2, 7, 7)))
    assert not one._early
    with one.linking():
        one.receive("a", _news(wire.Row(1, 2, 7, 7)))
        assert one._early
    assert not one._early
