"""From a request's frame to its reply: one typed reply for each request, and a repeated request is done once.

A frame is arbitrary bytes (see `ipcsync._wire.codec`). No body has a list or map, so nothing much larger is built.

ZeroMQ's descriptor is edge-triggered, and sending replies may take the signal of new requests. So `zmq.EVENTS` is read
again after each drain and its replies. A drain has a budget of requests and time, so that no peer keeps the loop busy.

A client's first reply of a drain is sent at once; the later ones are held until there is no further request, or for
2 ms. While many clients have many requests in flight, each has one reply in 2 ms, since ZeroMQ takes their requests in
turn. Such a call waits for all of its replies, so these are held until there are several, until the drain ends, or
until others are to be told of something.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta

from ipcsync._logs import fields
from ipcsync._wire import codec, messages
from ipcsync._wire.codec import ARRAY, UNREADABLE
from ipcsync._wire.messages import REQUESTS, VERSION, RequestBody
from ipcsync.errors import IpcSyncError, ProtocolError, SessionExpired
from ipcsync_coordinator.effects import Feed
from ipcsync_coordinator.gate import Sender, StrikeCounter, Unread, cut
from ipcsync_coordinator.handlers import Handlers
from ipcsync_coordinator.journal import Reply
from ipcsync_coordinator.questions import MOST_ROWS
from ipcsync_coordinator.state import Kept, Session
from ipcsync_keeper.config import MAX_FRAME, Settings

log = logging.getLogger("ipcsync.coordinator")

_MOST_FIXED = 0x7F  # a byte up to it is that number
_SIZES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # of a whole number, by its first byte
_BUDGET = 512
_LONGEST_NS = 50_000_000  # for the budget: some requests take 10 ms
_HOLD_NS = 2_000_000
_LOOK_EVERY = 8
_SEVERAL = 16  # of a window of 64
_EVENTS, _IN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # ints, since an enum costs as much as the call


# --- reading a frame --------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request as it came."""

    id: int
    op: str
    token: bytes
    deadline_ns: int
    body: RequestBody


_Id = Annotated[int, Meta(gt=0, le=(1 << 63) - 1)]
_Deadline = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Version = Annotated[int, Meta(ge=VERSION, le=VERSION)]
_id = msgspec.msgpack.Decoder(_Id)
_request = msgspec.msgpack.Decoder(tuple[_Version, _Id, str, bytes, _Deadline, msgspec.Raw])
_bodies = {op: msgspec.msgpack.Decoder[Any](kind) for op, kind in REQUESTS.items()}


def peek_id(frame: bytes | memoryview) -> int:
    """The request id of an invalid frame, 0 if there is none: so that its refusal is a typed reply, too."""
    if len(frame) < 3 or frame[0] & 0xF0 != ARRAY or frame[1] > _MOST_FIXED:
        return 0
    try:
        return _id.decode(frame[2 : 3 + _SIZES.get(frame[2], 0)])
    except msgspec.MsgspecError:
        return 0


def decode_request(frame: bytes | memoryview, max_frame: int = MAX_FRAME) -> Request:
    """The request in a frame of at most `max_frame` bytes; ProtocolError says which rule it breaks."""
    if len(frame) > max_frame:
        raise ProtocolError(f"a frame of {len(frame)} bytes, more than {max_frame}", code="too_large")
    if len(frame) > 1 and frame[0] & 0xF0 == ARRAY and VERSION != frame[1] <= _MOST_FIXED:
        raise ProtocolError(f"protocol version {frame[1]}, but this is {VERSION}", code="version")
    try:
        _, id_, op, token, deadline_ns, body = _request.decode(frame)
    except UNREADABLE as error:
        raise ProtocolError(f"not a request: {type(error).__name__}: {error}", code="malformed") from None
    decoder = _bodies.get(op)
    if decoder is None:
        raise ProtocolError(f"unknown operation {op!r:.80}", code="unknown_op")
    try:
        return Request(id_, op, token, deadline_ns, decoder.decode(body))
    except UNREADABLE as error:
        raise ProtocolError(f"{REQUESTS[op].__name__}: {error}", code="invalid") from None


# --- from a frame to its reply ----------------------------------------------------------------------------------------


class Dispatcher:
    """Turns request frames into reply frames, once their effects are carried out. `now_ns` is CLOCK_MONOTONIC.

    `is_one_of_many` says of the last frame whether its call has sent others, all of whose replies the call waits for.
    `strikes` counts the invalid messages of each connection.
    """

    def __init__(self, settings: Settings, handlers: Handlers) -> None:
        self._max_frame = settings.max_frame
        self._handlers = handlers
        self._metrics = handlers.metrics
        self.strikes = StrikeCounter(settings.max_invalid)
        self._transactions = handlers.transactions
        self._journal = handlers.transactions.journal
        self.is_one_of_many = False

    def handle(self, frame: bytes, sender: Sender, now_ns: int) -> bytes | None:
        """The reply to a frame, None if its client does not wait for one any more."""
        self.is_one_of_many = False
        op, request_id = "", 0  # until they are known
        is_poison = self._journal.begin_request(frame)
        try:
            if is_poison:
                raise ProtocolError("coordinators died of this request: it is not tried again", code="poison")
            request = decode_request(frame, self._max_frame)
            op, request_id = request.op, request.id
            return self._answer(request, sender, now_ns)
        except IpcSyncError as error:
            self._metrics.count_refusal(error, op)
            failure = codec.failure_of(error)
            if is_poison:
                log.error("refused", extra=fields(reason="poison"))
            elif not op:
                self.strikes.strike(sender.routing)
        except Exception:
            self._metrics.refusals["internal"] += 1
            self._metrics.results[op]["internal"] += 1
            log.exception("request failed", extra=fields(op=op))
            failure = messages.Failure("IpcSyncError", "the coordinator has an internal error; see its log")
        finally:
            self._transactions.commit()  # also the changes of a request that failed
            self._journal.end_request()
            self._metrics.observe((time.monotonic_ns() - now_ns) / 1e9)
        return codec.encode_reply(request_id or peek_id(frame), failure)

    def _answer(self, request: Request, sender: Sender, now_ns: int) -> bytes | None:
        op = request.op
        if isinstance(request.body, messages.Hello):
            self._handlers.refuse_other_clock(request.body)  # before its deadline, which that clock gives
        if op == "hello" or (not request.token and messages.is_question(request.body)):
            return None if self._is_late(request, now_ns) else self._decide(None, request, sender)
        sessions = self._transactions.sessions
        session = sessions.find(request.token)
        if session is None:
            kept: Kept | None = sessions.final_reply(request.token, request.id)
        else:
            self.strikes.clear(sender.routing)
            self.is_one_of_many = 0 < request.deadline_ns == session.deadline_ns
            session.deadline_ns = request.deadline_ns
            kept = session.replies.get(request.id)
        # Before the deadline: a client asks about requests that it gave up.
        if isinstance(kept, bytes):
            return kept
        if session is not None and kept is not None:
            return codec.encode_reply(request.id, self._handlers.attachment_again(session, kept))
        if self._is_late(request, now_ns):
            return None
        if session is None:
            self.strikes.strike(sender.routing)
            raise SessionExpired("no such session: it expired, was closed, or is another coordinator's; connect again")
        if request.id <= session.forgotten:
            raise ProtocolError(f"request {request.id} was answered too long ago", code="forgotten")
        if session.state != "live" and op not in ("close", "break", "bye"):
            raise SessionExpired(
                f"the session {session.who} expired: it was silent for longer than its lease's "
                f"{session.ttl_ns / 1e9:g} s; connect again",
                session=session.label,
            )
        return self._decide(session, request, sender)

    def _is_late(self, request: Request, now_ns: int) -> bool:
        if is_late := 0 < request.deadline_ns < now_ns:
            self._metrics.refusals["late"] += 1
            self._metrics.results[request.op]["late"] += 1
        return is_late

    def _decide(self, session: Session | None, request: Request, sender: Sender) -> bytes | None:
        """The reply to a request of a session, or to a question or hello without one; None if it follows later."""
        op, body = request.op, None
        is_question = messages.is_question(request.body)
        effect = "none" if is_question else request.body.effect
        self._metrics.requests[op] += 1
        try:
            if effect != "none":
                self._journal.make_room()
            if isinstance(request.body, messages.Remote):
                asked = request.body, request.id, request.deadline_ns
                body = self._handlers.fleet.ask(session, *asked, sender.routing)
                if body is None:
                    return None  # the reply follows once the bridge has answered
            elif is_question:
                body = self._handlers.questions[op](request.body, None if session is not None else MOST_ROWS)
            elif isinstance(request.body, messages.Hello):
                body = self._handlers.hello(request.body, sender)
            else:
                assert session is not None
                body = self._handlers.table[op](session, request.body) or messages.Done()
            self._metrics.results[op]["ok"] += 1
        except IpcSyncError as error:
            if is_question:
                self._metrics.results[op][type(error).__name__] += 1
            else:
                self._metrics.count_refusal(error, op)
            reply = codec.encode_reply(request.id, codec.failure_of(error))
        else:
            reply = codec.encode_reply(request.id, body)
        if effect == "none":
            return reply
        kept = Reply.of(session.token, request.id, body, reply) if effect == "once" and session is not None else None
        return reply if self._transactions.commit(kept, is_refusal=body is None) else None


# --- the socket -------------------------------------------------------------------------------------------------------


class Requests:
    """A bound ROUTER and its peers. `refuse` counts refusals by reason, and logs some of them with fields.

    What others are told of these requests, on the `feed`, goes out once held replies have been sent.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        settings: Settings,
        dispatcher: Dispatcher,
        refuse: Callable[..., None],
        feed: Feed,
    ) -> None:
        self.socket = socket
        self._max_frames = settings.max_frames
        self._dispatcher = dispatcher
        self._strikes = dispatcher.strikes
        self._unread = Unread()
        self._refuse = refuse
        self._feed = feed
        self._is_serving = False
        self._held: dict[bytes, list[bytes]] = {}  # later replies of a drain, by routing id
        self._wait_for_many: set[bytes] = set()  # those of them whose last request was one of many
        self._send_at = 0

    def drain(self) -> bool:
        """Answer the waiting requests; returns whether there may be more."""
        if self._serve_up_to(1) and self._has_more():  # usually not: most clients send one request and wait
            self._serve_up_to(_BUDGET)
            return self._has_more()
        return False

    def _has_more(self) -> bool:
        return bool(self.socket.getsockopt(_EVENTS) & _IN)  # type: ignore[operator] # an int

    def _serve_up_to(self, most: int) -> bool:
        """Answer so many requests, or those of a moment; whether there may be more."""
        self._is_serving = True
        until_ns = time.monotonic_ns() + _LONGEST_NS
        try:
            for count in range(1, most + 1):
                if count % _LOOK_EVERY == 0:
                    # By itself ZeroMQ looks for other senders only every 100 frames: too late in a flood.
                    self._has_more()
                try:
                    routing = self.socket.recv(_NOW)
                except zmq.Again:
                    return False
                self._serve(routing)
                if time.monotonic_ns() > until_ns:
                    break
        finally:
            self._is_serving = False
            self._send_replies()
        return True

    def _serve(self, routing: bytes) -> None:
        frame = self.socket.recv(_NOW, copy=False)  # a ROUTER never delivers a routing id alone
        sender = Sender(routing[:255], frame)  # it is remembered: a valid one is no longer
        frames, has_more = 1, frame.more
        while has_more:  # only the first is read
            frames, has_more = frames + 1, self.socket.recv(_NOW, copy=False).more
        if frames > self._max_frames:
            self._refuse("too_many_frames")
            self._strikes.strike(sender.routing)
        else:
            now_ns = time.monotonic_ns()
            if now_ns > self._send_at:
                self._send_replies(0 if self._feed.has_any() else _SEVERAL)
                self._send_at = now_ns + _HOLD_NS
            reply = self._dispatcher.handle(frame.bytes, sender, now_ns)
            if reply is not None and not self._unread.admits(sender, len(reply)):
                self._refuse("slow_client")  # as where its queue is full: it asks again
            elif reply is not None:
                self._answer(routing, reply, is_one_of_many=self._dispatcher.is_one_of_many)
        if self._strikes.take_due():
            cut(sender, "stranger", self._refuse)

    def _answer(self, routing: bytes, reply: bytes, *, is_one_of_many: bool = False) -> None:
        """Send a client's first reply of a drain at once, and hold the later ones, and those of a call among others."""
        held = self._held.get(routing)
        if is_one_of_many:
            self._wait_for_many.add(routing)
            if held is None and self._held:
                held = self._held[routing] = []
        else:
            self._wait_for_many.discard(routing)
        if held is None:
            self._held[routing] = []
            self.send(routing, reply)
        else:
            held.append(reply)

    def _send_replies(self, least: int = 0) -> None:
        """Send the held replies, those of one client together, so that it wakes once; of a call, `least` or more."""
        for routing in list(self._held):
            if routing not in self._wait_for_many or len(self._held[routing]) >= least:
                self._wait_for_many.discard(routing)
                for reply in self._held.pop(routing):
                    self.send(routing, reply)
        if not self._held:
            self._feed.flush()

    def deliver(self, routing: bytes, reply: bytes) -> None:
        """Send the reply to an earlier request; during a drain it is one of that drain's."""
        (self._answer if self._is_serving else self.send)(routing, reply)

    def send(self, routing: bytes, reply: bytes) -> None:
        try:
            try:
                self.socket.send(routing, _MORE)
            except zmq.Again:
                self._has_more()  # ZeroMQ learns here how much the client has read
                self.socket.send(routing, _MORE)
            self.socket.send(reply, _NOW)
        except zmq.Again:
            self._refuse("slow_client")  # it does not read its replies, so they are dropped
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._refuse("gone_client")
