"""The request socket: one request at a time, each retried under its own id until its reply or its deadline.

One thread uses the socket at a time, the one that holds the lock. Control requests are rare, and handing them to a
thread of their own would double the round trip.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq
from zmq.backend import zmq_poll

from ipcsync._deadline import bounded
from ipcsync._locks import CallLock, holding, take, trying
from ipcsync._session.owner import check_endpoint, check_server
from ipcsync._shared import items_of
from ipcsync._wire import codec
from ipcsync._wire.messages import Failure, Message
from ipcsync._zeromq import new_context
from ipcsync.errors import ConnectError, IpcSyncError, ProtocolError, Reentered, SessionLost, WaitTimeout

_M = TypeVar("_M", bound=Message)

_RETRY_NS = 1_000_000_000
_FORGOTTEN_NS = 60_000_000_000  # behind the deadline of a request that was given up
_SLICE_NS = 50_000_000
_EAGER_NS, _EAGER_SLICE_NS = 250_000_000, 10_000_000  # at first, since another coordinator may follow a dead one
_NOW, _EVENTS = int(zmq.NOBLOCK), int(zmq.EVENTS)  # ints cost less than enums
_IN, _IN_OR_OUT = int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)

_contexts: dict[None, zmq.Context[zmq.Socket[bytes]]] = {}


def zmq_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The ZeroMQ context of this process's clients."""
    # One I/O thread for all clients. Two first calls at the same time make two contexts, of which one is used.
    if (known := _contexts.get(None)) is not None:
        return known
    made = new_context()
    used = _contexts.setdefault(None, made)
    if used is not made:
        made.term()
    return used


def dealer(endpoint: str) -> zmq.Socket[bytes]:
    """A socket for requests to the coordinator there."""
    socket: zmq.Socket[bytes] = zmq_context().socket(zmq.DEALER)
    socket.linger = 0
    socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue a request for a daemon that is not there yet
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_REPLY)
    socket.connect(endpoint)
    return socket


class Request:
    """One request and its reply; it outlives the call that made it.

    `on_late` gets the reply if no call takes it: the request was given up, or an exception ended its call. `sent_to` is
    the number of the coordinator that it was sent to last.
    """

    __slots__ = ("body", "deadline", "frame", "id", "is_sent", "is_taken", "on_late", "reply", "sent_to", "was_awaited")

    def __init__(self, body: Message, on_late: Callable[[Message], None] | None = None) -> None:
        self.body: Message = body
        self.on_late: Callable[[Message], None] | None = on_late
        self.id: int = 0
        self.is_sent: bool = False  # True also if it only may have been
        self.sent_to: int = 0
        self.frame: bytes = b""
        self.deadline: int = 0
        self.reply: Message | None = None
        self.is_taken: bool = False
        self.was_awaited: bool = False  # to the end of its time, so that no reply was lost before


def _unknown() -> int:
    return 0


class Connection:
    """A DEALER socket to one coordinator. Thread-safe. `first_id`: above the ids of the session's earlier requests.

    ConnectError for a coordinator of another user, unless `checks_owner` is False: root may ask any.
    """

    def __init__(self, endpoint: str, *, first_id: int = 1, checks_owner: bool = True) -> None:
        if checks_owner:
            check_endpoint(endpoint)
        self._checks_owner = checks_owner
        self.endpoint = endpoint
        self.sent: int = 0
        self.window = 1  # how many requests the coordinator allows in flight
        self._ids = itertools.count(first_id)
        self._lock = CallLock()
        self._late: dict[int, Request] = {}
        self._checked = -1  # the number of the coordinator whose uid was checked last
        self.starts: Callable[[], int] = _unknown
        """How many coordinators have served; when it changes, unanswered requests are sent again under the same ids."""
        self._socket: zmq.Socket[bytes] | None = dealer(endpoint)

    def request(self, body: Message, token: bytes, timeout: float, check: Callable[[], None] | None = None) -> Message:
        """Send a request and return its reply's body; raises the error in the reply.

        `check` is called in every slice of the wait and may raise. WaitTimeout after `timeout` seconds, ValueError for
        a timeout that is negative or NaN.
        """
        request = Request(body)
        self.exchange([request], token, timeout, check)
        return self.result_of(request, timeout)

    def exchange(
        self, requests: Sequence[Request], token: bytes, timeout: float, check: Callable[[], None] | None = None
    ) -> None:
        """Send requests, many before the first is answered, and wait until each has its reply, or for `timeout` s.

        An exception may come at any moment: the caller then calls `abandon` for the replies that came or will come.
        Raises Reentered in a finalizer or signal's handler that interrupts another request on this thread.
        """
        if not timeout >= 0:
            raise ValueError(f"timeout is a number of seconds from 0 up, not {timeout!r}")
        for request in requests:
            codec.check_body(request.body)  # here: a client that keeps sending invalid requests is cut off
        timeout = bounded(timeout)
        deadline = time.monotonic_ns() + int(timeout * 1e9)
        lock = self._lock
        if lock.is_mine() and lock.is_held_below():
            raise Reentered("a request of this client is under way on this thread, which a request here interrupts")
        try:
            if not take(lock, timeout):
                raise WaitTimeout(
                    f"another request kept the connection to {self.endpoint} for {timeout} s", timeout=timeout
                )
            with lock:
                lock.release()
                self._exchange(requests, token, deadline, check)
        except BaseException:
            lock.unwind()
            raise

    def abandon(self, requests: Sequence[Request]) -> None:
        """No call takes the replies of these: `drain_late` gives them to their `on_late`."""
        for request in requests:
            if request.is_sent and not request.is_taken and request.on_late is not None:
                self._late[request.id] = request

    def result_of(self, request: Request, timeout: float) -> Message:
        """The reply's body; raises the error in it, or WaitTimeout if none came."""
        answer = self._answer(request.reply, timeout)
        if isinstance(answer, IpcSyncError):
            raise answer
        return answer

    def _answer(self, reply: Message | None, timeout: float) -> Message | IpcSyncError:
        if reply is None:
            return WaitTimeout(f"the coordinator at {self.endpoint} did not answer within {timeout} s", timeout=timeout)
        if not isinstance(reply, Failure):
            return reply
        error = codec.error_of(reply)
        if isinstance(error, SessionLost):
            error.endpoint = self.endpoint
        return error

    def _exchange(
        self, requests: Sequence[Request], token: bytes, deadline: int, check: Callable[[], None] | None
    ) -> None:
        socket = self._open_socket()
        for request in requests:
            id_ = next(self._ids)
            request.frame = codec.encode_request(id_, request.body, token, deadline)
            request.deadline = deadline
            request.id = id_
        wanted = {request.id: request for request in requests}
        left, oldest = len(requests), 0
        resend_at = sent_to = 0
        was_sent = False
        eager_until = time.monotonic_ns() + _EAGER_NS
        while left and (now := time.monotonic_ns()) < deadline:
            while requests[oldest].reply is not None:
                oldest += 1
            allowed = self._allowed(requests[oldest : oldest + self.window])
            if now >= resend_at or sent_to != self.starts():
                # The same ids: if only a reply was lost, the coordinator sends it again and does nothing twice.
                sent_to = self.starts()
                was_sent = self._send_late_again(socket) and self._try_send(socket, allowed)
                resend_at = now + _RETRY_NS if was_sent else 0
            elif unsent := [request for request in allowed if not request.is_sent]:
                self._try_send(socket, unsent)
            longest = _EAGER_SLICE_NS if now < eager_until else _SLICE_NS
            slice_ms = max(1, min(longest, deadline - now) // 1_000_000)
            if not was_sent:
                socket.poll(slice_ms, _IN_OR_OUT)
            if answered := self._receive(socket, wanted, left, slice_ms if was_sent else 0):
                left -= answered
                # While replies come, the others are on their way: one that is lost keeps the window from moving on.
                resend_at = time.monotonic_ns() + _RETRY_NS if was_sent else 0
            if check is not None and left:
                check()
        if left:
            self._receive(socket, wanted, left)  # a process that was stopped meanwhile may find its reply here
            for request in requests:
                request.was_awaited = request.reply is None
            self.abandon([request for request in requests if request.was_awaited])

    def _allowed(self, requests: Sequence[Request]) -> list[Request]:
        """The unanswered ones of these that may be in flight now; the first is the oldest that is unanswered.

        Also many answered ones after an unanswered one count: the coordinator would forget that one's reply.
        """
        end = requests[0].id + self.window
        return [request for request in requests if request.reply is None and request.id < end]

    def _open_socket(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            raise ConnectError("the connection was closed", endpoint=self.endpoint)
        return self._socket

    def _try_send(self, socket: zmq.Socket[bytes], requests: Sequence[Request]) -> bool:
        """Whether any was sent: if there was not room for all, all are sent again later."""
        for count, request in enumerate(requests):
            was_sent, request.is_sent = request.is_sent, True
            starts = self.starts()
            try:
                socket.send(request.frame, _NOW)
            except zmq.Again:
                request.is_sent = was_sent
                return count > 0  # no coordinator is connected right now
            request.sent_to = starts  # only now: one that was given up is sent to each coordinator once
            self.sent += 1
        return True

    def _receive(self, socket: zmq.Socket[bytes], wanted: dict[int, Request], left: int = 0, wait_ms: int = 0) -> int:
        """Read the replies that have arrived, waiting for the first; how many of the `wanted` ones were answered.

        It ends with the last of these, `left` of which had no reply before.
        """
        # A poll, since its limit holds across signals: a blocking receive starts its limit again after each.
        if wait_ms and not zmq_poll([(socket, _IN)], wait_ms):
            return 0
        answered = 0
        # Asked for, since the exception of an empty socket takes longer than a reply.
        while socket.getsockopt(_EVENTS) & _IN:  # type: ignore[operator] # an int
            try:
                frame = socket.recv(_NOW, copy=False)
            except zmq.Again:
                break  # what was there went with a coordinator that died
            if self._checks_owner and self._checked != (starts := self.starts()):
                check_server(frame, self.endpoint)
                self._checked = starts
            if frame.more:
                raise ProtocolError("a reply of several frames", code="malformed")
            request_id, body = codec.decode_reply(frame.buffer)
            request = wanted.get(request_id) or self._late.get(request_id)
            if request is not None and request.reply is None:
                request.reply = body
                answered += request_id in wanted
                if left and answered == left:
                    break
        return answered

    def _send_late_again(self, socket: zmq.Socket[bytes]) -> bool:
        """Send requests that were given up to a new coordinator; whether all were sent.

        It knows what the last coordinator did, and drops requests that were not done, since no call waits for them.
        """
        starts = self.starts()
        return all(
            late.sent_to == starts or self._try_send(socket, [late])
            for late in list(self._late.values())
            if late.reply is None
        )

    @property
    def has_late(self) -> bool:
        """Whether `drain_late` may soon have something to do."""
        return any(time.monotonic_ns() < late.deadline + _RETRY_NS for late in list(self._late.values()))

    @trying("_lock")
    def drain_late(self) -> None:
        """Read replies that came after their request was given up; does nothing while a request is under way.

        An exception that ended a request may have lost its reply: then the request is sent again.
        """
        if not self._late or self._socket is None:
            return
        self._send_late_again(self._socket)
        self._receive(self._socket, {})
        now = time.monotonic_ns()
        for id_, request in items_of(self._late):
            if request.reply is not None:
                if request.on_late is not None:
                    request.on_late(request.reply)
                del self._late[id_]
            elif now >= request.deadline + _FORGOTTEN_NS:
                del self._late[id_]
            elif not request.was_awaited:
                # Also past the deadline: the coordinator does it no more, but has the reply if it was done before.
                self._try_send(self._socket, [request])

    @holding("_lock")
    def close(self) -> None:
        """Close the socket; twice does nothing."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def take_id(self) -> int:
        """An unused id, above those of all requests so far."""
        return next(self._ids)

    @property
    def is_in_use_below(self) -> bool:
        """Whether a request is under way in a call of this thread that this one interrupts."""
        lock = self._lock
        return lock.is_mine() and lock.is_held_below()


def expect(reply: Message, kind: type[_M]) -> _M:
    """The reply, if it is of that kind; else ProtocolError."""
    if not isinstance(reply, kind):
        raise ProtocolError(
            f"expected {kind.__name__}, but the coordinator answered {type(reply).__name__}", code="reply"
        )
    return reply
