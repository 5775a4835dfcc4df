"""Points in CUDA graphs: what is captured waits for a gate and writes a tap; ordinary streams beside it do the rest.

What a replay checks and does is in the core's replay.pxi, and what those streams are given in its lane_steps.pxi.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import ClassVar, NoReturn
from weakref import WeakKeyDictionary

from ipcsync import _drivers
from ipcsync._drivers import DriverObject
from ipcsync._engines import queued
from ipcsync._engines.core import Bracket, Lane, Place, ReplayingBase, Wait, lanes_of_process
from ipcsync._engines.engine import bind
from ipcsync._native import context, foreign, fork
from ipcsync._native.context import DEFAULT_STREAMS, LEGACY, OnDevice, call
from ipcsync._native.device import Device, parse
from ipcsync._native.pinned import take
from ipcsync._native.stream import Stream, resolve, stream_handle
from ipcsync._session.session import Session
from ipcsync._threads import CallLock, under
from ipcsync.client.event import SharedEvent
from ipcsync.client.point import Point, check_passing, check_recorder
from ipcsync.errors import CaptureError, IpcSyncError, WaitTimeout
from ipcsync.typing import DeviceLike, StreamLike

_MANY_CAPTURES = 64  # that are remembered: more are not under way at once
_MANY_LANES = 32

_log = logging.getLogger("ipcsync")
_capturing, _making = CallLock(), CallLock()  # of captures, and of lanes
_captures: dict[int, list[Captured]] = {}  # by the ids of captures: what went into each, in order


# --- what is captured -------------------------------------------------------------------------------------------------


class Captured(Place):
    """What both have: a word of 32 bits, and the captures that it went into."""

    _noun: ClassVar[str]
    _function: ClassVar[str]  # that is captured: with the word, and 1

    def __init__(self, device: DeviceLike | None = None) -> None:
        fork.arm()
        index = parse(device)
        super().__init__(index, take(index, self._noun, 4)[1], is_gate=isinstance(self, GraphWait))
        self._earlier: set[Captured] | None = None  # those that came before it in each of its captures

    @property
    def device(self) -> Device:
        """The device of the graphs that it is for."""
        return Device(self._index)

    def is_capturing(self, stream: StreamLike | None = None) -> bool:
        """Whether `stream` (the current one by default) is being captured, so that `capture` is possible."""
        return resolve(stream, self._index if stream is None else None).is_capturing()

    def capture(self, stream: StreamLike | None = None) -> None:
        """Put it into the graph that `stream` (the current one by default) is being captured into.

        It may be in many graphs, in each once. Raises CaptureError where nothing is captured, for a second time in one
        capture, and for a stream of another device; DriverError if the driver refuses it, as in a conditional node.
        """
        fork.check()
        handle, ordinal = stream_handle(stream, self._index if stream is None else None)
        with OnDevice(ordinal) as inside, inside:
            if not context.is_capturing(handle):
                self._refuse(
                    "the stream is not being captured: call it between the begin and the end of a capture, and use "
                    "Point.wait or SharedEvent.record for work outside of graphs"
                )
            status, number = call("cuStreamGetCaptureInfo", handle)[:2]
            if int(status) != 1:
                self._refuse("this capture is invalid already: an earlier call of it was refused")
            if ordinal != self._index:
                self._refuse(f"it is for device {self._index}, and the stream is of device {ordinal}")
            under(_capturing, self._capture, handle, int(number))

    def _capture(self, handle: DriverObject, number: int) -> None:
        others = _captures.get(number, [])
        if self in others:
            self._refuse("it is in this capture already; make one for each place")
        self._earlier = {*others} if self._earlier is None else self._earlier.intersection(others)
        call(self._function, handle, self._address, 1, 0)
        self._note_capture()
        _captures[number] = [*others, self]
        for old in list(_captures)[:-_MANY_CAPTURES]:
            del _captures[old]

    def _refuse(self, why: str) -> NoReturn:
        raise CaptureError(f"this {self._noun} cannot be captured: {why}")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} belongs to the graphs of its process: make one in the other process")


class GraphWait(Captured):
    """A place in CUDA graphs at which each replay waits for a point of its own, named at `Client.replay`.

    `device` is that of the graphs, the current one by default. It belongs to the process: any client may use it, for
    points of any event, and graphs that have it outlive clients.
    """

    _noun = "wait"
    _function = "cuStreamWaitValue32"


class GraphRecord(Captured):
    """A place in CUDA graphs at which each replay records on an event that is named at `Client.replay`.

    `device` is that of the graphs, the current one by default. It belongs to the process, as a GraphWait does.
    """

    _noun = "record"
    _function = "cuStreamWriteValue32"


# --- lanes: the library's own streams beside each launch stream -------------------------------------------------------


def lane_of(launch: DriverObject, ordinal: int) -> tuple[Lane, int]:
    """The lane of a launch stream of device `ordinal`, made at its first replay, and the stream's id.

    StreamCapturing if it captures.
    """
    with OnDevice(ordinal) as inside, inside:
        context.refuse_capturing(launch, "replay")
        stream_id = _id_of(launch)
        return lanes_of_process.get(stream_id) or under(_making, _make_lane, launch, ordinal, stream_id), stream_id


def _id_of(stream: DriverObject) -> int:
    return int(call("cuStreamGetId", stream))


def refuse_per_thread(stream: Stream) -> None:
    """Raise IpcSyncError for this thread's own default stream, which is another one on the thread of a task's call."""
    if stream.stream_id in DEFAULT_STREAMS:
        with OnDevice(stream.device_index) as inside, inside:
            context.refuse_capturing(stream._handle, "resume")
            if _id_of(stream._handle) != _id_of(LEGACY):
                raise IpcSyncError("the per-thread default stream is another one on each thread: use Client.resume")


def _make_lane(launch: DriverObject, ordinal: int, stream_id: int) -> Lane:
    lane = lanes_of_process.get(stream_id)
    if lane is not None:
        return lane
    bind()  # a replay may come before the first engine
    if int(launch) in DEFAULT_STREAMS:
        if stream_id != _id_of(LEGACY):
            raise CaptureError("the per-thread default stream is another one on each thread: launch on one of your own")
        home = call("cuCtxGetCurrent")
    else:
        home = call("cuStreamGetCtx", launch)
    key = queued.list_of(launch, ordinal, "replay")
    # A program may make a stream for each launch. A copy, since a finalizer may change the table within any step.
    for lane in lanes_of_process.copy().values() if len(lanes_of_process) >= _MANY_LANES else ():
        if int(lane.home) == int(home) and lane.serve(launch, stream_id, key):  # its stream has no replays now
            return lane
    with OnDevice(ordinal, home) as inside, inside:
        least = Stream.priority_range()[1]
        own = Stream(ordinal, least), Stream(ordinal, least)
        ids = _id_of(own[0]._handle), _id_of(own[1]._handle)
        words = {name: take(ordinal, "lane", 8) for name in ("over", "drained", "armed", "fed")}
        lane = Lane(ordinal, home, own, ids, words)
    lane.serve(launch, stream_id, key)
    return lane


def beside(launch: DriverObject, ordinal: int) -> list[Stream]:
    """The library's own streams beside a launch stream, if it has had a replay."""
    if not lanes_of_process:
        return []
    with OnDevice(ordinal) as inside, inside:
        context.refuse_capturing(launch, "resume")  # asking for the id would invalidate the capture
        lane = lanes_of_process.get(_id_of(launch))
    return [] if lane is None else [lane.feeder, lane.drainer]


# --- replays ----------------------------------------------------------------------------------------------------------


class Replay(Bracket):
    """What a block of `Client.replay` gives: behind it, `replay[record]` is a GraphRecord's point, or a KeyError."""

    __slots__ = ()

    @property
    def is_used(self) -> bool:
        """Whether anything was queued for it; not in a block of `Client.next` in which torch replayed nothing."""
        return self._is_used

    def __getitem__(self, record: GraphRecord) -> Point:
        event, generation = self._record_of(record)
        if not self._is_over:
            raise CaptureError("the points of a replay are there after its block: it is recorded once all is launched")
        if not generation:
            raise CaptureError(
                "this replay made no such record: its block raised, or an earlier record of the event did, or nothing "
                "was replayed"
            )
        return Point(event._attached, generation)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a replay does not travel: send the bytes of its points")


class Replaying(ReplayingBase):
    """A block within which graphs are launched on one stream. Made by `Client.replay`; used once.

    If nothing refers to it any more, as after an exception at its very end, the next replay there ends it.
    """

    __slots__ = ()

    _replay_type = Replay
    _replay: Replay
    _check_recorder = staticmethod(check_recorder)
    _check_passing = staticmethod(check_passing)

    # --- what the core asks for ---------------------------------------------------------------------------------------

    def _find_stream(self) -> tuple[StreamLike, int, int]:
        stream = resolve(self._stream)  # the current one would be destroyed once it is not that any more
        return stream if self._stream is None else self._stream, stream._pointer, stream._index

    def _elsewhere(self) -> CaptureError | None:
        """The error of a replay on this stream while torch launches on another one; None if it does not."""
        if _is_current(self._address, self._ordinal):
            return None
        return CaptureError(
            "the replay's stream is not torch's current one, on which torch launches graphs: enter "
            "`with torch.cuda.stream(…)` first, or leave `stream` out"
        )

    def _find_lane(self) -> tuple[Lane, int]:
        return lane_of(_drivers.load().CUstream(self._address), self._ordinal)

    def _record(self, event: SharedEvent, stream: Stream, behind: list[Wait]) -> int:
        return event._engine.record(stream._handle, stream._index, self._timeout, (), behind)

    # --- errors -------------------------------------------------------------------------------------------------------

    def _raise_type(self, *got: object) -> NoReturn:
        raise TypeError(
            "replay takes waits, a mapping from GraphWait to Point, and records, one from GraphRecord to SharedEvent, "
            f"but got {': '.join(type(one).__name__ for one in got)}"
        )

    def _raise_used(self) -> NoReturn:
        raise CaptureError("a replay is used once: ask Client.replay for another one")

    def _raise_ended(self) -> NoReturn:
        raise CaptureError("this replay was ended by another call")

    def _raise_open(self) -> NoReturn:
        raise CaptureError("a replay on this stream is open: one at a time, whichever thread or task it is")

    def _raise_no_room(self, most: int) -> NoReturn:
        why = f"{most} are in flight, and the oldest was not over" if most else "another on its stream was not begun"
        raise WaitTimeout(f"no room for a further replay: {why} within {self._timeout} s", timeout=self._timeout)


def _is_current(address: int, ordinal: int | None) -> bool:
    """Whether torch, if it is there, launches on that stream: 0 and 1 are the legacy default one."""
    current = foreign.torch_stream(ordinal)
    return current is None or max(foreign.stream_pointer(current), 1) == max(address, 1)


def end_all(session: Session) -> None:
    """End the open replays of a session that is being closed: their graphs and streams go on.

    What cannot be ended is logged: in a broken context nothing can, nor amid a capture, and the session has to end.
    """
    if not fork.is_in_bad_fork():
        for lane in lanes_of_process.copy().values():
            try:
                lane.end_from_outside(session)
            except IpcSyncError as error:  # noqa: PERF203 - the others are ended
                _log.warning("an open replay of %r was not ended: %s", session, error)


# --- replays that somebody else launches within a block: torch's hooks say when ---------------------------------------

has_hooks: bool = False
"""Whether `begins` and `ends` are called around each replay of torch's; set by what installs them."""
_thread = threading.local()


def _blocks() -> WeakKeyDictionary[Upcoming, None]:
    """The open blocks of this thread, the innermost last, but for those that a signal's exception ended."""
    found: WeakKeyDictionary[Upcoming, None] = _thread.__dict__.setdefault("blocks", WeakKeyDictionary())
    return found


class Upcoming:
    """A block whose first replay by torch, on this thread, waits and records. Made by `Client.next`; used once.

    What torch replays later in the block belongs to the same replay, on the same stream.
    """

    def __init__(self, replaying: Replaying) -> None:
        if not has_hooks:
            raise IpcSyncError(
                "nothing tells ipcsync of torch's replays: call ipcsync.integrations.torch.install() once, or put the "
                "launch in a block of Client.replay"
            )
        self._replaying = replaying
        self._is_used = False
        self._outer: BaseException | None = None  # an exception that is being handled around the launch
        self._error: BaseException | None = None

    def __enter__(self) -> Replay:
        blocks = _blocks()
        if self._replaying._replay._is_over or any(block._replaying is self._replaying for block in blocks):
            self._replaying._raise_used()
        blocks[self] = None
        return self._replaying._replay

    def begin(self) -> None:
        """Torch is about to launch a graph on its current stream."""
        self._outer = sys.exc_info()[1]
        if not self._is_used:
            self._replaying.__enter__()
            self._is_used = True
            return
        if self._replaying._replay._is_over:
            self._replaying._raise_ended()
        if not _is_current(self._replaying._address, None):
            # Caught within the block, it makes no record: the one in the graph that is not launched would be complete.
            self._error = CaptureError("this block has replays on another stream: one block for each stream")
            raise self._error

    def end(self) -> None:
        """Torch has launched it, or failed to."""
        error = sys.exc_info()[1]
        if error is not self._outer:
            self._error = error

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _blocks().pop(self, None)
        if self._is_used:
            self._replaying._leave(self._error if error is None else error)
        else:
            self._replaying._replay._is_over = True


def begins(_graph: object) -> None:
    """A hook: a graph is about to be launched on torch's current stream."""
    if blocks := list(_blocks()):
        blocks[-1].begin()


def ends(_graph: object) -> None:
    """A hook: it was launched, or that raised."""
    if blocks := list(_blocks()):
        blocks[-1].end()
