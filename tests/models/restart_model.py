"""A coordinator that is killed at any of its steps and started again: every state of the model is walked.

    python -m tests.models.restart_model            every scenario, then every planted mistake (minutes, 1 GB)
    python -m tests.models.restart_model NAME …     these mistakes only, with the steps that lead to what must not be
    python -m tests.models.restart_model large      the largest scenario, which takes 2 GB of memory and some minutes

What the model has and leaves out stands in `restart_world`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from array import array
from collections import deque
from typing import Any

from tests.kit.collector import collector_off
from tests.models.restart_clients import Clients
from tests.models.restart_world import BROKEN, FREE, MAX, MISTAKES, OPEN, R, Reg, Scenario, Values, W, Work, World


class Model(Clients):
    """All moves from a world, and what must hold in it."""

    # --- all moves ----------------------------------------------------------------------------------------------------

    def moves(self, world: World) -> list[Any]:  # noqa: PLR0912 - as many as there are moves
        """(label, world, is a fault)"""
        found: list[Any] = []
        add = found.append
        if world.mem is None:
            add(("a new coordinator starts", self.recover(world), False))
        elif world.work is not None:
            add((f"coordinator: {world.work.stages[0]} {world.work.rest[:1]}", self.step(world), False))
        else:
            for s in (R, W):
                client = world.of(s)
                if client.copies:
                    add((f"coordinator takes {'RW'[s - 1]}'s {client.at}", self.begin(world, s), False))
                state = world.mem.sess[s - 1]
                if not client.alive and state in ("live", "expired"):
                    reg, todo = self.end(world, world.mem, s, "closed", breaks=True, released=True)
                    add(("coordinator sees a death", self.tick(world, reg, todo), False))
                elif client.silent and state == "live":
                    reg, todo = self.end(world, world.mem, s, "expired", breaks=True, released=False)
                    add(("coordinator sees silence", self.tick(world, reg, todo), False))
            if world.held and world.completed != MAX:
                add(("coordinator releases again", world._replace(completed=MAX), False))
            if world.swaps:
                add(
                    (
                        "coordinator compacts",
                        world._replace(stale=(world.journal, world.todo, world.done), swaps=0),
                        True,
                    )
                )
        if world.stale is not None:
            add(("the keeper takes the swap", world._replace(stale=None), False))
        if world.zombie:
            gone = world._replace(zombie=world.zombie[1:])
            held = world.held
            add(
                (
                    f"the old one stores {world.zombie[0]}",
                    self.effect(gone, world.zombie[0])._replace(held=held, spare=world.spare),
                    False,
                )
            )
        if world.kills and world.mem is not None:
            add(("the coordinator is killed", self.kill(world), True))
        if world.deaths and world.r.alive:
            add(
                ("R is killed", world.put(R, alive=False, buf=(), silent=False)._replace(deaths=world.deaths - 1), True)
            )
        if world.stops and world.r.alive and not world.r.silent:
            add(("R is stopped", world.put(R, silent=True)._replace(stops=world.stops - 1), True))
        if world.r.silent:
            add(("R goes on", world.put(R, silent=False), False))
        if world.pending and world.r.alive:
            value, use = world.pending
            after = world._replace(truth=world.truth | {value}, pending=())
            if self.timeline:
                wrong = "" if world.inc == use and world.state != FREE else "a late write reaches the next use"
                after = after._replace(completed=value, wrong=after.wrong or wrong)
            add(("the GPU completes", after, False))
        if world.w.queued and world.completed >= world.w.queued:
            early = world.state == OPEN and world.w.queued not in world.truth
            after = world.put(W, queued=0)
            add(("W's stream goes on", after._replace(wrong="a stream went on too early") if early else after, False))
        found += self.client_moves(world, R)
        found += self.client_moves(world, W)
        return found

    def tick(self, world: World, reg: Reg, todo: list[Values]) -> World:
        work = self.tidy(Work(self.stages(False), tuple(todo), tuple(todo), ()))
        return world._replace(mem=reg, work=work)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def judge(self, world: World) -> str:  # noqa: PLR0912 - one for each promise
        if world.wrong:
            return world.wrong
        if world.completed == MAX and world.state == OPEN:
            return "a word is released while its use is open"
        for s in (R, W):
            client = world.of(s)
            if client.alive and client.inc and client.inc != world.inc:
                return f"{s} holds use {client.inc}, and the slot is at {world.inc}"
        if world.mem is None or world.work is not None or world.zombie:
            return ""
        slot = world.mem.slot
        if (slot.inc, slot.state) != (world.inc, world.state) or (slot.state != FREE and slot.rec != world.rec):
            return f"journal and board differ at rest: {slot} beside {world.inc, world.state, world.rec}"
        names = {"live": "LIVE", "expired": "EXPIRED", "gone": "FREE", "none": "FREE", "closed": "EXPIRED"}
        for s in (R, W):
            client = world.of(s)
            if names[world.mem.sess[s - 1]] != world.lines[s - 1]:
                return f"a session is {world.mem.sess[s - 1]}, and its line says {world.lines[s - 1]}"
            if client.alive and client.inc and (slot.inc != client.inc or not (slot.active | slot.draining) & s):
                return f"{s} holds a lease that the coordinator does not know"
            if client.alive and client.inc and client.base != slot.base:
                return f"{s} counts from {client.base}, and the coordinator from {slot.base}"
        if slot.state == BROKEN and any(value not in world.truth for value in range(slot.base + 1, world.wm + 1)):
            return "the watermark covers what is not complete"
        if slot.ring and world.rings[slot.ring - 1] is None:
            return "a slot's event is destroyed"
        if slot.ring and world.spare & 1 << slot.ring:
            return "an event is in a ring and spare"
        return ""

    def is_good_end(self, world: World) -> bool:
        for s in (R, W):
            client = world.of(s)
            if client.alive and (client.at != "end" or client.waits or client.inc):
                return False
        if world.mem is None or world.work is not None or world.mem.slot.state != FREE:
            return False
        if any(state == "live" and not world.of(s).alive for s, state in zip((R, W), world.mem.sess, strict=True)):
            return False
        if any(state in ("expired",) and world.mem.slot.state != FREE for state in world.mem.sess):
            return False
        return all(holds is None or world.spare & 1 << number for number, holds in enumerate(world.rings, 1))


class Found(Exception):  # noqa: N818 - what was looked for, no error of the program
    """Something that must not be."""


def explore(scenario: Scenario) -> tuple[int, int]:
    with collector_off():  # what lives here grows by the million, and has no cycles
        return _walk(scenario)


def _walk(scenario: Scenario) -> tuple[int, int]:
    model = Model(scenario)
    first = model.start()
    numbers = {first: 0}
    worlds = [first]
    came = [(-1, "")]
    edges_from, edges_to = array("I"), array("I")
    transitions = 0
    index = 0
    while index < len(worlds):
        world = worlds[index]
        for label, following, is_fault in model.moves(world):
            transitions += 1
            number = numbers.get(following)
            if number is None:
                number = numbers[following] = len(worlds)
                worlds.append(following)
                came.append((index, label))
                wrong = model.judge(following)
                if wrong:
                    raise Found(_tell(wrong, worlds, came, number, transitions))
            if not is_fault:
                edges_from.append(index)
                edges_to.append(number)
        index += 1
    _must_reach_the_end(model, worlds, came, edges_from, edges_to, transitions)
    return len(worlds), transitions


def _must_reach_the_end(
    model: Model,
    worlds: list[World],
    came: list[tuple[int, str]],
    sources: array[int],
    targets: array[int],
    transitions: int,
) -> None:
    count = len(worlds)
    starts = array("I", bytes(4 * (count + 1)))
    for target in targets:
        starts[target + 1] += 1
    for number in range(count):
        starts[number + 1] += starts[number]
    place = array("I", starts)
    back = array("I", bytes(4 * len(targets)))
    for source, target in zip(sources, targets, strict=True):
        back[place[target]] = source
        place[target] += 1
    reached = bytearray(count)
    queue = deque(number for number in range(count) if model.is_good_end(worlds[number]))
    if not queue:
        raise Found("no end is ever reached")
    for number in queue:
        reached[number] = 1
    while queue:
        number = queue.popleft()
        for source in back[starts[number] : starts[number + 1]]:
            if not reached[source]:
                reached[source] = 1
                queue.append(source)
    for number in range(count):
        if not reached[number]:
            raise Found(_tell("something is leaked, or somebody waits for ever", worlds, came, number, transitions))


def _tell(wrong: str, worlds: list[World], came: list[tuple[int, str]], number: int, transitions: int) -> str:
    steps, at = [], number
    while at >= 0:
        at, label = came[at]
        steps.append(label)
    text = "\n    ".join(reversed(steps[:-1]))
    size = f"{len(worlds)} states, {transitions} transitions, {len(steps) - 1} steps"
    return f"{wrong}  [{size}]\n    {text}\n    in the end: {worlds[number]}"


SCENARIOS = {
    "one death of the coordinator": Scenario(kills=1),
    "two deaths of the coordinator": Scenario(kills=2),
    "it and the recorder die": Scenario(kills=1, deaths=1),
    "it dies, the recorder expires and goes on": Scenario(kills=1, stops=1),
    "it dies, a request is sent twice": Scenario(kills=1, doubles=1),
    "it dies, a request is given up": Scenario(kills=1, giveups=1),
    "it dies while the recorder greets": Scenario(kills=1, greets=True),
}
AHEAD = Scenario(engine="timeline", kills=1, stops=1, wanted=2)
UNREAD = Scenario(kills=1, unread_stay=True)
FOUND_IN = {  # the cheapest scenario that shows it; "one death of the coordinator" else
    "watermark at the effect": SCENARIOS["it and the recorder die"],
    "expiry not appended": SCENARIOS["it and the recorder die"],
    "held not rebuilt": AHEAD,
    "given up for good": SCENARIOS["it dies, a request is given up"],
    "late before kept": SCENARIOS["it dies, a request is given up"],
}
LARGE = {"it dies twice, and the recorder": Scenario(kills=2, deaths=1)}  # 2 to 3 GB of memory
ENGINES = ("event", "timeline")


def main() -> int:
    wanted = sys.argv[1:]
    failed = 0
    scenarios = LARGE if wanted == ["large"] else SCENARIOS
    if not wanted or scenarios is LARGE:
        for name, scenario in scenarios.items():
            for engine in ENGINES:
                failed += not _show(name, dataclasses.replace(scenario, engine=engine), should_hold=True)
        if scenarios is LARGE:
            return int(bool(failed))
        for name, scenario in (
            ("a wait ahead of all that is recorded, it dies, the recorder expires", AHEAD),
            ("unread replies stay", UNREAD),
        ):
            failed += not _show(name, scenario, should_hold=True)
    for mistake in wanted or MISTAKES:
        scenario = FOUND_IN.get(mistake, SCENARIOS["one death of the coordinator"])
        failed += not _show(f"planted: {mistake}", scenario, mistake, should_hold=False, in_full=bool(wanted))
    if not wanted:
        for name in ("one death of the coordinator", "it and the recorder die", "it dies, a request is sent twice"):
            failed += not _show(
                f"harmless: refusals not appended, {name}", SCENARIOS[name], "refusals not appended", should_hold=True
            )
        failed += not _show(
            "but not: refusals not appended, unread replies stay", UNREAD, "refusals not appended", should_hold=False
        )
    return int(bool(failed))


def _show(name: str, scenario: Scenario, mistake: str = "", *, should_hold: bool, in_full: bool = False) -> bool:
    """Explore, say what came out, and whether that is what should."""
    began = time.monotonic()
    try:
        states, transitions = explore(dataclasses.replace(scenario, mistakes=frozenset({mistake} - {""})))
        holds, told = True, f"{states} states, {transitions} transitions"
    except Found as found:
        holds, told = False, str(found) if in_full else str(found).splitlines()[0]
    mark, seconds = "✔" if holds == should_hold else "✘", time.monotonic() - began
    sys.stdout.write(f"{mark} {scenario.engine:8} {name}: {told}, {seconds:.0f} s\n")
    sys.stdout.flush()
    return holds == should_hold


if __name__ == "__main__":
    sys.exit(main())
