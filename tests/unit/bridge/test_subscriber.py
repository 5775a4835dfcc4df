"""What a node knows of the events that it mirrors, whatever comes first: the answer or the news."""

from __future__ import annotations

from typing import Any

from ipcsync_bridge import wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.mirrors import Mirrors
from ipcsync_bridge.subscriber import Subscriber

_EPOCH, _LIFE = b"e" * 16, b"l" * 16


def _subscriber() -> Subscriber:
    none: Any = None
    settings = Settings("b", ("nats://127.0.0.1:4222",))
    return Subscriber(settings, none, none, Mirrors(none, none), Counters(), none, lambda: None)


def _news(*rows: wire.Row) -> wire.News:
    return wire.News(1, _EPOCH, wire.pack_rows(rows))


def test_news_that_overtake_the_answer_that_makes_their_use_known_count() -> None:
    one, row = _subscriber(), wire.Row(1, 2)
    with one.linking():
        one.receive("a", _news(wire.Row(1, 2, 7, 7), wire.Row(3, 4, 9, 9)))
        one.receive("a", _news(wire.Row(1, 2, 5, 5)))
        source = one.source_of("a", wire.State(1, _EPOCH, _LIFE, wire.pack_rows([row])), 0.0)
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
