"""Recovery: a coordinator continues from the journal of an earlier one."""

from __future__ import annotations

from ipcsync._board import BROKEN, CLOSED, FREE, OPEN, Board
from ipcsync_coordinator.journal import JournalError
from ipcsync_coordinator.records import Record, folded
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import Slot
from ipcsync_coordinator.transactions import Transactions

_STATES = {"free": FREE, "open": OPEN, "broken": BROKEN, "closed": CLOSED, "kept": BROKEN}


def recover(transactions: Transactions, now_ns: int) -> list[Slot]:
    """Fill an empty registry and session table, and finish what was begun. Returns the slots that differ on the board.

    JournalError if the journal cannot be read, or is inconsistent.
    """
    journal, effects = transactions.journal, transactions.effects
    board, table = effects.board, transactions.sessions
    records, is_carried_out = journal.read()
    if not records:
        return []
    try:
        left = folded(records)
        _restore(transactions.registry, board, left)
        for slot in left.slots:
            effects.pool.handles(slot.ring)  # all are there
    except KeyError as error:
        raise JournalError(f"it names {error}, which does not exist") from None
    for session in left.sessions:
        session.beat_ns, session.told = now_ns, session.state
        table.add(session)
    for reply in left.replies:
        table.keep(reply.token, reply.id, reply.kept)
    for slot in left.slots:
        slot.told = slot.ended or "opened"
    if not is_carried_out:
        effects.redo(records[-1].sessions, records[-1].slots)
        journal.carried_out()
    for slot in left.slots:
        effects.resume(slot)
    effects.pool.sweep(serial for slot in left.slots for serial in slot.ring)
    return [slot for slot in left.slots if board.slot(slot.index).state != _STATES[slot.state]]


def _restore(registry: Registry, board: Board, left: Record) -> None:
    lines = {session.line for session in left.sessions}
    # By the last session of each line: which line has been free for longest is unknown.
    free = sorted(set(range(board.sessions)) - lines, key=lambda line: board.session(line).serial)
    registry.restore(left.sessions, left.slots, free)
    registry.count, registry.high_water, registry.streams = left.count, left.high_water, left.streams
    for origin, tombstone in left.tombstones:
        registry.tombstones.add(origin, tombstone)
        registry.has_had_bridge = True
    registry.tombstones.new.clear()
