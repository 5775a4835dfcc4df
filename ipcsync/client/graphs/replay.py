"""Replays of graphs that wait for points and record on events. What they check and do is in the core's replay.pxi."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ipcsync._drivers import load
from ipcsync._engines.core import Bracket, Lane, ReplayingBase, Wait
from ipcsync._native import foreign, fork
from ipcsync._native.stream import stream_handle
from ipcsync.client import _ahead
from ipcsync.client.graphs.captured import GraphRecord
from ipcsync.client.graphs.lanes import lane_of, lanes
from ipcsync.client.point import Point
from ipcsync.errors import CaptureError, DeviceMismatch, DriverError, EngineMismatch, IpcSyncError, WaitTimeout

if TYPE_CHECKING:
    from ipcsync._engines import Engine
    from ipcsync._session.session import Session
    from ipcsync.client.event import SharedEvent

_log = logging.getLogger("ipcsync")


class Replay(Bracket):
    """What a block of `Client.replay` gives: behind the block, `replay[record]` is the point of each GraphRecord."""

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

    # --- what the core asks for ---------------------------------------------------------------------------------------

    def _find_stream(self) -> tuple[int, int]:
        handle, ordinal = stream_handle(self._stream)
        return int(handle), ordinal

    def _elsewhere(self) -> CaptureError | None:
        """The error of a replay on this stream while torch launches on another one; None if it does not."""
        current = foreign.torch_stream(self._ordinal)
        if current is None or foreign.stream_pointer(current) == self._address:
            return None
        return CaptureError(
            "the replay's stream is not torch's current one, on which torch launches graphs: enter "
            "`with torch.cuda.stream(…)` first, or leave `stream` out"
        )

    def _find_lane(self) -> tuple[Lane, int]:
        return lane_of(load().CUstream(self._address), self._ordinal)

    def _check_passing(self) -> None:
        _ahead.check_passing(self._ordinal)

    def _check_recorder(self, engine: Engine) -> None:
        _ahead.check_recorder(engine)

    def _record(self, event: SharedEvent, behind: list[Wait]) -> int:
        """Record on D, behind these waits too."""
        stream = self._drainer
        return event._record_on(stream._handle, stream._index, self._timeout, (), behind).generation

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

    def _raise_held(self, place: str) -> NoReturn:
        raise CaptureError(f"{place} is in use: a replay that names it is not ended")

    def _raise_place(self, place: str, ordinal: int) -> NoReturn:
        if ordinal != self._ordinal:
            raise DeviceMismatch(f"{place} is for another device than the stream's, {self._ordinal}")
        raise CaptureError(f"{place} was never captured: call its capture within a capture first")

    def _raise_no_room(self, most: int) -> NoReturn:
        why = (
            f"{most} are in flight, and the oldest was not over" if most else "another one on its stream was not begun"
        )
        raise WaitTimeout(f"no room for a further replay: {why} within {self._timeout} s", timeout=self._timeout)

    def _raise_unmade(self, engine: Engine, generation: int) -> NoReturn:
        raise ValueError(
            f"generation {generation} of {engine.label} is for this replay to record, which waits for its points "
            "first: within a graph, the order of its nodes is what to wait by"
        )

    def _raise_not_released(self, engine: Engine, generation: int) -> NoReturn:
        """On the engine `event` nobody ends a wait for a process that died."""
        what = f"generation {generation} of {engine.label}, which uses the engine 'event', is pending"
        if self._replay._is_ahead:
            raise EngineMismatch(f"{what}: a replay waits ahead of records only for events with engine='timeline'")
        raise EngineMismatch(
            f"{what}, and depends on another process: if that died, the replay's stream would never go on. Open the "
            "event with engine='timeline', or wait for the point by Point.synchronize before the replay"
        )

    def _raise_device(self, engine: Engine) -> NoReturn:
        raise DeviceMismatch(f"Event device {engine.ordinal} does not match recording stream's device {self._ordinal}.")

    def _raise_depth(self, engine: Engine, count: int) -> NoReturn:
        raise EngineMismatch(
            f"a replay makes {count} records of {engine.label}, which uses the engine 'event' with depth="
            f"{engine.depth}: open it with a larger depth, or with engine='timeline', which has no such limit"
        )


def end_all(session: Session) -> None:
    """End the open replays of a session that is being closed: their graphs and streams go on.

    What the driver refuses is logged: in a broken context nothing ends, and the session has to.
    """
    if not fork.is_in_bad_fork():
        for lane in lanes():
            try:
                lane.end_from_outside(session)
            except DriverError as error:  # noqa: PERF203 - the others are ended
                _log.warning("an open replay of %r was not ended: %s", session, error)


# --- replays that somebody else launches within a block: torch's hooks say when ---------------------------------------

has_hooks: bool = False
"""Whether `begins` and `ends` are called around each replay of torch's; set by what installs them."""


_thread = threading.local()


def _blocks() -> list[Upcoming]:
    """The open blocks of this thread, the innermost last."""
    found: list[Upcoming] = _thread.__dict__.setdefault("blocks", [])
    return found


class Upcoming:
    """A block whose first replay by torch, on this thread, waits and records. Made by `Client.next`; used once.

    What torch replays later in the block belongs to the same replay, on the same stream.
    """

    def __init__(self, replaying: Replaying) -> None:
        self._replaying = replaying
        self._is_used = False
        self._outer: BaseException | None = None  # an exception that is being handled around the launch
        self._error: BaseException | None = None

    def __enter__(self) -> Replay:
        if not has_hooks:
            raise IpcSyncError(
                "nothing tells ipcsync of torch's replays: call ipcsync.integrations.torch.install() once, or put the "
                "launch in a block of Client.replay"
            )
        blocks = _blocks()
        if self._replaying._replay._is_over or any(block._replaying is self._replaying for block in blocks):
            self._replaying._raise_used()
        blocks.append(self)
        return self._replaying._replay

    def begin(self) -> None:
        """Torch is about to launch a graph on its current stream."""
        self._outer = sys.exc_info()[1]
        if not self._is_used:
            self._replaying.__enter__()
            self._is_used = True
            return
        current = foreign.torch_stream(None)
        if current is not None and foreign.stream_pointer(current) != self._replaying._address:
            # Caught within the block, it makes no record: the one in the graph that is not launched would be complete.
            self._error = CaptureError("this block has replays on another stream: one block for each stream")
            raise self._error

    def end(self) -> None:
        """Torch has launched it, or failed to."""
        error = sys.exc_info()[1]
        if error is not self._outer:
            self._error = error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self in _blocks():
            _blocks().remove(self)
        if self._is_used:
            self._replaying._leave(error or self._error)
        else:
            self._replaying._replay._is_over = True


def begins(_graph: object) -> None:
    """A hook: a graph is about to be launched on torch's current stream."""
    if blocks := _blocks():
        blocks[-1].begin()


def ends(_graph: object) -> None:
    """A hook: it was launched, or that raised."""
    if blocks := _blocks():
        blocks[-1].end()
