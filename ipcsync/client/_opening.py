"""Opening events and streams: names, options, and the requests to this node, another one, or the fleet."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from ipcsync._deadline import deadline_of, left_of
from ipcsync._native import device as devices
from ipcsync._native.context import current_ordinal, has_current, ordinal_of, uuid_of
from ipcsync._native.stream import Stream
from ipcsync._session.attachments import Opening
from ipcsync._session.session import Session
from ipcsync._wire import messages
from ipcsync._wire import names as event_names
from ipcsync._wire import nodes as node_names
from ipcsync.client.event import SharedEvent
from ipcsync.errors import DeviceMismatch, EngineMismatch, InvalidDevice, IpcSyncError, ProtocolError, WaitTimeout
from ipcsync.typing import Chains, DeviceLike, EngineChoice

DEFAULT_DEPTH = 16
"""How many records of an event may be in flight on the `event` engine, unless its creator says otherwise."""

_SHOWN = 80  # characters of a name that is refused
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25
_LONGEST_REASON = 1024  # as a request may have

log = logging.getLogger("ipcsync")


@dataclass(frozen=True)
class ConnectOptions:
    """The arguments of `connect`."""

    endpoint: str | None = None
    name: str | None = None
    timeout: float = 5.0
    lease_ttl: float | None = None
    trace: str | os.PathLike[str] | None = None
    chains: Chains = "stream"
    prefix: str = ""
    engine: EngineChoice = "auto"
    depth: int | None = None


@dataclass(frozen=True)
class OpenOptions:
    """The arguments of `Client.event` that say what is opened, and how. ValueError or TypeError for invalid ones."""

    recorder: bool
    device: DeviceLike | None
    engine: EngineChoice
    depth: int | None = None  # the client's by default
    timeout: float | None = None  # in seconds, for all events together; the session's own by default
    node: str | None = None
    fleet: bool = False

    def __post_init__(self) -> None:
        if self.depth is not None:
            _check_depth(self.depth)
        if self.engine not in ("auto", "event", "timeline"):
            raise ValueError(f"engine is 'auto', 'event' or 'timeline', but got {self.engine!r}")
        if self.node is not None and self.fleet:
            raise ValueError("an event is one of a node, or of the whole fleet: give `node` or `fleet`, not both")


def chosen_engine(engine: EngineChoice) -> EngineChoice:
    """The engine of `connect`: $IPCSYNC_ENGINE in place of "auto". ValueError for another one."""
    of_environment = engine == "auto"
    found = os.environ.get("IPCSYNC_ENGINE", "") or "auto" if of_environment else engine
    if found not in ("auto", "event", "timeline"):
        where = "IPCSYNC_ENGINE" if of_environment else "engine"
        raise ValueError(f"{where} is 'auto', 'event' or 'timeline', but got {found!r}")
    return cast("EngineChoice", found)


def chosen_depth(depth: int | None) -> int:
    """The depth of `connect`: $IPCSYNC_DEPTH in place of None. ValueError or TypeError for an invalid one."""
    if depth is not None:
        _check_depth(depth)
        return depth
    found = os.environ.get("IPCSYNC_DEPTH", "") or str(DEFAULT_DEPTH)
    if not (found.isascii() and found.isdigit() and len(found) <= 4 and 1 <= int(found) <= 1024):
        raise ValueError(f"IPCSYNC_DEPTH is from 1 to 1024, but got {found!r:.80}")
    return int(found)


def _check_depth(depth: int) -> None:
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise TypeError(f"depth is an int, but got {type(depth).__name__}")
    if not 1 <= depth <= 1024:
        raise ValueError(f"depth is from 1 to 1024, but got {depth}")


# --- names ------------------------------------------------------------------------------------------------------------


def plain(text: str, what: str = "name") -> str:
    """The text as a plain str: subclasses of str (of numpy, enum or a user) cannot be sent."""
    if not isinstance(text, str):
        raise TypeError(f"a {what} is a str, but got {type(text).__name__}")
    return str.__str__(text)


class Naming:
    """The names of one client. The coordinator, and so every other client, has them with `prefix` before them."""

    def __init__(self, prefix: str) -> None:
        self.prefix: str = plain(prefix, "prefix")
        if self.prefix:
            _check(f"{self.prefix}x", f"the prefix {_short(prefix)}")

    def full(self, name: str) -> str:
        """The coordinator's name. ProtocolError if it is invalid."""
        name = plain(name)
        _check(name, f"the name {_short(name)}")
        if self.prefix:
            _check(self.prefix + name, f"the name {_short(name)}, behind the prefix {_short(self.prefix)},")
        return self.prefix + name

    def begin(self, prefix: str) -> str:
        """The coordinator's prefix for names that begin with `prefix` here."""
        return self.prefix + plain(prefix, "prefix")

    def shown(self, name: str) -> str:
        """This client's name; the whole name for an event of other clients, to which a point has led."""
        return name.removeprefix(self.prefix)

    @contextmanager
    def shown_in_errors(self) -> Iterator[None]:
        """In the block, an error that is raised has this client's name in `event`."""
        try:
            yield
        except IpcSyncError as error:
            event = getattr(error, "event", "")
            if event and self.prefix:
                error.event = self.shown(event)  # type: ignore[attr-defined] # asked for above
            raise


def _short(name: str) -> str:
    return repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}…"


def _check(name: str, what: str) -> None:
    reason = event_names.why_not(name)
    if reason:
        raise ProtocolError(f"{what} {reason}", code="name")


def check_node(node: str) -> None:
    """Raise ValueError for an invalid name of a node."""
    reason = node_names.why_not(node)
    if reason:
        raise ValueError(f"a node's name {reason}, but got {node!r:.80}")


# --- events -----------------------------------------------------------------------------------------------------------


def open_named(session: Session, naming: Naming, names: Sequence[str], options: OpenOptions) -> list[SharedEvent]:
    """Open events by their names, which are this client's: all, or none."""
    full = [naming.full(name) for name in names]
    openings = [Opening() for _ in full]
    session.check()
    try:
        with naming.shown_in_errors():
            if options.node is not None:
                return _open_on_node(session, full, options, openings, options.node)
            if options.fleet:
                return [_open_in_fleet(session, full[0], options, openings[0])]
            return open_events(session, full, options, openings)
    except BaseException:
        session.abandon(openings)
        raise


def open_events(
    session: Session, names: Sequence[str], options: OpenOptions, openings: Sequence[Opening]
) -> list[SharedEvent]:
    """Open events of this node by their full names, "" for one without; for `openings`.

    The caller abandons these if an exception comes before it has the events.
    """
    session.check()
    depth, engine = session.depth if options.depth is None else options.depth, options.engine
    ordinal = devices.parse(options.device)
    device = "" if options.device is None else uuid_of(ordinal)
    default = uuid_of(current_ordinal())
    is_recorder = bool(options.recorder)
    may_be_timeline = (session.engine if engine == "auto" else engine) != "event"
    # Who only reads may read of another device, and who records may find the event there: neither wants a context here.
    is_used_here = (
        options.device is not None
        or has_current()
        or devices.has_primary_context(ordinal)
        or (is_recorder and may_be_timeline and not _are_elsewhere(session, names, default, options.timeout))
    )
    seconds = session.timeout if options.timeout is None else options.timeout
    why_not = session.trials.why_not_timeline(ordinal, seconds) if may_be_timeline and is_used_here else ""
    bodies = [
        messages.Open(name, is_recorder, device, default, engine, depth, session.engine, why_not[:_LONGEST_REASON])
        for name in names
    ]
    session.open(bodies, openings, options.timeout)
    opened = [SharedEvent(opening, is_recorder=is_recorder) for opening in openings]
    for event in opened:
        note_depth(event, options.depth)
    return opened


def _are_elsewhere(session: Session, names: Sequence[str], device: str, timeout: float | None) -> bool:
    """Whether all the events exist, on other devices."""

    def is_elsewhere(name: str) -> bool:
        found = session.request(messages.ListEvents(name), messages.EventList, timeout).events
        return any(event.name == name and event.device != device for event in found)

    return all(name and is_elsewhere(name) for name in names)


def note_depth(event: SharedEvent, wanted: int | None) -> None:
    """Log, once for an event, that another depth than its own was asked for."""
    engine = event._engine
    if wanted in (None, engine.depth) or engine.kind == "timeline" or engine.has_warned_of_depth:
        return
    engine.has_warned_of_depth = True
    log.warning(
        "depth=%d is ignored: %s is open, with the depth %d of who opened it first", wanted, engine.label, engine.depth
    )


# --- events of other nodes, through the bridge ------------------------------------------------------------------------


def _open_on_node(
    session: Session, names: Sequence[str], options: OpenOptions, openings: Sequence[Opening], node: str
) -> list[SharedEvent]:
    check_node(node)
    if options.recorder:
        raise ValueError("an event of another node is recorded there: here it is opened for waiting only")
    _refuse_event_engine(names, options)
    return _open_to_wait(session, names, options, openings, node)


def _open_in_fleet(session: Session, name: str, options: OpenOptions, opening: Opening) -> SharedEvent:
    """The fleet's event of a name: as its recorder, on this node, or for waiting, once a recorder has claimed it.

    RecorderTaken if another node has the name.
    """
    _refuse_event_engine([name], options)
    seconds = session.timeout if options.timeout is None else options.timeout
    if not options.recorder:
        return _find(session, name, options, opening, seconds)
    deadline = deadline_of(seconds)
    (opened,) = open_events(session, [name], replace(options, engine="timeline", timeout=seconds), [opening])
    _, slot, incarnation = opened._engine.origin
    claim = messages.Remote("claim", "", name, slot=slot, incarnation=incarnation)
    session.request(claim, messages.Done, left_of(deadline))
    return opened


def _find(session: Session, name: str, options: OpenOptions, opening: Opening, seconds: float) -> SharedEvent:
    deadline = time.monotonic() + seconds
    pause_s = _FIRST_PAUSE_S
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        try:
            session.check()
            return _open_to_wait(session, [name], replace(options, timeout=left), [opening], "")[0]
        except WaitTimeout as error:
            # It is not claimed yet. The bridge says so soon, since a request that waits delays others.
            if time.monotonic() + pause_s >= deadline:
                raise WaitTimeout(
                    f"no process in the fleet has opened {name!r} as its recorder within {seconds} s: {error}",
                    event=name,
                    timeout=seconds,
                ) from None
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)  # each look asks the fleet's store


def _open_to_wait(
    session: Session, names: Sequence[str], options: OpenOptions, openings: Sequence[Opening], node: str
) -> list[SharedEvent]:
    """`node`: "" for whichever node has the fleet's event of a name."""
    device = devices.parse(options.device)
    bodies = [messages.Remote("open", node, name, default_device=uuid_of(device)) for name in names]
    session.open(bodies, openings, options.timeout)
    opened = [SharedEvent(opening, is_recorder=False) for opening in openings]
    for event in opened:
        if options.device is not None and event.device.index != device:
            raise DeviceMismatch(
                f"{event.name!r} of node {event.node!r} is waited for on {event.device} here, not on device {device}"
            )
    return opened


def _refuse_event_engine(names: Sequence[str], options: OpenOptions) -> None:
    if options.engine == "event":
        told = ", ".join(map(repr, names))
        raise EngineMismatch(f"the engine 'event' does not work between nodes: open {told} with engine='timeline'")


# --- streams ----------------------------------------------------------------------------------------------------------


def open_stream(
    session: Session, naming: Naming, name: str, device: DeviceLike | None, priority: int, timeout: float | None
) -> Stream:
    """A new stream of this process, with the device and priority that the coordinator has for the name."""
    body = messages.OpenStream(
        name=naming.full(name),
        device="" if device is None else uuid_of(devices.parse(device)),
        default_device=uuid_of(current_ordinal()),
        priority=priority,
    )
    spec = session.request(body, messages.StreamSpec, timeout)
    try:
        ordinal = ordinal_of(spec.device)
    except InvalidDevice as error:
        raise DeviceMismatch(f"the stream {name!r} is on a device that is not visible here: {error}") from None
    return Stream(ordinal, spec.priority)
