"""Shared events: the users' objects, their names, and how they are opened."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from functools import partial
from types import DynamicClassAttribute
from typing import NoReturn

from ipcsync._closing import Closing
from ipcsync._deadline import deadline_of, left_of, pauses
from ipcsync._engines.core import EventBase, shortened
from ipcsync._native import device as devices
from ipcsync._native import fork
from ipcsync._native.context import count, current, current_ordinal, has_primary, uuid_of
from ipcsync._native.stream import stream_handle
from ipcsync._session.attachments import AttachmentRef
from ipcsync._session.session import Session
from ipcsync._wire import messages
from ipcsync._wire import names as event_names
from ipcsync.client._twins import EventView
from ipcsync.client.point import Point, bound
from ipcsync.errors import DeviceMismatch, EngineMismatch, ProtocolError, WaitTimeout
from ipcsync.typing import DeviceLike, EngineChoice, StreamLike

DEFAULT_DEPTH = 16
"""How many records of an event may be in flight on the `event` engine, unless its creator says otherwise."""

_SHOWN = 80  # characters of a name that is refused
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_LONGEST_REASON = 1024  # as a request may have

_log = logging.getLogger("ipcsync")

# Attributes of torch.cuda.Event that its users try first.
_POINTS = "its points have it: take the one that record() gave, event.at(generation) or event.latest, and call point."
_HINTS = {
    "wait": f": {_POINTS}wait(stream)",
    "query": f": {_POINTS}query()",
    "synchronize": f": {_POINTS}synchronize(timeout)",
    "elapsed_time": ": it has no timing; use ipcsync.Event(enable_timing=True) within one process",
    "ipc_handle": ": event.handles has those of its ring, and other processes open it by its name",
}


@shortened("record")
class SharedEvent(EventBase, EventView[Point], Closing):
    """A named channel of GPU work: one session records on it, any number wait.

    Made by `Client.event`. Each record makes the next generation and returns its point. A context manager: it closes.
    """

    def __init__(self, session: Session, opening: AttachmentRef, *, is_recorder: bool) -> None:
        self._session = session
        self._attached = opening
        self._point_type = Point
        self._is_recorder = is_recorder
        self._is_open = True

    def record(
        self, stream: StreamLike | None = None, *, timeout: float | None = None, after: Iterable[Point] = ()
    ) -> Point:
        """Record the next generation after all work submitted to `stream` so far; returns its point.

        If `depth` records are in flight on the `event` engine, it first blocks until the oldest is complete, at most
        `timeout` seconds (WaitTimeout names the oldest). Raises NotRecorder if it was not opened with `recorder=True`,
        DeviceMismatch for a stream of another device, StreamCapturing, EventClosed, and as each use of a Point.

        The record depends on every wait that this library queued on `stream` earlier, and on the points `after`:
        name those that the work depends on by other means (torch, CUDA events, a graph), which ipcsync cannot see. The
        stream is made to wait for those that are not complete, as by `Point.wait`, so the record is not complete before
        they are; the host first waits until they are recorded, within the same `timeout`. If any of them is lost,
        nothing is recorded, and RecorderLost of cause "behind" says which session ended. Raises ValueError for a point
        of this event that is not recorded before this one.
        """
        if not (self._is_open and self._is_recorder):
            self._raise_not_recorder()
        handle, ordinal = stream_handle(stream, self._engine.ordinal if stream is None else None)
        points, timeout = bound(after, timeout) if after else ((), timeout)
        return Point(self._attached, self._engine.record(handle, ordinal, timeout, points))

    def _raise_not_recorder(self) -> None:
        self._check()
        self._engine.raise_not_recorder("this object")

    def _point(self, generation: int) -> Point:
        return Point(self._attached, generation)

    def close(self) -> None:
        """Close this object. The last one over the attachment ends that, and wakes this process's waits on it.

        A recorder's close finishes the event: its name is free, and waits for later generations raise RecorderLost. It
        waits up to 1 s for other threads' calls, 0.5 s for the coordinator. A second call, or a child's, does nothing.
        """
        if not fork.is_in_bad_fork():
            self._is_open = False
            self._session.close_opening(self._attached)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a shared event is not copied and not sent: open it by its name again with client.event(name), or send "
            "bytes(point)"
        )


def _refuse(name: str, hint: str, event: SharedEvent) -> NoReturn:
    raise AttributeError(f"a SharedEvent has no {name!r}{hint}", name=name, obj=event)


for _name, _hint in _HINTS.items():  # a `__getattr__` would make each call slower
    setattr(SharedEvent, _name, DynamicClassAttribute(partial(_refuse, _name, _hint)))


# --- names ------------------------------------------------------------------------------------------------------------


def short(name: str) -> str:
    """As an error shows it."""
    return repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}…"


def check_name(name: str, what: str) -> None:
    """Raise ProtocolError for an invalid one."""
    if reason := event_names.why_not(name):
        raise ProtocolError(f"{what} {reason}", code="name")


def check_node(node: str) -> None:
    """Raise ValueError for an invalid name of a node."""
    if reason := event_names.why_not_node(node):
        raise ValueError(f"a node's name {reason}, but got {node!r:.80}")


# --- events -----------------------------------------------------------------------------------------------------------


def check_engine(engine: str, what: str = "engine") -> None:
    """ValueError for an invalid one."""
    if engine not in ("auto", "event", "timeline"):
        raise ValueError(f"{what} is 'auto', 'event' or 'timeline', but got {engine!r}")


def depth_of(depth: int | None) -> int:
    """The depth of a client, from the environment in place of None. ValueError or TypeError for an invalid one."""
    if depth is None:
        text = os.environ.get("IPCSYNC_DEPTH") or str(DEFAULT_DEPTH)
        if not (re.fullmatch("[0-9]{1,4}", text) and 1 <= int(text) <= 1024):
            raise ValueError(f"IPCSYNC_DEPTH is from 1 to 1024, but got {text!r:.80}")
        return int(text)
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise TypeError(f"depth is an int, but got {type(depth).__name__}")
    if not 1 <= depth <= 1024:
        raise ValueError(f"depth is from 1 to 1024, but got {depth}")
    return depth


def open_events(
    session: Session,
    names: Sequence[str],
    openings: Sequence[AttachmentRef],
    device: DeviceLike | None,
    engine: EngineChoice,
    depth: int | None,
    timeout: float | None,
    *,
    recorder: bool,
    node: str | None = None,
    fleet: bool = False,
) -> list[SharedEvent]:
    """Open events by their full names, "" for one without, for `openings`: all, or none. Options as of `Client.event`.

    The caller abandons the openings if an exception comes before it has the events.
    """
    check_engine(engine)
    own_depth = session.depth if depth is None else depth_of(depth)
    seconds = session.timeout if timeout is None else timeout
    session.check()
    if node is not None or fleet:
        _check_elsewhere(names, engine, node, recorder=recorder, fleet=fleet)
        if not recorder:
            return _open_elsewhere(session, names, openings, device, seconds, node)
        engine = "timeline"
    began = time.monotonic_ns()
    deadline = deadline_of(seconds, began)
    here = current_ordinal()
    ordinal = here if device is None and here < count() else devices.parse(device)
    told, default = "" if device is None else uuid_of(ordinal), uuid_of(here)
    is_recorder = bool(recorder)
    may_be_timeline = (session.engine if engine == "auto" else engine) != "event"
    # Who only reads may read of another device, and who records may find the event there: neither wants a context here.
    is_used_here = (
        device is not None
        or current() is not None
        or has_primary(ordinal)
        or (is_recorder and may_be_timeline and not _are_elsewhere(session, names, default, deadline))
    )
    why_not = session.driving.why_not_timeline(ordinal, left_of(deadline)) if may_be_timeline and is_used_here else ""
    likes = default, engine, own_depth, session.engine, why_not[:_LONGEST_REASON]
    session.open([messages.Open(name, is_recorder, told, *likes) for name in names], openings, seconds, began)
    opened = [SharedEvent(session, opening, is_recorder=is_recorder) for opening in openings]
    for event in opened:
        note_depth(event, depth)
        if fleet:
            _, slot, incarnation = event._engine.origin
            claim = messages.Remote("claim", "", names[0], slot=slot, incarnation=incarnation)
            session.request(claim, messages.Done, left_of(deadline))  # RecorderTaken if another node has the name
    return opened


def _are_elsewhere(session: Session, names: Sequence[str], device: str, deadline: int) -> bool:
    """Whether all the events exist, on other devices. Asks nobody if the coordinator serves this device alone."""
    if session.lease.welcome.devices == [device]:
        return False
    for name in names:
        found = session.request(messages.ListEvents(name), messages.EventList, left_of(deadline)).events if name else []
        if not any(event.name == name and event.device != device for event in found):
            return False
    return True


def note_depth(event: SharedEvent, wanted: int | None) -> None:
    """Log, once for an event, that another depth than its own was asked for."""
    engine = event._engine
    if wanted is None or depth_of(wanted) == engine.depth or engine.kind == "timeline" or engine.has_warned_of_depth:
        return
    engine.has_warned_of_depth = True
    text = "depth=%d is ignored: %s is open, with the depth %d of who opened it first"
    _log.warning(text, wanted, engine.label, engine.depth)


# --- events of other nodes, through the bridge ------------------------------------------------------------------------


def _check_elsewhere(names: Sequence[str], engine: str, node: str | None, *, recorder: bool, fleet: bool) -> None:
    if node is not None:
        if fleet:
            raise ValueError("an event is one of a node, or of the whole fleet: give `node` or `fleet`, not both")
        check_node(node)
        if recorder:
            raise ValueError("an event of another node is recorded there: here it is opened for waiting only")
    if engine == "event":
        told = ", ".join(map(repr, names))
        raise EngineMismatch(f"the engine 'event' does not work between nodes: open {told} with engine='timeline'")


def _open_elsewhere(
    session: Session,
    names: Sequence[str],
    openings: Sequence[AttachmentRef],
    device: DeviceLike | None,
    seconds: float,
    node: str | None,
) -> list[SharedEvent]:
    """Open a node's events for waiting, or without one the fleet's event of a name, once its recorder has opened it."""
    index, deadline, why = devices.parse(device), deadline_of(seconds), ""
    bodies = [messages.Remote("open", node or "", name, default_device=uuid_of(index)) for name in names]
    # A request that waits at the bridge delays others. So the bridge says soon that the name is not claimed yet.
    for pause_s in pauses(seconds, _FIRST_PAUSE_S, _LONGEST_PAUSE_S):  # each look asks the fleet's store
        try:
            session.check()
            session.open(bodies, openings, left_of(deadline) if node is None else seconds)
            break
        except WaitTimeout as error:
            if node is not None:
                raise
            why = str(error)
        time.sleep(pause_s)
    else:
        text = f"no process in the fleet has opened {names[0]!r} as its recorder within {seconds} s: {why}"
        raise WaitTimeout(text, event=names[0], timeout=seconds)
    opened = [SharedEvent(session, opening, is_recorder=False) for opening in openings]
    for event in opened:
        if device is not None and event.device.index != index:
            raise DeviceMismatch(
                f"{event.name!r} of node {event.node!r} is waited for on {event.device} here, not on device {index}"
            )
    return opened
