"""Lanes: the library's own streams beside each launch stream. The core's lane_steps.pxi says what they are given."""

from __future__ import annotations

from ipcsync._drivers import STREAM_NON_BLOCKING, DriverObject, unwrap
from ipcsync._engines.core import Lane, lanes_of_process
from ipcsync._engines.engine import bind
from ipcsync._locks import CallLock, under
from ipcsync._native import context
from ipcsync._native.context import LEGACY, OnDevice
from ipcsync._native.pinned import take
from ipcsync._native.stream import Stream
from ipcsync.errors import CaptureError

_MANY = 32  # lanes
_LEGACY = 1  # CU_STREAM_LEGACY

_lock = CallLock()


def lane_of(launch: DriverObject, ordinal: int) -> tuple[Lane, int]:
    """The lane of a launch stream of device `ordinal`, made at its first replay, and the stream's id.

    StreamCapturing if it captures.
    """
    with OnDevice(ordinal) as inside, inside:
        context.refuse_capturing(launch, "replay")
        stream_id = _id_of(launch)
        return lanes_of_process.get(stream_id) or under(_lock, _make, launch, ordinal, stream_id), stream_id


def _id_of(stream: DriverObject) -> int:
    return int(unwrap(context.driver().cuStreamGetId(stream), "cuStreamGetId"))


def _make(launch: DriverObject, ordinal: int, stream_id: int) -> Lane:
    lane = lanes_of_process.get(stream_id)
    if lane is not None:
        return lane
    bind()  # a replay may come before the first engine
    driver = context.driver()
    if int(launch) in LEGACY:
        if stream_id != _id_of(_LEGACY):
            raise CaptureError("the per-thread default stream is another one on each thread: launch on one of your own")
        home = unwrap(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
    else:
        home = unwrap(driver.cuStreamGetCtx(launch), "cuStreamGetCtx")
    flags = unwrap(driver.cuStreamGetFlags(launch), "cuStreamGetFlags")
    key = stream_id if int(flags) & STREAM_NON_BLOCKING else -1 - ordinal
    lane = _take_free(home, launch, stream_id, key)
    if lane is None:
        with OnDevice(ordinal, home) as inside, inside:
            least = Stream.priority_range()[1]
            own = Stream(ordinal, least), Stream(ordinal, least)
            ids = _id_of(own[0]._handle), _id_of(own[1]._handle)
            lane = Lane(ordinal, home, own, ids, [take(ordinal, "lane", 8) for _ in range(4)])
        lane.serve(launch, stream_id, key)
    return lane


def _take_free(home: DriverObject, launch: DriverObject, stream_id: int, key: int) -> Lane | None:
    """The lane of a stream without replays now, once there are many: a program may make a stream for each launch."""
    for lane in lanes() if len(lanes_of_process) >= _MANY else ():
        if int(lane.home) == int(home) and lane.serve(launch, stream_id, key):
            return lane
    return None


def beside(launch: DriverObject, ordinal: int) -> list[Stream]:
    """The library's own streams beside a launch stream, if it has had a replay."""
    if not lanes_of_process:
        return []
    with OnDevice(ordinal) as inside, inside:
        context.refuse_capturing(launch, "resume")  # asking for the id would invalidate the capture
        lane = lanes_of_process.get(_id_of(launch))
    return [] if lane is None else [lane.feeder, lane.drainer]


def lanes() -> list[Lane]:
    """All lanes of this process."""
    return list(lanes_of_process.copy().values())  # a copy, since a finalizer may change the table within any step
