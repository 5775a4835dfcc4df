"""Questions of sessions to other nodes, and the bridge's answers.

A question goes out on the feed as a `Want`. Its reply is owed until the bridge has answered, or until the session does
not wait any more. The journal has no wants: sessions ask the next coordinator again, and the bridge asks for the wants.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ipcsync._logs import fields
from ipcsync._wire import codec, messages, names
from ipcsync._wire.codec import Origin
from ipcsync.errors import (
    EngineMismatch,
    EventClosed,
    IpcSyncError,
    NoBridge,
    NodeLost,
    NotRecorder,
    ProtocolError,
    QuotaExceeded,
    StalePoint,
)
from ipcsync_coordinator.journal import Reply, Transactions
from ipcsync_coordinator.questions import MOST_IN_FLIGHT, attachment_of
from ipcsync_coordinator.state import Session

log = logging.getLogger("ipcsync.coordinator")

MOST_WANTS = 65_536
_Operation: TypeAlias = Callable[[Session, Any], messages.Message | None]
_ANSWERS = (messages.Done, messages.NodeList, messages.BridgeInfo, messages.EventList, messages.Failure)


@dataclass
class _Owed:
    """A reply that a session waits for, or who asks without one."""

    want: messages.Want
    session: Session | None
    key: tuple[bytes, int]  # the token, or without a session the connection that it came by; the request's id
    routing: bytes
    device: str

    @property
    def is_waited_for(self) -> bool:
        """Whether who asked may still be there."""
        return self.session is None or self.session.state == "live"


class Fleet:
    """The operations of and about other nodes. `deliver` sends a reply's frame to a routing id."""

    def __init__(self, transactions: Transactions) -> None:
        self._registry = transactions.registry
        self._effects = transactions.effects
        self._sessions = transactions.sessions
        self._transactions = transactions
        self._epoch = transactions.effects.board.epoch
        self._number = transactions.effects.feed.number  # of wants; no other coordinator of this epoch has these
        self._owed: dict[int, _Owed] = {}
        self._asked: defaultdict[bytes, dict[int, int]] = defaultdict(dict)  # by both parts of `_Owed.key`
        self.deliver: Callable[[bytes, bytes], object] = lambda *_: None  # before there is a socket
        self.table: dict[str, _Operation] = {
            "import": partial(_of_bridge, self._import),
            "answer": partial(_of_bridge, self._answer),
            "finish": partial(_of_bridge, self._finish),
            "wants": partial(_of_bridge, lambda *_: messages.WantList([owed.want for owed in self._owed.values()])),
        }

    # --- what sessions ask --------------------------------------------------------------------------------------------

    def ask(
        self, session: Session | None, body: messages.Remote, request_id: int, deadline_ns: int, routing: bytes
    ) -> messages.Message | None:
        """The reply; None if it is owed until the bridge answers. A question needs no `session`."""
        self._check_names(body)
        key = (routing if session is None else session.token, request_id)
        mine = self._asked.get(key[0], {})
        if (known := mine.get(request_id)) is not None:  # it asks again, maybe over another connection
            self._owed[known].routing = routing
            return None
        if session is not None and body.what == "attach":
            if len(body.epoch) != len(self._epoch) or body.epoch == self._epoch:
                raise ProtocolError("a point of another node must have another epoch than this one", code="epoch")
            if self._is_known(origin := Origin(body.epoch, body.slot, body.incarnation)):
                return self._attach(session, origin, body.default_device)
        elif session is not None and body.what == "claim":
            self._check_claim(session, body)
        self._require_bridge(body)
        if len(mine) >= MOST_IN_FLIGHT:
            self.tick(time.monotonic_ns())  # it has no more in flight: others were given up
        if len(mine) >= MOST_IN_FLIGHT:
            raise QuotaExceeded(f"{MOST_IN_FLIGHT} questions of one session are unanswered", limit=MOST_IN_FLIGHT)
        if len(self._owed) >= MOST_WANTS:
            raise QuotaExceeded(f"{MOST_WANTS} questions to other nodes are unanswered", limit=MOST_WANTS)
        self._number += 1
        epoch = self._epoch if body.what == "claim" else body.epoch
        want = messages.Want(
            self._number, body.what, deadline_ns, body.node, body.name, epoch, body.slot, body.incarnation
        )
        self._owed[want.number] = _Owed(want, session, key, routing, body.default_device)
        self._asked[key[0]][request_id] = want.number
        self._effects.feed.announce("wanted", want=want)
        return None

    def _check_names(self, body: messages.Remote) -> None:
        """The bridge sends them on in subjects and batches, where an invalid one would fail for others too."""
        why_not = names.why_not_node(body.node) if body.node or body.what == "events" else None
        if why_not:
            raise ProtocolError(f"a node's name {why_not}, not {body.node!r:.80}", code="name")
        if body.what == "open":
            self._registry.check_name(body.name, "an event's name")

    def _is_known(self, origin: Origin) -> bool:
        """Whether it has a mirror here, or a lost one: then the bridge need not be asked."""
        return origin in self._registry.mirrors or self._registry.tombstones.find(origin) is not None

    def _attach(self, session: Session, origin: Origin, device: str, name: str = "") -> messages.Attachment:
        slot = self._registry.mirrors.get(origin)
        if origin.epoch == self._epoch:  # the fleet's event is on this node
            slot = self._registry.attach(session, origin.slot, origin.incarnation)
        elif slot is not None:
            slot = self._registry.attach(session, slot.index, slot.incarnation)
        else:
            tombstone = self._registry.tombstones.find(origin)
            assert tombstone is not None
            slot = self._registry.restore_from_tombstone(session, origin, tombstone, self._device(device), name)
        return attachment_of(slot, session, self._effects.pool)

    def _device(self, wanted: str) -> str:
        """The device of a mirror: that of the session that asked for it first."""
        devices = self._effects.pool.devices
        return wanted if wanted in devices else devices[0]

    def _check_claim(self, session: Session, body: messages.Remote) -> None:
        slot = self._registry.slots.get(body.slot)
        if slot is None or slot.incarnation != body.incarnation or slot.state != "open":
            raise EventClosed(f"the event {body.name!r} is over")
        if not slot.is_recorded_by(session):
            raise NotRecorder(f"this session does not record on {body.name!r}", event=body.name)
        if slot.engine != "timeline":
            raise EngineMismatch(
                f"the event {body.name!r} uses the engine {slot.engine!r}, and between nodes only 'timeline' works: "
                "open it with engine='timeline'"
            )

    def _require_bridge(self, body: messages.Remote) -> None:
        if self._sessions.bridge() is not None:
            return
        if body.what == "attach" and not self._registry.has_had_bridge:
            raise StalePoint(
                "this point is of an earlier coordinator, or of another one: what it stands for is void, and this "
                "session is healthy; drop it, and have its sender connect again and record anew (if it is of another "
                "node, a bridge must run here: ipcsync bridge)",
                cause="gone",
            )
        raise NoBridge("no bridge runs beside this coordinator: start `ipcsync bridge --node NAME --nats URL`")

    def tick(self, now_ns: int) -> None:
        """Forget questions whose sessions do not wait any more; without a bridge, refuse the others."""
        if not self._owed:
            return
        has_bridge = self._sessions.bridge() is not None
        for owed in list(self._owed.values()):
            if 0 < owed.want.deadline_ns < now_ns or not owed.is_waited_for:
                self._forget(owed)
            elif not has_bridge:
                self._reply(owed, codec.failure_of(NoBridge("the bridge to other nodes has ended without an answer")))

    def _forget(self, owed: _Owed) -> None:
        asker, request_id = owed.key
        del self._owed[owed.want.number], self._asked[asker][request_id]
        if not self._asked[asker]:
            del self._asked[asker]

    def _reply(self, owed: _Owed, body: messages.Message) -> None:
        """Send the reply to a question, and keep it unless it may be asked again."""
        self._forget(owed)
        token, request_id = owed.key
        frame = codec.encode_reply(request_id, body)
        if owed.session is not None and owed.want.what in ("attach", "open", "claim"):
            is_refusal = isinstance(body, messages.Failure)
            reply = Reply.of(token, request_id, body, frame)
            if not self._transactions.commit(reply, is_refusal=is_refusal):
                return
        self.deliver(owed.routing, frame)

    # --- what the bridge says -----------------------------------------------------------------------------------------

    def _import(self, session: Session, body: messages.Import) -> messages.Message | None:
        owed = self._owed.get(body.want)
        origin = Origin(body.epoch, body.slot, body.incarnation)
        if body.epoch == self._epoch:
            self._give(owed, origin)
            return None
        if not self._is_known(origin):
            device = self._device(owed.device if owed is not None else "")
            self._registry.create(session, body.name, recorder=True, device=device, origin=origin, node=body.node)
        slot = self._registry.mirrors.get(origin)
        self._give(owed, origin)
        if slot is not None and slot.is_unwanted:  # who asked is gone, or was refused
            self._registry.touched.unwanted.add(slot)
        if slot is None or not slot.is_recorded_by(session) or slot.state != "open":
            raise NodeLost(f"slot {body.slot} of node {body.node!r} is lost on this node for good", node=body.node)
        return attachment_of(slot, session, self._effects.pool)

    def _give(self, owed: _Owed | None, origin: Origin) -> None:
        """Reply to the session that asked for a use with an attachment to it, or with the error."""
        if owed is None or owed.session is None or not owed.is_waited_for:
            return  # it waits no more
        body: messages.Message
        try:
            body = self._attach(owed.session, origin, owed.device, owed.want.name)
        except IpcSyncError as error:
            body = codec.failure_of(error)
        self._reply(owed, body)

    def _answer(self, _: Session, body: messages.Answer) -> None:
        owed = self._owed.get(body.want)
        reply = codec.decode_reply(body.reply)[1]
        if not isinstance(reply, _ANSWERS):
            raise ProtocolError(f"{type(reply).__name__} is not an answer to a question to other nodes", code="invalid")
        if owed is not None:
            self._reply(owed, reply)

    def _finish(self, session: Session, body: messages.Finish) -> None:
        self._registry.finish_mirror(session, body.slot, body.incarnation, body.state, body.reason)
        if body.state == "broken":
            log.info("mirror lost", extra=fields(slot=body.slot, reason=body.reason))


def _of_bridge(operation: _Operation, session: Session, body: messages.Message) -> messages.Message | None:
    if session.role != "bridge":
        raise ProtocolError("only a bridge may send this", code="role")
    return operation(session, body)
