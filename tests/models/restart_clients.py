"""The model's two clients: R records, W waits, and both ask again what was not answered."""

from __future__ import annotations

from typing import Any

from tests.models.restart_coordinator import Coordinator
from tests.models.restart_world import BROKEN, FREE, MAX, OPEN, Client, R, Values, W, World


class Clients(Coordinator):
    """What R and W do, as (label, world, is a fault)."""

    # --- the clients --------------------------------------------------------------------------------------------------

    def send(self, world: World, s: int, number: int) -> World:
        c = world.of(s)
        op = ("open", s == R) if number == c.late else self.op_of(s, c)
        return world.put(s, copies=(*c.copies, (number, op)), sent_in=world.starts)

    @staticmethod
    def op_of(s: int, client: Client) -> Values:
        at = client.at
        if at == "hello":
            return ("hello",)
        if at == "open":
            return ("open", s == R)
        if at == "reopen":
            return ("open", True)
        if at.startswith("linger"):
            return ("close", client.inc, False, False)
        if at.startswith("leave"):
            return ("close", client.held, True, False)
        assert at == "bye", at
        return ("bye",)

    def client_moves(self, world: World, s: int) -> list[Any]:  # noqa: PLR0912 - as many as there are moves
        """(label, world, is a fault)"""
        c = world.of(s)
        if not c.alive or c.silent:
            return []
        moves: list[Any] = []
        serves = world.mem is not None and not (
            world.work and not world.work.target and "E" in world.work.stages and world.starts and not world.done
        )
        name = "RW"[s - 1]
        if c.buf:
            (number, reply), rest = c.buf[0], c.buf[1:]
            read = world.put(s, buf=rest)
            if number == c.late:
                if reply[0] == "ok":
                    read = read.put(s, late=0, held=reply[1], at="leave late", id=c.id + 1)
                else:
                    read = read.put(s, late=0)
                moves.append((f"{name} reads the late reply {reply}", read, False))
            elif c.waits and number == c.id:
                moves.append((f"{name} reads {reply}", self.answered(read, s, reply), False))
            else:
                moves.append((f"{name} drops a reply", read, False))
        if c.waits:
            if serves and not c.copies and (self.s.unread_stay or not c.buf) and c.sent_in != world.starts:
                moves.append((f"{name} sends again", self.send(world, s, c.id), False))
            if serves and world.doubles and len(c.copies) == 1:
                twice = world.put(s, copies=c.copies * 2)._replace(doubles=world.doubles - 1)
                moves.append((f"{name} sends twice", twice, True))
            if world.giveups and c.at == "open" and s == W:
                gone = world.put(s, waits=False, late=c.id, at="end")._replace(giveups=world.giveups - 1)
                moves.append((f"{name} gives up", gone, True))
            return moves
        asks = c.late and not c.copies and not c.buf and serves and c.sent_in != world.starts
        if asks and not self.has("given up for good"):
            moves.append((f"{name} asks for what it gave up", self.send(world, s, c.late), False))
        if c.at in ("hello", "open", "reopen", "bye") or c.at.startswith(("linger", "leave")):
            if serves:
                moves.append((f"{name} sends {c.at}", self.send(world.put(s, waits=True), s, c.id), False))
            return moves
        moves += [(f"{name} {label}", following, False) for label, following in self.use(world, s, c)]
        return moves

    def answered(self, world: World, s: int, reply: Values) -> World:
        c = world.of(s)
        world = world.put(s, waits=False, id=c.id + 1)
        if c.at == "hello":
            return world.put(s, at="open", owner=True)
        if c.at in ("open", "reopen"):
            if reply[0] == "ok":
                if world.inc != reply[1] or world.state == FREE:
                    return world._replace(wrong=f"{s} is told of use {reply[1]}, and the board has {world.inc}")
                at = "record" if s == R else "use" if c.at == "open" else "check"
                return world.put(s, inc=reply[1], base=reply[2], ring=reply[3], at=at, made=False)
            if reply[0] == "expired":
                return world.put(s, at="end")
            again = c.tries < 1 and c.at == "reopen"
            return world.put(s, at="reopen" if again else "end", tries=c.tries + again)
        if c.at.startswith("linger"):
            return world.put(s, at="drain")
        if c.at.startswith("leave"):
            following = {"leave": "bye" if s == R else "reopen", "leave again": "bye", "leave late": "end"}[c.at]
            if reply[0] == "expired" or world.lines[s - 1] != "LIVE":
                following = "end"
            return world.put(s, at=following, held=0)
        return world.put(s, at="end")

    def go(self, world: World, s: int, again: bool = False) -> World:
        """Let go of everything, and be about to tell it."""
        c = world.of(s)
        return world.put(s, at="leave again" if again else "leave", held=c.inc, inc=0, ring=0)

    def use(self, world: World, s: int, c: Client) -> list[Any]:  # noqa: PLR0912 - one for each place in the program
        at = c.at
        if at == "record":
            if world.lines[0] != "LIVE" or world.state != OPEN or world.inc != c.inc:
                return [("is refused", world.put(s, at="drain"))]
            return [("looks", world.put(s, at="record 2"))]
        if at == "record 2":
            value = c.base + 1
            if not self.timeline:
                holds = world.rings[c.ring - 1]
                if holds is None or (holds and holds not in world.truth):
                    return [("records", world._replace(wrong="a record into an event that is pending or destroyed"))]
                rings = list(world.rings)
                rings[c.ring - 1] = value
                world = world._replace(rings=tuple(rings))
            return [("records", world.put(s, at="record 3", made=True)._replace(pending=(value, c.inc)))]
        if at == "record 3":
            if world.inc != c.inc:
                return [("publishes", world._replace(wrong="a record is published in the next use"))]
            return [("publishes", world.put(s, at="harvest")._replace(recorded=c.base + 1))]
        if at == "harvest":
            moves = [("goes on", world.put(s, at="drain"))]
            if not self.timeline and c.base + 1 in world.truth and world.state != BROKEN:
                moves.append(("looks at the state", world.put(s, at="harvest 2")))
            return moves
        if at == "harvest 2":
            if world.inc != c.inc or world.state == FREE:
                return [("stores completed", world._replace(wrong="`completed` of the next use is stored"))]
            return [("stores completed", world.put(s, at="drain")._replace(completed=c.base + 1))]
        if at == "drain":
            if s == W:
                return self.drain_waiter(world, c)
            moves = []
            drained = not c.made or c.base + 1 in world.truth
            told = self.timeline or not c.made or world.completed >= c.base + 1 or world.state == BROKEN
            if drained and told:
                moves.append(("lets go", self.go(world, s)))
            elif drained:
                moves.append(("harvests", world.put(s, at="harvest")))
            closed = world.mem is not None and world.mem.slot.draining & s
            if not closed:
                moves.append(("closes, and lingers", world.put(s, at="linger")))
            return moves
        if at == "check":  # W has the next use
            moves = []
            holds = 0 if self.timeline else world.rings[c.ring - 1]
            wrong = ""
            if world.recorded != c.base or world.completed != c.base:
                wrong = "the next use does not begin where the last ended"
            elif holds is None or (holds and holds not in world.truth):
                wrong = "the next use has an event that is pending or destroyed"
            elif world.rec != s:
                wrong = "the next use has another recorder than it was told"
            return [("checks", world._replace(wrong=wrong) if wrong else self.go(world, s, True))]
        if at == "end":
            return []
        return self.wait(world, c)

    def drain_waiter(self, world: World, c: Client) -> list[Any]:
        if not c.queued:
            return [("lets go", self.go(world, W))]
        closed = world.mem is not None and world.mem.slot.draining & W
        return [] if closed else [("closes, and lingers", world.put(W, at="linger"))]

    def wait(self, world: World, c: Client) -> list[Any]:  # noqa: PLR0912 - one for each place
        """W asks for a generation: on the event engine a query, on a timeline a wait ahead."""
        at, wanted = c.at, c.base + self.s.wanted
        over = world.put(W, at="drain", held=0)
        if at == "use":
            moves = [("times out", over)]
            if self.timeline:
                return (
                    [*moves, ("finds it over", over)]
                    if world.state != OPEN
                    else [*moves, ("queues a wait", world.put(W, at="look", queued=wanted))]
                )
            return [*moves, ("loads completed", world.put(W, at="use 2", held=world.completed))]
        if at == "look":
            return [("looks", over)]
        if at == "use 2":
            done = world.wm if world.state == BROKEN or c.held == MAX else c.held
            if min(done, world.recorded) >= wanted:
                return [("says complete", self.passes(over, wanted, "the board"))]
            if world.state != OPEN:
                return [("finds it lost", over)]
            if world.recorded < wanted:
                return [("looks again", world.put(W, at="use", held=0))]
            return [("asks the driver", world.put(W, at="use 3", held=0))]
        if at == "use 3":
            holds = world.rings[c.ring - 1]
            if holds is None:
                return [("asks", world._replace(wrong="a destroyed event is queried"))]
            yes = ("hears that it is complete", world.put(W, at="use 4"))
            no = ("hears that it is not", world.put(W, at="use"))
            if holds == 0 or holds in world.truth:
                return [yes]
            return [no] if world.r.alive else [yes, no]
        if at == "use 4":
            # After the driver's word: whether the recorder lives. Nobody recorded as such: it has not come yet.
            lives = not world.rec or world.rec == W or (world.r.alive and world.lines[0] != "FREE")
            return [("looks at the recorder", world.put(W, at="use 5", held=int(lives)))]
        assert at == "use 5"
        if c.held and world.state != BROKEN:
            return [("says complete", self.passes(over, wanted, "the driver"))]
        kept = world.wm if world.state == BROKEN else world.completed
        if kept < wanted:
            return [("says lost", over)]
        return [("says complete", self.passes(over, wanted, "the board"))]

    @staticmethod
    def passes(world: World, wanted: int, who: str) -> World:
        if wanted in world.truth:
            return world
        return world._replace(wrong=f"a silent pass: by {who} {wanted} is complete, and it is not")
