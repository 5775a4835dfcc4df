"""How a transition takes effect: appended to the journal, then carried out, then marked as that; replies come after.
And how a coordinator continues from the journal of an earlier one.

The order is what makes a coordinator's death at any step harmless.
"""

from __future__ import annotations

import logging

from ipcsync._board import BROKEN, CLOSED, FREE, OPEN, Board
from ipcsync._logs import fields, is_round
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.journal import Journal, JournalError, Record, Reply, folded, record_of
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import SessionTable, Slot

log = logging.getLogger("ipcsync.coordinator")

_STATES = {"free": FREE, "open": OPEN, "broken": BROKEN, "closed": CLOSED, "kept": BROKEN}


class Transactions:
    """Has transitions of the registry take effect."""

    def __init__(self, registry: Registry, sessions: SessionTable, effects: Effects, journal: Journal) -> None:
        self.registry = registry
        self.sessions = sessions
        self.effects = effects
        self.journal = journal
        self._failures = 0  # to append

    def commit(self, reply: Reply | None = None, *, is_refusal: bool = False) -> bool:
        """Have everything since the last call take effect, and keep the reply; returns whether that may be sent.

        What could not be appended is, with what follows, at the next call: who asked for it asks again. A refusal is
        kept in memory only: a reply that its client has not read is lost with the connection.
        """
        touched, tombstones = self.registry.touched, self.registry.tombstones
        self.effects.fill_in(touched.slots)
        if touched or (reply and not is_refusal):
            replies = [] if reply is None or is_refusal else [reply]
            try:
                self.journal.append(record_of(self.registry, touched, replies, tombstones.new))
            except OSError as error:
                self._failures += 1
                if is_round(self._failures):
                    log.error("no memory for the journal", extra=fields(why=error, count=self._failures))
                return is_refusal
            self.effects.carry_out(touched)
            touched.clear()
            tombstones.new.clear()
            self._keep(reply)  # before the log may be compacted: what is not kept is then in no log
            self.journal.carried_out()
        else:
            self._keep(reply)
        return True

    def _keep(self, reply: Reply | None) -> None:
        if reply is not None:
            self.sessions.keep(reply.token, reply.id, reply.kept)


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
    registry.count, registry.high_water = left.count, left.high_water
    for origin, tombstone in left.tombstones:
        registry.tombstones.add(origin, tombstone)
        registry.has_had_bridge = True
    registry.tombstones.new.clear()
