"""Recovery: a coordinator continues from the journal of an earlier one."""

from __future__ import annotations

from ipcsync._board import BROKEN, CLOSED, FREE, OPEN, Board
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.journal import Journal, JournalError
from ipcsync_coordinator.liveness import ProcessWatch
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.records import Record, SessionRecord, SlotRecord, folded
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.sessions import SessionEntry, SessionTable
from ipcsync_coordinator.state import Session, Slot
from ipcsync_coordinator.tombstones import Origin, Tombstone

_STATES = {"free": FREE, "open": OPEN, "broken": BROKEN, "closed": CLOSED}


def recover(
    journal: Journal, registry: Registry, table: SessionTable, effects: Effects, board: Board, now_ns: int
) -> list[Slot]:
    """Fill an empty registry and session table, and finish what was begun. Returns the slots that differ on the board.

    JournalError if the journal cannot be read, or is inconsistent.
    """
    records, is_carried_out = journal.read()
    if not records:
        return []
    try:
        left = folded(records)
        _restore(registry, effects.pool, board, left)
    except KeyError as error:
        raise JournalError(f"it names {error}, which does not exist") from None
    for each in left.sessions:
        table.add(_entry(registry.sessions[each.serial], each, board, now_ns))
    for reply in left.replies:
        table.keep(reply.token, reply.id, reply.kept)
    if not is_carried_out:
        effects.redo(records[-1].effects)
        journal.carried_out()
    for slot in registry.slots.values():
        if slot.is_quarantined:
            effects.resume(slot)
    effects.pool.sweep(shared.serial for slot in registry.slots.values() for shared in slot.ring or ())
    return [slot for slot in registry.slots.values() if board.slot(slot.index).state != _STATES[slot.state]]


def _restore(registry: Registry, pool: Pool, board: Board, left: Record) -> None:
    known = {each.serial: _session(each) for each in left.sessions}
    lines = {session.line for session in known.values()}
    # By the last session of each line: which line has been free for longest is unknown.
    free = sorted(set(range(board.sessions)) - lines, key=lambda line: board.session(line).serial)
    registry.restore(list(known.values()), [_slot(each, known, pool) for each in left.slots], free)
    registry.count, registry.high_water, registry.streams = left.count, left.high_water, left.streams
    for tombstone in left.tombstones:
        registry.tombstones.restore(Origin(*tombstone[:3]), Tombstone(*tombstone[3:]))
        registry.has_had_bridge = True


def _session(record: SessionRecord) -> Session:
    session = Session(record.id, record.serial, record.serial & 0xFFFF, record.name, role=record.role)
    session.state = record.state  # type: ignore[assignment] # one of its values
    session.end = "" if session.state == "live" else session.state
    session.pid = record.pid if record.started else 0
    session.started, session.streams = record.started, set(record.streams)
    return session


def _slot(record: SlotRecord, sessions: dict[int, Session], pool: Pool) -> Slot:
    recorder = None
    if record.recorder is not None:
        serial, session_id, name = record.recorder
        gone = Session(session_id, serial, serial & 0xFFFF, name, record.recorder_pid, state="closed")
        recorder = sessions.get(serial) or gone
    return Slot(
        record.index,
        record.state,  # type: ignore[arg-type] # one of its values
        record.incarnation,
        record.name,
        record.device,
        record.engine,
        record.depth,
        record.base,
        [pool.held[serial] for serial in record.ring],
        recorder,
        set(record.active),
        set(record.draining),
        set(record.left),
        record.is_drained,
        None if record.origin is None else Origin(*record.origin),
        record.node,
        record.reason,
        record.good,
        record.is_tombstone,
        record.remains,
        record.freed,
    )


def _entry(session: Session, record: SessionRecord, board: Board, now_ns: int) -> SessionEntry:
    watch = ProcessWatch.resumed(record.pid, record.started, board, session.line, is_ready=record.is_ready)
    entry = SessionEntry(session, record.token, record.nonce, record.ttl_ns, record.opened_ns, now_ns, watch)
    entry.why_not_event, entry.is_ready, entry.forgotten = record.why_not_event, record.is_ready, record.forgotten
    entry.was_confirmed = record.is_confirmed
    return entry
