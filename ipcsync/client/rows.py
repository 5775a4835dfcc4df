"""What the lists of a client hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EventInfo:
    """One shared event. `device` is a UUID, `attached` a count, `recorder` a session's name or id, empty for none."""

    name: str
    device: str
    engine: str
    state: str
    generation: int
    completed: int
    attached: int
    recorder: str


@dataclass(frozen=True)
class SessionInfo:
    """One session. `id` is public, not its token; `pid` as the coordinator sees it, 0 if it cannot; times in seconds."""

    id: str
    name: str
    pid: int
    events: int
    connected_s: float
    last_seen_s: float


@dataclass(frozen=True)
class Notice:
    """One change, or one row of the first snapshot.

    `kind` is "opened", "closed", "broken", "session_opened" or "session_closed"; `name` the event's or the session's;
    `number` counts the coordinator's changes.
    """

    kind: str
    name: str
    number: int
    device: str = ""
    engine: str = ""
    session: str = ""
