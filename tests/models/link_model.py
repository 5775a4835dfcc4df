"""An event of one node mirrored on another: every state of a small world, over a network that may do anything.

The network loses, repeats, delays and reorders. All of that is one rule here: whatever once was true on the recording
node may be heard on the other at any later moment, any number of times, or never. The recorder dies or closes, its slot
is used anew, its node restarts; the waiting node suspects it at any time, its own bridge dies, mirrors are let go of
and asked for again. The waiting node's bridge is upgraded at any time: the new code knows what the mirrors say, and
nothing else.

    python -m tests.models.link_model            the world as it should be, then every planted mistake
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

GENERATIONS = 2
MISTAKES = {
    "no identity": "news of another use or life are taken for this one's",
    "not capped": "what a GPU wrote before its record was published is told as complete",
    "assigned": "news replace what is known, and are not merged",
    "listens on": "a mirror that is finished hears further news",
    "no tombstone": "a lost mirror that was let go of is linked anew",
    "empty tombstone": "what was good of a lost mirror is forgotten with it",
    "forgets": "the new code stores the first news over what the mirrors say",
    "goes on blindly": "the new code stores on mirrors that the coordinator has finished",
}


class Use(NamedTuple):
    """One use of the slot of the recording node: `word` is the GPU's, `good` what counted when it broke."""

    recorded: int = 0
    word: int = 0
    state: str = "open"
    good: int = 0


class Fact(NamedTuple):
    """What a look at a use gives, and a message carries."""

    use: int
    recorded: int
    completed: int
    state: str


class Mirror(NamedTuple):
    """What the waiting node's board says."""

    recorded: int = 0
    completed: int = 0
    state: str = "open"


class World(NamedTuple):
    """`uses` of the slot one after another, `facts` that were true ever, `truth` of what was complete while it counted.

    On the waiting node: a mirror of each use or None, the tombstones, and what somebody has seen there, for good.
    `unheard`: the mirrors of which the bridge's present code has heard nothing.
    """

    uses: tuple[Use, ...]
    facts: frozenset[Fact]
    truth: frozenset[tuple[int, int]]
    mirrors: tuple[Mirror | None, ...]
    tombstones: tuple[int | None, ...]
    seen_good: frozenset[tuple[int, int]] = frozenset()
    seen_lost: frozenset[tuple[int, int]] = frozenset()
    unheard: frozenset[int] = frozenset()


class Violation(AssertionError):  # noqa: N818 - what a checker calls it
    """What must not be, with the steps that led there."""


def start(uses: int) -> World:
    """Nothing is recorded, and nothing linked."""
    world = World((Use(),), frozenset(), frozenset(), (None,) * uses, (None,) * uses)
    return _looked(world, "")


def moves(world: World, mistake: str) -> Iterator[tuple[str, World]]:
    """All that may happen next."""
    yield from _at_home(world, mistake)
    there = frozenset(use for use, mirror in enumerate(world.mirrors) if mirror is not None)
    yield "the bridge goes on with new code", world._replace(unheard=there)
    for use, mirror in enumerate(world.mirrors):
        yield from _linking(world, use, mirror, mistake)
        if mirror is None:
            continue
        yield from _hearing(world, use, mirror, mistake)
        if mirror.state != "broken":
            yield f"mirror {use}: its node is lost, or a bridge", _put(world, use, mirror._replace(state="broken"))
        yield f"somebody looks at mirror {use}", _seen(world, use, mirror)


def _at_home(world: World, mistake: str) -> Iterator[tuple[str, World]]:
    """On the recording node. A word may be written before its record is published, and after its recorder died."""
    now = world.uses[-1]
    found = []
    if now.state == "open" and now.recorded < GENERATIONS:
        found.append(("a record is published", now._replace(recorded=now.recorded + 1)))
    if now.word < GENERATIONS and now.word <= now.recorded:
        found.append(("the GPU writes the word", now._replace(word=now.word + 1)))
    if now.state != "broken":
        good = min(now.word, now.recorded)
        found.append(("the recorder dies, and the event is broken", now._replace(state="broken", good=good)))
    if now.state == "open":
        found.append(("the recorder closes", now._replace(state="closed")))
    for label, then in found:
        yield label, _looked(world._replace(uses=(*world.uses[:-1], then)), mistake)
    if len(world.uses) < len(world.mirrors):
        yield "the slot is used anew, or its node restarts", _looked(world._replace(uses=(*world.uses, Use())), mistake)


def _looked(world: World, mistake: str) -> World:
    """What a look at the present use would give is told from now on, and what counts there is true."""
    number, use = len(world.uses) - 1, world.uses[-1]
    completed = use.good if use.state == "broken" else use.word
    if mistake != "not capped":
        completed = min(completed, use.recorded)
    fact = Fact(number, use.recorded, completed, use.state)
    counts = use.good if use.state == "broken" else min(use.word, use.recorded)
    truth = world.truth | {(number, generation) for generation in range(1, counts + 1)}
    return world._replace(facts=world.facts | {fact}, truth=truth)


def _linking(world: World, use: int, mirror: Mirror | None, mistake: str) -> Iterator[tuple[str, World]]:
    if mirror is None:
        tombstone = world.tombstones[use]
        fresh = Mirror() if tombstone is None else Mirror(tombstone, tombstone, "broken")
        yield f"use {use} is asked for", _put(world, use, fresh)
        return
    tombstones = list(world.tombstones)
    if mirror.state != "broken":  # nobody holds it any more, and nothing was lost: who comes later sees it anew
        kept = frozenset(each for each in world.seen_good if each[0] != use)
        yield f"mirror {use} is let go of, unbroken", _put(world._replace(seen_good=kept), use, None)
        return
    if mistake != "no tombstone":
        tombstones[use] = 0 if mistake == "empty tombstone" else min(mirror.completed, mirror.recorded)
    yield f"mirror {use} is let go of", _put(world._replace(tombstones=tuple(tombstones)), use, None)


def _hearing(world: World, use: int, mirror: Mirror, mistake: str) -> Iterator[tuple[str, World]]:
    is_first = use in world.unheard
    listens = mirror.state != "broken" or mistake == "listens on" or (mistake == "goes on blindly" and is_first)
    known = Mirror() if mistake == "forgets" and is_first else mirror
    for fact in world.facts:
        if (fact.use == use or mistake == "no identity") and listens:
            heard = world._replace(unheard=world.unheard - {use})
            yield f"mirror {use} hears {fact}", _put(heard, use, _merged(known, fact, mistake))


def _put(world: World, use: int, mirror: Mirror | None) -> World:
    mirrors = list(world.mirrors)
    mirrors[use] = mirror
    return world._replace(mirrors=tuple(mirrors))


def _merged(mirror: Mirror, fact: Fact, mistake: str) -> Mirror:
    if mistake == "assigned":
        return Mirror(fact.recorded, fact.completed, fact.state)
    ranks = ("open", "closed", "broken")
    cap = fact.completed if mistake == "not capped" else min(fact.completed, fact.recorded)
    return Mirror(
        max(mirror.recorded, fact.recorded, cap if mistake == "not capped" else 0),
        max(mirror.completed, cap),
        max(mirror.state, fact.state, key=ranks.index),
    )


def _seen(world: World, use: int, mirror: Mirror) -> World:
    """What every waiter there concludes, and remembers."""
    good, lost = set(), set()
    for generation in range(1, GENERATIONS + 1):
        if generation <= min(mirror.completed, mirror.recorded):
            good.add((use, generation))
        elif mirror.state == "broken" or (mirror.state == "closed" and generation > mirror.recorded):
            lost.add((use, generation))
    return world._replace(seen_good=world.seen_good | good, seen_lost=world.seen_lost | lost)


def check(world: World) -> str:
    """What is wrong, "" if nothing is."""
    if world.seen_good - world.truth:
        return "seen complete, and never was"
    if world.seen_good & world.seen_lost:
        return "said to be complete, and lost"
    return ""


def explore(uses: int, mistake: str = "", most: int = 10_000_000) -> int:
    """How many states there are; Violation with the steps that lead to one that must not be."""
    first = start(uses)
    came: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    while queue and len(came) < most:
        world = queue.popleft()
        for label, then in moves(world, mistake):
            if then in came:
                continue
            came[then] = (world, label)
            wrong = check(then)
            if wrong:
                raise Violation(f"{wrong}:\n" + "\n".join(_steps(came, then)))
            queue.append(then)
    return len(came)


def _steps(came: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    steps = []
    while (step := came[world]) is not None:
        world, label = step
        steps.append(label)
    return steps[::-1]


def main(say: Callable[[str], object]) -> None:
    """Walk all of it."""
    say(f"one use: {explore(1):,} states, all")
    say(f"two uses: {explore(2, most=500_000):,} states")
    for mistake, what in MISTAKES.items():
        say(f"{mistake}: {what}\n  {_found(mistake)}")


def _found(mistake: str) -> str:
    try:
        return f"NOT FOUND in {explore(2, mistake, most=100_000):,} states"
    except Violation as error:
        return str(error)


if __name__ == "__main__":
    main(lambda text: sys.stdout.write(f"{text}\n"))
