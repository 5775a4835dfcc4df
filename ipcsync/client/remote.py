"""How events of other nodes are opened, by way of the bridge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ipcsync._native.context import current_ordinal, uuid_of
from ipcsync._session.attachments import Opening
from ipcsync._session.session import Session
from ipcsync._wire import messages, nodes
from ipcsync.client.event import SharedEvent
from ipcsync.errors import EngineMismatch, WaitTimeout
from ipcsync.typing import EngineChoice

_PAUSE_S = 0.02


def open_remote(
    session: Session,
    names: Sequence[str],
    openings: Sequence[Opening],
    node: str | None,
    recorder: bool,
    engine: EngineChoice,
    timeout: float | None,
) -> list[SharedEvent]:
    """Open events of a node, or of the fleet if that is None, for waiting. As `open_events`, with its duties."""
    session.check()
    reason = None if node is None else nodes.why_not(node)
    if reason:
        raise ValueError(f"a node's name {reason}, but got {node!r:.80}")
    if recorder:
        raise ValueError("an event of another node is recorded there: here it is opened for waiting only")
    refuse_engine(engine)
    default = uuid_of(current_ordinal())
    bodies = [messages.Remote("open", node or "", name, default_device=default) for name in names]
    session.open_remote(bodies, openings, timeout)
    return [SharedEvent(opening, is_recorder=False) for opening in openings]


def find_in_fleet(
    session: Session, name: str, opening: Opening, engine: EngineChoice, timeout: float | None
) -> SharedEvent:
    """Open the fleet's event of a name for waiting, once somebody has claimed it."""
    seconds = session.timeout if timeout is None else timeout
    deadline = time.monotonic() + seconds
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        try:
            return open_remote(session, [name], [opening], None, False, engine, left)[0]
        except WaitTimeout as error:
            # Nobody has it yet. The bridge answers that soon: a question that waits keeps other requests waiting.
            if time.monotonic() + _PAUSE_S >= deadline:
                raise WaitTimeout(
                    f"nobody in the fleet has opened {name!r} as its recorder within {seconds} s: {error}",
                    event=name,
                    timeout=seconds,
                ) from None
        time.sleep(_PAUSE_S)


def claim(session: Session, name: str, open_here: Callable[[], SharedEvent], timeout: float | None) -> SharedEvent:
    """Open an event here as its recorder, and have it for the whole fleet. RecorderTaken if another node has it."""
    opened = open_here()
    _, slot, incarnation = opened._engine.origin
    session.request(messages.Remote("claim", "", name, slot=slot, incarnation=incarnation), messages.Done, timeout)
    return opened


def refuse_engine(engine: EngineChoice) -> None:
    """Raise EngineMismatch for the one that does not work between nodes."""
    if engine == "event":
        raise EngineMismatch("between nodes only the engine 'timeline' works")
