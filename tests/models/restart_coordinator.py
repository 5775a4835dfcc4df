"""The model's coordinator: transition, append, effects, "carried out", reply; and what a start makes of the journal."""

from __future__ import annotations

from typing import Any

from tests.models.restart_world import (
    BROKEN,
    CLOSED,
    FREE,
    MAX,
    OPEN,
    Client,
    R,
    Reg,
    Scenario,
    Slot,
    Values,
    W,
    Work,
    World,
)


class Coordinator:
    """What the coordinator, its journal and its keeper do."""

    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        self.timeline = scenario.engine == "timeline"

    def has(self, mistake: str) -> bool:
        return mistake in self.s.mistakes

    def start(self) -> World:
        s = self.s
        world = World(
            kills=s.kills,
            deaths=s.deaths,
            stops=s.stops,
            doubles=s.doubles,
            giveups=s.giveups,
            swaps=int(self.has("swap by message")),
        )
        if s.greets:
            reg = Reg(sess=("none", "live"))
            world = world._replace(mem=reg, journal=reg, lines=("FREE", "LIVE"), r=Client(at="hello"))
        return world

    # --- the registry's transitions: (reg, effects, reply) ------------------------------------------------------------

    def watermark(self, world: World, base: int) -> int:
        return world.wm if world.completed == MAX else min(max(world.completed, base), world.recorded)

    def leave(
        self, world: World, reg: Reg, s: int, *, breaks: bool, released: bool, drained: bool = False
    ) -> tuple[Any, ...]:
        slot = reg.slot
        todo: list[Values] = []
        draining = slot.draining & ~s if released else slot.draining | s
        slot = slot._replace(active=slot.active & ~s, draining=draining)
        if slot.rec == s:
            if breaks and slot.state in (OPEN, CLOSED) and not slot.drained:
                value = None if self.has("watermark at the effect") else self.watermark(world, slot.base)
                slot = slot._replace(state=BROKEN)
                todo += [("wm", value), ("state", BROKEN)] + [("release",)] * self.timeline
            elif slot.state == OPEN:
                slot = slot._replace(state=CLOSED)
                todo += [("state", CLOSED)]
            if (released or drained) and slot.state == CLOSED and not slot.drained:
                slot = slot._replace(drained=True)
                todo += [("wm", world.recorded), ("release",)] if self.timeline else []
        elif slot.state == OPEN and not slot.active:
            slot = slot._replace(state=CLOSED)
            todo += [("state", CLOSED)]
            if not slot.rec and slot.draining:
                slot = slot._replace(drained=True)
                todo += [("wm", world.recorded), ("release",)] if self.timeline else []
        if not slot.active and not slot.draining:
            good = slot.state != BROKEN and world.completed >= world.recorded
            what = "ask" if self.has("ring decided at the effect") else "back" if good else "destroy"
            todo += [("unrelease",), ("state", FREE)] + ([("ring", slot.ring, what)] if slot.ring else [])
            slot = Slot(inc=slot.inc)
        return reg._replace(slot=slot), todo

    def end(self, world: World, reg: Reg, s: int, state: str, *, breaks: bool, released: bool) -> tuple[Any, ...]:
        todo: list[Values] = []
        was = reg.sess[s - 1]
        if was == "live":
            reg = self.set_session(reg, s, state)
            todo += [("line", s, "EXPIRED")]
        if (reg.slot.active | reg.slot.draining) & s:
            reg, more = self.leave(world, reg, s, breaks=breaks, released=released)
            todo += more
        attached = (reg.slot.active | reg.slot.draining) & s
        if not attached and (released or reg.sess[s - 1] != "expired"):
            reg = self.set_session(reg, s, "gone")
            todo += [("line", s, "FREE")]
        return reg, todo

    @staticmethod
    def set_session(reg: Reg, s: int, state: str) -> Reg:
        sess = list(reg.sess)
        sess[s - 1] = state
        return reg._replace(sess=tuple(sess))

    def request(self, world: World, s: int, op: Values) -> tuple[Any, ...]:
        """(world, reg, effects, reply)"""
        reg, slot = world.mem, world.mem.slot
        state = reg.sess[s - 1]
        if op[0] == "hello":
            if state != "none":
                return world, reg, [], ("welcome",)
            return world, self.set_session(reg, s, "live"), [("assign", s)], ("welcome",)
        if state == "gone" or (state != "live" and op[0] == "open"):
            return world, reg, [], ("expired",)
        if op[0] == "bye":
            reg, todo = self.end(world, reg, s, "closed", breaks=False, released=True)
            return world, reg, todo, ("done",)
        if op[0] == "close":
            _, inc, released, drained = op
            if inc != slot.inc or not (slot.active | slot.draining) & s:
                return world, reg, [], ("done",)
            reg, todo = self.leave(world, reg, s, breaks=False, released=released, drained=drained)
            if reg.sess[s - 1] != "live" and not (reg.slot.active | reg.slot.draining) & s:
                reg, more = self.end(world, reg, s, reg.sess[s - 1], breaks=False, released=True)
                todo += more
            return world, reg, todo, ("done",)
        recorder = op[1]
        todo = []
        if slot.state == FREE:
            world, ring = self.take(world)
            base = world.recorded
            slot = Slot(inc=slot.inc + 1, state=OPEN, base=base, ring=ring)
            todo = [("rec", 0), ("open", slot.inc)]
        elif slot.state != OPEN:
            return world, reg, [], ("quota",)
        elif recorder and slot.rec not in (0, s):
            return world, reg, [], ("taken",)
        slot = slot._replace(active=slot.active | s, draining=slot.draining & ~s)
        if recorder and not slot.rec:
            slot = slot._replace(rec=s)
            todo += [("rec", s)]
        return world, reg._replace(slot=slot), todo, ("ok", slot.inc, slot.base, slot.ring)

    def take(self, world: World) -> tuple[World, int]:
        if self.timeline:
            return world, 0
        for ring in range(1, len(world.rings) + 1):
            if world.spare & (1 << ring):
                holds = world.rings[ring - 1]
                if holds is None:
                    world = world._replace(wrong="a destroyed event is handed out")
                elif holds and holds not in world.truth:
                    world = world._replace(wrong="an event whose last record is not complete is handed out")
                return world._replace(spare=world.spare & ~(1 << ring)), ring
        return world._replace(rings=(*world.rings, 0)), len(world.rings) + 1

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def stages(self, is_request: bool) -> str:
        if self.has("reply before append") and is_request:
            return "RAED"
        if self.has("effect before append"):
            return "EADR" if is_request else "EAD"
        if self.has("expiry not appended") and not is_request:
            return "E"
        return "AEDR" if is_request else "AED"

    def begin(self, world: World, s: int) -> World | None:
        """Take in one copy of a client's request."""
        client = world.of(s)
        number, op = client.copies[0]
        world = world.put(s, copies=client.copies[1:])
        kept_id, kept = world.mem.kept[s - 1]
        is_late = client.late == number
        if is_late and self.has("late before kept"):
            return world
        if kept_id == number:
            return self.deliver(world, s, number, kept)
        if is_late or number < kept_id:
            return world  # dropped
        world, reg, todo, reply = self.request(world, s, op)
        if (todo or reply[0] in ("ok", "done")) and world.did[s - 1] >= number:
            return world._replace(wrong=f"request {number} of {s} is done twice")
        kept_all = list(reg.kept)
        kept_all[s - 1] = (number, reply)
        reg = reg._replace(kept=tuple(kept_all))
        refused = not todo and reply[0] in ("taken", "quota", "expired")
        world = world._replace(mem=reg)
        if refused and self.has("refusals not appended"):
            return self.deliver(world, s, number, reply)
        return world._replace(work=Work(self.stages(True), tuple(todo), tuple(todo), (s, number, reply)))

    def deliver(self, world: World, s: int, number: int, reply: Values) -> World:
        client = world.of(s)
        return world.put(s, buf=(*client.buf, (number, reply))) if client.alive else world

    def step(self, world: World) -> World:
        """The next step of what the coordinator is at."""
        work = world.work
        stage = work.stages[0]
        following = Work(work.stages[1:], work.rest, work.todo, work.target)
        if stage == "E":
            if work.rest:
                world = self.effect(world, work.rest[0])
                return world._replace(work=self.tidy(work._replace(rest=work.rest[1:])))
            return world._replace(work=self.tidy(following))
        if stage == "A":
            reg = world.mem
            if self.has("reply not appended") and work.target:
                reg = reg._replace(kept=world.journal.kept)
            done = not work.todo or "E" not in work.stages
            world = world._replace(journal=reg, todo=work.todo, done=done)
            if work.target:
                s, number, reply = work.target
                if work.todo or reply[0] in ("ok", "done"):
                    did = list(world.did)
                    did[s - 1] = max(did[s - 1], number)
                    world = world._replace(did=tuple(did))
        elif stage == "D":
            world = world._replace(done=True)
        elif stage == "R":
            world = self.deliver(world, *work.target)
        return world._replace(work=self.tidy(following))

    @staticmethod
    def tidy(work: Work) -> Work | None:
        """Without stages that have nothing to do."""
        while work.stages and ((work.stages[0] == "E" and not work.rest) or (work.stages[0] == "D" and not work.todo)):
            work = work._replace(stages=work.stages[1:])
        return work if work.stages else None

    def effect(self, world: World, what: Values) -> World:  # noqa: PLR0912 - one for each kind
        """One store, or one thing that the keeper is told."""
        kind = what[0]
        if kind == "rec":
            return world._replace(rec=what[1])
        if kind == "open":
            for s in (R, W):
                client = world.of(s)
                if client.alive and client.inc and client.inc != what[1]:
                    return world._replace(wrong=f"the slot is used anew while {s} still holds use {client.inc}")
            if self.has("base at a redo"):
                world = world._replace(mem=world.mem._replace(slot=world.mem.slot._replace(base=world.recorded)))
            return world._replace(inc=what[1], wm=0, state=OPEN)
        if kind == "state":
            return world._replace(state=what[1])
        if kind == "wm":
            value = what[1]
            if value is None:
                slot = (world.mem or world.journal).slot
                value = self.watermark(world, slot.base)
            if world.state == BROKEN and value != world.wm:
                return world._replace(wrong=f"the watermark of a broken use changes from {world.wm} to {value}")
            return world._replace(wm=value)
        if kind == "release":
            return world._replace(completed=MAX, held=True)
        if kind == "unrelease":
            return world._replace(held=False, completed=world.recorded)
        if kind == "ring":
            _, ring, fate = what
            if fate == "ask":
                good = world.state != BROKEN and world.completed >= world.recorded
                # What the board says now, as `Effects.fill_in` asks: before the state is stored at the first time.
                fate = "back" if good else "destroy"
            if fate == "back":
                return world._replace(spare=world.spare | 1 << ring)
            return self.destroy(world, ring)
        if kind == "line":
            lines = list(world.lines)
            lines[what[1] - 1] = what[2]
            return world._replace(lines=tuple(lines))
        assert kind == "assign"
        if world.of(what[1]).owner:
            return world._replace(wrong="a session's mark of life is wiped from its line")
        lines = list(world.lines)
        lines[what[1] - 1] = "LIVE"
        return world._replace(lines=tuple(lines))

    def destroy(self, world: World, ring: int) -> World:
        for s in (R, W):
            client = world.of(s)
            if client.alive and client.inc and client.ring == ring and not self.timeline:
                return world._replace(wrong=f"an event is destroyed that {s} has imported")
        rings = list(world.rings)
        rings[ring - 1] = None
        return world._replace(rings=tuple(rings), spare=world.spare & ~(1 << ring))

    def recover(self, world: World) -> World:
        reg = world.journal
        if self.has("journal from the board"):
            reg = reg._replace(slot=reg.slot._replace(state=world.state) if world.state != FREE else reg.slot)
        slot = reg.slot
        world = world._replace(mem=reg, starts=world.starts + 1, spare=0)
        held = self.timeline and slot.state != FREE and (slot.state == BROKEN or slot.drained)
        world = world._replace(held=held and not self.has("held not rebuilt"))
        if not self.has("no sweep"):
            keep = slot.ring
            if self.has("sweep takes quarantined rings") and slot.state != OPEN:
                keep = 0
            for ring in range(1, len(world.rings) + 1):
                if ring != keep and world.rings[ring - 1] is not None:
                    world = self.destroy(world, ring)
        marked = world.done and not self.has("no carried-out mark") and not self.has("base at a redo")
        if world.todo and not marked and not self.has("redo skipped"):
            # What a ring becomes is settled by the sweep.
            todo = world.todo
            if not self.has("no sweep") and not self.has("ring decided at the effect"):
                todo = tuple(each for each in todo if each[0] != "ring")
            return world._replace(work=Work("ED", todo, world.todo, ()))
        return world._replace(done=True)

    def kill(self, world: World) -> World:
        work: Work | None = world.work
        zombie: tuple[Values, ...] = ()
        if self.has("old one still writing") and work is not None:
            zombie = work.rest if work.stages[0] == "E" else ()
        if world.stale is not None:
            journal, todo, done = world.stale
            world = world._replace(journal=journal, todo=todo, done=done, stale=None)
        world = world._replace(mem=None, work=None, spare=0, held=False, zombie=zombie, kills=world.kills - 1)
        for s in (R, W):
            world = world.put(s, copies=(), buf=world.of(s).buf if self.s.unread_stay else ())
        return world
