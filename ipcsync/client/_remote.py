"""Opening events of other nodes, through the bridge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ipcsync._deadline import deadline_of, left_of
from ipcsync._native import device as devices
from ipcsync._native.context import uuid_of
from ipcsync._session.references import Opening
from ipcsync._session.session import Session
from ipcsync._wire import messages, nodes
from ipcsync.client._opening import Wanted, open_events
from ipcsync.client.event import SharedEvent
from ipcsync.errors import DeviceMismatch, EngineMismatch, WaitTimeout

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.25


def check_node(node: str) -> None:
    """Raise ValueError for an invalid name of a node."""
    reason = nodes.why_not(node)
    if reason:
        raise ValueError(f"a node's name {reason}, but got {node!r:.80}")


def open_on_node(session: Session, wanted: Wanted, openings: Sequence[Opening], node: str) -> list[SharedEvent]:
    """Open events of a node for waiting. As for `open_events`, the caller abandons the openings at an exception."""
    session.check()
    wanted.check()
    check_node(node)
    if wanted.is_recorder:
        raise ValueError("an event of another node is recorded there: here it is opened for waiting only")
    _raise_if_event(wanted)
    return _open_to_wait(session, wanted, openings, node)


def open_in_fleet(session: Session, wanted: Wanted, opening: Opening) -> SharedEvent:
    """Open the fleet's event of a name: as its recorder, on this node, or for waiting, once a recorder has claimed it.

    As for `open_events`, the caller abandons the opening at an exception. RecorderTaken if another node has the name.
    """
    wanted.check()
    _raise_if_event(wanted)
    return _claim(session, wanted, opening) if wanted.is_recorder else _find(session, wanted, opening)


def _claim(session: Session, wanted: Wanted, opening: Opening) -> SharedEvent:
    seconds = session.timeout if wanted.timeout is None else wanted.timeout
    deadline = deadline_of(seconds)
    (opened,) = open_events(session, replace(wanted, engine="timeline", timeout=seconds), [opening])
    _, slot, incarnation = opened._engine.origin
    claim = messages.Remote("claim", "", wanted.names[0], slot=slot, incarnation=incarnation)
    session.request(claim, messages.Done, left_of(deadline))
    return opened


def _find(session: Session, wanted: Wanted, opening: Opening) -> SharedEvent:
    (name,) = wanted.names
    seconds = session.timeout if wanted.timeout is None else wanted.timeout
    deadline = time.monotonic() + seconds
    pause_s = _FIRST_PAUSE_S
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        try:
            session.check()
            return _open_to_wait(session, replace(wanted, timeout=left), [opening], "")[0]
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


def _open_to_wait(session: Session, wanted: Wanted, openings: Sequence[Opening], node: str) -> list[SharedEvent]:
    """`node`: "" for whichever node has the fleet's event of a name."""
    device = devices.parse(wanted.device)
    bodies = [messages.Remote("open", node, name, default_device=uuid_of(device)) for name in wanted.names]
    session.open_remote(bodies, openings, wanted.timeout)
    opened = [SharedEvent(opening, is_recorder=False) for opening in openings]
    for event in opened:
        if wanted.device is not None and event.device.index != device:
            raise DeviceMismatch(
                f"{event.name!r} of node {event.node!r} is waited for on {event.device} here, not on device {device}"
            )
    return opened


def _raise_if_event(wanted: Wanted) -> None:
    if wanted.engine == "event":
        names = ", ".join(map(repr, wanted.names))
        raise EngineMismatch(f"the engine 'event' does not work between nodes: open {names} with engine='timeline'")
