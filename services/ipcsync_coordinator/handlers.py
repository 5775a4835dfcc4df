"""The operations. This module uses neither sockets nor frames."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from ipcsync._board import Peer
from ipcsync._linux.process import pid_namespace, shm_identity, start_time, time_namespace
from ipcsync._logs import fields
from ipcsync._wire import codec, messages
from ipcsync.errors import ConnectError, EventClosed, ProtocolError, QuotaExceeded, RecorderLost
from ipcsync_coordinator.deaths import DeathWatch
from ipcsync_coordinator.fleet import Fleet
from ipcsync_coordinator.gate import Sender
from ipcsync_coordinator.journal import Transactions
from ipcsync_coordinator.questions import MOST_IN_FLIGHT, Metrics, Questions, attachment_of, remains_of
from ipcsync_coordinator.registry import check_usable
from ipcsync_coordinator.state import UNKNOWN, Session, Use
from ipcsync_keeper.config import MAX_TTL, MIN_TTL
from ipcsync_keeper.resources import StartupConfig

log = logging.getLogger("ipcsync.coordinator")


class Handlers(Questions):
    """The operations, those that change something in `table`, and the beginning and end of sessions."""

    def __init__(
        self,
        transactions: Transactions,
        metrics: Metrics,
        config: StartupConfig,
        feed_endpoint: str,
        deaths: DeathWatch,
        room: Callable[[], int],
    ) -> None:
        super().__init__(transactions, metrics, config)
        limits = self._registry.limits
        # As many as replies are kept for repeats. ZeroMQ learns only every half queue what the other side has read.
        self._window = min(limits.remembered_requests, max(1, limits.reply_queue // 2), MOST_IN_FLIGHT)
        self.fleet = Fleet(transactions)
        self._feed_endpoint = feed_endpoint
        self._deaths = deaths
        self._room = room  # how many sessions the file descriptors allow
        self._namespace = pid_namespace()
        self._time_namespace = time_namespace()
        self._shm = shm_identity()
        self.table: dict[str, Callable[[Session, Any], messages.Message | None]] = {  # None: it is done
            "ready": self._ready,
            "open": self._open,
            "attach": self._attach,
            "close": self._close,
            "break": lambda session, body: self._registry.break_event(session, body.slot, body.incarnation),
            "stream": self._stream,
            "snapshot": self.snapshot,
            "probe": self._probe,
            "bye": self._bye,
            **self.fleet.table,
        }

    def watch(self, session: Session) -> None:
        session.peer = Peer(self._board, session.serial)
        self._deaths.watch(session.peer)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def refuse_other_clock(self, hello: messages.Hello) -> None:
        """Raise ConnectError for a process with another CLOCK_MONOTONIC.

        If its clock is behind, each of its requests would be dropped as late; if ahead, its lease would never expire.
        """
        if hello.time_namespace and self._time_namespace and hello.time_namespace != self._time_namespace:
            raise ConnectError(
                "the process and the coordinator are in two time namespaces, but leases need a clock that both share: "
                "start them in the same one"
            )

    def hello(self, hello: messages.Hello, sender: Sender) -> messages.Welcome:
        known = self._sessions.of_nonce(hello.nonce)
        if known is not None:
            return self._welcome(known)
        self._check_admission(hello, sender)
        ttl = self._granted_ttl(hello.lease_ttl)
        session = self._registry.open_session(os.urandom(4).hex(), hello.name, hello.role, self._is_held)
        session.token, session.nonce = os.urandom(16), hello.nonce
        session.opened_ns = session.beat_ns = time.monotonic_ns()
        session.ttl_ns, session.why_not_event, session.pid = int(ttl * 1e9), self._why_not_event(hello), sender.pid
        with suppress(OSError):  # descriptors are short: the TTL and the lifeline decide
            session.started = start_time(session.pid) or 0
        self._sessions.add(session)
        log.info("session opened", extra=fields(id=session.id, name=session.name, pid=session.pid, ttl_s=ttl))
        return self._welcome(session)

    def _check_admission(self, hello: messages.Hello, sender: Sender) -> None:
        mine, theirs = os.geteuid(), sender.uid
        if theirs not in ("", str(mine)):
            raise ConnectError(
                f"this is uid {theirs}, and the coordinator is of uid {mine}: a session needs the same one, and root "
                "may only look (ipcsync status)"
            )
        if hello.role not in ("", "bridge"):
            raise ProtocolError(f"a session's role must be 'bridge' or empty, not {hello.role!r:.80}", code="role")
        if hello.role and (serving := self._sessions.bridge()) is not None:
            raise ConnectError(f"the bridge {serving.who} serves here already; a coordinator has one: stop it first")
        if not hello.role and hello.driver != self._config.driver:
            raise ConnectError(
                f"this coordinator uses the driver {self._config.driver!r}, the client {hello.driver!r}: "
                "set IPCSYNC_DRIVER to the same for both"
            )
        if len(self._sessions) >= (room := self._room()):
            raise QuotaExceeded(f"the file descriptors allow {room} sessions (raise `ulimit -n`)", limit=room)

    def _is_held(self, line: int) -> bool:
        # By a child that C code forked, after its parent's death: who gets the line would wait for the child's end.
        return self._board.has_lifeline(self._board.session(line))

    def _granted_ttl(self, wanted: float | None) -> float:
        if wanted is None:
            return self._registry.limits.lease_ttl
        if math.isnan(wanted) or wanted <= 0:
            raise ProtocolError(f"a lease's TTL must be a positive number of seconds, not {wanted}", code="ttl")
        return min(max(wanted, MIN_TTL), MAX_TTL)

    def _why_not_event(self, hello: messages.Hello) -> str | None:
        if hello.shm and self._shm and hello.shm != self._shm and not hello.role:  # a bridge opens no handle
            return "the process and the coordinator do not share /dev/shm, which CUDA's event handles need"
        if hello.namespace != self._namespace and hello.pid == self._config.keeper_pid and not hello.role:
            return (
                f"the process and the coordinator have the same pid value {hello.pid} in two pid namespaces, "
                "and CUDA takes one's handles for the other's own"
            )
        return None

    def _welcome(self, session: Session) -> messages.Welcome:
        ttl = session.ttl_ns / 1e9
        return messages.Welcome(
            token=session.token,
            session=session.id,
            serial=session.serial,
            line=session.line,
            epoch=self._board.epoch,
            lease_ttl=ttl,
            heartbeat=ttl / 3,
            board=self._board.path,
            feed=self._feed_endpoint,
            driver=self._config.driver,
            devices=self._pool.devices,
            window=self._window,
        )

    def _ready(self, session: Session, _: messages.Ready) -> None:
        session.is_ready = True
        self._registry.touched.sessions.add(session)
        self.watch(session)

    def _bye(self, session: Session, body: messages.Bye) -> None:
        # Appended later, it would keep the replies to all others back until then.
        slots = [self._registry.slots[index] for index in session.attached]
        used = sum(len(slot.active) + len(slot.draining) + slot.depth for slot in slots)
        self.transactions.journal.make_room(512 * len(slots) + 10 * used)
        self._end(session, released=body.released)

    def _end(self, session: Session, *, released: bool) -> None:
        self._registry.end_session(session, released=released)
        log.info("session closed", extra=fields(id=session.id, name=session.name, pid=session.pid))

    def lose(self, session: Session, how: str) -> None:
        """End a session whose process is dead ("pidfd"), or was silent for longer than its TTL ("ttl").

        Its slots stay until it is gone: a dead process submits nothing more, and what it submitted may go on.
        """
        if not self._is_lost(session, how):
            return
        # A session that was never ready, without a lifeline, does not use the board: its line needs no proof of death.
        if not (session.is_ready or self._is_held(session.line)):
            self._registry.release_dead(session)
        else:
            self._registry.lose(session, "died" if session.is_dead else "expired")
        self.transactions.commit()

    def bury(self, session: Session) -> None:
        """Free the slots of a session whose process is gone, but those that a GPU may still touch for it.

        A child forked from it keeps the driver's files, and so its work. Without a lock that shows their end, as under
        CUDA MPS, that is never known.
        """
        if not self._is_lost(session, "pidfd"):
            return
        peer = session.peer or Peer(self._board, session.serial)
        self._registry.release_dead(session, held=0 if peer.is_over() else peer.lock or UNKNOWN)
        self.transactions.commit()

    def _is_lost(self, session: Session, how: str) -> bool:
        """Whether it is lost, which is noted; else its goodbye stands on the board, and it is ended as closed."""
        if self._board.session(session.line).has_said_goodbye:  # its process is gone, and no coordinator took its Bye
            self._end(session, released=True)
            self.transactions.commit()
            return False
        session.is_dead |= how == "pidfd"
        if session.state == "live":
            self.metrics.deaths[how] += 1
            log.warning("session lost", extra=fields(id=session.id, name=session.name, pid=session.pid, how=how))
        return True

    def break_drained(self, session: Session) -> None:
        """Break the events of a session that drains, and whose process was silent for longer than its TTL."""
        log.warning("events lost", extra=fields(id=session.id, name=session.name, pid=session.pid, how="ttl"))
        self._registry.break_drained(session)
        self.transactions.commit()

    # --- events -------------------------------------------------------------------------------------------------------

    def _open(self, session: Session, body: messages.Open) -> messages.Message:
        slot = self._registry.names.get(body.name)
        if slot is not None:
            was_tried_there = slot.device == (body.device or body.default_device)
            check_usable(session, slot, body.why_not_timeline if was_tried_there else "")
            self._registry.join(session, slot, recorder=body.recorder, device=body.device, engine=body.engine)
        else:
            self._registry.check_room(session, body.name)
            device = body.device or body.default_device or self._pool.devices[0]
            wanted = body.default_engine if body.engine == "auto" else body.engine
            engine = self._pool.choose_engine(session, wanted, device, body.why_not_timeline)
            self._registry.kept.check(engine, self._pool.left_pending)
            ring = self._pool.take(device, body.depth) if engine == "event" else []
            slot = self._registry.create(
                session, body.name, recorder=body.recorder, device=device, engine=engine, depth=body.depth, ring=ring
            )
        return attachment_of(slot, session, self._pool)

    def _attach(self, session: Session, body: messages.Attach) -> messages.Message:
        known = self._registry.slots.get(body.slot)
        if known is not None and known.incarnation == body.incarnation:
            if session.role and known.origin is not None:  # it asks for another node, and its mirrors are not its own
                raise RecorderLost(f"slot {body.slot} mirrors an event of another node", cause="gone")
            if known.is_over and known.origin is None:
                return remains_of(known, self._effects.line(known.index).recorded)
        slot = self._registry.attach(session, body.slot, body.incarnation)
        return attachment_of(slot, session, self._pool)

    def attachment_again(self, session: Session, use: Use) -> messages.Message:
        """The attachment that a reply gave. A session that has left the slot since has read that reply."""
        slot = self._registry.slots.get(use.slot)
        if slot is None or slot.incarnation != use.incarnation or slot.is_over:
            return codec.failure_of(EventClosed(f"the event of slot {use.slot} was closed by this session"))
        return replace(attachment_of(slot, session, self._pool), recorder=use.is_recorder)

    def _close(self, session: Session, body: messages.Close) -> None:
        self._registry.close(session, body.slot, body.incarnation, released=body.released, drained=body.drained)

    def _stream(self, session: Session, body: messages.OpenStream) -> messages.Message:
        default = body.default_device or self._pool.devices[0]
        device, priority = self._registry.stream(session, body.name, body.device, default, body.priority)
        return messages.StreamSpec(device, priority)

    def _probe(self, session: Session, body: messages.Probe) -> messages.Message:
        device = body.device or self._pool.devices[0]
        self._pool.check_served(device)
        reason = session.why_not_event or self._pool.why_not_event(device)
        handle = b"" if reason else self._pool.probe_handle(device)
        return messages.ProbeReply(handle, reason)
