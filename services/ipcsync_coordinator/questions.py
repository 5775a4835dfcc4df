"""What clients are told of sessions and slots: attachments, the rows of lists, counts and metrics."""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast, get_args

from ipcsync import __version__
from ipcsync._linux.process import resident_bytes
from ipcsync._logs import fields, is_round
from ipcsync._wire import messages
from ipcsync.errors import IpcSyncError, ProtocolError
from ipcsync.typing import EngineName
from ipcsync_coordinator.effects import watermark
from ipcsync_coordinator.journal import Transactions
from ipcsync_coordinator.pool import Pool
from ipcsync_coordinator.state import Recorder, Session, Slot
from ipcsync_keeper.resources import StartupConfig

log = logging.getLogger("ipcsync.coordinator")

MOST_IN_FLIGHT = 256
"""The most unanswered requests of one client, whose queue takes 1,000."""
MOST_ROWS = 4096
"""The most rows of a list that is asked for without a session."""


# --- what is told -----------------------------------------------------------------------------------------------------


def attachment_of(slot: Slot, session: Session, pool: Pool) -> messages.Attachment:
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
        origin=origin,
    )


def remains_of(slot: Slot, recorded: int) -> messages.Remains:
    """What became of the last use of a slot, which is over; `recorded` stays on the board until the next one."""
    ended = "closed" if slot.ended == "closed" else slot.reason if slot.reason in ("expired", "behind") else "died"
    cause = cast("messages.RemainsCause", ended)
    who = (slot.recorder if cause != "behind" else None) or Recorder(0, "", "")  # one that lives has not ended
    recorded = max(recorded - slot.base, 0)
    good = min(slot.good, recorded)
    return messages.Remains(
        slot.name, slot.index, slot.incarnation, slot.device, recorded, good, cause, who.serial, who.label, who.pid
    )


class Questions:
    """The operations that change nothing, in `questions`. Of a list, the first `most` rows are told, None: all."""

    def __init__(self, transactions: Transactions, metrics: Metrics, config: StartupConfig) -> None:
        self.transactions = transactions
        self._registry = transactions.registry
        self._sessions = transactions.sessions
        self._effects = transactions.effects
        self._board = transactions.effects.board
        self._pool = transactions.effects.pool
        self.metrics = metrics
        self._config = config
        self.serves_ns = time.monotonic_ns()  # since when requests are answered
        # By operation: the body, and the most rows of the reply.
        self.questions: dict[str, Callable[[Any, int | None], messages.Message]] = {
            "events": lambda body, most: messages.EventList(self._events(body.prefix, most)),
            "sessions": lambda _, most: messages.SessionList(self._live(most)),
            "attachments": self._attachments,
            "stats": lambda *_: messages.Counters(self.stats()),
        }

    def snapshot(self, _: Session, body: messages.Snapshot) -> messages.Message:
        """All events and sessions, and the number of the last announcement that they follow from."""
        self.metrics.resyncs += body.is_resync
        return messages.SnapshotReply(self._effects.feed.number, self._events(body.prefix), self._live())

    def _in_use(self, prefix: str) -> Iterator[Slot]:
        """The slots in use whose names begin with `prefix`, those in quarantine included."""
        return (slot for slot in self._registry.slots.values() if not slot.is_over and slot.name.startswith(prefix))

    def _events(self, prefix: str, most: int | None = None) -> list[messages.EventInfo]:
        return [self._event(slot) for slot in islice(self._in_use(prefix), most)]

    def _event(self, slot: Slot) -> messages.EventInfo:
        assert slot.state != "free"
        assert slot.state != "kept"
        line = self._effects.line(slot.index)
        generation = max(line.recorded - slot.base, 0)
        is_final = slot.state == "broken" or slot.is_drained
        completed = slot.good if is_final else watermark(slot, line) - slot.base
        return messages.EventInfo(
            name=slot.name,
            device=slot.device,
            engine=cast("EngineName", slot.engine),
            state=slot.state,
            generation=generation,
            completed=min(max(completed, 0), generation),
            attached=len(slot.active) + len(slot.draining),
            recorder=slot.recorder.label if slot.recorder else "",
            slot=slot.index,
            incarnation=slot.incarnation,
            node=slot.node,
            cause=slot.cause,
            ended_s=slot.quarantined_s(time.monotonic_ns()),
        )

    def _attachments(self, body: messages.ListAttachments, most: int | None) -> messages.Message:
        slots = self._in_use(body.prefix)
        uses = (self._use(slot, serial) for slot in slots for serial in sorted(slot.active | slot.draining))
        return messages.AttachmentList(list(islice(uses, body.limit if most is None else min(body.limit, most))))

    def _use(self, slot: Slot, serial: int) -> messages.AttachmentInfo:
        session = self._registry.sessions[serial]
        return messages.AttachmentInfo(
            event=slot.name,
            session=session.label,
            session_id=session.id,
            role="records" if slot.is_recorded_by(session) else "waits",
            state="active" if serial in slot.active else "draining",
            slot=slot.index,
            incarnation=slot.incarnation,
        )

    def _live(self, most: int | None = None) -> list[messages.SessionInfo]:
        now_ns = time.monotonic_ns()
        live = (session for session in self._sessions if session.state == "live")
        return [self._session(session, now_ns) for session in islice(live, most)]

    def _session(self, session: Session, now_ns: int) -> messages.SessionInfo:
        seen = max(self._board.session(session.line).heartbeat, session.opened_ns)
        return messages.SessionInfo(
            id=session.id,
            name=session.name,
            pid=session.pid,
            events=len(session.attached),
            connected_s=(now_ns - session.opened_ns) / 1e9,
            last_seen_s=max(now_ns - seen, 0) / 1e9,
        )

    def stats(self) -> dict[str, object]:
        registry, pool = self._registry, self._pool
        slots = [slot for slot in registry.slots.values() if not slot.is_over]
        opened_ns = [session.opened_ns for session in self._sessions if session.state == "live"]
        now_ns = time.monotonic_ns()
        return {
            "version": __version__,
            "epoch": self._board.epoch.hex(),
            "driver": self._config.driver,
            "lease_ttl_s": registry.limits.lease_ttl,
            "sessions": len(opened_ns),
            "max_sessions": registry.limits.max_sessions,
            "oldest_lease_s": (now_ns - min(opened_ns, default=now_ns)) / 1e9,
            "attachments": sum(len(slot.active) + len(slot.draining) for slot in slots),
            "events": sum(slot.state == "open" for slot in slots),
            "states": {
                kind: dict(Counter(slot.state for slot in slots if slot.engine == kind))
                for kind in get_args(EngineName)
            },
            "pool_size": registry.limits.pool,
            "pool_in_use": registry.in_use,
            "pool_high_water": registry.high_water,
            "cuda_events": pool.made,
            "kept": registry.kept.counts(pool.left_pending),
            "kept_limit": registry.kept.limits,
            "quarantined": sum(slot.state != "open" for slot in slots),
            "quarantine_oldest_s": max((slot.quarantined_s(now_ns) or 0.0 for slot in slots), default=0.0),
            "feed_number": self._effects.feed.number,
            **self.metrics.stats(),
            "uptime_s": (now_ns - self._config.started_ns) / 1e9,
            "starts": self._config.starts,
            "start_s": (now_ns - self.serves_ns) / 1e9,
            "pause_s": (self.serves_ns - self._config.unserved_ns) / 1e9 if self._config.unserved_ns else 0.0,
            "restarts": self._config.restarts,
            "pid": os.getpid(),
            "keeper_pid": self._config.keeper_pid,
            "memory_bytes": resident_bytes(os.getpid()),
            "keeper_memory_bytes": resident_bytes(self._config.keeper_pid),
        }


# --- what is counted --------------------------------------------------------------------------------------------------


BOUNDS_S = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 500e-3, 1.0)
"""Upper bounds, in seconds, of the buckets for a request's time."""


class Metrics:
    """Counts of requests and refusals, of results by operation, and a histogram of the time that each frame took."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter({"pidfd": 0, "ttl": 0})
        self.resyncs = 0
        self.results: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By operation: "ok", the name of an error, "late" or "internal"."""
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def count_refusal(self, error: IpcSyncError, op: str) -> None:
        """Count a refused request, with its operation if that is known."""
        code = error.code if isinstance(error, ProtocolError) else ""
        self.refusals[code or type(error).__name__] += 1
        if op:
            self.results[op][type(error).__name__] += 1

    def refuse(self, reason: str, **more: object) -> None:
        """Count a refusal that is of no request, and log some of them."""
        self.refusals[reason] += 1
        if is_round(self.refusals[reason]):
            log.warning("refused", extra=fields(reason=reason, count=self.refusals[reason], **more))

    def observe(self, seconds: float) -> None:
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def stats(self) -> dict[str, object]:
        """All metrics, for `Client.stats`; a latency's counts are not cumulative, the last is above every bound."""
        return {
            "requests": dict(self.requests),
            "refusals": dict(self.refusals),
            "deaths": dict(self.deaths),
            "resyncs": self.resyncs,
            "results": {op: dict(counter) for op, counter in self.results.items()},
            "latency": {"bounds_s": list(BOUNDS_S), "counts": list(self._buckets), "sum_s": self._sum_s},
        }
