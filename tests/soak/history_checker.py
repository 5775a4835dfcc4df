"""Reads the histories of a soak, and says which promises they show broken.

What is known from outside of ipcsync decides: the truth words, which the recorders' streams wrote before each record;
the deeds of whoever killed and stopped; and the order of the one clock. A record's `start` and `end` enclose its call,
so of two calls one came first only if it ended before the other started: nothing here depends on what lies between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from tests.soak.history import DEEDS, NO_NAME, Op, Record, Result, generation_of, life_of, read, tag_of
from tests.soak.history_facts import FOREVER, Life, Place, Report, Use, Violation

_POINT_OPS = (Op.SYNCHRONIZE, Op.QUERY, Op.WAIT)
_ENDS_OF_USE = (Op.CLOSE_RECORDER, Op.CLOSE_WAITER, Op.DISCONNECT)
_SESSION = {Result.SESSION_EXPIRED}
_LOSABLE = {Result.OK, Result.RECORDER_LOST, Result.EVENT_CLOSED, Result.TIMEOUT} | _SESSION
_MAY: dict[int, set[Result]] = {
    Op.CONNECT: {Result.OK} | _SESSION,
    Op.OPEN_RECORDER: {Result.OK, Result.RECORDER_TAKEN, Result.TIMEOUT} | _SESSION,
    Op.OPEN_WAITER: {Result.OK, Result.TIMEOUT} | _SESSION,
    Op.ATTACH: {Result.OK, Result.RECORDER_LOST, Result.EVENT_CLOSED, Result.TIMEOUT} | _SESSION,
    Op.RECORD: {Result.OK, Result.TIMEOUT} | _SESSION,
    Op.WAIT: _LOSABLE,
    Op.SYNCHRONIZE: _LOSABLE,
    Op.QUERY: (_LOSABLE | {Result.NOT_YET}) - {Result.TIMEOUT},
    Op.STREAM: (_LOSABLE | {Result.CLIENT_CLOSED}) - {Result.TIMEOUT},
    Op.CLOSE_RECORDER: {Result.OK},
    Op.CLOSE_WAITER: {Result.OK},
    Op.DISCONNECT: {Result.OK},
}

_LONGEST_DEATH_NS = 1_000_000_000


def check(directory: Path, *, ttl_s: float, slack_s: float = 2.0) -> Report:
    """Check all histories of a soak whose leases lasted `ttl_s` seconds.

    `slack_s` is how late a wake-up may be before it counts as lost.
    """
    return _Checker(directory, int(ttl_s * 1e9), int(slack_s * 1e9)).run()


class _Checker:
    def __init__(self, directory: Path, ttl_ns: int, slack_ns: int) -> None:
        self._paths = {life_of(path): path for path in sorted(directory.glob("life-*.history"))}
        self._deeds = directory / DEEDS
        self._ttl_ns = ttl_ns
        self._slack_ns = slack_ns
        self._report = Report()
        self._lives: dict[int, Life] = defaultdict(Life)
        self._uses: dict[int, Use] = {}
        self._tags: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int, int], Place] = defaultdict(Place)
        self._losses: list[tuple[int, Record]] = []
        self._told_late: set[tuple[int, int, int]] = set()  # life, slot and incarnation
        self._timeouts: list[tuple[int, Record]] = []
        self._early_ends: list[tuple[int, Record]] = []  # a stream went on without its point being good

    def run(self) -> Report:
        self._read_deeds()
        for life in self._paths:
            for record in read(self._paths[life]):
                self._learn(life, record)
        for life in self._paths:
            self._check_life(life)
        self._check_losses()
        self._check_timeouts()
        self._check_streams()
        self._check_slots()
        self._check_names()
        return self._report

    def _blame(self, rule: str, life: int, text: object) -> None:
        self._report.violations.append(Violation(rule, life, str(text)))

    def _tag(self, record: Record) -> int:
        return record.tag or self._tags.get((record.slot, record.incarnation), 0)

    # --- what is known ------------------------------------------------------------------------------------------------

    def _read_deeds(self) -> None:
        for deed in read(self._deeds):
            life = self._lives[deed.slot]
            if deed.op == Op.KILL:
                life.killed_at = deed.start
            elif deed.op == Op.STOP:
                life.stops.append((deed.start, FOREVER))
            elif deed.op == Op.CONTINUE:
                life.stops[-1] = (life.stops[-1][0], deed.end)
            elif deed.op == Op.EXIT:
                life.exited_at, life.status = deed.end, deed.generation
                if deed.generation and not life.killed_at:
                    self._blame("died", deed.slot, f"it ended by itself with status {deed.generation}")

    def _learn(self, life: int, record: Record) -> None:
        """What other lives' records are judged by: who recorded what until when, and who left when."""
        op, result = record.op, record.result
        if op == Op.LATE:
            self._lives[life].lates.append((record.start, record.end))
        if op == Op.DISCONNECT or result == Result.SESSION_EXPIRED:
            self._lives[life].goodbyes.append((record.start, record.end))
        if op == Op.OPEN_RECORDER and result == Result.OK:
            known = self._tags.setdefault((record.slot, record.incarnation), record.tag)
            if known != record.tag:
                self._blame("two recorders", life, f"one use of a slot was given to two: {record}")
            opened = self._uses.setdefault(record.tag, Use(life, record.name, record.end))
            opened.closed_at = FOREVER  # it may be opened again by its own recorder, while that has it open otherwise
        elif op == Op.RECORD and result == Result.OK:
            use = self._uses.get(record.tag)
            if use is None or record.generation != use.recorded + 1:
                self._blame("generations", life, f"not the one after {use.recorded if use else 'none'}: {record}")
            if use is not None:
                use.recorded, use.last_record = record.generation, record.start
        elif op == Op.CLOSE_RECORDER and record.tag in self._uses:
            closed = self._uses[record.tag]
            closed.closed_at = min(closed.closed_at, record.start)

    # --- one life -----------------------------------------------------------------------------------------------------

    def _check_life(self, life: int) -> None:
        begun: Record | None = None
        left: set[tuple[int, int]] = set()  # uses that this life closed itself
        seen_good: set[int] = set()  # holds of points that were complete
        has_left_all = False
        last = 0
        for record in read(self._paths[life]):
            self._report.counts[record.op, record.result] += 1
            last = record.end
            where = record.slot, record.incarnation
            if record.result == Result.BEGUN:
                begun = record
                has_left_all |= record.op == Op.DISCONNECT
                if record.op in _ENDS_OF_USE:
                    left.add(where)
                continue
            begun = None
            if record.op == Op.CONNECT and record.result == Result.OK:
                has_left_all = False
            if record.op == Op.DESCRIPTORS:
                if record.generation > record.slot:
                    self._blame("leak", life, f"{record.slot} file descriptors became {record.generation}")
                continue
            self._check_result(life, record, has_left_all or where in left)
            if record.op in _POINT_OPS or record.op == Op.STREAM:
                self._check_point(life, record, seen_good)
            self._place(life, record)
        self._check_end(life, begun, last)

    def _check_result(self, life: int, record: Record, left: bool) -> None:
        """Whether such a call may end so at all."""
        if record.op == Op.STUCK:
            self._blame("lost wake-up", life, f"a stream does not get past it: {record}")
        if record.op not in _MAY:
            return
        if record.result not in _MAY[record.op]:
            self._blame("error", life, record)
        elif record.result == Result.SESSION_EXPIRED and not self._may_expire(life, record.start, record.end):
            self._blame("expired", life, f"it was never stopped for a TTL: {record}")
        elif record.result == Result.EVENT_CLOSED and record.op in _POINT_OPS and not left:
            self._blame("closed", life, f"nobody here closed it: {record}")
        elif record.result == Result.TIMEOUT and not self._lives[life].was_stopped(record.start, record.end):
            if record.op in _POINT_OPS:
                self._timeouts.append((life, record))
            elif not self._was_overloaded(record.start, record.end):
                self._blame("lost wake-up", life, f"it ended by its timeout: {record}")

    def _may_expire(self, life: int, start: int, until: int) -> bool:
        """Whether this life was stopped for long before `until`, or its threads, or any around then, could not run."""
        # A pause shorter than a TTL can expire a session whose last heartbeat was old already.
        stops = self._lives[life].stops
        was_stopped = any(start < until and min(end, until) - start > self._ttl_ns // 2 for start, end in stops)
        was_late = any(start < until for start, _ in self._lives[life].lates)
        return was_stopped or was_late or self._was_overloaded(start - 2 * self._ttl_ns, until)

    def _was_overloaded(self, start: int, end: int) -> bool:
        """Whether meanwhile the machine did not get on.

        Some thread that nobody had stopped was kept waiting for a processor, or a killed process could not even end.
        """
        lives = self._lives.values()
        return any(
            late < end and start < ran and not state.was_stopped(late, ran)
            for state in lives
            for late, ran in state.lates
        ) or any(
            0 < state.killed_at < end
            and start < state.exited_at
            and state.exited_at - state.killed_at > _LONGEST_DEATH_NS
            for state in lives
        )

    def _check_point(self, life: int, record: Record, seen_good: set[int]) -> None:
        covered = tag_of(record.truth) == self._tag(record) != 0 and generation_of(record.truth) >= record.generation
        if record.result == Result.OK and record.op != Op.WAIT:
            if not covered:
                self._blame("silent pass", life, record)
            if record.op != Op.STREAM:
                seen_good.add(record.held)
        elif record.op == Op.STREAM:
            if not covered:
                self._early_ends.append((life, record))
        elif record.result in (Result.NOT_YET, Result.RECORDER_LOST):
            if record.held in seen_good:
                self._blame("taken back", life, f"this process saw it complete before: {record}")
            if record.result == Result.RECORDER_LOST:
                self._losses.append((life, record))

    def _place(self, life: int, record: Record) -> None:
        if record.op == Op.ATTACH and record.result == Result.EVENT_CLOSED:
            place = self._places[record.slot, record.incarnation]
            place.gone_at = min(place.gone_at, record.end)
        elif record.incarnation and record.result in (Result.OK, Result.NOT_YET) and record.op not in _ENDS_OF_USE:
            place = self._places[record.slot, record.incarnation]
            place.first_end = min(place.first_end, record.end)
            key = (life, record.slot, record.incarnation)
            if record.op == Op.ATTACH and record.engine == 2:
                self._told_late.add(key)
            # What became of a use that had ended is remembered: to be told it is no work on the slot.
            is_work = record.op != Op.STREAM and key not in self._told_late
            if record.start > place.last_start and is_work:
                place.last_start, place.last = record.start, (life, record)

    def _check_end(self, life: int, begun: Record | None, last: int) -> None:
        """Whether the last call of a life that did not return had the time to."""
        if begun is None:
            return
        state = self._lives[life]
        end = state.killed_at or state.exited_at or last
        stopped = sum(min(until, end) - start for start, until in state.stops if begun.start < until and start < end)
        if end - begun.start - stopped > begun.timeout_ms * 1_000_000 + 2 * self._slack_ns:
            self._blame("hang", life, f"{(end - begun.start) / 1e9:.1f} s later it had not returned: {begun}")

    # --- all together -------------------------------------------------------------------------------------------------

    def _may_be_lost(self, tag: int, generation: int, until: int) -> bool:
        """Whether anything happened before `until` for which this generation may be lost."""
        use = self._uses.get(tag)
        if use is None:
            return True  # its recorder was killed before it could say who it is, or none ever came
        life = self._lives[use.life]
        if 0 < life.killed_at < until or self._may_expire(use.life, until, until):
            return True
        if life.has_left(use.opened_at, until):
            return True
        return use.closed_at < until and generation > use.recorded

    def _check_losses(self) -> None:
        """A loss has a reason, and is for ever, in every process."""
        first: dict[int, list[Record]] = defaultdict(list)
        for life, record in self._losses:
            tag = self._tag(record)
            if not self._may_be_lost(tag, record.generation, record.end):
                self._blame("false loss", life, f"its recorder lived and had it: {record}")
            if tag:
                first[tag].append(record)
        known: dict[tuple[int, int], list[Record]] = defaultdict(list)
        for life, record in self._records_of(lambda record: self._tag(record) in first):
            if record.op not in (Op.SYNCHRONIZE, Op.QUERY, Op.WAIT) or record.result != Result.OK:
                continue
            tag = self._tag(record)
            if record.op == Op.WAIT:  # it asks the driver before it queues anything
                if generation_of(record.truth) >= record.generation:
                    known[tag, life].append(record)
                continue
            lost_at = min((r.end for r in first[tag] if r.generation <= record.generation), default=FOREVER)
            earlier = known[tag, life]
            if record.start > lost_at and not any(
                r.generation >= record.generation and r.start <= lost_at for r in earlier
            ):
                self._blame(
                    "loss undone", life, f"it was lost {(record.start - lost_at) / 1e6:.3f} ms before: {record}"
                )
            earlier.append(record)

    def _check_timeouts(self) -> None:
        """A wait that ran into its timeout, though what it waited for had come, or could never come, long before."""
        tags = {self._tag(record) for _, record in self._timeouts} - {0}
        good: dict[int, list[Record]] = defaultdict(list)
        for _, record in self._records_of(lambda record: self._tag(record) in tags):
            if record.result != Result.BEGUN:
                good[self._tag(record)].append(record)
        for life, record in self._timeouts:
            tag = self._tag(record)
            due = self._due(record, tag, good[tag])
            deadline = record.start + record.timeout_ms * 1_000_000
            if due + self._slack_ns < deadline:
                self._blame("lost wake-up", life, f"due {(deadline - due) / 1e9:.3f} s before its deadline: {record}")

    def _due(self, wait: Record, tag: int, records: list[Record]) -> int:
        """When at the latest a wait had no reason to go on."""
        use = self._uses.get(tag)
        if use is None:
            return FOREVER
        recorder = self._lives[use.life]
        due = recorder.killed_at or FOREVER
        recorded = seen = FOREVER
        for record in records:
            is_done = record.result == Result.OK and record.op in (Op.SYNCHRONIZE, Op.QUERY)
            is_lost = record.result == Result.RECORDER_LOST and record.generation <= wait.generation
            if is_lost or (is_done and record.generation >= wait.generation):
                due = min(due, record.end)
            if record.op == Op.RECORD and record.result == Result.OK and record.generation == wait.generation:
                recorded = record.end
            if tag_of(record.truth) == tag and generation_of(record.truth) >= wait.generation:
                seen = min(seen, record.end)
        if wait.op == Op.WAIT:  # its host part ends with the record
            due = min(due, recorded)
        elif not recorder.was_stopped(recorded, wait.end):
            due = min(due, max(recorded, seen))
        return due

    def _check_streams(self) -> None:
        """A stream goes on behind a wait without its point being good only where the point may be lost."""
        for life, record in self._early_ends:
            excused = record.result in (
                Result.RECORDER_LOST,
                Result.SESSION_EXPIRED,
                Result.EVENT_CLOSED,
                Result.CLIENT_CLOSED,
            )
            if not excused or not self._may_be_lost(self._tag(record), record.generation, record.end):
                self._blame("silent pass", life, f"the stream went on: {record}")

    def _check_slots(self) -> None:
        """Nothing works on an incarnation any more once it was told gone, or a later one was seen."""
        by_slot: dict[int, list[tuple[int, Place]]] = defaultdict(list)
        for (slot, incarnation), place in self._places.items():
            by_slot[slot].append((incarnation, place))
        for places in by_slot.values():
            over = FOREVER
            for _, place in sorted(places, key=lambda pair: -pair[0]):
                over_here = min(over, place.gone_at)
                if place.last is not None and place.last_start > over_here:
                    life, record = place.last
                    self._blame(
                        "reused slot",
                        life,
                        f"its use was over {(record.start - over_here) / 1e6:.3f} ms before: {record}",
                    )
                over = min(over, place.first_end)

    def _check_names(self) -> None:
        """A name has one recorder at a time."""
        by_name: dict[int, list[Use]] = defaultdict(list)
        for use in self._uses.values():
            if use.name != NO_NAME:
                by_name[use.name].append(use)
        for name, uses in by_name.items():
            uses.sort(key=lambda use: use.opened_at)
            for use, following in pairwise(uses):
                if use.last_record > following.opened_at:
                    self._blame(
                        "two recorders", use.life, f"it records on e{name}, which life {following.life} has since"
                    )

    def _records_of(self, wanted: Callable[[Record], bool]) -> Iterator[tuple[int, Record]]:
        for life, path in self._paths.items():
            for record in read(path):
                if wanted(record):
                    yield life, record
