"""Brackets: what is queued around the launch of a graph, so that its constant operations wait and record once each.

A lane belongs to one launch stream L. It has two streams of its own, F that feeds and D that drains, four words, and
counts its brackets. Bracket r, in the host's order:

    prepare   on L   wait over >= r-1 · wait drained >= r-1 · all taps = 0 · armed = r
    feed      on F   wait over >= r-1 · (wait for the point · gate = 1) for each · fed = r
    the launch, on L: none, one, several, any graph; a graph holds only `wait gate >= 1` and `tap = 1`
    end       on L   all taps = 1 · wait fed >= r · all gates = 0 · over = r
    drain     on D   wait armed >= r · (wait tap >= 1 · record) for each · drained = r

`tests/faults/graph_model.py` is its model, and `tests/graphs/test_order.py` compares the two. Nobody needs to know what
an exception left undone: each step may be repeated, but for a feed, whose place `fed = r` alone takes, and an end,
which is repeated under the next number.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ipcsync._drivers import DriverObject, unwrap
from ipcsync._locks import CallLock, attempt, under, under_within
from ipcsync._native import capture, context
from ipcsync._native.context import LEGACY, OnDevice
from ipcsync._native.stream import Stream
from ipcsync._shared import items_of
from ipcsync.client.graphs import _words as words
from ipcsync.client.graphs import captured, engines
from ipcsync.client.graphs._words import Batch, Step
from ipcsync.client.graphs.captured import Captured
from ipcsync.errors import CaptureError, WaitTimeout

if TYPE_CHECKING:
    from ipcsync.client.graphs.captured import GraphRecord, GraphWait

_IDLE, _PREPARING, _FEEDING, _OPEN, _ENDING, _DRAINING = range(6)
_OPERATIONS = 900  # of a stream's queue, which takes in some 1,024
_MOST = 32  # brackets in flight
_PLANS = 64  # that are kept
_MANY = 32  # lanes
_LEGACY = 1  # CU_STREAM_LEGACY
_PATIENCE_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


_uses: weakref.WeakKeyDictionary[Captured, tuple[Lane, int]] = weakref.WeakKeyDictionary()
"""The lane and the number of the last bracket that a wait or record was in."""


class Plan:
    """The batches of a bracket over these gates and taps. They are in the order of their captures."""

    def __init__(self, lane: Lane, waits: Sequence[GraphWait], records: Sequence[GraphRecord]) -> None:
        self.waits, self.records = waits, records
        self.all: tuple[Captured, ...] = (*waits, *records)
        gates = [each._word for each in waits]
        taps = [each._word for each in records]
        ended = [words.wait_number(lane.over, 1), words.wait_number(lane.drained, 1)]
        self.prepare = Batch([*ended, *(words.write(tap, 0) for tap in taps), words.write_number(lane.armed)])
        self.fed = Batch([words.write_number(lane.fed)])
        opens = [step for gate in gates for step in (words.wait(lane.over, 0), words.write(gate, 1))]
        self.feed = Batch([ended[0], *opens, words.write_number(lane.fed)])
        self.end = Batch([*self.ending(words.wait_number(lane.fed)), words.write_number(lane.over)])
        armed = [words.wait_number(lane.armed)]
        self.tapped = [Batch([*(armed if n == 0 else []), words.wait(tap, 1)]) for n, tap in enumerate(taps)]
        self.armed = Batch(armed)
        self.drained = Batch([words.write_number(lane.drained)])
        most = max(2 * len(gates) + 2, len(gates) + len(taps) + 6, 2 * len(taps) + 2)
        self.in_flight = max(1, min(_MOST, _OPERATIONS // most))

    def ending(self, fed: Step) -> list[Step]:
        """The operations that end a bracket, but for the last; `fed` is the wait for its feed."""
        gates = [words.write(each._word, 0) for each in self.waits]
        return [*(words.write(each._word, 1) for each in self.records), fed, *gates]


class Lane:
    """The brackets of one launch stream, one open at a time. What changes it is called with its lock held."""

    def __init__(self, ordinal: int, home: DriverObject) -> None:
        self.ordinal = ordinal
        self.home = home  # the launch stream's context
        self.lock = CallLock()
        self._launch: DriverObject = None
        self.key = self.stream_id = 0
        self.over, self.drained, self.armed, self.fed = (words.take(ordinal) for _ in range(4))
        least = Stream.priority_range()[1]
        self.feeder, self.drainer = Stream(ordinal, least), Stream(ordinal, least)
        driver = context.driver()
        ids = [int(unwrap(driver.cuStreamGetId(each._handle), "cuStreamGetId")) for each in self._own]
        self.feeder_id, self.drainer_id = ids
        self._at = (_IDLE, 0)  # the step that is done or under way, and the number of its bracket
        self._prepared = 0  # the number under which the open bracket was prepared, and is fed
        self._owner: weakref.ref[object] | None = None
        self._stream: object = None  # what the launch stream was taken from: it lives as long as a bracket is open
        self._plan: Plan | None = None
        self._others: Batch | None = None  # waits for brackets of other lanes with the same words
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._planned_at = 0  # the newest capture when they were made

    @property
    def _own(self) -> tuple[Stream, Stream]:
        return self.feeder, self.drainer

    @property
    def owner(self) -> object | None:
        """Whose bracket is open, None if none is, or if its owner is gone."""
        return None if self._owner is None else self._owner()

    def serve(self, launch: DriverObject, stream_id: int, key: int) -> None:
        """Be the lane of this launch stream, whose list of waits is `key`."""
        self._launch, self.key, self.stream_id = launch, key, stream_id

    def leave(self) -> bool:
        """Serve no stream from now on, if all brackets are over; whether they are. Called with the lock held."""
        if self.is_free:
            self.stream_id = 0
        return not self.stream_id

    @property
    def is_free(self) -> bool:
        """Whether all brackets are over, and nothing lost stands in the way of its own streams."""
        step, number = self._at
        is_over = self._plan is None and step == _IDLE and number == self.over.value == self.drained.value
        return is_over and not engines.has_any(self.feeder_id) and not engines.has_any(self.drainer_id)

    @property
    def nothing(self) -> tuple[int, int, int]:
        """What a gate waits for whose point is complete."""
        return self.over.address, 0, 0

    def has_open(self, each: Captured) -> bool:
        """Whether an open bracket has it."""
        plan = self._plan
        return plan is not None and each in plan.all

    def plan(self, waits: Iterable[GraphWait], records: Iterable[GraphRecord]) -> Plan:
        """The batches for these, in the order of their captures."""
        if self._planned_at != captured.newest() or len(self._plans) >= _PLANS:
            self._plans.clear()
            self._planned_at = captured.newest()
        key = (tuple(waits), tuple(records))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = Plan(self, sorted(key[0], key=_place), sorted(key[1], key=_place))
        return plan

    def await_room(self, plan: Plan, deadline_ns: int, timeout: float | None, check: Callable[[], None]) -> None:
        """Block until few enough brackets are in flight, at most until `deadline_ns`."""
        pause_s = _FIRST_PAUSE_S
        while self._at[1] - self.drained.value >= plan.in_flight:
            check()
            if time.monotonic_ns() >= deadline_ns:
                raise WaitTimeout(
                    f"no room for a further replay: {plan.in_flight} are in flight, and the oldest was not over within "
                    f"{timeout} s",
                    timeout=timeout,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    # --- the steps ----------------------------------------------------------------------------------------------------

    def claim(self, plan: Plan, owner: object, stream: object) -> None:
        """Have the next bracket be `owner`'s. CaptureError if one is open on this stream, or over any of these words.

        What an exception left of an earlier one is ended first.
        """
        others: dict[Lane, int] = {}
        for each in plan.all:
            lane, number = _uses.get(each, (self, 0))
            if lane is self:
                continue
            if lane.has_open(each):
                if lane.owner is None:  # its own thread may be ending it, and wait for what this one holds
                    under_within(lane.lock, _PATIENCE_S, lane.finish)
                if lane.has_open(each):
                    raise CaptureError(f"{each!r} is in use: a replay on another stream that names it is not ended")
                number = _uses[each][1]
            others[lane] = max(others.get(lane, 0), number)
        if self._plan is not None:
            if self.owner is not None:
                raise CaptureError("a replay on this stream is open: one at a time, whichever thread or task it is")
            self.finish()
        waits = [words.wait(word, number) for lane, number in others.items() for word in (lane.over, lane.drained)]
        self._others = Batch(waits) if waits else None
        for each in plan.all:
            _uses[each] = (self, self._at[1] + 1)
        self._plan, self._stream = plan, stream
        self._owner = weakref.ref(owner)

    def prepare(self) -> None:
        """Prepare a bracket on L."""
        self._prepared = self._at[1] + 1
        self._at = (_PREPARING, self._prepared)
        self._prepare()

    def _prepare(self) -> None:
        assert self._plan is not None
        if self._others is not None:
            self._put(self._others, 0)
        self._put(self._plan.prepare, self._at[1])

    def _put(self, batch: Batch, number: int) -> None:
        """On L; the legacy stream is that of its context."""
        if int(self._launch) not in LEGACY:
            batch.put(self._launch, self.ordinal, number)
            return
        with OnDevice(self.ordinal, self.home) as inside, inside:
            batch.put(self._launch, self.ordinal, number)

    def feed(self, waits: Sequence[engines.Queued], due: Sequence[tuple[int, int, int]]) -> None:
        """Feed the bracket. `waits` are queued on F first.

        `due`: the word, the value and the flags that each gate waits for, in the order of the plan.
        """
        assert self._plan is not None
        plan, number = self._plan, self._at[1]
        self._at = (_FEEDING, number)
        if self._others is not None:
            self._feed(self._others)
        for index, each in enumerate(due):
            plan.feed.aim(1 + 2 * index, *each)
        engines.queue(self.feeder, self.feeder_id, waits, lambda: self._feed(plan.feed))
        self._at = (_OPEN, number)

    def _feed(self, batch: Batch) -> None:
        batch.put(self.feeder._handle, self.ordinal, self._at[1])

    def end(self) -> None:
        """End the bracket on L."""
        assert self._plan is not None
        self._at = (_ENDING, self._at[1])
        self._put(self._plan.end, self._at[1])

    def drain(self, record: Callable[[GraphRecord], object] | None) -> None:
        """Drain the bracket, and be ready for the next: `record` is called behind each tap, and raises nothing."""
        assert self._plan is not None
        plan = self._plan
        self._at = (_DRAINING, self._at[1])
        if not plan.records:
            self._drain(plan.armed)
        for each, tapped in zip(plan.records, plan.tapped, strict=True):
            self._drain(tapped)  # the first waits for `armed` too
            if record is not None:
                record(each)
        plan.drained.put(self.drainer._handle, self.ordinal, self._at[1])
        self._forget()

    def _drain(self, batch: Batch) -> None:
        batch.put(self.drainer._handle, self.ordinal, self._prepared)

    def _forget(self) -> None:
        plan, number = self._plan, self._at[1]
        assert plan is not None
        for each in plan.all:
            _uses[each] = (self, number)
        self._owner = self._others = self._stream = None
        self._at = (_IDLE, number)
        self._plan = None

    def finish(self) -> None:
        """End the open bracket, whatever an exception left of it, without records; does nothing if none is open."""
        plan = self._plan
        if plan is None:
            return
        step, number = self._at
        if step == _IDLE:
            self._forget()
            return
        if step == _PREPARING:
            self._prepare()  # perhaps again
        if step in (_PREPARING, _FEEDING):
            self._feed(plan.fed)  # perhaps behind a part of the feed, or all of it
        if step == _ENDING:  # perhaps it is over by now, and once more under its number would spoil the next one
            self._at = (_ENDING, number + 1)
            end = [*plan.ending(words.wait(self.fed, self._prepared)), words.write_number(self.over)]
            self._put(Batch(end), number + 1)
        elif step != _DRAINING:
            self.end()
        self.drain(None)


def _place(each: GraphWait | GraphRecord) -> int:
    return each._place


_lanes: dict[int, Lane] = {}
_lock = CallLock()


def lane_of(launch: DriverObject, ordinal: int) -> tuple[Lane, int]:
    """The lane of a launch stream of device `ordinal`, made at its first replay, and the stream's id.

    StreamCapturing if it captures.
    """
    with OnDevice(ordinal) as inside, inside:
        capture.refuse_capturing(launch, "replay")
        driver = context.driver()
        stream_id = int(unwrap(driver.cuStreamGetId(launch), "cuStreamGetId"))
        return _lanes.get(stream_id) or under(_lock, _make, launch, ordinal, stream_id), stream_id


def _make(launch: DriverObject, ordinal: int, stream_id: int) -> Lane:
    lane = _lanes.get(stream_id)
    if lane is not None:
        return lane
    driver = context.driver()
    if int(launch) in LEGACY:
        if stream_id != int(unwrap(driver.cuStreamGetId(_LEGACY), "cuStreamGetId")):
            raise CaptureError("the per-thread default stream is another one on each thread: launch on one of your own")
        home = unwrap(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
    else:
        home = unwrap(driver.cuStreamGetCtx(launch), "cuStreamGetCtx")
    flags = unwrap(driver.cuStreamGetFlags(launch), "cuStreamGetFlags")
    lane = _take_free(home)
    if lane is None:
        with OnDevice(ordinal, home) as inside, inside:
            lane = Lane(ordinal, home)
    lane.serve(launch, stream_id, engines.key_of(flags, stream_id, ordinal))
    _lanes[stream_id] = lane
    return lane


def _take_free(home: DriverObject) -> Lane | None:
    """The lane of a stream without replays now, once there are many: a program may make a stream for each launch."""
    for stream_id, lane in items_of(_lanes) if len(_lanes) >= _MANY else ():
        if int(lane.home) == int(home) and attempt(lane.lock, 0.0, lane.leave):
            del _lanes[stream_id]
            return lane
    return None


def beside(launch: DriverObject, ordinal: int) -> list[Stream]:
    """The library's own streams beside a launch stream, if it has had a replay."""
    if not _lanes:
        return []
    with OnDevice(ordinal) as inside, inside:
        capture.refuse_capturing(launch, "resume")  # asking for the id would invalidate the capture
        stream_id = int(unwrap(context.driver().cuStreamGetId(launch), "cuStreamGetId"))
    lane = _lanes.get(stream_id)
    return [] if lane is None else [lane.feeder, lane.drainer]


def lanes() -> list[Lane]:
    """All lanes of this process."""
    return [lane for _, lane in items_of(_lanes)]
