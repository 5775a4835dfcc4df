"""Links between nodes: what is merged, what is asked for again, and when a node is lost."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from ipcsync_bridge.exports import Follower
from ipcsync_bridge.subscriber import Source
from ipcsync_bridge.wire import UNSURE, Row

KEY = (1, 2)


def source() -> Source:
    return Source("a", b"e" * 16, ttl_s=5.0, alive_until=105.0)


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


def test_each_change_of_what_is_wanted_has_a_version_of_its_own() -> None:
    one = source()
    versions = [one.version]
    one.link(Row(*KEY))
    versions.append(one.version)
    one.unlink(KEY)
    versions += [one.version, source().version]
    assert len({0, *versions}) == 5


def test_a_node_is_lost_a_ttl_after_the_sending_of_the_last_ping_that_it_answered() -> None:
    one = source()
    one.touch(101.0)  # answered at 104, which makes it no fresher
    assert one.alive_until == 106.0
    one.touch(90.0)
    assert one.alive_until == 106.0


@pytest.mark.parametrize(("ttl_s", "ping_s"), [(5.0, 1.0), (60.0, 1.0), (1.0, 0.25)])
def test_pings_come_each_second_and_at_least_four_in_a_ttl(ttl_s: float, ping_s: float) -> None:
    assert Source("a", b"e" * 16, ttl_s=ttl_s, alive_until=100.0 + ttl_s).ping_s == ping_s


def test_another_epoch_or_a_lower_term_is_not_this_life_of_the_node() -> None:
    one = source()
    assert one.is_of(4, b"e" * 16)
    assert not one.is_of(3, b"e" * 16)
    assert not one.is_of(9, b"f" * 16)


def follower(count: int = 3) -> Follower:
    return Follower("b", 100.0, {(slot, 1): 0.0 for slot in range(count)})


def test_what_was_not_told_yet_is_replaced_by_what_is_newer() -> None:
    one = follower()
    conflated = sum(one.put(Row(0, 1, generation, generation)) for generation in range(100))
    assert (conflated, [*one.rows.values()]) == (99, [Row(0, 1, 99, 99)])


class Told(NamedTuple):
    """A node that is sent rows of two uses, which have been recorded `made` times, and what it `knows` of them.

    `on_the_way`: the message under way, None if there is none.
    """

    follower: Follower
    made: tuple[int, int] = (0, 0)
    knows: tuple[int, int] = (0, 0)
    on_the_way: tuple[Row, ...] | None = None


def steps(now: Told) -> Iterator[Told]:
    """What may happen next: a record, and of a message that it is sent, is lost, or is taken in, answered or not."""
    for slot in range(2):
        if now.made[slot] < 3:
            after = now._replace(follower=copy.deepcopy(now.follower), made=_with(now.made, slot, now.made[slot] + 1))
            after.follower.put(Row(slot, 1, after.made[slot]))
            yield after
    after = now._replace(follower=copy.deepcopy(now.follower), on_the_way=None)
    if now.on_the_way is None:
        if rows := after.follower.take(1):
            yield after._replace(on_the_way=tuple(rows))
        return
    knows = now.knows
    for row in now.on_the_way:
        knows = _with(knows, row.slot, max(knows[row.slot], row.recorded))
    after.follower.acked()
    yield after._replace(knows=knows)
    for known in (now.knows, knows):
        yield now._replace(knows=known, on_the_way=None)


def _with(counts: tuple[int, int], slot: int, count: int) -> tuple[int, int]:
    return (count, counts[1]) if slot == 0 else (counts[0], count)


def test_whatever_is_lost_is_known_once_nothing_is_left_to_send() -> None:
    first = Told(follower(2))
    seen, waiting = {repr(first)}, [first]
    while waiting:
        now = waiting.pop()
        assert now.follower.rows or now.knows == now.made, now
        for each in steps(now):
            if repr(each) not in seen:
                seen.add(repr(each))
                waiting.append(each)
    assert len(seen) > 100


def test_what_is_newer_is_not_acknowledged_by_what_was_sent_and_comes_last() -> None:
    one = follower()
    one.put(Row(0, 1, 1))
    one.put(Row(1, 1, 1))
    one.take(1000)
    one.put(Row(0, 1, 2))
    assert [*one.rows.values()] == [Row(1, 1, 1), Row(0, 1, 2)]
    one.acked()
    assert [*one.rows.values()] == [Row(0, 1, 2)]


def test_more_than_a_message_holds_goes_in_several() -> None:
    one = follower(5)
    for slot in range(5):
        one.put(Row(slot, 1, 1))
    sizes = []
    for _ in range(4):
        sizes.append(len(one.take(2)))
        one.acked()
    assert sizes == [2, 2, 1, 0]


def test_what_it_does_not_want_is_not_told() -> None:
    one = follower()
    one.put(Row(0, 1, 1))
    one.drop((0, 1))
    one.put(Row(0, 1, 2))
    assert not one.rows


def test_what_a_node_was_just_answered_is_kept_though_it_does_not_want_it_yet() -> None:
    one = follower()
    one.answered((0, 1), 100.0)
    assert one.unwanted({(1, 1)}, 101.0) == {(2, 1)}
    assert one.unwanted({(1, 1)}, 110.0) == {(0, 1), (2, 1)}


class Word(NamedTuple):
    """What is wanted, by its version, and of that what the node did not follow when it heard of it."""

    version: int
    keys: frozenset[tuple[int, int]]
    fresh: frozenset[tuple[int, int]]


class Wanted(NamedTuple):
    """A node that wants uses of another, which `sent` all that it ever said of that, and both ends of the link.

    A word may be lost, late, or come more than once. What is new in one is attached to before it is taken in: `begun`.
    """

    source: Source
    follower: Follower
    begun: Word | None = None
    sent: frozenset[tuple[int, frozenset[tuple[int, int]]]] = frozenset()
    changes: int = 0


def _copy(now: Wanted) -> Wanted:
    source = replace(now.source, links=dict(now.source.links))
    return now._replace(source=source, follower=replace(now.follower, keys=dict(now.follower.keys)))


def _want(now: Wanted, mistake: str) -> Iterator[Wanted]:
    """What may happen next: a change of what is wanted, a word said or heard, an open answered, a restart, a pong."""
    for key in ((0, 1), (1, 1)):
        after = _copy(now)
        if now.changes < 2:
            version = after.source.version
            (after.source.unlink if key in after.source.links else lambda k: after.source.link(Row(*k)))(key)  # noqa: B023
            if mistake == "no version of its own":
                after.source.version = version
            yield after._replace(changes=now.changes + 1)
        if not now.follower.keys.get(key):
            after = _copy(now)
            after.follower.answered(key, 100.0)
            if mistake == "an answer changes nothing":
                after.follower.version = now.follower.version
            yield after
    yield now._replace(sent=now.sent | {(now.source.version, frozenset(now.source.links))})
    for version, keys in now.sent:
        word = Word(version, keys, keys - now.follower.keys.keys())
        after = _copy(now)
        _hear(after.follower, word, 100.0, mistake)
        yield after
        if now.begun is None and word.fresh:
            yield now._replace(begun=word)
    if now.begun is not None:
        after = _copy(now)._replace(begun=None)
        _hear(after.follower, now.begun, 100.0, mistake)
        yield after
    after = _copy(now)
    after.source.answered(now.follower.version, 100.0, 100.0)
    yield after
    yield _copy(now)._replace(follower=Follower("b", 100.0), begun=None)


def _hear(follower: Follower, word: Word, now: float, mistake: str) -> None:
    follower.keys.update(dict.fromkeys(word.fresh - follower.keys.keys(), 0.0))
    for key in follower.unwanted(set(word.keys), now):
        follower.drop(key)
    is_right = follower.keys.keys() == word.keys or mistake == "acknowledged in doubt"
    if mistake == "acknowledged though another word has dropped some":
        is_right = follower.keys.keys() <= word.keys
    follower.version = word.version if is_right else UNSURE


def _settle(now: Wanted, mistake: str) -> bool:
    """Whether both agree, once nothing happens any more but two pings that are answered."""
    if now.begun is not None:
        _hear(now.follower, now.begun, 200.0, mistake)
    for _ in range(2):
        now.source.answered(now.follower.version, 200.0, 200.0)
        if now.source.known_version != now.source.version:
            keys = frozenset(now.source.links)
            _hear(now.follower, Word(now.source.version, keys, keys - now.follower.keys.keys()), 200.0, "")
    return now.follower.keys.keys() == now.source.links.keys()


@pytest.mark.parametrize(
    "mistake",
    [
        "",
        "no version of its own",
        "acknowledged in doubt",
        "acknowledged though another word has dropped some",
        "an answer changes nothing",
    ],
)
def test_what_is_wanted_is_sent_whatever_was_lost_or_late(mistake: str) -> None:
    first = Wanted(Source("a", b"e" * 16, 5.0, 105.0, version=5), Follower("b", 100.0))
    seen, waiting, is_right = {repr(first)}, [first], True
    while waiting and is_right:
        now = waiting.pop()
        is_right = _settle(_copy(now), mistake)
        for each in _want(now, mistake):
            if repr(each) not in seen:
                seen.add(repr(each))
                waiting.append(each)
    assert is_right == (not mistake)
    assert len(seen) > 10
