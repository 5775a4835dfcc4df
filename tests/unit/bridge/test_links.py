"""Links between nodes: what is merged, what is asked for again, and when a node is lost."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from ipcsync_bridge.links import ACK_EVERY, RETRY_S, WINDOW, Follower, Source
from ipcsync_bridge.wire import Row

CHANNEL, OTHER = b"c" * 16, b"d" * 16
KEY = (1, 2)


def source() -> Source:
    one = Source("a", b"e" * 16, ttl_s=5.0, alive_until=105.0)
    one.synced(CHANNEL, 0)
    return one


def test_merging_is_a_maximum_in_any_order() -> None:
    rows = [Row(*KEY, recorded, completed) for recorded in range(6) for completed in range(recorded + 1)]
    rows.append(Row(*KEY, 6, 6, state="closed"))
    for seed in range(20):
        chosen = random.Random(seed)
        link = Row(*KEY)
        for row in chosen.sample(rows, len(rows)) + chosen.choices(rows, k=10):
            before = (link.recorded, link.completed)
            link = link.merged(row)
            assert (link.recorded, link.completed) >= before
        assert (link.recorded, link.completed, link.state) == (6, 6, "closed")


def test_complete_is_never_more_than_recorded() -> None:
    link = Row(*KEY)
    link = link.merged(Row(*KEY, recorded=2, completed=5))
    assert (link.recorded, link.completed) == (2, 2)


def test_a_finished_link_hears_nothing_more() -> None:
    link = Row(*KEY)
    link = link.merged(Row(*KEY, 3, 2, state="broken", cause="died"))
    assert link.merged(Row(*KEY, 9, 9)) == link
    assert (link.recorded, link.completed, link.cause, link.has_ended) == (3, 2, "died", True)


def test_that_a_use_is_gone_says_nothing_of_what_became_of_it() -> None:
    link = Row(*KEY, 3, 2)
    assert link.merged(Row(*KEY, state="gone")) == link


def test_what_is_lost_may_only_grow() -> None:
    link = Row(*KEY)
    for lost, expected in ((5, 5), (7, 5), (3, 3), (0, 3)):
        link = link.merged(Row(*KEY, 9, 1, lost))
        assert link.lost == expected


def test_news_in_order_are_acknowledged_every_fourth_time() -> None:
    one = source()
    acks = [one.received_news(CHANNEL, number, 100.0) for number in range(1, 3 * ACK_EVERY + 1)]
    assert [number for number in acks if number] == [ACK_EVERY, 2 * ACK_EVERY, 3 * ACK_EVERY]
    assert not one.wants_sync


@pytest.mark.parametrize(("channel", "number"), [(CHANNEL, 3), (OTHER, 1)])
def test_a_gap_or_another_bridge_has_the_state_asked_for(channel: bytes, number: int) -> None:
    one = source()
    one.received_news(CHANNEL, 1, 100.0)
    one.received_news(channel, number, 100.0)
    assert one.wants_sync
    one.syncing()
    one.synced(channel, number)
    assert not one.wants_sync


class Told(NamedTuple):
    """A node that has told `sent` things, one a message, of which some are `on_the_way`; and who is to know them all.

    `asked` is None, "asked", or what the answer says that is on its way: how much had been told.
    """

    source: Source
    sent: int = 0
    on_the_way: tuple[int, ...] = ()
    asked: str | int | None = None
    known: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        return (repr(self.source), *self[1:])


def steps(now: Told) -> Iterator[Told]:
    """What may happen next: messages are lost, but never overtake each other; an answer may overtake them."""
    source = copy.copy(now.source)
    after = now._replace(source=source)
    if now.sent < 4:
        yield after._replace(sent=now.sent + 1, on_the_way=(*now.on_the_way, now.sent + 1))
    if now.on_the_way:
        number, *rest = now.on_the_way
        yield after._replace(on_the_way=tuple(rest))
        heard = copy.copy(source)
        heard.received_news(CHANNEL, number, 100.0)
        yield now._replace(source=heard, on_the_way=tuple(rest), known=now.known | {number})
    if now.asked is None and source.wants_sync:
        questions = copy.copy(source)
        questions.syncing()
        yield now._replace(source=questions, asked="asked")
    if now.asked == "asked":
        yield after._replace(asked=now.sent)
    if isinstance(now.asked, int):
        yield after._replace(asked=None, **_answered(source, now.asked, now.known))
    answered = copy.copy(now.source)
    answered.received_answer(CHANNEL, now.sent, 100.0)
    yield now._replace(source=answered)
    looked = copy.copy(now.source)
    looked.check(101.0)
    yield now._replace(source=looked)


def _answered(source: Source, number: int, known: frozenset[int]) -> dict[str, Any]:
    source = copy.copy(source)
    source.synced(CHANNEL, number)
    return {"source": source, "known": known | set(range(1, number + 1))}


def test_whatever_is_lost_while_something_is_asked_for_is_known_in_the_end() -> None:
    first = Told(source())
    seen, waiting = {first.key}, [first]
    while waiting:
        now = waiting.pop()
        if not now.on_the_way and now.asked is None:
            last = now._replace(source=copy.copy(now.source))
            for ping_s in (200.0, 300.0):  # the first may only clear what an earlier one had missed
                last.source.received_answer(CHANNEL, now.sent, ping_s)
                last.source.check(ping_s + 1)
                if last.source.wants_sync:
                    last.source.syncing()
                    last = last._replace(**_answered(last.source, now.sent, last.known))
            assert last.known == set(range(1, now.sent + 1)), now
        for each in steps(now):
            if each.key not in seen:
                seen.add(each.key)
                waiting.append(each)
    assert len(seen) > 1000


def test_an_answer_that_is_ahead_of_news_waits_for_them_a_moment() -> None:
    one = source()
    one.received_answer(CHANNEL, 2, 100.0)
    one.check(100.01)
    assert not one.wants_sync
    one.received_news(CHANNEL, 1, 100.02)
    one.received_news(CHANNEL, 2, 100.02)
    one.check(100.2)
    assert not one.wants_sync
    one.received_answer(CHANNEL, 3, 100.3)
    assert one.next_check == pytest.approx(100.35)
    one.check(100.36)
    assert one.wants_sync


def test_a_node_is_lost_a_ttl_after_the_sending_of_the_last_ping_that_it_answered() -> None:
    one = source()
    one.pinged(101.0)
    one.touch(101.0)  # answered at 104, which makes it no fresher
    assert not one.is_silent(105.9)
    assert one.is_silent(106.0)
    one.touch(90.0)
    assert one.is_silent(106.0)


@pytest.mark.parametrize(("ttl_s", "ping_s"), [(5.0, 1.0), (60.0, 1.0), (1.0, 0.25)])
def test_pings_come_each_second_and_at_least_four_in_a_ttl(ttl_s: float, ping_s: float) -> None:
    one = Source("a", b"e" * 16, ttl_s=ttl_s, alive_until=100.0 + ttl_s)
    one.pinged(100.0)
    assert one.next_ping == 100.0 + ping_s


def test_pings_come_sooner_while_nobody_listens() -> None:
    one = source()
    one.pinged(100.0)
    one.unreachable(100.1)
    assert one.next_ping == pytest.approx(100.1 + RETRY_S)


def test_who_stood_still_itself_gives_everybody_a_whole_ttl() -> None:
    one = source()
    one.paused(120.0)
    assert not one.is_silent(124.9)
    assert one.is_silent(125.0)


def test_another_epoch_or_a_lower_term_is_not_this_life_of_the_node() -> None:
    one = source()
    assert one.is_of(4, b"e" * 16)
    assert not one.is_of(3, b"e" * 16)
    assert not one.is_of(9, b"f" * 16)


def follower(count: int = 3) -> Follower:
    return Follower("b", 100.0, {(slot, 1) for slot in range(count)})


def test_what_was_not_told_yet_is_replaced_by_what_is_newer() -> None:
    one = follower()
    for generation in range(100):
        one.put(Row(0, 1, generation, generation))
    assert one.take(1000) == [Row(0, 1, 99, 99)]
    assert (one.number, one.conflated, one.take(1000)) == (1, 99, [])


def test_no_more_than_a_window_is_unacknowledged_and_what_waits_is_bounded() -> None:
    one = follower()
    for generation in range(WINDOW):
        one.put(Row(0, 1, generation))
        assert one.take(1000)
    for generation in range(100, 200):
        for slot in range(3):
            one.put(Row(slot, 1, generation))
    assert (one.take(1000), one.pending) == ([], 3)
    one.acked(1)
    assert {row.recorded for row in one.take(1000)} == {199}


def test_what_could_not_be_sent_is_told_later_unless_there_is_something_newer() -> None:
    one = follower()
    one.put(Row(0, 1, 1))
    one.put(Row(1, 1, 1))
    rows = one.take(1000)
    one.put(Row(0, 1, 2))
    one.give_back(rows)
    assert sorted(one.take(1000)) == [Row(0, 1, 2), Row(1, 1, 1)]


def test_what_it_does_not_want_is_not_told() -> None:
    one = follower()
    one.put(Row(0, 1, 1))
    one.drop({(0, 1)})
    one.put(Row(0, 1, 2))
    assert one.take(1000) == []


def test_more_than_a_message_holds_goes_in_several() -> None:
    one = follower(5)
    for slot in range(5):
        one.put(Row(slot, 1, 1))
    assert [len(one.take(2)) for _ in range(4)] == [2, 2, 1, 0]


def test_news_that_stay_missing_are_asked_for_once_until_an_answer_says_so_again() -> None:
    one = source()
    one.received_answer(CHANNEL, 2, 100.0)
    one.check(100.1)
    assert one.wants_sync
    assert one.next_check is None
    one.syncing()
    one.check(100.2)
    assert not one.wants_sync
    one.received_answer(CHANNEL, 2, 101.0)
    one.check(101.1)
    assert one.wants_sync
