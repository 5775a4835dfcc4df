"""One life of a soak's worker: does at random what users do, and writes down what it did and saw.

It holds to the rules of a user (its streams are its own, and what it closed it uses no more but to see that it is
refused), and to none besides: it may be stopped, continued or killed anywhere.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import ipcsync
from ipcsync._session.attachments import Finished
from ipcsync._session.session import is_here
from ipcsync.typing import EngineName
from tests.kit.descriptors import descriptors
from tests.soak.history import NO_NAME, Op, Record, Result, path_of
from tests.soak.lanes import RecordLane
from tests.soak.log import Notes
from tests.soak.mailbox import Letter, Mailbox
from tests.soak.oracle import CELLS, Truth, new_tag, stream_of
from tests.soak.session import NOBODY, Channel, Known, Plan, Session, key_of
from tests.soak.streams import Streams

LONG_S = 20.0  # for what must come: nothing may ever need it
_SHORT_S, _PATIENT_S = 0.2, 6.0  # for what need not come
_REQUEST_S = 15.0
_CLOSELY_S = 0.02
_MOST_ABANDONED = 4
_GOODBYE_S = 10.0
_MOST_TRIES = 5  # to connect, if this process is stopped each time
_MOST_OPEN = 6
_REQUEST = Record(Op.CONNECT, Result.OK, timeout_ms=int(_REQUEST_S * 1000))
_LONG = Record(Op.RECORD, Result.OK, timeout_ms=int(LONG_S * 1000))


class Worker:
    """One life."""

    def __init__(self, plan: Plan, truth: Truth, index: int, life: int) -> None:
        self._plan = plan
        self._truth = truth
        self._index = index
        self._life = life
        self._random = random.Random(f"{plan.seed}:{life}")
        self._notes = Notes(plan.directory, life, truth, self._lose)
        self._mail = Mailbox(plan.directory, index)
        self._cells = 0
        self._holds = 0
        self._session: Session | None = None
        self._lost: Session | None = None  # expired, and to be closed
        table: list[tuple[Callable[[Session], None], float]] = [
            (self._open_recorder, 4),
            (self._open_waiter, 3),
            (self._record, 14),
            (self._record_unnamed, 5),
            (self._send, 6),
            (self._wait, 16),
            (self._synchronize, 12),
            (self._query, 22),
            (self._query_closely, 3),
            (self._close_recorder, 1.5),
            (self._close_waiter, 2),
            (self._disconnect, 0.3),
        ]
        self._actions = [action for action, _ in table]
        self._weights = [weight for _, weight in table]

    # --- the life -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Live until the soak is over, or until this process is spent."""
        ipcsync.Stream()  # makes a context current, which pinned memory needs
        self._streams = Streams(self._notes, self._truth)
        before = self._descriptors_at_rest() if self._life % 8 == 0 else {}
        self._live()
        self._end_session()
        if before and not self._streams.abandoned:
            # A goodbye that a coordinator did not live to take is said again by a later beat.
            after = self._least_descriptors(len(before), _GOODBYE_S)
            self._notes.state(Op.DESCRIPTORS, Result.OK, slot=len(before), generation=len(after))
            if len(after) > len(before):
                self._notes.explain(RuntimeError(f"open at rest, at first: {before}; now: {after}"))
        self._notes.state(Op.END, Result.OK)
        self._notes.close()

    def _live(self) -> None:
        while not self._truth.is_over and not self._is_spent:
            session = self._session or self._connect()
            pause = self._random.expovariate(1 / self._plan.pace_s)
            select.select([self._mail], [], [], min(pause, 1.0))
            self._streams.look()
            self._receive(session)
            if self._session is session:
                self._random.choices(self._actions, self._weights)[0](session)

    @property
    def _is_spent(self) -> bool:
        return self._cells >= CELLS or len(self._streams.abandoned) >= _MOST_ABANDONED

    def _descriptors_at_rest(self) -> dict[int, str]:
        """Those open after a first session, when what is opened once is open; none if that session expired."""
        session = self._connect()
        try:
            for engine in ("event", "timeline"):
                with session.client.event(f"warm-{self._life}-{engine}", recorder=True, engine=engine) as event:
                    event.record(self._streams.record[0].stream).synchronize(LONG_S)
        except ipcsync.SessionExpired:  # this process was stopped for longer than its lease
            return {}
        finally:
            self._disconnect(session)
        return self._least_descriptors(0)

    @staticmethod
    def _least_descriptors(enough: int, seconds: float = 1.0) -> dict[int, str]:
        """Where they lead once they are down to `enough`, or else after so long: ZeroMQ closes on its own thread."""
        gc.collect()
        deadline = time.monotonic() + seconds
        while len(found := descriptors()) > enough and time.monotonic() < deadline:
            select.select([], [], [], 0.02)
        return found

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _connect(self) -> Session:
        if self._lost is not None:
            lost, self._lost = self._lost, None
            self._disconnect(lost)
        for _ in range(_MOST_TRIES):
            record, client = self._notes.attempt(
                _REQUEST, lambda: ipcsync.connect(self._plan.endpoint, name=f"w{self._index}", timeout=_REQUEST_S)
            )
            self._notes.write(record)
            if client is not None:
                client.timeout = _REQUEST_S  # an attach first tells the session's closes, one after the other
                self._session = Session(client)
                return self._session
            if record.result != Result.SESSION_EXPIRED:
                break
        raise RuntimeError("no session: the history says why")

    def _lose(self) -> None:
        self._lost, self._session = self._session or self._lost, None

    def _disconnect(self, session: Session) -> None:
        self._session = None
        record, _ = self._notes.attempt(Record(Op.DISCONNECT, Result.OK, timeout_ms=10_000), session.client.close)
        self._notes.write(record)
        self._streams.leave()

    def _end_session(self) -> None:
        """Close what is open, when the streams are past what was queued; afterwards nothing here knows of it."""
        deadline = time.monotonic() + 3.0
        while self._session is not None and self._streams.has_waits and time.monotonic() < deadline:
            self._streams.look()
            select.select([], [], [], 0.01)
        for session in (self._session, self._lost):
            if session is not None:
                self._disconnect(session)
        self._lost = None

    # --- events -------------------------------------------------------------------------------------------------------

    def _open(self, session: Session, op: Op, channels: list[Channel]) -> tuple[Record, Channel] | None:
        name = self._random.randrange(self._plan.names)
        if len(channels) >= _MOST_OPEN or any(channel.name == name for channel in channels):
            return None

        def call() -> tuple[ipcsync.SharedEvent, tuple[int, int, int]]:
            event = session.client.event(
                f"soak/e{name}",
                recorder=op is Op.OPEN_RECORDER,
                engine=self._plan.engine_of(name),
                depth=self._random.choice((1, 2, 4)),
                timeout=_REQUEST_S,
            )
            return event, key_of(bytes(event.at(1)))

        record, found = self._notes.attempt(_REQUEST._replace(op=op, name=name), call)
        if found is None:
            self._notes.write(record)
            return None
        event, (slot, incarnation, _) = found
        engine = int(event.engine == "timeline")
        channel = Channel(event, name, engine, (slot, incarnation))
        channels.append(channel)
        return record._replace(slot=slot, incarnation=incarnation, engine=engine), channel

    def _open_recorder(self, session: Session) -> None:
        found = self._open(session, Op.OPEN_RECORDER, session.recorders)
        if found is None:
            return
        record, channel = found
        earlier = session.own.get(channel.where)
        if earlier is None:
            self._claim(record, channel)
        else:  # closed as a recorder's and still open as a waiter's: it is the same use, with its recorder
            channel.tag, channel.cell, channel.recorded = earlier.tag, earlier.cell, earlier.recorded
            self._notes.write(record._replace(tag=channel.tag))
        session.own[channel.where] = channel

    def _claim(self, record: Record, channel: Channel) -> None:
        """Say before the first record which use this is."""
        channel.tag = new_tag(self._random, one_stream=channel.lane is not None)
        channel.cell = self._truth.cell(self._life, self._cells)
        self._cells += 1
        self._truth.publish(*channel.where, channel.tag, channel.cell)
        self._notes.write(record._replace(tag=channel.tag))

    def _open_waiter(self, session: Session) -> None:
        found = self._open(session, Op.OPEN_WAITER, session.waiters)
        if found is not None:
            self._notes.write(found[0])

    def _close(self, op: Op, channels: list[Channel]) -> None:
        if channels:
            channel = channels.pop(self._random.randrange(len(channels)))
            assert channel.event is not None
            slot, incarnation = channel.where
            blank = Record(op, Result.OK, channel.name, slot, incarnation, tag=channel.tag, timeout_ms=5000)
            record, _ = self._notes.attempt(blank, channel.event.close)
            self._notes.write(record)

    def _close_recorder(self, session: Session) -> None:
        self._close(Op.CLOSE_RECORDER, session.recorders)

    def _close_waiter(self, session: Session) -> None:
        self._close(Op.CLOSE_WAITER, session.waiters)

    # --- records ------------------------------------------------------------------------------------------------------

    def _record(self, session: Session) -> None:
        if session.recorders:
            channel = self._random.choice(session.recorders)
            for _ in range(self._random.choice((1, 1, 1, 8))):
                if self._session is session:
                    self._record_one(session, channel)

    def _record_one(self, session: Session, channel: Channel) -> None:
        event = channel.event
        assert event is not None
        lane = self._streams.record[stream_of(channel.tag, channel.recorded + 1)]
        self._record_on(session, channel, lane, lambda: event.record(lane.stream, timeout=LONG_S))

    def _record_unnamed(self, session: Session) -> None:
        engine: EngineName = "timeline" if self._plan.engine == "timeline" else "event"
        lane = self._streams.record[0]
        if session.unnamed is None:
            session.unnamed = Channel(None, NO_NAME, int(engine == "timeline"), lane=lane)
        self._record_on(session, session.unnamed, lane, lambda: session.client.record(lane.stream, engine=engine))

    def _record_on(
        self, session: Session, channel: Channel, lane: RecordLane, call: Callable[[], ipcsync.Point]
    ) -> None:
        if self._random.random() < 0.15:
            lane.hold(min(self._random.expovariate(1 / 0.06), 1.0))
        if not channel.tag:
            self._first_unnamed(channel, call)
            return
        generation = channel.recorded + 1
        self._truth.write_behind(lane.stream.cuda_stream, channel.cell, channel.tag, generation)
        slot, incarnation = channel.where
        blank = _LONG._replace(
            name=channel.name, slot=slot, incarnation=incarnation, generation=generation, tag=channel.tag,
            engine=channel.engine,
        )  # fmt: skip
        record, point = self._notes.attempt(blank, call)
        if point is None:
            self._notes.write(record)
            return
        channel.recorded = point.generation
        self._notes.write(record._replace(generation=point.generation))
        known = self._know(session, point, channel, tag=channel.tag, cell=channel.cell)
        for _ in range(self._random.choice((0, 1, 1, 2))):
            self._send_one(known)

    def _first_unnamed(self, channel: Channel, call: Callable[[], ipcsync.Point]) -> None:
        """An unnamed event has a slot, and so a cell, only from its first record on, whose point is told to nobody."""
        record, point = self._notes.attempt(_LONG._replace(op=Op.OPEN_RECORDER, engine=channel.engine), call)
        if point is None:
            self._notes.write(record)
            return
        slot, incarnation, channel.recorded = key_of(bytes(point))
        channel.where = slot, incarnation
        record = record._replace(slot=slot, incarnation=incarnation)
        self._claim(record, channel)
        self._notes.write(record._replace(op=Op.RECORD, generation=1, tag=channel.tag))

    # --- points -------------------------------------------------------------------------------------------------------

    def _know(
        self, session: Session, point: ipcsync.Point, of: Channel | Letter, *, must_come: bool = True, **fields: Any
    ) -> Known:
        self._holds += 1
        known = Known(point, of.name, self._holds, of.engine, must_come, **fields)
        if must_come:  # what need not come is looked at once
            session.known.append(known)
        return known

    def _send_one(self, known: Known) -> None:
        self._mail.send(self._random.randrange(self._plan.processes), known)

    def _send(self, session: Session) -> None:
        candidates = [known for known in session.known if known.cell != NOBODY]
        if candidates:
            self._send_one(self._random.choice(candidates))

    def _receive(self, session: Session) -> None:
        for _ in range(4):
            letter = self._mail.receive()
            if letter is None or self._session is not session:
                return
            self._attach(session, letter)

    def _attach(self, session: Session, letter: Letter) -> None:
        slot, incarnation, generation = key_of(letter.point)
        blank = _REQUEST._replace(
            op=Op.ATTACH, name=letter.name, slot=slot, incarnation=incarnation, generation=generation
        )
        record, point = self._notes.attempt(blank, lambda: session.client.point(letter.point))
        attached = None if point is None else point._attached
        is_late = attached is not None and isinstance(attached.engine, Finished)
        self._notes.write(record._replace(engine=2) if is_late else record)
        if point is not None:
            self._know(session, point, letter, tag=letter.tag, cell=letter.cell)

    def _some_point(self, session: Session) -> Known | None:
        """One that is known, or one by an open event: recorded already, or the next."""
        if not session.waiters or self._random.random() < 0.7:
            return self._random.choice(session.known) if session.known else None
        channel = self._random.choice(session.waiters)
        return self._point_of(session, channel, ahead=self._random.random() < 0.15)

    def _point_of(self, session: Session, channel: Channel, *, ahead: bool) -> Known | None:
        event = channel.event
        assert event is not None

        def call() -> tuple[ipcsync.Point, bool]:
            latest = event.generation
            is_next = ahead or latest == 0
            return event.at(latest + is_next), is_next

        slot, incarnation = channel.where
        # Asking for the point is a use as well, and may find the session expired.
        blank = Record(Op.QUERY, Result.OK, channel.name, slot, incarnation)
        record, found = self._notes.attempt(blank, call, blocks=False)
        if found is None:
            self._notes.write(record)
            return None
        point, is_next = found
        return self._know(session, point, channel, must_come=not is_next)

    # --- waits --------------------------------------------------------------------------------------------------------

    def _timeout_for(self, known: Known) -> float:
        return LONG_S if known.must_come else self._random.choices((_SHORT_S, _PATIENT_S), (19, 1))[0]

    def _synchronize(self, session: Session) -> None:
        known = self._some_point(session)
        if known is not None:
            timeout = self._timeout_for(known)
            self._notes.judge(Op.SYNCHRONIZE, known, lambda: known.point.synchronize(timeout), timeout)

    def _query(self, session: Session) -> None:
        known = self._some_point(session)
        if known is not None:
            self._notes.judge(Op.QUERY, known, known.point.query)

    def _query_closely(self, session: Session) -> None:
        """Ask for a generation again and again while it is being recorded, if it is."""
        known = self._point_of(session, self._random.choice(session.waiters), ahead=True) if session.waiters else None
        if known is None:
            return
        query = known.point.query
        deadline = time.monotonic() + _CLOSELY_S

        def call() -> bool:
            while not (is_done := query()) and time.monotonic() < deadline:
                continue
            return is_done

        self._notes.judge(Op.QUERY, known, call)

    def _wait(self, session: Session) -> None:
        lane = self._random.choice(self._streams.wait)
        known = None if lane.is_full else self._some_point(session)
        if known is None:
            return
        self._notes.learn(known)
        timeout = self._timeout_for(known)
        # Only where somebody records: behind a wait that nobody ever fulfils, a stream is of no use any more.
        ahead = bool(known.engine) and known.cell != NOBODY and not known.must_come and not _is_own(known.point)
        start = time.monotonic_ns()
        result = self._notes.judge(
            Op.WAIT, known, lambda: known.point.wait(lane.stream, timeout=timeout, ahead=ahead), timeout
        )
        # A wait that found its recorder lost may have been queued by then, and may hold the stream for ever.
        if result in (Result.OK, Result.RECORDER_LOST) and known.cell != NOBODY:
            self._streams.put(lane, known, start)


def _is_own(point: ipcsync.Point) -> bool:
    """Whether a session of this process records its event: then no stream may wait ahead."""
    engine = point._bound().engine
    return not isinstance(engine, Finished) and is_here(engine.board.epoch, engine.line.recorder)


def main(plan: Plan, truth: Truth, index: int, life: int) -> None:
    """The whole of a worker's process, forked from one that never used ipcsync."""
    # Whoever asks a worker that hangs for its stacks finds them beside its history.
    stacks = open(path_of(plan.directory, life).with_suffix(".stacks"), "w")  # noqa: SIM115 - for the process's life
    faulthandler.register(signal.SIGUSR1, stacks)
    try:
        Worker(plan, truth, index, life).run()
    except Exception as error:
        with open(path_of(plan.directory, life).with_suffix(".errors"), "a") as file:
            traceback.print_exception(error, file=file)
        raise
