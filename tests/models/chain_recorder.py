"""The chain model's recorders: wait, record, and the judgement of what they recorded.

As in record.pxi, wait.pxi and chain.pxi of ipcsync/_engines/core_cython.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.models.chain_world import BROKEN, LIVE, Entry, Looks, Point, Stage, Stream, World

Steps = Iterator[tuple[str, World]]


def _to(world: World, i: int, step: str, *registers: Any, **values: Any) -> World:
    return world.stage(i, step=step, registers=registers, **values)


class Recorders(Looks):
    """What each session's process does by itself."""

    def session(self, world: World, i: int) -> Steps:
        """The next step of session `i`'s program, or of its heartbeat once that is over."""
        stage = world.stages[i]
        steps = {
            "next": self._next,
            "queue": self._queue,
            "after": self._after,
            "evidence": self._evidence,
            "late": self._late,
            "bits": self._store_bits,
            "valid_as_of": self._store_valid_as_of,
            "behind": self._store_behind,
            "record": self._record,
            "publish": self._publish,
            "judge": self._judge,
            "tell": self._tell,
            "stop": self._beat,
        }
        yield from steps[stage.step](world, i)

    # --- wait ---------------------------------------------------------------------------------------------------------

    def _next(self, world: World, i: int) -> Steps:
        stage = world.stages[i]
        program = self.scenario.programs[i]
        if stage.op >= len(program):
            yield from self._beat(world, i)
            return
        what, *point = program[stage.op]
        if what == "wait":
            up, generation = point
            if self.on_board(world, up, generation):
                yield "finds it complete", _to(world, i, "next", op=stage.op + 1)
            elif world.slots[up].recorded >= generation:
                yield "sees the record", _to(world, i, "queue")
            elif self.is_lost(world, up, generation):
                yield "RecorderLost at the wait", _to(world, i, "stop", was_told=True)
        elif what == "interrupt":
            listed = () if (point[0], point[1]) in stage.waits else ((point[0], point[1]),)
            values = {"waits": (*stage.waits, *listed), "unqueued": (*stage.unqueued, *listed)}
            yield "lists a wait, and is interrupted", _to(world, i, "next", op=stage.op + 1, **values)
        elif what == "ahead":
            yield "waits ahead", _to(world, i, "queue")
        elif what == "stream":  # another stream, which follows the last record
            queue = (*stage.queue, ("wait", i, stage.made))
            yield "takes another stream", _to(world, i, "next", op=stage.op + 1, queue=queue, waits=())
        elif what == "other":
            mine = Stream(stage.queue, stage.is_torn, stage.waits, stage.unqueued)
            taken = {**stage.other._asdict(), "other": mine, "is_other": not stage.is_other}
            yield "takes the other stream", _to(world, i, "next", op=stage.op + 1, **taken)
        elif what == "beats":
            yield from self._beat(world, i)
            yield "goes on", _to(world, i, "next", op=stage.op + 1)
        elif what == "close":
            yield "closes", _to(world, i, "next", op=stage.op + 1, closes=True)
        else:
            yield from self._begin_record(world, i)

    def _queue(self, world: World, i: int) -> Steps:
        stage = world.stages[i]
        _, up, generation = self.scenario.programs[i][stage.op]
        queue = (*stage.queue, ("wait", up, generation))
        waits = (*(wait for wait in stage.waits if wait != (up, generation)), (up, generation))
        unqueued = tuple(wait for wait in stage.unqueued if wait != (up, generation))
        yield "queues the wait", _to(world, i, "after", queue=queue, waits=waits, unqueued=unqueued)

    def _after(self, world: World, i: int) -> Steps:
        stage = world.stages[i]
        _, up, generation = self.scenario.programs[i][stage.op]
        if self.is_lost(world, up, generation):
            yield "RecorderLost after the wait", _to(world, i, "stop", was_told=True)
        else:
            yield "looks after the wait", _to(world, i, "next", op=stage.op + 1)

    # --- record -------------------------------------------------------------------------------------------------------

    def _begin_record(self, world: World, i: int) -> Steps:
        world = self._unprove(world, i)
        stage, slot = world.stages[i], world.slots[i]
        waits = tuple(wait for wait in stage.waits if not self.on_board(world, *wait))
        pending = self._before(world, stage._replace(waits=waits))
        if slot.lost and not self.scenario.is_today:
            yield "RecorderLost: the event is lost", _to(world, i, "stop", was_told=True)
        elif self.scenario.is_today or not pending:
            yield "records, behind nothing new", _to(world, i, "record", waits=waits)
        elif any(self.is_lost(world, *wait) for wait in pending):
            yield "RecorderLost at the record", _to(world, i, "stop", was_told=True, waits=waits)
        else:
            yield "loads newest", _to(world, i, "evidence", world.newest, waits=waits)

    def _before(self, world: World, stage: Stage) -> tuple[Point, ...]:
        """The waits that a record stands behind."""
        others = stage.other.waits if self.scenario.behind_all else ()
        rest = (wait for wait in others if wait not in stage.waits and not self.on_board(world, *wait))
        return (*stage.waits, *rest)

    def _unprove(self, world: World, i: int) -> World:
        """A record that failed is repeated: it proves nothing, since it may be on another stream now."""
        entries, made = world.stages[i].entries, world.stages[i].made
        if not entries or entries[-1].generation <= made or self.has("repeat proves"):
            return world
        return world.stage(i, entries=(*entries[:-1], entries[-1]._replace(proves=())))

    def _evidence(self, world: World, i: int) -> Steps:
        """Whom the next record stands behind: checked later than `newest` was read."""
        stage, slot = world.stages[i], world.slots[i]
        own, bits = 1 << i, 0
        pending = self._before(world, stage)
        for up, generation in pending:
            if self.is_lost(world, up, generation):
                yield "RecorderLost at the record", _to(world, i, "stop", was_told=True)
                return
            bits |= self._whose(world, up, generation, own)
        older = stage.entries
        if not self.has("valid_as_of by force") and not self.bits_are_good(world, i, slot.bits, slot.valid_as_of):
            older = tuple(each._replace(bits=each.bits | own) for each in older)  # still theirs?
        if self.scenario.behind_all and any(not self.on_board(world, *wait) for wait in stage.other.waits):
            bits |= own  # its stream does not wait for these
        unqueued = () if self.has("listed is queued") else stage.unqueued
        proves = tuple(wait for wait in stage.waits if wait not in unqueued)
        entry = Entry(stage.made + 1, pending, bits, proves, stage.is_other)
        entries = _with(older, entry)
        row = _row(entries)
        if self.has("valid_as_of late"):
            yield "checks whom it stands behind", _to(world, i, "late", row, entries=entries)
        else:
            step = "record" if self.has("publish first") else "bits"
            yield "checks whom it stands behind", _to(world, i, step, row, *stage.registers, entries=entries)

    def _whose(self, world: World, up: int, generation: int, own: int) -> int:
        theirs, line = world.slots[up], world.lines[up]
        is_ahead = theirs.recorded < generation and not self.has("ahead unmarked")
        if line.state != LIVE or line.mark or is_ahead:
            return own
        bits = 1 << up
        if theirs.behind and theirs.behind <= generation and not self.has("no closure"):
            if self.has("evidence unchecked"):
                bits |= theirs.bits & ~(1 << up) | (own if theirs.bits >> up & 1 else 0)
            else:
                bits |= theirs.bits if self.bits_are_good(world, up, theirs.bits, theirs.valid_as_of) else own
        return bits

    def _late(self, world: World, i: int) -> Steps:
        yield "loads newest", _to(world, i, "bits", world.stages[i].registers[0], world.newest)

    def _store_bits(self, world: World, i: int) -> Steps:
        bits, valid_as_of = world.stages[i].registers
        yield "stores bits", _to(world, i, "valid_as_of", valid_as_of).slot(i, bits=bits)

    def _store_valid_as_of(self, world: World, i: int) -> Steps:
        yield "stores valid_as_of", _to(world, i, "behind").slot(i, valid_as_of=world.stages[i].registers[0])

    def _store_behind(self, world: World, i: int) -> Steps:
        stage, slot = world.stages[i], world.slots[i]
        if self.has("publish first"):
            following, generation = _to(world, i, "next", op=stage.op + 1), stage.made
        else:
            following, generation = _to(world, i, "record"), stage.made + 1
        yield "stores behind", following.slot(i, behind=slot.behind or generation)

    def _record(self, world: World, i: int) -> Steps:
        stage, slot = world.stages[i], world.slots[i]
        generation = stage.made + 1
        if self.scenario.programs[i][stage.op] == ("fail",):
            failed = _to(world, i, "next", op=stage.op + 1)
            yield "is interrupted before the driver's record", self._unprove(failed, i)
            return
        follows = stage.made and stage.is_other != stage.made_on
        before = (("wait", i, stage.made),) if follows else ()
        queue = (*stage.queue, *before, ("record", i, generation))
        values = {"queue": queue, "made": generation, "made_on": stage.is_other}
        recorded = _to(world, i, "publish", *stage.registers, **values)
        yield "the driver's record", recorded.slot(i, sent=slot.sent | 1 << generation)

    def _publish(self, world: World, i: int) -> Steps:
        stage = world.stages[i]
        following = _to(world, i, "next", op=stage.op + 1)
        if self.has("publish first") and stage.registers:
            following = _to(world, i, "bits", *stage.registers)
        yield f"publishes {stage.made}", following.slot(i, recorded=stage.made)

    # --- the judgement ------------------------------------------------------------------------------------------------

    def _beat(self, world: World, i: int) -> Steps:
        """The heartbeat's thread, a nudge, or the next call: first what is complete, then who lives."""
        stage, slot = world.stages[i], world.slots[i]
        if slot.state == BROKEN or stage.has_expired:
            return
        done = 0
        while done < slot.recorded and self.driver_says(world, i, done + 1):
            done += 1
        is_unjudged = self.scenario.is_today or self.has("publish unjudged")
        is_unjudged |= self.has("no judge") and not stage.entries
        if is_unjudged and not self.is_timeline(i) and done > slot.completed:
            yield "publishes what is complete", world.slot(i, completed=done)
        if self.scenario.is_today or self.has("no judge"):
            return
        yield "asks the driver", _to(world, i, "judge", done, stage.step)

    def _judge(self, world: World, i: int) -> Steps:
        stage, slot = world.stages[i], world.slots[i]
        done, back = stage.registers
        entries, lost, waits, other = stage.entries, slot.lost, stage.waits, stage.other
        if entries and not lost and self.bits_are_good(world, i, slot.bits, slot.valid_as_of):
            proves_all = self.has("proves all")
            waits = _left(waits, entries, done, None if proves_all else stage.is_other)
            left = _left(other.waits, entries, done, None if proves_all else not stage.is_other)
            other = other._replace(waits=left)
            entries = tuple(entry for entry in entries if entry.generation > done)
        else:
            entries, lost = self._one_by_one(world, entries, lost, done)
        settled = done if not entries else min(done, entries[0].generation - 1)
        stores = self._to_tell(world, i, settled, entries, lost)
        asks = stage.asks or bool(lost and (settled >= lost - 1 or self.has("break at once")))
        label = "judges: lost" if lost else f"judges: settled to {settled}"
        if stores:
            yield label, _to(world, i, "tell", back, *stores, asks, entries=entries, waits=waits, other=other)
        else:
            yield label, _to(world, i, back, entries=entries, waits=waits, other=other, asks=asks)

    def _one_by_one(
        self, world: World, entries: tuple[Entry, ...], lost: int, done: int
    ) -> tuple[tuple[Entry, ...], int]:
        behind = [each.generation for each in entries if any(self.is_lost(world, *wait) for wait in each.waits)]
        lost = min(filter(None, (lost, *behind)), default=0)  # for good
        left = tuple(
            each
            for each in entries
            if each.generation > done or 0 < lost <= each.generation or not self._accepts_all(world, each)
        )
        if lost and left and self.has("all at once"):
            lost = left[0].generation
        return left, lost

    def _accepts_all(self, world: World, entry: Entry) -> bool:
        return all(self._accepts(world, wait) for wait in entry.waits)

    def _accepts(self, world: World, wait: Point) -> bool:
        """The recorder as a waiter for what it stands behind, after its own work was found complete."""
        up, generation = wait
        theirs = world.slots[up]
        if self.on_board(world, up, generation):
            return True
        if theirs.state == BROKEN or not self.is_alive(world, up) or theirs.recorded < generation:
            return False
        is_behind = theirs.behind and theirs.behind <= generation
        is_clear = not is_behind or self.bits_are_good(world, up, theirs.bits, theirs.valid_as_of)
        return is_clear and self.driver_says(world, up, generation)

    def _to_tell(
        self, world: World, i: int, settled: int, entries: tuple[Entry, ...], lost: int
    ) -> list[tuple[str, int]]:
        """What a judgement stores, in this order."""
        slot = world.slots[i]
        stores: list[tuple[str, int]] = []
        behind, bits = (entries[0].generation if entries else 0), _row(entries)
        if self.has("cleared too soon") and len(entries) < len(world.stages[i].entries):
            bits = 0
        if not self.is_timeline(i) and settled > slot.completed and not self.has("publish unjudged"):
            stores.append(("completed", settled))
        if behind != slot.behind:
            stores.append(("behind", behind))
        if bits != slot.bits:
            stores.append(("bits", bits))
        if lost != slot.lost:
            stores.append(("lost", lost))
        if lost and slot.bits and self.has("cleared at loss"):
            stores.append(("bits", 0))
        return stores

    def _tell(self, world: World, i: int) -> Steps:
        """One word a step; then it may ask for the break."""
        back, (word, value), *rest, asks = world.stages[i].registers
        following = _to(world, i, "tell", back, *rest, asks) if rest else _to(world, i, back, asks=asks)
        yield f"stores {word} {value}", following.slot(i, **{word: value})


def _row(entries: tuple[Entry, ...]) -> int:
    bits = 0
    for entry in entries:
        bits |= entry.bits
    return bits


def _with(entries: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    """The entries and a further one, which is merged with that of the same number: a record that failed."""
    if not entries or entries[-1].generation < entry.generation:
        return (*entries, entry)
    last = entries[-1]
    waits = (*last.waits, *(wait for wait in entry.waits if wait not in last.waits))
    return (*entries[:-1], last._replace(waits=waits, bits=last.bits | entry.bits))


def _left(waits: tuple[Point, ...], entries: tuple[Entry, ...], done: int, is_other: bool | None) -> tuple[Point, ...]:
    """A stream's waits without those queued before a record there that is settled: they were satisfied.

    `is_other`: which stream it is; None takes the records on either.
    """
    settled = [each for each in entries if each.generation <= done and is_other in (None, each.is_other)]
    over = {wait for entry in settled for wait in (entry.waits if is_other is None else entry.proves)}
    return tuple(wait for wait in waits if wait not in over)
