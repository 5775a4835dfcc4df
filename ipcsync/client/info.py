"""What the lists of a client hold."""

from __future__ import annotations

from dataclasses import dataclass

from ipcsync._wire import messages


@dataclass(frozen=True)
class EventInfo:
    """One shared event. `device` is a UUID, `attached` a count, `recorder` a session's name or id, empty for none.

    `slot` and `incarnation` tell events apart that have no name, or the same one after another.
    """

    name: str
    device: str
    engine: str
    state: str
    generation: int
    completed: int
    attached: int
    recorder: str
    slot: int = 0
    incarnation: int = 0

    @classmethod
    def of(cls, row: messages.EventRow) -> EventInfo:
        """From what the coordinator sent."""
        return cls(
            row.name,
            row.device,
            row.engine,
            row.state,
            row.generation,
            row.completed,
            row.attached,
            row.recorder,
            row.slot,
            row.incarnation,
        )


@dataclass(frozen=True)
class AttachmentInfo:
    """One session's use of one shared event.

    `event` is its name, empty for an unnamed one, `session` a name or else the id, `session_id` public. `role` is
    "records" or "waits"; `state` "active", or "lingering" once it closed the event but may still touch it. `slot` and
    `incarnation` are the event's, as in `EventInfo`.
    """

    event: str
    session: str
    session_id: str
    role: str
    state: str
    slot: int
    incarnation: int

    @classmethod
    def of(cls, row: messages.AttachmentRow) -> AttachmentInfo:
        """From what the coordinator sent."""
        return cls(row.event, row.session, row.session_id, row.role, row.state, row.slot, row.incarnation)


@dataclass(frozen=True)
class SessionInfo:
    """One session. `id` is public, not its token; `pid` as the coordinator sees it (0: it cannot); times in seconds."""

    id: str
    name: str
    pid: int
    events: int
    connected_s: float
    last_seen_s: float

    @classmethod
    def of(cls, row: messages.SessionRow) -> SessionInfo:
        """From what the coordinator sent."""
        return cls(row.id, row.name, row.pid, row.events, row.connected_s, row.last_seen_s)
