"""A replay: the block around the launch of graphs that wait for points and record on events."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ipcsync._deadline import deadline_of, left_of
from ipcsync._drivers import DriverObject
from ipcsync._locks import CallLock, under, under_within
from ipcsync._native import foreign, fork
from ipcsync._native.stream import stream_handle
from ipcsync.client.event import SharedEvent
from ipcsync.client.graphs import ahead as passing
from ipcsync.client.graphs import engines
from ipcsync.client.graphs._lane import Lane, Plan, lane_of, lanes
from ipcsync.client.graphs.captured import GraphRecord, GraphWait
from ipcsync.client.point import Point
from ipcsync.errors import CaptureError, DeviceMismatch, IpcSyncError
from ipcsync.typing import StreamLike

if TYPE_CHECKING:
    from ipcsync._session.session import Session

_PATIENCE_S = 1.0  # of a close, for a call of another thread that is inside the driver

_claims = CallLock()  # of what is in use by open replays


class Replay:
    """What a block of `Client.replay` gives: behind the block, `replay[record]` is the point of each GraphRecord."""

    def __init__(self, records: Iterable[GraphRecord]) -> None:
        self._records = frozenset(records)
        self._points: dict[GraphRecord, Point] = {}
        self._is_over = self._is_used = False

    @property
    def is_used(self) -> bool:
        """Whether anything was queued for it; not in a block of `Client.next` in which torch replayed nothing."""
        return self._is_used

    def __getitem__(self, record: GraphRecord) -> Point:
        if record not in self._records:
            raise KeyError(record)
        if not self._is_over:
            raise CaptureError("the points of a replay are there after its block: it is recorded once all is launched")
        if record not in self._points:
            raise CaptureError(
                "this replay made no such record: its block raised, or an earlier record of the event did, or nothing "
                "was replayed"
            )
        return self._points[record]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a replay does not travel: send the bytes of its points")


class Replaying:
    """A block within which graphs are launched on one stream. Made by `Client.replay`; used once.

    If nothing refers to it any more, as after an exception at its very end, the next replay there ends it.
    """

    def __init__(
        self,
        session: Session,
        waits: Mapping[GraphWait, Point],
        records: Mapping[GraphRecord, SharedEvent],
        stream: StreamLike | None,
        timeout: float | None,
        *,
        ahead: bool,
    ) -> None:
        self._session = session
        self._waits = dict(waits)
        self._records = dict(records)
        self._stream = stream
        self._timeout = timeout
        self._ahead = ahead
        for key, value in (*self._waits.items(), *self._records.items()):
            _check_type(key, value)
        deadline_of(timeout)
        self._replay = Replay(self._records)
        self._lane: Lane | None = None
        self._handle: DriverObject = None
        self._pending: Sequence[GraphWait] = ()
        self._fed: Sequence[engines.Queued] = ()
        self._error: BaseException | None = None
        self._failed: set[SharedEvent] = set()

    # --- the beginning ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Replay:
        self._enter(*self._where())
        return self._replay

    def _where(self) -> tuple[DriverObject, int]:
        """The launch stream. Raises CaptureError if torch would launch elsewhere."""
        if self._lane is not None or self._replay._is_over:
            raise CaptureError("a replay is used once: ask Client.replay for another one")
        self._session.check()
        handle, ordinal = stream_handle(self._stream)
        self._raise_if_elsewhere(int(handle), ordinal)
        return handle, ordinal

    def _raise_if_elsewhere(self, address: int, ordinal: int) -> None:
        current = foreign.torch_stream(ordinal)
        if current is not None and foreign.stream_pointer(current) != address:
            raise CaptureError(
                "the replay's stream is not torch's current one, on which torch launches graphs: enter "
                "`with torch.cuda.stream(…)` first, or leave `stream` out"
            )

    def _enter(self, handle: DriverObject, ordinal: int) -> None:
        """Wait until all can be queued, and queue what comes before the launch."""
        deadline = deadline_of(self._timeout)
        self._handle = handle
        while not self._try_enter(*lane_of(handle, ordinal), deadline):
            pass  # another thread took the lane for another stream

    def _try_enter(self, lane: Lane, stream_id: int, deadline: int) -> bool:
        pending = self._check(lane, deadline)
        plan = lane.plan(self._waits, self._records)
        lane.await_room(plan, deadline, self._timeout, self._session.check_liveness)
        try:
            return under(lane.lock, self._begin, lane, stream_id, plan, pending)
        except BaseException:
            under(lane.lock, self._give_up, lane)
            raise

    def _check(self, lane: Lane, deadline: int) -> list[GraphWait]:
        """The waits whose points are pending; raises for everything that may be refused."""
        for each in (*self._waits, *self._records):
            if each._index != lane.ordinal:
                raise DeviceMismatch(f"{each!r} is for another device than the stream's, {lane.ordinal}")
            if not each._place:
                raise CaptureError(f"{each!r} was never captured: call its capture within a capture first")
        if self._ahead:
            passing.check(lane.ordinal)
        for point in self._waits.values():
            if point._attached is None:
                point._bound_within(self._timeout)
        if not self._ahead:
            engines.raise_if_unmade(self._waits.values(), self._records.values())
        pending = [wait for wait, point in self._waits.items() if not point.query()]
        for wait in pending:
            if not self._ahead:
                engines.await_recorded(self._waits[wait], deadline, self._timeout)
            engines.check_fed(self._waits[wait], ahead=self._ahead)
        for event, count in collections.Counter(self._records.values()).items():
            oldest = engines.check_recorded(event, lane.ordinal, count)
            engines.raise_if_lost(lane.key, event)
            if oldest:
                event.at(oldest).synchronize(None if self._timeout is None else left_of(deadline))
        return pending

    def _begin(self, lane: Lane, stream_id: int, plan: Plan, pending: Sequence[GraphWait]) -> bool:
        if lane.stream_id != stream_id:
            return False
        under(_claims, lane.claim, plan, self, self._stream)
        self._lane, self._pending, self._replay._is_used = lane, pending, True
        self._fed = engines.by_event(self._waits[wait] for wait in pending)
        lane.prepare()
        if self._ahead and self._records:
            engines.list_all(lane.key, lane.drainer_id)
        listed = engines.list_points(self._fed, lane.key, lane.feeder_id)  # before they are queued
        due = {wait: engines.due(self._waits[wait]) for wait in pending}
        for wait, word in due.items():
            if word is None:
                self._waits[wait].wait(lane.feeder, timeout=0)
        lane.feed(self._fed, [due.get(wait) or lane.nothing for wait in plan.waits])
        engines.are_queued(listed)
        return True

    # --- the end ------------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit(error, self._elsewhere())

    def _elsewhere(self) -> CaptureError | None:
        """The error of a block that ends where torch launches on another stream than this one."""
        assert self._lane is not None
        try:
            self._raise_if_elsewhere(int(self._handle), self._lane.ordinal)
        except CaptureError as error:
            return error
        return None

    def _exit(self, error: BaseException | None, elsewhere: CaptureError | None = None) -> None:
        """Queue what comes behind the launch; without records if the block raised."""
        fork.check()
        lane = self._lane
        assert lane is not None
        self._error = elsewhere
        try:
            under(lane.lock, self._end, lane, is_whole=error is None and elsewhere is None)
        except BaseException:
            under(lane.lock, self._give_up, lane)
            raise
        if self._error is not None and error is None:
            raise self._error

    def _end(self, lane: Lane, *, is_whole: bool) -> None:
        self._replay._is_over = True
        if lane.owner is not self:
            self._session.check()
            raise CaptureError("this replay was ended by another call")
        lane.end()
        if is_whole and self._records:
            engines.list_all(lane.key, lane.drainer_id, self._fed if self._ahead else ())
        lane.drain(self._record if is_whole else None)

    def _record(self, record: GraphRecord) -> None:
        """Record on the drainer, behind the record's tap. It raises after the block: the other taps are drained first.

        Of an event, no later record takes the place of one that failed.
        """
        event = self._records[record]
        if event in self._failed:
            return
        assert self._lane is not None
        try:
            if self._ahead:  # else it stands behind all points that were fed
                behind = [self._waits[wait] for wait in self._pending if not record.is_surely_before(wait)]
                points = engines.by_event(behind)
                listed = engines.list_points(points, self._lane.drainer_id, self._lane.feeder_id, only_last=True)
                engines.are_queued(listed)
            self._replay._points[record] = engines.record(event, self._lane.drainer, self._timeout)
        except IpcSyncError as error:
            self._failed.add(event)
            self._error = self._error or error

    def _give_up(self, lane: Lane) -> None:
        """End the bracket after an exception, if it is this replay's."""
        self._replay._is_over = True
        if lane.owner is self:
            lane.finish()

    def end_from_outside(self) -> None:
        """End it as if its block had raised: its client is being closed."""
        lane = self._lane
        if lane is not None and not self._replay._is_over:
            under_within(lane.lock, _PATIENCE_S, self._give_up, lane)

    def is_of(self, session: Session) -> bool:
        """Whether it is of that session."""
        return self._session is session


def _check_type(key: object, value: object) -> None:
    kinds: dict[type[object], type[object]] = {GraphWait: Point, GraphRecord: SharedEvent}
    if not isinstance(value, kinds.get(type(key), ())):
        raise TypeError(
            "replay takes waits, a mapping from GraphWait to Point, and records, one from GraphRecord to SharedEvent, "
            f"but got {type(key).__name__}: {type(value).__name__}"
        )


def end_all(session: Session) -> None:
    """End the open replays of a session that is being closed: their graphs and streams go on."""
    if fork.is_in_bad_fork():
        return
    for lane in lanes():
        owner = lane.owner
        if isinstance(owner, Replaying) and owner.is_of(session):
            owner.end_from_outside()
