"""The board model's recorder and coordinator: record, publish_completed, close; break, finish, free and open anew.

As in record.pxi and query.pxi of the compiled core, and ipcsync_coordinator/effects.py.
"""

from __future__ import annotations

from tests.models import board_world as do
from tests.models.board_waiter import Waits
from tests.models.board_world import BROKEN, CLOSED, FREE, MAX, OPEN, RECORDER
from tests.models.explorer import Ended, Op, Program


class Records(Waits):
    """The recorder's threads, and how any process lets go."""

    # query.pxi: what the recorder publishes, and room in the ring

    def publish_completed(self, me: int) -> Program:
        if self.is_timeline:
            return ""
        done = yield self.own(me, "done")
        made = yield self.own(me, "made")
        before = done
        if done == made:
            return ""
        if (yield Op("cuEventQuery", do.event_query, (me, made))):
            done = made
        else:
            while done + 1 < made and (yield Op("cuEventQuery", do.event_query, (me, done + 1))):
                done += 1
        if done != before:
            if not self.has("told of an orphan") and (yield from self.is_orphaned()):
                return ""
            state = yield self.load("state")
            if state != BROKEN:
                yield Op("store completed", do.store_completed, (done,))
        yield self.keep(me, "done", done)
        return ""

    def find_room(self, me: int, generation: int) -> Program:
        if self.is_timeline or self.has("harvest after overwrite"):
            return True
        if (yield from self.has_room(me, generation)):
            return True
        yield from self.under_lock(me, "r", self.publish_unless_closed, me)
        if self.has("record into a full ring"):
            return True
        has_room = yield from self.has_room(me, generation)
        return has_room

    def make_room(self, me: int, generation: int) -> Program:
        oldest = generation - self.scenario.depth
        yield from self.publish_room(me)
        if (yield from self.has_room(me, generation)):
            return ""
        while True:
            done = yield self.own(me, "done")
            if oldest <= done:
                break
            del done
            yield from self.await_driver(me, "r", oldest)
            yield from self.guard(me, "guard.check_liveness")
            yield from self.look_for_room(me)
        del done
        if not (yield from self.has_room(me, generation)):
            yield from self.await_retract(me)
        return ""

    def publish_room(self, me: int) -> Program:
        yield from self.raise_if_closed(me)
        yield from self.under_lock(me, "r", self.publish_completed, me)
        yield from self.under_lock(me, "r", self.raise_room, me, None)
        return ""

    def look_for_room(self, me: int) -> Program:
        yield from self.check(me)
        yield from self.raise_unless_open(me)
        yield from self.publish_room(me)
        return ""

    def has_room(self, me: int, generation: int) -> Program:
        room = yield self.own(me, "room")
        return generation <= room

    def await_retract(self, me: int) -> Program:
        done = yield self.own(me, "done")
        hazards = yield from self.hazards("")
        while True:
            again = yield from self.hazards("")
            hazards = hazards & again
            del again
            if not hazards:
                break
            yield self.note("pause")
            yield from self.look_for_room(me)
            hazards = yield from self.of_the_living(hazards)
        yield from self.under_lock(me, "r", self.give_room, me, done)
        return ""

    def give_room(self, me: int, done: int) -> Program:
        room = yield self.own(me, "room")
        yield self.keep(me, "room", max(room, done + self.scenario.depth))
        return ""

    def raise_room(self, me: int, hazards: frozenset[tuple[int, int]] | None) -> Program:
        done = yield self.own(me, "done")
        room = yield self.own(me, "room")
        if room < done + self.scenario.depth:
            if hazards is None:
                hazards = yield from self.hazards()
            if not hazards:
                yield self.keep(me, "room", done + self.scenario.depth)
        return ""

    def hazards(self, label: str = "load hazards") -> Program:
        if label:  # else Python reads them
            yield self.note("fence")
        announced = yield Op(label and "load announced", do.load, ("announced",), not self._hot["announced"])
        if not announced or self.has("room without a look"):
            return frozenset()
        hazards = yield Op(label, do.load_hazards)
        return hazards

    def of_the_living(self, hazards: frozenset[tuple[int, int]]) -> Program:
        left = tuple(sorted(hazards))
        while left:
            is_alive = yield Op("announcer alive?", do.ask_announcer, (left[0][0],), not self.scenario.waiters_die)
            if not is_alive and not self.has("wait for the dead"):
                hazards = hazards - {left[0]}
            left = left[1:]
        return hazards

    def publish_unless_closed(self, me: int) -> Program:
        is_closed = yield self.own(me, "is_closed")
        if is_closed:
            return ""
        hazards = None
        if self.has("look at hazards too early"):
            hazards = yield from self.hazards()
        yield from self.publish_completed(me)
        yield from self.raise_room(me, hazards)
        return ""

    # record.pxi

    def record(self, me: int, generation: int, stream: int, last: int) -> Program:
        yield from self.check(me)
        yield self.note("cuStreamIsCapturing")
        while not (yield from self.find_room(me, generation)):
            yield from self.make_room(me, generation)
            yield self.note("cuStreamIsCapturing")
        yield self.note("cuStreamGetId")
        is_awaited = True
        if self.has("awaited before publish"):
            is_awaited = yield self.load("awaited")
        if not (yield from self.in_turn(me, "r", self.record_and_publish, me, generation, stream, last)):
            yield from self.raise_no_record(me)
        if not self.has("awaited before publish"):
            is_awaited = yield from self.is_awaited()
        if not is_awaited:
            yield Op("", do.owe_nothing)
        elif not self.has("wake before publish"):
            yield Op("wake", do.wake)
        del is_awaited
        yield from self.raise_unless_open(me)
        return ""

    def is_awaited(self) -> Program:
        """With the bridge a waiter like others: its word is its own."""
        awaited = yield Op("load awaited", do.ask_awaited)
        if not awaited:
            yield self.note("load followed")
        return awaited

    def record_and_publish(self, me: int, generation: int, stream: int, last: int) -> Program:
        is_closed = yield self.own(me, "is_closed")
        if is_closed:
            return False
        state = yield self.load("state")
        if state != OPEN:
            return False
        del is_closed, state
        follows = 0
        if stream != last and generation > 1 and not self.has("no following"):
            follows = generation - 1
            yield self.note("cuStreamWaitValue64" if self.is_timeline else "cuStreamWaitEvent")
        publish = Op("store recorded", do.publish, (generation, not self.has("wake before publish")))
        if self.is_timeline:
            record = Op("cuStreamWriteValue64", do.write_word, (generation, stream, follows))
        else:
            record = Op("cuEventRecord", do.record, (generation, stream, follows))
        if self.has("publish before record"):
            yield publish
            yield self.note("fence")
        yield record
        if self.is_timeline:
            yield self.note("mark")
        yield self.keep(me, "made", generation)
        if self.has("wake before publish"):
            yield Op("wake", do.wake)
        if not self.has("publish before record"):
            yield publish
            yield self.note("fence")
        if self.has("harvest after overwrite"):
            yield from self.under_lock(me, "r", self.publish_completed, me)
        return True

    def raise_unless_open(self, me: int) -> Program:
        state = yield self.load("state")
        if state != OPEN:
            yield from self.raise_no_record(me)
        return ""

    def raise_no_record(self, me: int) -> Program:
        yield from self.check(me)
        raise Ended("closed")

    def recorder(self) -> Program:
        """A thread that records on one stream after another, then closes if it is to."""
        streams = self.scenario.streams
        index = self.scenario.recorded
        while index < len(streams):
            try:
                yield from self.record(RECORDER, index + 1, streams[index], streams[index - 1] if index else 0)
            except Ended:  # expired: all that is left to it is to let go
                break
            index += 1
        del index
        if self.scenario.closes:
            yield from self.close(RECORDER, "r")
        return "recorded"

    def heartbeat(self) -> Program:
        """The recorder's other thread: a few beats."""
        beats = 0
        while beats < len(self.scenario.streams):
            yield from self.under_lock(RECORDER, "h", self.publish_completed, RECORDER)
            beats += 1
        return "beaten"

    # query.pxi: the end of a use

    def is_idle(self, me: int) -> Program:
        if self.is_timeline:
            return True
        done = yield self.own(me, "done")
        made = yield self.own(me, "made")
        if done == made:
            return True
        complete = yield Op("cuEventQuery", do.event_query, (me, made))
        return complete

    def is_drained(self, me: int) -> Program:
        if me != RECORDER:
            return True
        state = yield self.load("state")
        if state not in (OPEN, CLOSED):
            drained = yield from self.is_idle(me)
            return drained
        yield from self.under_lock(me, "r", self.publish_completed, me)
        completed = yield self.load("completed")
        made = yield self.own(me, "made")
        return completed >= made

    def look_inside(self, me: int) -> Program:
        inside = yield self.own(me, "inside")
        return inside

    def let_go(self, me: int, thread: str) -> Program:
        if self.has("let go without the lock"):
            inside = yield from self.look_inside(me)
        else:
            inside = yield from self.under_lock(me, thread, self.look_inside, me)
        gone = not inside
        is_over = False
        if gone:
            is_over = yield Op("", do.ask_coordinator, (), not self.scenario.orphans)
        if gone and not is_over:
            gone = yield from self.is_drained(me)
        if is_over:
            gone = True
        elif gone and me == RECORDER:
            if self.is_timeline and not self.has("let go undrained"):
                gone = yield Op("markers?", do.ask_own_markers)
        elif gone:
            gone = yield Op("markers?", do.ask_markers, (me,))
        if gone:
            yield self.keep(me, "has_import", False)
        return gone

    def close(self, me: int, thread: str) -> Program:
        yield self.keep(me, "is_closed", True)
        yield Op("wake", do.wake)
        if me == RECORDER:
            yield Op("tell", do.store_own, (me, "told", "closed"))
        while not (yield from self.in_turn(me, thread, self.let_go, me, thread)):
            continue
        yield Op("tell", do.store_own, (me, "told", "left"))
        return "left"


class Model(Records):
    """The threads of one scenario."""

    # ipcsync_coordinator/effects.py

    def coordinator(self) -> Program:
        """Finishes the slot when its recorder is gone, frees it, and opens it anew."""
        news = yield Op("notice", do.notice, ("",))
        if news == "left":  # it told both before this one listened
            news = "closed"
        if news == "closed":
            yield from self.finish(CLOSED)
            news = yield Op("notice", do.notice, ("closed",))
            if news == "left":
                yield from self.drained()
        if news in ("dead", "expired"):
            yield from self.broken()
        is_released = self.is_timeline
        is_hasty = self.has("reuse before detach")
        while True:
            what = yield Op("proof?", do.await_proof, (is_hasty, is_released and not self.has("release once")))
            if what == "proven":
                break
            yield self.store("completed", MAX)
        if self.scenario.reuse:
            yield from self.freed()
            yield from self.opened()
        return "freed"

    def broken(self) -> Program:
        completed = yield Op("load completed", do.begin_break)
        recorded = yield Op("load recorded", do.see_what_is_kept)
        if self.is_timeline:  # what chains change here, `chain_model` has
            yield self.note("load first_dependent")
            yield self.note("load lost")
        watermark = min(completed, recorded)
        if self.is_timeline and self.has("release before state"):
            yield self.store("completed", MAX)
        if not self.has("watermark not taken"):
            yield self.store("watermark", watermark)
        yield from self.finish(BROKEN)
        if self.is_timeline:
            yield self.store("completed", MAX)
        yield Op("", do.store, ("breaking", "over"), True)
        return ""

    def finish(self, state: int) -> Program:
        wake = Op("wake", do.wake, (True,))
        if self.has("wake before state"):
            yield wake
            yield self.store("state", state)
        else:
            yield self.store("state", state)
            yield wake
        return ""

    def drained(self) -> Program:
        recorded = yield self.load("recorded")
        if self.is_timeline:
            if not self.has("watermark not taken"):
                yield self.store("watermark", recorded)
            yield self.store("completed", MAX)
        return ""

    def freed(self) -> Program:
        if not self.is_timeline:  # whether the ring may be used again
            yield self.note("load recorded")
            yield self.note("load completed")
        recorded = yield self.load("recorded")
        completed = yield self.load("completed")
        if completed != recorded:
            yield self.store("completed", recorded)
        yield from self.finish(FREE)
        return ""

    def opened(self) -> Program:
        """The new use, and the work of its recorder, which is complete at once."""
        base = yield self.load("recorded")
        yield self.store("recorder", 0)
        yield self.store("watermark", 0)
        for word in ("first_dependent", "valid_as_of", "lost", "root_cause"):
            yield self.note(f"store {word}")
        yield self.ask_to_be_woken(0)
        yield self.note("store followed")
        yield self.note("store announced")
        yield self.store("incarnation", 2)
        yield self.store("state", OPEN)
        yield Op("a new recorder's work", do.work_anew, (base + 2,))
        return ""
