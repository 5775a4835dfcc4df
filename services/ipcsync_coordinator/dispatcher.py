"""From a request's frame to its reply's: one typed reply for each request, and a repeated request is done once.

A frame is arbitrary bytes, as `ipcsync._wire.codec` describes them. No body has a list or a map, so nothing much larger
than its frame is built.
"""

from __future__ import annotations

import logging
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ipcsync._logs import fields
from ipcsync._wire import codec, messages
from ipcsync._wire.codec import UNREADABLE
from ipcsync._wire.messages import REQUESTS, VERSION, RequestBody
from ipcsync.errors import IpcSyncError, ProtocolError, SessionExpired
from ipcsync_coordinator.handlers import Handlers
from ipcsync_coordinator.journal import Reply
from ipcsync_coordinator.limits import Sender, StrikeCounter
from ipcsync_coordinator.questions import MOST_ROWS, Metrics
from ipcsync_coordinator.state import Kept, Session
from ipcsync_keeper.config import MAX_FRAME, Settings

log = logging.getLogger("ipcsync.coordinator")


class Dispatcher:
    """Turns request frames into reply frames. `now_ns` is CLOCK_MONOTONIC.

    `is_one_of_many` says of the last frame whether its call has sent others, all of whose replies the call waits for.
    `strikes` counts the invalid messages of each connection. The effects of a request are carried out before its reply
    is sent.
    """

    def __init__(self, settings: Settings, handlers: Handlers, metrics: Metrics, strikes: StrikeCounter) -> None:
        self._max_frame = settings.max_frame
        self._handlers = handlers
        self._table = handlers.table
        self._questions = handlers.questions
        self._sessions = handlers.transactions.sessions
        self._metrics = metrics
        self._strikes = strikes
        self._transactions = handlers.transactions
        self._journal = handlers.transactions.journal
        self.is_one_of_many = False

    def handle(self, frame: bytes, sender: Sender, now_ns: int) -> bytes | None:
        """The reply to a frame, None if its client does not wait for one any more."""
        self.is_one_of_many = False
        is_poison = self._journal.begin_request(frame)
        try:
            return self._handle(frame, sender, now_ns, is_poison=is_poison)
        finally:
            self._journal.end_request()
            self._metrics.observe((time.monotonic_ns() - now_ns) / 1e9)

    def _handle(self, frame: bytes, sender: Sender, now_ns: int, *, is_poison: bool) -> bytes | None:
        op, request_id = "", 0  # until they are known
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
                self._strikes.strike(sender.routing)
        except Exception:
            self._metrics.refusals["internal"] += 1
            self._metrics.results[op]["internal"] += 1
            log.exception("request failed", extra=fields(op=op))
            failure = messages.Failure("IpcSyncError", "the coordinator has an internal error; see its log")
        finally:
            self._transactions.commit()  # also the changes of a request that failed
        return codec.encode_reply(request_id or peek_id(frame), failure)

    def _answer(self, request: Request, sender: Sender, now_ns: int) -> bytes | None:
        op = request.op
        if isinstance(request.body, messages.Hello):
            self._handlers.refuse_other_clock(request.body)  # before its deadline, which that clock gives
        if op == "hello" or (not request.token and messages.is_question(request.body)):
            return None if self._is_late(request, now_ns) else self._decide(None, request, sender)
        session = self._sessions.find(request.token)
        if session is None:
            kept: Kept | None = self._sessions.final_reply(request.token, request.id)
        else:
            self._strikes.clear(sender.routing)
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
            self._strikes.strike(sender.routing)
            raise SessionExpired(
                "no such session here: it expired, was closed, or is of an earlier coordinator; connect again"
            )
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
        if not 0 < request.deadline_ns < now_ns:
            return False
        self._metrics.refusals["late"] += 1
        self._metrics.results[request.op]["late"] += 1
        return True

    def _decide(self, session: Session | None, request: Request, sender: Sender) -> bytes | None:
        """The reply to a request of a session, or to a question or hello without one; None if it follows later."""
        op, body = request.op, None
        is_question = messages.is_question(request.body)
        effect = "none" if is_question else request.body.effect
        self._metrics.requests[op] += 1
        try:
            if effect != "none":
                self._journal.make_room()
            if op == "remote":
                body = self._handlers.fleet.ask(session, request, sender.routing)
                if body is None:
                    return None  # the reply follows once the bridge has answered
            elif is_question:
                body = self._questions[op](request.body, None if session is not None else MOST_ROWS)
            elif isinstance(request.body, messages.Hello):
                body = self._handlers.hello(request.body, sender)
            else:
                assert session is not None
                body = self._table[op](session, request.body)
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


_ARRAY = 0x90  # the first byte of a short array, whose low half is the length
_MOST_FIXED = 0x7F  # a byte up to it is that number
_SIZES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # of a whole number, by its first byte


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
    if len(frame) < 3 or frame[0] & 0xF0 != _ARRAY or frame[1] > _MOST_FIXED:
        return 0
    try:
        return _id.decode(frame[2 : 3 + _SIZES.get(frame[2], 0)])
    except msgspec.MsgspecError:
        return 0


def decode_request(frame: bytes | memoryview, max_frame: int = MAX_FRAME) -> Request:
    """The request in a frame of at most `max_frame` bytes; ProtocolError says which rule it breaks."""
    if len(frame) > max_frame:
        raise ProtocolError(f"a frame of {len(frame)} bytes, more than {max_frame}", code="too_large")
    if len(frame) > 1 and frame[0] & 0xF0 == _ARRAY and VERSION != frame[1] <= _MOST_FIXED:
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
