"""Promises along chains as a model, walked breadth first: sessions 0, 1, 2 … each record on a slot of their own, on one
stream each; a waiter looks at one generation of the last slot until it knows.

Beside them the GPU streams, the driver, the kernel's marks, and the coordinator, which sees deaths late, breaks slots,
releases timeline words and gives a dead session's line to another one. One step is one load, store or call where the
order matters; `test_chain_order` compares that order with the code's. Faults, each with a budget: a session is killed
at any step (what its stream has not done may still be done, or never, and its driver may call it complete); a session
is stopped past its TTL and lives on; a session closes its slot.

Judged are:

1. each acceptance: all waits before that generation were satisfied, not released or torn (`truth`);
2. from every state the waiter's end is in reach by fair steps alone: those of living programs, GPUs, the coordinator;
3. no answer differs from what the board had already decided when that look began;
4. lost only for a reason; what was known complete on the board before the death is a reason for nothing.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator

from tests.kit.collector import collector_off
from tests.models.chain_recorder import Recorders, Steps
from tests.models.chain_world import BROKEN, CLOSED, EXPIRED, FREE, LIVE, MAX, OPEN, Line, Scenario, Slot, Stage, World
from tests.models.chain_world import Waiter as WaiterState
from tests.models.explorer import Violation

_MOST_STATES = 3_000_000


class Waiters(Recorders):
    """Who waits: as in query.pxi and line.pxi of ipcsync/_engines/core_cython."""

    def waiter(self, world: World) -> Steps:
        """The waiter's next step."""
        steps = {
            "look": self._look,
            "driver": self._ask_again,
            "behind": self._look_behind,
            "bits": self._look_at_bits,
            "line": self._look_at_line,
            "ask": self._ask,
            "after": self._look_at_recorder,
            "board": self._ask_board,
            "end": self._end,
        }
        step = steps.get(world.waiter.step)
        if step is not None:
            yield from step(world)

    def _go(self, world: World, step: str, *registers: int) -> World:
        return world._replace(waiter=WaiterState(step, registers, world.waiter.began))

    def _again(self, world: World) -> World:
        return world._replace(waiter=WaiterState())

    def _look(self, world: World) -> Steps:
        i, n = self.last, self.scenario.wanted
        slot = world.slots[i]
        is_lost = bool((slot.lost and slot.lost <= n) or (slot.state == BROKEN and slot.watermark < n))
        world = world._replace(waiter=WaiterState("look", (), (self.on_board(world, i, n), is_lost)))
        if slot.state == BROKEN:
            yield "waiter: broken", self._go(world, "end", slot.watermark >= n)
        elif slot.lost and slot.lost <= n:
            yield "waiter: lost", self._go(world, "end", False)
        elif slot.recorded < n:
            if not self.is_alive(world, i) or slot.state == CLOSED:
                yield "waiter: not recorded, and its recorder closed or died", self._go(world, "end", False)
        elif self.on_board(world, i, n) and not self.is_timeline(i):
            yield "waiter: the board says complete", self._go(world, "end", True)
        elif self.has("liveness first") and slot.behind and slot.behind <= n:
            if self.bits_are_good(world, i, slot.bits, slot.valid_as_of):
                yield "waiter: all live", self._go(world, "driver")
            elif not self.is_alive(world, i):
                yield "waiter: its recorder is dead", self._go(world, "end", False)
        elif self.driver_says(world, i, n):
            yield "waiter: the driver says complete", self._go(world, "behind")
        elif not self.is_alive(world, i):
            yield "waiter: pending, and its recorder is dead", self._go(world, "end", False)

    def _ask_again(self, world: World) -> Steps:
        if self.driver_says(world, self.last, self.scenario.wanted):
            yield "waiter: then complete", self._go(world, "after")
        else:
            yield "waiter: pending", self._again(world)

    def _look_behind(self, world: World) -> Steps:
        slot = world.slots[self.last]
        if self.has("word of the broken") and slot.state == BROKEN:
            yield "waiter: accepts", self._accept(world, "the word of a broken event")
        elif self.scenario.is_today or not slot.behind or slot.behind > self.scenario.wanted:
            yield "waiter: behind nothing", self._go(world, "after")
        else:
            yield "waiter: loads valid_as_of", self._go(world, "bits", slot.valid_as_of)

    def _look_at_bits(self, world: World) -> Steps:
        (valid_as_of,) = world.waiter.registers
        yield "waiter: loads bits", self._go(world, "line", valid_as_of, world.slots[self.last].bits)

    def _look_at_line(self, world: World) -> Steps:
        valid_as_of, bits = world.waiter.registers
        if bits >> self.last & 1:
            yield "waiter: only its recorder can tell; nudges", self._go(world, "ask")
        elif not bits:
            yield "waiter: all live", self._go(world, "after")
        else:
            j = bits.bit_length() - 1
            if self.line_is_good(world, j, valid_as_of):
                yield f"waiter: {j} lives", self._go(world, "line", valid_as_of, bits & ~(1 << j))
            else:
                yield f"waiter: {j} is over; nudges", self._go(world, "ask")

    def _ask(self, world: World) -> Steps:
        if self.is_alive(world, self.last):
            yield "waiter: looks again", self._again(world)
        else:
            yield "waiter: nobody can tell any more", self._go(world, "board")

    def _look_at_recorder(self, world: World) -> Steps:
        if world.slots[self.last].state == BROKEN:
            yield "waiter: broken meanwhile", self._again(world)
        elif self.is_timeline(self.last) or self.is_alive(world, self.last):
            yield "waiter: accepts", self._accept(world, "the driver's word")
        else:
            yield "waiter: its recorder is dead", self._go(world, "board")

    def _ask_board(self, world: World) -> Steps:
        is_good = self.on_board(world, self.last, self.scenario.wanted)
        yield "waiter: asks the board only", self._go(world, "end", is_good)

    def _end(self, world: World) -> Steps:
        (is_good,) = world.waiter.registers
        if is_good:
            yield "waiter: complete", self._accept(world, "the board's word")
        else:
            yield "waiter: RecorderLost", self._lose(world)

    def _accept(self, world: World, how: str) -> World:
        following, n = self._go(world, "good"), self.scenario.wanted
        truth = world.slots[self.last].truth
        if any(not truth >> generation & 1 for generation in range(1, n + 1)):
            return following._replace(wrong=f"generation {n} is taken as complete ({how}), behind what was not done")
        if world.waiter.began[1]:
            return following._replace(wrong="taken as complete after the board had said lost")
        return following

    def _lose(self, world: World) -> World:
        following = self._go(world, "lost")
        if world.waiter.began[0]:
            return following._replace(wrong="lost after the board had said good")
        if not self._may_be_lost(world, self.last, self.scenario.wanted):
            return following._replace(wrong=f"generation {self.scenario.wanted} is lost for no reason")
        return following

    def _may_be_lost(self, world: World, i: int, generation: int) -> bool:
        """A reason in the chain: a session that is over, and left what was not known complete; or a cut loss."""
        slot, line, stage = world.slots[i], world.lines[i], world.stages[i]
        if slot.known >> generation & 1:
            return False
        if line.serial != i + 1 or line.mark or line.state != LIVE or stage.has_expired:
            return True
        if (stage.was_told or stage.closes) and slot.recorded < generation:
            return True
        return any(self._may_be_lost(world, *wait) for wait in self._waits_before(i, generation))

    def _waits_before(self, i: int, generation: int) -> list[tuple[int, int]]:
        made, waits = 0, []
        for what, *point in self.scenario.programs[i]:
            if what in ("wait", "ahead"):
                waits.append((int(point[0]), int(point[1])))
            elif what == "rec":  # a record that fails has the number of the next one
                made += 1
                if made == generation:
                    break
        return waits


class Model(Waiters):
    """All that happens in one scenario."""

    def start(self) -> World:
        """Nothing was done yet."""
        s = self.scenario
        n = len(s.programs)
        lines = tuple(Line(i + 1) for i in range(n))
        return World((Slot(),) * n, lines, (Stage(),) * n, newest=n, kills=s.kills, stops=s.stops, reuses=s.reuses)

    def _stream(self, world: World, i: int) -> Steps:
        """A GPU does the next of a stream's work."""
        stage = world.stages[i]
        if stage.queue:
            further = world.stage(i, queue=stage.queue[1:])
            for label, following, is_torn in self._work(further, i, stage.queue[0], is_torn=stage.is_torn):
                yield label, following.stage(i, is_torn=is_torn)
        other = stage.other
        if other.queue:
            for label, following, is_torn in self._work(world, i, other.queue[0], is_torn=other.is_torn):
                left = other._replace(queue=other.queue[1:], is_torn=is_torn)
                yield f"{label}, on the other stream", following.stage(i, other=left)

    def _work(
        self, world: World, i: int, work: tuple[str, int, int], *, is_torn: bool
    ) -> Iterator[tuple[str, World, bool]]:
        """One piece of work is done: (label, the world, whether its stream is torn from then on)."""
        kind, up, generation = work
        if kind == "wait":
            if self.driver_says(world, up, generation):
                is_torn = is_torn or not world.slots[up].truth >> generation & 1
                yield f"stream of {i} goes past ({up}, {generation})", world, is_torn
            return
        slot = world.slots[i]
        values = {
            "physical": slot.physical | 1 << generation,
            "truth": slot.truth | (0 if is_torn else 1 << generation),
        }
        if self.is_timeline(i):
            values["completed"] = generation
        yield f"GPU of {i} completes {generation}", world.slot(i, **values), is_torn

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def _coordinator(self, world: World) -> Steps:
        """As in ipcsync_coordinator/effects.py."""
        if world.coordinator:
            yield from self._go_on(world)
            return
        for i in range(len(world.stages)):
            yield from self._notice(world, i)
        if world.reuses:
            for i, line in enumerate(world.lines):
                if line.state == FREE:
                    counted = world._replace(newest=world.newest + 1, reuses=world.reuses - 1)
                    yield "coordinator: counts a new session", counted._replace(coordinator=("assign", i, 0))

    def _notice(self, world: World, i: int) -> Steps:
        stage, line, slot = world.stages[i], world.lines[i], world.slots[i]
        is_own = line.serial == i + 1
        if line.mark and is_own and line.state != FREE:
            yield f"coordinator: sees the death of {i}", world._replace(coordinator=("bury", i, 0))
        elif stage.has_expired and line.state == LIVE and is_own:
            yield f"coordinator: {i} is past its TTL", world._replace(coordinator=("expire", i, 0))
        elif stage.asks and slot.state != BROKEN:
            yield f"coordinator: breaks {i} at its word", world._replace(coordinator=("break", i, 1))
        elif (stage.closes or stage.was_told) and slot.state == OPEN:
            yield f"coordinator: {i} closes", world.slot(i, state=CLOSED)
        elif self._is_drained(world, i):
            yield f"coordinator: {i} closed, all complete", world._replace(coordinator=("drain", i, 0))
        if slot.state == BROKEN and self.is_timeline(i) and slot.completed != MAX:
            yield f"coordinator: releases {i} again", world.slot(i, completed=MAX)

    def _is_drained(self, world: World, i: int) -> bool:
        stage, slot = world.stages[i], world.slots[i]
        if slot.state != CLOSED or not self.is_timeline(i) or slot.completed == MAX or slot.lost:
            return False
        is_here = stage.is_alive and not stage.has_expired and not stage.entries
        return is_here and all(slot.physical >> generation & 1 for generation in range(1, slot.recorded + 1))

    def _go_on(self, world: World) -> Steps:
        what, i, step = world.coordinator
        slot = world.slots[i]
        if what == "assign":
            given = world.line(i, serial=world.newest, state=LIVE, mark=False)
            yield f"coordinator: gives line {i} to a new session", given._replace(coordinator=())
        elif what == "drain":
            drained = world.slot(i, watermark=slot.recorded, completed=MAX)
            yield f"coordinator: releases {i}, which is drained", drained._replace(coordinator=())
        elif step == 0 and not (self.has("release first") and self.is_timeline(i)):
            yield f"coordinator: session {i} is over", self._at(world.line(i, state=EXPIRED), 1)
        elif step in (0, 1):
            if slot.state == BROKEN or (slot.state == CLOSED and slot.completed == MAX):
                yield "coordinator: nothing to break", self._at(world, 5)
            else:
                watermark = self._watermark(world, i)
                yield f"coordinator: watermark of {i} is {watermark}", self._at(world.slot(i, watermark=watermark), 2)
        elif step == 2:
            yield f"coordinator: {i} is broken", self._at(world.slot(i, state=BROKEN), 3)
        elif step == 3:
            released = world.slot(i, completed=MAX) if self.is_timeline(i) else world
            is_early = self.has("release first") and what != "break"
            yield f"coordinator: releases {i}", self._at(released, 4 if is_early else 5)
        elif step == 4:
            yield f"coordinator: session {i} is over", self._at(world.line(i, state=EXPIRED), 5)
        else:
            done = world.line(i, state=FREE) if what == "bury" else world
            yield "coordinator: done", done._replace(coordinator=())

    @staticmethod
    def _at(world: World, step: int) -> World:
        what, i, _ = world.coordinator
        return world._replace(coordinator=(what, i, step))

    def _watermark(self, world: World, i: int) -> int:
        slot = world.slots[i]
        if slot.completed == MAX:
            return slot.watermark
        watermark = min(slot.completed, slot.recorded)
        if self.is_timeline(i) and not self.scenario.is_today and not self.has("word at break"):
            for first in (slot.behind, slot.lost):
                watermark = min(watermark, first - 1) if first else watermark
        return watermark

    # --- all together -------------------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[tuple[str, World, bool]]:
        """(label, next world, whether that is fair: sure to happen while it stays possible)."""
        if world.wrong or world.waiter.step in ("good", "lost"):
            return
        for i, stage in enumerate(world.stages):
            if stage.is_alive:
                for label, following in self.session(world, i):
                    yield f"{i}: {label}", following, True
            for label, following in self._stream(world, i):
                yield label, following, stage.is_alive
            yield from self._faults(world, i)
        for label, following in (*self._coordinator(world), *self.waiter(world)):
            yield label, following, True

    def _faults(self, world: World, i: int) -> Iterator[tuple[str, World, bool]]:
        stage, slot, s = world.stages[i], world.slots[i], self.scenario
        if s.lies and not stage.is_alive and not self.is_timeline(i) and not slot.lies and slot.sent & ~slot.physical:
            yield f"the driver calls the work of {i} complete", world.slot(i, lies=True), False
        if i in s.killable and stage.is_alive and world.kills:
            marked = world.line(i, mark=True) if world.lines[i].serial == i + 1 else world
            yield f"{i} is killed", marked.stage(i, is_alive=False)._replace(kills=world.kills - 1), False
        if i in s.stoppable and stage.is_alive and world.stops and not stage.has_expired:
            yield (
                f"{i} is stopped past its TTL",
                world.stage(i, has_expired=True)._replace(stops=world.stops - 1),
                False,
            )


def explore(scenario: Scenario) -> dict[str, int]:
    """Walk all of a scenario; how many states there are, and ends "good" and "lost". Raises Violation."""
    return _Walk(Model(scenario)).run()


class _Walk:
    def __init__(self, model: Model) -> None:
        self._model = model
        start = model.start()
        self._numbers = {start: 0}
        self._from = array("l", [-1])
        self._labels = [""]
        self._heads, self._tails = array("l"), array("l")  # of the fair moves
        self._todo = deque([start])

    def run(self) -> dict[str, int]:
        with collector_off():  # what lives here grows by the million, and has no cycles
            return self._run()

    def _run(self) -> dict[str, int]:
        counts = {"states": 0, "good": 0, "lost": 0}
        ends = []
        while self._todo:
            world = self._todo.popleft()
            here = self._numbers[world]
            if world.wrong:
                self._fail(world.wrong, here)
            if world.waiter.step in counts:
                counts[world.waiter.step] += 1
                ends.append(here)
            for label, following, is_fair in self._model.moves(world):
                # A world that was reached has been noted, and so has one with the same words.
                is_noted = following.slots is world.slots and following.lines is world.lines
                noted = following if is_noted else self._model.note(following)
                if noted != world:
                    self._visit(here, label, noted, is_fair)
        self._judge_endings(ends)
        return {**counts, "states": len(self._numbers)}

    def _visit(self, here: int, label: str, world: World, is_fair: bool) -> None:
        there = self._numbers.get(world)
        if there is None:
            there = self._numbers[world] = len(self._from)
            assert there <= _MOST_STATES
            self._from.append(here)
            self._labels.append(sys.intern(label))
            self._todo.append(world)
        if is_fair:
            self._heads.append(there)
            self._tails.append(here)

    def _judge_endings(self, ends: list[int]) -> None:
        """From every state the waiter's end is in reach by fair steps."""
        before: dict[int, list[int]] = {}
        for head, tail in zip(self._heads, self._tails, strict=True):
            before.setdefault(head, []).append(tail)
        has_end = bytearray(len(self._from))
        todo = list(ends)
        for end in ends:
            has_end[end] = 1
        while todo:
            for tail in before.get(todo.pop(), ()):
                if not has_end[tail]:
                    has_end[tail] = 1
                    todo.append(tail)
        stuck = has_end.find(0)
        if stuck >= 0:
            self._fail("the waiter may wait for ever", stuck)

    def _fail(self, wrong: str, at: int) -> None:
        steps = []
        while at > 0:
            steps.append(self._labels[at])
            at = self._from[at]
        raise Violation("\n  ".join([wrong, *reversed(steps)]))
