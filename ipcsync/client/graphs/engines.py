"""Everything that replays need of an engine beyond the public calls of points and events: one module to bind anew.

What it uses:

- `engine.kind`, `ordinal`, `is_recorder`, `recorded_here`, `depth`, `origin`, `label`, `name`: what the event is;
- `engine.await_recorded`: the host's wait for a record, without a stream;
- `engine.behind.stands`: whether a generation stands behind something that is not settled;
- `engine._raise_no_record`: the error of an event that takes no more records;
- `queued.add`, `queued.of`, `queued.key_of`: the lists of waits that the next record of a stream stands behind.

All work goes through `Point.wait` and `SharedEvent.record`, on streams of the library's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ipcsync._engines import queued
from ipcsync._engines.loss import Loss
from ipcsync._engines.queued_wait import Lost
from ipcsync.errors import DeviceMismatch, EngineMismatch

if TYPE_CHECKING:
    from ipcsync._drivers import DriverObject
    from ipcsync.client.event import SharedEvent
    from ipcsync.client.point import Point


def key_of(flags: DriverObject, stream_id: int, ordinal: int) -> int:
    """The key of the list of waits of a stream with such flags."""
    return queued.key_of(flags, stream_id, ordinal)


def await_recorded(point: Point, deadline_ns: int, timeout: float | None) -> None:
    """Block until the point is recorded; raises as `Point.wait`."""
    point._bound().engine.await_recorded(point.generation, deadline_ns, timeout)


def check_fed(point: Point, *, ahead: bool) -> bool:
    """Whether the point is pending, so that a stream has to wait for it. Raises if it is lost, or may never end a wait.

    On the `event` engine nobody ends a stream's wait for a process that died.
    """
    if point.query():
        return False
    engine = point._bound().engine
    if engine.kind == "timeline":
        return True
    what = f"generation {point.generation} of {engine.label}, which uses the engine 'event', is pending"
    if ahead:
        raise EngineMismatch(f"{what}: a replay waits ahead of records only for events with engine='timeline'")
    if not engine.is_recorder or engine.behind.stands(point.generation):
        raise EngineMismatch(
            f"{what}, and depends on another process: if that died, the replay's stream would never go on. Open the "
            "event with engine='timeline', or wait for the point by Point.synchronize before the replay"
        )
    return True


def is_of(point: Point, event: SharedEvent) -> bool:
    """Whether the point is a record of that event which is not made yet."""
    engine = point._bound().engine
    return engine.origin == event._engine.origin and point.generation > engine.generation


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
        engine._raise_no_record()
    if engine.kind == "timeline":
        return 0
    if count > engine.depth:
        raise EngineMismatch(
            f"a replay makes {count} records of {engine.label}, which uses the engine 'event' with depth="
            f"{engine.depth}: open it with a larger depth, or with engine='timeline', which has no such limit"
        )
    return max(0, engine.recorded_here + count - engine.depth)


def raise_if_lost(key: int, event: SharedEvent) -> None:
    """Raise RecorderLost if a stream with that list stands behind something lost, so that `event` can't record."""
    for wait in queued.of(key):
        fate = wait.known()
        if isinstance(fate, Loss):
            engine = event._engine
            raise wait.behind(fate).error(engine.name, engine.label, engine.recorded_here + 1)


def list_point(point: Point, key: int, stream_id: int) -> None:
    """Have the next records on a stream (the key of its list, and its id) stand behind the point."""
    queued.add(key, point._bound().engine, point.generation, stream_id)


def list_all(source: int, key: int, stream_id: int, but: Collection[Point] = ()) -> None:
    """Have the next records on a stream stand behind all waits in the list `source`, but those for the events of `but`.

    Lost ones are left out: who records looks for them before.
    """
    views = {id(point._bound().engine) for point in but}
    for wait in queued.of(source):
        if wait.verdict is not True and not isinstance(wait, Lost) and id(wait.view) not in views:
            queued.add(key, wait.view, wait.generation, stream_id)
