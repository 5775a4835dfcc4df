"""How a transition takes effect: appended to the journal, then carried out, then marked as that; replies come after.

The order is what makes a coordinator's death at any step harmless. `tests/faults` has its model.
"""

from __future__ import annotations

import logging

from ipcsync._logs import fields, is_round
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.journal import Journal
from ipcsync_coordinator.records import Reply, record_of
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.sessions import SessionTable

log = logging.getLogger("ipcsync.coordinator")


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
