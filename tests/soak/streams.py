"""Watches a soak worker's streams: what each saw when it got past a wait, and why one does not."""

from __future__ import annotations

import time
from typing import Any

from tests.soak.history import Op, Result, generation_of, tag_of
from tests.soak.lanes import LOOK_NS, Gates, Pinned, Queued, RecordLane, WaitLane
from tests.soak.log import Notes
from tests.soak.oracle import STREAMS, Truth
from tests.soak.session import Known

_MUST_COME_NS = 12_000_000_000
_STRIKES = 4


class Streams:
    """All streams of a worker."""

    def __init__(self, notes: Notes, truth: Truth) -> None:
        self._notes = notes
        self._truth = truth
        self._pinned = Pinned()
        gates = Gates(self._pinned, lambda due, ran: notes.state(Op.LATE, Result.OK, start=due, end=ran))
        self.record = [RecordLane(self._pinned, gates) for _ in range(STREAMS)]
        self.wait = [WaitLane(self._pinned) for _ in range(2)]
        self.abandoned: list[Any] = []

    def put(self, lane: WaitLane, known: Known, start: int) -> None:
        """Look behind the wait just queued."""
        lane.put(known, start, known.cell, self._truth)

    @property
    def has_waits(self) -> bool:
        """Whether any stream is not known to be past its waits."""
        return any(lane.queued for lane in self.wait)

    def look(self) -> None:
        """Write down what streams saw that got past a wait, and look after those that do not."""
        for number, lane in enumerate(self.wait):
            while (found := lane.take_done()) is not None:
                self._judge(*found)
            if lane.queued and time.monotonic_ns() > lane.queued[0].look_at:
                self._judge_stuck(number)

    def leave(self) -> None:
        """The session is over: nothing can be asked of its points any more."""
        for number, lane in enumerate(self.wait):
            while (found := lane.take_done()) is not None:
                self._judge(*found, over=True)
            if lane.queued:
                self._abandon(number)

    def _judge(self, queued: Queued, truth: int, *, over: bool = False) -> None:
        """The stream is past a wait: either the work was done, or the point says that it will not be."""
        known = queued.known
        result = Result.OK
        if tag_of(truth) != known.tag or generation_of(truth) < known.key[2]:
            result = Result.CLIENT_CLOSED if over else self._notes.judge(Op.QUERY, known, known.point.query)
        self._notes.state(Op.STREAM, result, known=known, start=queued.start, truth=truth)

    def _judge_stuck(self, number: int) -> None:
        """A stream does not get on. On the event engine a recorder's death may do that; nothing else, nowhere else."""
        head = self.wait[number].queued[0]
        known = head.known
        result = self._notes.judge(Op.QUERY, known, known.point.query)
        if result in (Result.SESSION_EXPIRED, Result.CLIENT_CLOSED):
            return  # nothing is known of its points any more
        if result is Result.EVENT_CLOSED or (result is Result.RECORDER_LOST and not known.engine):
            self._abandon(number)
            return
        head.look_at = time.monotonic_ns() + LOOK_NS  # from now: this thread may have been inside a call for long
        if result is Result.NOT_YET:
            is_stuck = known.must_come and time.monotonic_ns() - head.start > _MUST_COME_NS
        else:
            head.strikes += 1  # it may have come, or been released, this moment
            is_stuck = head.strikes >= _STRIKES
        if is_stuck:
            truth = self._truth.read(head.cell)
            self._notes.state(Op.STUCK, result, known=known, start=head.start, truth=truth)
            self._abandon(number)

    def _abandon(self, number: int) -> None:
        """A stream that a dead recorder blocks for ever is left as it is; a process ends that has too many of them."""
        self.abandoned.append(self.wait[number])
        self.wait[number] = WaitLane(self._pinned)
