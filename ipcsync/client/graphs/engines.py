"""Everything that replays need of an engine beyond the public calls of points and events: one module to bind anew.

- `engine.kind`, `ordinal`, `is_recorder`, `recorded_here`, `depth`, `origin`, `label`, `name`: what the event is;
- `engine.await_recorded`: the host's wait for a record, without a stream;
- `engine.behind.stands`: whether a generation stands behind something that is not settled;
- `engine.raise_no_record`: the error of an event that takes no more records;
- `queued.add`, `queued.of`, `queued.latest`: the lists of waits that the next record of a stream stands behind;
- of a timeline: the word's address (`open_word`), `base` and the flags of its waits, so that waits for many words are
  queued by one call; around that call, what a wait does: `enter` and `leave` (the use is not released meanwhile),
  `mark_work` (a marker behind it), `check_wait`.

Records, and waits on the `event` engine, go through `SharedEvent.record` and `Point.wait`, on streams of the library's.
What would make a replay of many records cheap: an entry that makes `count` records of a timeline by one batch, each
behind a wait for a word that the caller names, with one marker and one store of `recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ipcsync._drivers.constants import STREAM_NON_BLOCKING
from ipcsync._engines import Engine, queued
from ipcsync._engines.core import Wait
from ipcsync._engines.loss import Loss
from ipcsync.errors import DeviceMismatch, EngineMismatch

if TYPE_CHECKING:
    from ipcsync._drivers import DriverObject
    from ipcsync._native.stream import Stream
    from ipcsync.client.event import SharedEvent
    from ipcsync.client.point import Point


def key_of(flags: DriverObject, stream_id: int, ordinal: int) -> int:
    """The key of the list of waits of a stream with such flags."""
    return stream_id if int(flags) & STREAM_NON_BLOCKING else -1 - ordinal


def has_any(key: int) -> bool:
    """Whether any wait is in that list that is not known good."""
    return any(wait.known() is not True for wait in queued.of(key))


def await_recorded(point: Point, deadline_ns: int, timeout: float | None) -> None:
    """Block until the point is recorded; raises as `Point.wait`."""
    point._bound().engine.await_recorded(point.generation, deadline_ns, timeout)


def check_fed(point: Point, *, ahead: bool) -> None:
    """Raise EngineMismatch if a stream may wait for the pending point for ever.

    On the engine `event` nobody ends a wait for a process that died.
    """
    engine = point._bound().engine
    if engine.kind == "timeline":
        return
    what = f"generation {point.generation} of {engine.label}, which uses the engine 'event', is pending"
    if ahead:
        raise EngineMismatch(f"{what}: a replay waits ahead of records only for events with engine='timeline'")
    if not engine.is_recorder or engine.behind.stands(point.generation):
        raise EngineMismatch(
            f"{what}, and depends on another process: if that died, the replay's stream would never go on. Open the "
            "event with engine='timeline', or wait for the point by Point.synchronize before the replay"
        )


def raise_if_unmade(points: Iterable[Point], events: Iterable[SharedEvent]) -> None:
    """Raise ValueError if a point is a record of one of these events which is not made yet."""
    origins = {event._engine.origin for event in events}
    for point in points:
        engine = point._bound().engine
        if engine.origin in origins and point.generation > engine.generation:
            raise ValueError(f"{point!r} is for this replay to record: with ahead=True it waits for its own records")


def check_recorded(event: SharedEvent, ordinal: int, count: int) -> int:
    """Raise unless `count` records on a stream of device `ordinal` are possible.

    Returns the generation that has to be complete before there is room for them; 0 if none has to be.
    """
    event._check()
    if not event._is_recorder:
        event._raise_not_recorder()
    engine = event._engine
    if engine.ordinal != ordinal:
        raise DeviceMismatch(f"Event device {engine.ordinal} does not match recording stream's device {ordinal}.")
    if event.state != "open" or event.is_lost:
        engine.raise_no_record()
    if engine.kind == "timeline":
        return 0
    if count > engine.depth:
        raise EngineMismatch(
            f"a replay makes {count} records of {engine.label}, which uses the engine 'event' with depth="
            f"{engine.depth}: open it with a larger depth, or with engine='timeline', which has no such limit"
        )
    return max(0, engine.recorded_here + count - engine.depth)


def record(event: SharedEvent, stream: Stream, timeout: float | None) -> Point:
    """Record on a stream; there is always room on a timeline."""
    return event.record(stream) if event._engine.kind == "timeline" else event.record(stream, timeout=timeout)


def raise_if_lost(key: int, event: SharedEvent) -> None:
    """Raise RecorderLost if a stream with that list stands behind something lost, so that `event` can't record."""
    for wait in queued.of(key):
        fate = wait.known()
        if isinstance(fate, Loss):
            engine = event._engine
            raise wait.behind(fate).error(engine.name, engine.label, engine.recorded_here + 1)


Due = tuple[int, int, int]
"""A word's address, the value that it is to have at least, and the flags of the wait."""


class Queued(NamedTuple):
    """The pending points of one event, of which a stream is about to wait for all."""

    engine: Engine
    generations: list[int]


def due(point: Point) -> Due | None:
    """What a stream waits for, for this point; None on the `event` engine."""
    engine = point._bound().engine
    if engine.kind != "timeline":
        return None
    return engine._address or engine.open_word(), engine.base + point.generation, engine._flags


def by_event(points: Iterable[Point]) -> list[Queued]:
    """These points, by their events."""
    found: dict[int, Queued] = {}
    for point in sorted(points, key=lambda point: point.generation):
        engine = point._bound().engine
        found.setdefault(id(engine), Queued(engine, [])).generations.append(point.generation)
    return list(found.values())


def list_points(points: Iterable[Queued], key: int, stream_id: int, *, only_last: bool = False) -> list[Wait]:
    """Have the next records on the stream whose list is `key` stand behind these points.

    `stream_id`: the stream that waits for them, or is about to. `only_last`: of each event, which the others precede.
    For a stream of the library's own: from one of a user's, `resume` may take a lost one, and leave the others.
    """
    return [
        queued.add(key, each.engine, number, stream_id)
        for each in points
        for number in each.generations[-1 if only_last else 0 :]
    ]


def are_queued(waits: Iterable[Wait]) -> None:
    """The stream has these waits, which are listed."""
    for wait in waits:
        wait.is_queued = True


def queue(stream: Stream, stream_id: int, points: Sequence[Queued], put: Callable[[], object]) -> None:
    """Call `put`, which queues waits for these points on the stream. They are listed already."""
    entered: list[Engine] = []
    try:
        for each in points:
            each.engine.enter()
            entered.append(each.engine)
        try:
            put()
        finally:  # behind a refused call too, of which the stream may have work
            for engine in entered:
                engine.mark_work(stream._handle, stream_id, engine.ordinal)
    finally:
        for engine in entered:
            engine.leave()
    for each in points:
        each.engine.check_wait(each.generations[-1])


def list_all(source: int, key: int, but: Collection[Queued] = ()) -> None:
    """Have the next records on the stream whose list is `key` stand behind all waits in the list `source`.

    Not behind those for the events of `but`; nor behind lost ones: who records looks for them before.
    """
    views = {id(each.engine) for each in but}
    for wait in queued.latest(source):
        if wait.verdict is None and id(wait.view) not in views:
            copy = queued.add(key, wait.view, wait.generation, wait.stream)
            copy.is_queued |= wait.is_queued
