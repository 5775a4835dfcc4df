"""The rows of the lists that clients ask for: events, sessions, attachments."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import cast

from ipcsync._board import Board
from ipcsync._wire import messages
from ipcsync.typing import EngineName
from ipcsync_coordinator.effects import Effects, cause_of_end
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import Session, Slot


def event_rows(
    registry: Registry, board: Board, effects: Effects, prefix: str, most: int | None = None
) -> list[messages.EventInfo]:
    """The first `most` events whose names begin with `prefix`, those in quarantine included."""
    slots = (slot for slot in registry.slots.values() if not slot.is_over and slot.name.startswith(prefix))
    return [_event(slot, board, effects) for slot in islice(slots, most)]


def _event(slot: Slot, board: Board, effects: Effects) -> messages.EventInfo:
    assert slot.state != "free"
    assert slot.state != "kept"
    line = board.slot(slot.index)
    generation = max(line.recorded - slot.base, 0)
    completed = line.completed if slot.state == "open" else min(line.completed, line.watermark or line.completed)
    if line.lost > slot.base:
        completed = min(completed, line.lost - 1)
    return messages.EventInfo(
        name=slot.name,
        device=slot.device,
        engine=cast("EngineName", slot.engine),
        state=slot.state,
        generation=generation,
        completed=min(max(completed - slot.base, 0), generation),
        attached=len(slot.active) + len(slot.draining),
        recorder=slot.recorder.label if slot.recorder else "",
        slot=slot.index,
        incarnation=slot.incarnation,
        node=slot.node,
        cause=cause_of_end(slot, slot.state),
        ended_s=effects.quarantined_s(slot),
    )


def attachment_of(slot: Slot, session: Session, pool: Pool) -> messages.Attachment:
    """What `session` needs to use the event of a slot."""
    origin = None if slot.origin is None else messages.Origin(*slot.origin, slot.node)
    return messages.Attachment(
        name=slot.name,
        slot=slot.index,
        incarnation=slot.incarnation,
        base=slot.base,
        device=slot.device,
        engine=slot.engine,
        depth=slot.depth,
        recorder=slot.is_recorded_by(session),
        handles=pool.handles(slot.ring),
        serials=slot.ring,
        origin=origin,
    )


def session_rows(sessions: Iterable[Session], board: Board, most: int | None = None) -> list[messages.SessionInfo]:
    """The first `most` live sessions."""
    now_ns = time.monotonic_ns()
    live = (session for session in sessions if session.state == "live")
    return [_session(session, board, now_ns) for session in islice(live, most)]


def _session(session: Session, board: Board, now_ns: int) -> messages.SessionInfo:
    seen = max(board.session(session.line).heartbeat, session.opened_ns)
    return messages.SessionInfo(
        id=session.id,
        name=session.name,
        pid=session.watch.pid,
        events=len(session.attached),
        connected_s=(now_ns - session.opened_ns) / 1e9,
        last_seen_s=max(now_ns - seen, 0) / 1e9,
    )


def attachment_rows(registry: Registry, prefix: str, limit: int) -> list[messages.AttachmentInfo]:
    """The first `limit` uses of events whose names begin with `prefix`."""
    return list(islice(_uses(registry, prefix), limit))


def _uses(registry: Registry, prefix: str) -> Iterator[messages.AttachmentInfo]:
    for slot in registry.slots.values():
        if not slot.is_over and slot.name.startswith(prefix):
            for serial in sorted(slot.active | slot.draining):
                yield _use(registry, slot, serial)


def _use(registry: Registry, slot: Slot, serial: int) -> messages.AttachmentInfo:
    session = registry.sessions[serial]
    return messages.AttachmentInfo(
        event=slot.name,
        session=session.label,
        session_id=session.id,
        role="records" if slot.is_recorded_by(session) else "waits",
        state="active" if serial in slot.active else "draining",
        slot=slot.index,
        incarnation=slot.incarnation,
    )
