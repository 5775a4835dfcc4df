"""The board model's waiters: query, synchronize and wait, as in the compiled core's slot, query and wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.models import board_world as do
from tests.models.board_world import BROKEN, LOCKED, MAX, OPEN, RECORDER, Scenario
from tests.models.explorer import Ended, Op, Program


class SlotView:
    """The looks that every use takes: `check`, `is_complete`, and what refuses."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.is_timeline = scenario.engine == "timeline"
        ends = scenario.dies or scenario.expires
        finishes = ends or scenario.closes
        self._hot = {
            "incarnation": scenario.reuse,
            "state": finishes,
            "recorder": scenario.reuse,
            "watermark": ends or scenario.reuse or (self.is_timeline and scenario.closes),
            "recorded": True,
            "completed": True,
            "awaited": True,
            "announced": not self.is_timeline and any(name == "wait" for call in scenario.calls for name, _ in call),
        }
        self._shared = {RECORDER} if scenario.heartbeat else set()  # processes of two threads
        self._shared |= scenario.closers

    def has(self, mistake: str) -> bool:
        """Whether that mistake is planted."""
        return mistake in self.scenario.mistakes

    # Words of the board, attributes of a process.

    def load(self, name: str) -> Op:
        """One load of a word."""
        return Op(f"load {name}", do.load, (name,), not self._hot[name])

    def store(self, name: str, value: Any) -> Op:
        """One store of a word."""
        return Op(f"store {name}", do.store, (name, value))

    def ask_to_be_woken(self, value: int = 1) -> Op:
        """The store of `awaited`."""
        return self.store("awaited", value)

    def own(self, me: int, name: str) -> Op:
        """One load of an engine's attribute."""
        return Op(f"own {name}", do.load_own, (me, name), me not in self._shared or name in LOCKED)

    def keep(self, me: int, name: str, value: Any) -> Op:
        """One store of an engine's attribute."""
        return Op(f"own {name}", do.store_own, (me, name, value), me not in self._shared or name in LOCKED)

    def under_lock(self, me: int, thread: str, body: Callable[..., Program], *args: Any) -> Program:
        """`body(*args)` with `state` held."""
        value = yield from self.holding("lock", "", "", me, thread, body, *args)
        return value

    def in_turn(self, me: int, thread: str, body: Callable[..., Program], *args: Any) -> Program:
        """`body(*args)` with the turn of calls that queue work."""
        value = yield from self.holding("turn", "lock", "unlock", me, thread, body, *args)
        return value

    def holding(
        self, which: str, take: str, give: str, me: int, thread: str, body: Callable[..., Program], *args: Any
    ) -> Program:
        """`body(*args)` with one of a use's locks held; it is released however that ends."""
        yield Op(take, do.lock, (me, which, thread), me not in self._shared)
        problem = ""
        value = None
        try:
            value = yield from body(*args)
        except Ended as ended:
            problem = str(ended)
        yield Op(give, do.store_own, (me, which, ""), True)
        if problem:
            raise Ended(problem)
        return value

    def note(self, label: str) -> Op:
        """A call that changes nothing here."""
        return Op(label, do.load, ("incarnation",), True)

    # slot.pxi

    def check(self, me: int) -> Program:
        yield from self.guard(me, "guard.check")
        yield from self.check_slot(me)
        return ""

    def check_slot(self, me: int) -> Program:
        yield from self.raise_if_closed(me)
        incarnation = yield self.load("incarnation")
        if incarnation != 1:
            raise Ended("closed")
        return ""

    def guard(self, me: int, label: str) -> Program:
        if self.scenario.orphans:
            raises = yield Op(label, do.ask_guard, (me,))
            if raises:
                raise Ended("orphaned")
            return ""
        if me != RECORDER or not self.scenario.expires:
            yield self.note(label)
            return ""
        is_expired = yield Op(label, do.load_own, (me, "is_expired"))
        if is_expired:
            raise Ended("expired")
        return ""

    def raise_if_closed(self, me: int) -> Program:
        is_closed = yield self.own(me, "is_closed")
        if is_closed:
            raise Ended("closed")
        return ""

    def last_look(self, me: int) -> Program:
        if not self.has("no last look"):
            yield from self.raise_if_closed(me)
        return ""

    def board_completed(self) -> Program:
        count = yield self.load("completed")
        state = yield self.load("state")
        if (state == BROKEN and not self.has("completed whatever the state")) or count == MAX:
            count = yield self.load("watermark")
        if self.is_timeline:
            yield self.note("load first_dependent")
        return count

    def is_on_board(self, generation: int) -> Program:
        done = yield from self.board_completed()
        recorded = yield self.load("recorded")
        return generation <= min(done, recorded)

    def is_complete(self, me: int, generation: int) -> Program:
        seen = yield self.own(me, "seen")
        if generation <= seen:
            return True
        done = yield from self.board_completed()
        if done < generation:
            yield self.note("load lost")
            yield from self.last_look(me)
            return False
        recorded = yield self.load("recorded")
        yield from self.last_look(me)
        done = min(done, recorded)
        if generation > done:
            return False
        yield self.keep(me, "seen", done)
        return True

    def recorder_is_alive(self) -> Program:
        serial = yield self.load("recorder")
        if not serial:
            return True
        alive = yield Op("recorder alive?", do.ask_alive, (serial,), not (self.scenario.dies or self.scenario.closes))
        return alive

    def is_orphaned(self) -> Program:
        is_over = yield Op("coordinator?", do.ask_coordinator, (), not self.scenario.orphans)
        return is_over

    def raise_if_orphaned(self, me: int) -> Program:
        if not self.has("no look at the coordinator") and (yield from self.is_orphaned()):
            yield from self.guard(me, "guard.check_liveness")
            if not self.has("no last look at an orphan"):
                yield from self.raise_if_closed(me)
        return ""

    def raise_if_finished(self, me: int, generation: int) -> Program:
        state = yield self.load("state")
        yield from self.last_look(me)
        if state == OPEN:
            yield self.note("load first_dependent")
            return ""
        if (yield from self.is_complete(me, generation)):
            return ""
        if state == BROKEN:
            raise Ended("lost")
        recorded = yield self.load("recorded")
        if generation > recorded:
            raise Ended("lost")
        return ""

    def raise_unless_good(self, me: int, generation: int) -> Program:
        if not (yield from self.is_complete(me, generation)):
            raise Ended("lost")
        return ""

    def check_liveness(self, me: int, generation: int) -> Program:
        yield from self.guard(me, "guard.check")
        yield from self.guard(me, "coordinator?")
        yield from self.check_slot(me)
        yield from self.raise_if_dead(me, generation)
        return ""

    def raise_if_dead(self, me: int, generation: int) -> Program:
        alive = yield from self.recorder_is_alive()
        yield from self.last_look(me)
        if not alive:
            yield from self.raise_unless_good(me, generation)
        return ""


class Waits(SlotView):
    """The calls of a waiter."""

    # query.pxi and wait.pxi

    def await_recorded(self, me: int, generation: int) -> Program:
        while True:
            recorded = yield self.load("recorded")
            if recorded >= generation:
                yield from self.last_look(me)
                return ""
            yield from self.raise_if_finished(me, generation)
            if not self.has("asleep unawaited"):
                awaited = yield self.load("awaited")
                if not awaited:
                    yield self.ask_to_be_woken()
                del awaited
            yield Op("sleep", do.sleep, (me, recorded))
            yield Op("slept", do.slept, (me,))
            again = yield self.load("recorded")
            if again == recorded:
                del again, recorded
                yield from self.check_liveness(me, generation)

    def confirm(self, me: int, generation: int) -> Program:
        yield self.note("load first_dependent")
        if self.has("alive before query"):
            alive = True
        else:
            alive = yield from self.recorder_is_alive()
        if alive and not self.has("no look at the state"):
            state = yield self.load("state")
            alive = state != BROKEN
        yield from self.last_look(me)
        yield from self.raise_if_orphaned(me)
        if alive:
            yield self.keep(me, "seen", generation)
        else:
            yield from self.raise_unless_good(me, generation)
        return ""

    def ask_early(self, me: int, generation: int) -> Program:
        if self.has("alive before query") and not (yield from self.recorder_is_alive()):
            yield from self.raise_unless_good(me, generation)
        return ""

    def done(self, me: int, thread: str, generation: int) -> Program:
        if self.is_timeline:
            done = yield from self.is_on_board(generation)
        else:
            done = yield from self.in_driver(me, thread, Op("cuEventQuery", do.event_query, (me, generation)))
        return done

    def await_driver(self, me: int, thread: str, generation: int) -> Program:
        work = Op("await work", do.event_query, (me, generation))  # False: its slice is over
        if self.is_timeline:
            if (yield from self.is_complete(me, generation)):
                return True
            count = yield self.load("completed")
            if count == MAX:
                return False
            if count >= generation:
                state = yield self.load("state")
                return state != BROKEN
            del count
            yield self.note("await work")
        elif (yield from self.done(me, thread, generation)):
            return True
        elif not (yield from self.in_driver(me, thread, work)):
            return False
        if (yield from self.done(me, thread, generation)):
            return True
        is_complete = yield from self.is_complete(me, generation)
        return is_complete

    def query(self, me: int, thread: str, generation: int) -> Program:
        yield from self.check(me)
        if (yield from self.is_complete(me, generation)):
            return "True"
        recorded = yield self.load("recorded")
        is_asked = recorded >= generation or self.has("wait before recorded")
        del recorded
        if is_asked and not self.has("no look at the state"):
            state = yield self.load("state")  # what is broken the driver may keep for ever
            is_asked = state != BROKEN
            del state
        if not is_asked:
            yield from self.raise_if_finished(me, generation)
            return "False"
        del is_asked
        yield from self.ask_early(me, generation)
        if (yield from self.done(me, thread, generation)):
            yield from self.confirm(me, generation)
            return "True"
        yield from self.raise_if_finished(me, generation)
        return "False"

    def in_driver(self, me: int, thread: str, ask: Op) -> Program:
        if self.has("inside after the look"):
            yield from self.go_inside(me)
        else:
            yield from self.under_lock(me, thread, self.go_inside, me)
        done = yield ask
        yield self.keep(me, "inside", 0)
        return done

    def go_inside(self, me: int) -> Program:
        yield from self.raise_if_closed(me)
        if not self.has("let go while inside"):
            yield self.keep(me, "inside", 1)
        return ""

    def synchronize(self, me: int, thread: str, generation: int) -> Program:
        yield from self.check(me)
        if (yield from self.is_complete(me, generation)):
            return "ok"
        yield from self.await_recorded(me, generation)
        while True:
            if (yield from self.is_complete(me, generation)):
                return "ok"
            yield from self.raise_if_finished(me, generation)
            yield from self.ask_early(me, generation)
            if (yield from self.await_driver(me, thread, generation)):
                yield from self.confirm(me, generation)
                return "ok"
            yield from self.check_liveness(me, generation)

    def wait(self, me: int, thread: str, generation: int, ahead: bool) -> Program:
        yield from self.check(me)
        yield self.note("cuStreamIsCapturing")
        if (yield from self.is_complete(me, generation)):
            return "ok"
        if not ahead and not self.has("wait before recorded"):
            recorded = yield self.load("recorded")
            is_there = recorded >= generation
            del recorded
            if is_there:
                is_closed = yield self.own(me, "is_closed")
                is_there = not is_closed
                del is_closed
            if not is_there:
                yield from self.await_recorded(me, generation)
                yield self.note("cuStreamIsCapturing")
            del is_there
        yield from (self.raise_if_finished if ahead else self.raise_if_not_open)(me, generation)
        if not self.is_timeline and (yield from self.done(me, thread, generation)):
            yield from self.confirm(me, generation)
            return "ok"
        yield self.note("cuStreamGetId")
        if not (yield from self.in_turn(me, thread, self.queue_wait, me, generation)):
            return "ok"
        yield from self.raise_if_not_open(me, generation, is_queued=True)
        if not self.has("no look at the recorder"):
            yield from self.raise_if_dead(me, generation)
        yield from self.raise_if_orphaned(me)
        return "ok"

    def raise_if_not_open(self, me: int, generation: int, *, is_queued: bool = False) -> Program:
        state = yield self.load("state")
        if state != OPEN:
            del state
            yield from self.raise_if_finished(me, generation)
            if is_queued:
                yield from self.is_complete(me, generation)
        elif is_queued:
            yield self.note("load first_dependent")
        return ""

    def queue_wait(self, me: int, generation: int) -> Program:
        yield from self.raise_if_closed(me)
        if self.is_timeline:
            yield Op("cuStreamWaitValue64", do.queue_wait_value, (me, generation))
            yield self.note("mark")
            return True
        retract = Op("retract", do.retract, (me,))
        is_early = self.has("look before the hazard")
        found = False
        if is_early:
            found = yield from self.is_reached(me, generation)
        yield from self.announce(me)
        if not is_early:
            found = yield from self.is_reached(me, generation)
        if not found:
            if self.has("retract too early"):
                yield retract
            yield Op("cuStreamWaitEvent", do.queue_wait, (me, generation))
            yield self.note("load recorded")  # whether the ring went round all the same: a hazard counts for a second
            yield self.note("mark")
        if found or not self.has("retract too early"):
            yield retract
        return not found

    def is_reached(self, me: int, generation: int) -> Program:
        """The look with a hazard announced: the recorder stores `completed` before it looks at the hazards."""
        done = yield self.load("completed")
        if done < generation:
            return False
        del done
        is_complete = yield from self.is_complete(me, generation)
        return is_complete

    def announce(self, me: int) -> Program:
        announced = yield self.load("announced")
        if not announced:
            yield self.store("announced", 1)
        del announced
        yield Op("announce", do.announce, (me,))
        yield self.note("fence")
        return ""

    def waiter(self, me: int) -> Program:
        """A thread that makes its calls one after the other; it ends with their results."""
        calls = self.scenario.calls[me - 1]
        index = 0
        results = ""
        while index < len(calls):
            name, generation = calls[index]
            yield Op("", do.begin_call, (me, generation))
            if name == "query":
                result = yield from self.query(me, "w", generation)
            elif name == "synchronize":
                result = yield from self.synchronize(me, "w", generation)
            else:
                result = yield from self.wait(me, "w", generation, name == "ahead")
            results = f"{results}{result},"
            index += 1
        return results.rstrip(",")
