"""The request socket: one request at a time, each retried under its own id until its reply or its deadline.

One thread at a time uses a connection: the owner of its session, or whoever asks without a session.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import AF_UNIX, SO_DOMAIN, SOCK_STREAM, SOL_SOCKET, fromfd
from typing import TypeVar

import zmq
from zmq.backend import zmq_poll

from ipcsync._deadline import deadline_of
from ipcsync._linux.process import peer_of
from ipcsync._room import new_context
from ipcsync._threads import CallLock, under_within
from ipcsync._wire import codec, endpoints
from ipcsync._wire.messages import Failure, Message, Remote
from ipcsync.errors import ConnectError, ProtocolError, SessionLost, WaitTimeout

_M = TypeVar("_M", bound=Message)

_RETRY_NS = 1_000_000_000
_FORGOTTEN_NS = 60_000_000_000  # behind the deadline of a request that was given up
_SLICE_NS = 50_000_000
_EAGER_NS, _EAGER_SLICE_NS = 250_000_000, 10_000_000  # at first, since another coordinator may follow a dead one
_NOW, _EVENTS = int(zmq.NOBLOCK), int(zmq.EVENTS)  # ints cost less than enums
_IN, _IN_OR_OUT = int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)

_contexts: dict[None, zmq.Context[zmq.Socket[bytes]]] = {}
_making = CallLock()
_ALONE_S = 2.0  # for which a thread waits for another one, that may wait for this one in a finalizer


def zmq_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The ZeroMQ context of this process's clients, which has one I/O thread for all of them."""
    # One thread after another: two would take what each of them saw to be free.
    return _contexts.get(None) or under_within(_making, _ALONE_S, _make_context) or _make_context()


def _make_context() -> zmq.Context[zmq.Socket[bytes]]:
    made = _contexts.get(None) or new_context()
    used = _contexts.setdefault(None, made)
    if used is not made:
        made.term()
    return used


@dataclass(eq=False, slots=True)
class Request:
    """One request and its reply.

    `on_late` gets the reply if the request is given up before it comes. `sent_to` is the number of the coordinator that
    it was sent to last, -1 if to none.
    """

    body: Message
    on_late: Callable[[Message], None] | None = None
    id: int = 0
    sent_to: int = -1
    frame: bytes = b""
    deadline: int = 0
    reply: Message | None = None


class Connection:
    """A DEALER socket to one coordinator. `first_id`: above the ids of the session's earlier requests.

    ConnectError for a coordinator of another user, unless `checks_owner` is False: root may ask any.
    """

    def __init__(self, endpoint: str, *, first_id: int = 1, checks_owner: bool = True) -> None:
        if checks_owner:
            check_endpoint(endpoint)
        self._checks_owner = checks_owner
        self.endpoint = endpoint
        self.sent: int = 0
        self.window = 1  # how many requests the coordinator allows in flight
        self.blocks_signals = False  # whether the thread that uses it does: then it may wait in the socket
        self._rcvtimeo = -1
        self.ids: itertools.count[int] = itertools.count(first_id)
        self._late: dict[int, Request] = {}  # given up, and maybe done
        self._checked = -1  # the number of the coordinator whose uid was checked last
        self.starts: Callable[[], int] = int
        """How many coordinators have served; when it changes, unanswered requests are sent again under the same ids."""
        socket = zmq_context().socket(zmq.DEALER)
        self._socket: zmq.Socket[bytes] | None = socket
        socket.linger = 0
        socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue a request for a daemon that is not there yet
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_REPLY)
        socket.connect(endpoint)

    def request(self, body: Message, token: bytes, timeout: float, check: Callable[[], None] | None = None) -> Message:
        """Send a request and return its reply's body; raises the error in the reply.

        `check` is called in every slice of the wait and may raise. WaitTimeout after `timeout` seconds, ValueError for
        a timeout that is negative or NaN.
        """
        request = Request(body)
        self.exchange([request], token, deadline_of(timeout), check)
        return self.result_of(request, timeout)

    def exchange(
        self, requests: Sequence[Request], token: bytes, deadline: int, check: Callable[[], None] | None = None
    ) -> None:
        """Send requests, many before the first is answered, and wait until each has its reply, or until `deadline`."""
        for request in requests:
            codec.check_body(request.body)  # here: a client that keeps sending invalid requests is cut off
        try:
            self._exchange(requests, token, deadline, check)
        finally:
            for request in requests:
                if request.sent_to >= 0 and request.reply is None and request.on_late is not None:
                    self._late[request.id] = request

    def result_of(self, request: Request, timeout: float) -> Message:
        reply = request.reply
        if reply is None:
            who = "the coordinator or its bridge" if isinstance(request.body, Remote) else "the coordinator"
            raise WaitTimeout(f"{who} at {self.endpoint} did not answer within {timeout} s", timeout=timeout)
        if not isinstance(reply, Failure):
            return reply
        error = codec.error_of(reply)
        if isinstance(error, SessionLost):
            error.endpoint = self.endpoint
        try:
            raise error
        finally:
            del error  # else it, its traceback and this frame would keep the session until a collection

    def _exchange(
        self, requests: Sequence[Request], token: bytes, deadline: int, check: Callable[[], None] | None
    ) -> None:
        socket = self._socket
        if socket is None:
            raise ConnectError("the connection was closed", endpoint=self.endpoint)
        for request in requests:
            request.deadline, request.id = deadline, next(self.ids)
            request.frame = codec.encode_request(request.id, request.body, token, deadline)
        wanted = {request.id: request for request in requests}
        left, oldest, answered = len(requests), 0, 0
        allowed: list[Request] = []
        resend_at = sent_to = 0
        was_sent = False
        eager_until = time.monotonic_ns() + _EAGER_NS
        while left and (now := time.monotonic_ns()) < deadline:
            if answered or not allowed:
                while requests[oldest].reply is not None:
                    oldest += 1
                # Many answered ones after an unanswered one count too: the coordinator would forget that one's reply.
                end = requests[oldest].id + self.window
                ahead = requests[oldest : oldest + self.window]
                allowed = [request for request in ahead if request.reply is None and request.id < end]
            if now >= resend_at or sent_to != self.starts():
                # The same ids: if only a reply was lost, the coordinator sends it again and does nothing twice.
                sent_to = self.starts()
                was_sent = self._send_late_again(socket) and self._try_send(socket, allowed)
                resend_at = now + _RETRY_NS if was_sent else 0
            elif unsent := [request for request in allowed if request.sent_to < 0]:
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

    def _try_send(self, socket: zmq.Socket[bytes], requests: Sequence[Request]) -> bool:
        """Whether any was sent: if there was not room for all, all are sent again later."""
        for count, request in enumerate(requests):
            starts = self.starts()
            try:
                socket.send(request.frame, _NOW)
            except zmq.Again:
                return count > 0  # no coordinator is connected right now
            request.sent_to = starts
            self.sent += 1
        return True

    def _receive(self, socket: zmq.Socket[bytes], wanted: dict[int, Request], left: int = 0, wait_ms: int = 0) -> int:
        """Read the replies that have arrived, waiting for the first; how many of the `wanted` ones were answered.

        It ends with the last of these, `left` of which had no reply before.
        """
        # Elsewhere a poll, since its limit holds across signals: a blocking receive starts its limit again after each.
        flags = 0 if wait_ms and self.blocks_signals else _NOW
        if wait_ms and flags and not zmq_poll([(socket, _IN)], wait_ms):
            return 0
        if not flags and wait_ms != self._rcvtimeo:
            self._rcvtimeo = socket.rcvtimeo = wait_ms
        answered = 0
        # Asked for, since the exception of an empty socket takes longer than a reply.
        while not flags or socket.getsockopt(_EVENTS) & _IN:  # type: ignore[operator] # an int
            try:
                frame = socket.recv(flags, copy=False)
            except zmq.Again:
                break  # nothing came, or what was there went with a coordinator that died
            flags = _NOW
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
        unanswered = [late for late in self._late.values() if late.reply is None]
        return all(late.sent_to == starts or self._try_send(socket, [late]) for late in unanswered)

    @property
    def has_late(self) -> bool:
        return any(time.monotonic_ns() < late.deadline + _RETRY_NS for late in self._late.values())

    def drain_late(self) -> None:
        if not self._late or self._socket is None:
            return
        self._send_late_again(self._socket)
        self._receive(self._socket, {})
        now = time.monotonic_ns()
        for id_, request in list(self._late.items()):
            if request.reply is not None and request.on_late is not None:
                request.on_late(request.reply)
            if request.reply is not None or now >= request.deadline + _FORGOTTEN_NS:
                del self._late[id_]

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()


def expect(reply: Message, kind: type[_M]) -> _M:
    if not isinstance(reply, kind):
        raise ProtocolError(f"expected {kind.__name__}, but the coordinator sent {type(reply).__name__}", code="reply")
    return reply


# --- whose socket it is -----------------------------------------------------------------------------------------------


def check_endpoint(endpoint: str) -> None:
    """Raise ConnectError if the socket belongs to another user, or is in a directory that this user may not search."""
    path = endpoints.socket_path(endpoint)
    try:
        owner = os.stat(path).st_uid
    except PermissionError:
        for parent in reversed(Path(path).parents):  # the first that this user may not search
            if not os.access(parent, os.X_OK, effective_ids=True):
                owner = parent.stat().st_uid
                advice = "; start one as this user (ipcsync coordinator), or run this process as that one"
                _check_uid(owner, f"the directory {parent} belongs to uid {owner}", endpoint, advice)
                text = f"the directory {parent} has a mode that excludes its own user"
                raise ConnectError(text, endpoint=endpoint) from None
        return
    except OSError:
        return  # not there yet: connecting waits for it
    _check_uid(owner, f"the socket {path} belongs to uid {owner}", endpoint)


def check_server(frame: zmq.Frame, endpoint: str) -> None:
    """Raise ConnectError if another user's process sent this frame, or could do so from the socket's directory.

    Until there is a socket, another user may make the directory, and there is nothing to be checked before.
    """
    path = endpoints.socket_path(endpoint)
    owner = server = os.geteuid()  # if the directory was removed meanwhile, or the connection is gone by now
    with suppress(OSError):
        owner = os.stat(os.path.dirname(path) or ".").st_uid
    _check_uid(owner, f"the directory of the socket {path} belongs to uid {owner}", endpoint)
    # A duplicate, since libzmq may close its own, and the number may then be another file's.
    with suppress(zmq.ZMQError, ValueError, OSError), fromfd(int(frame.get(zmq.SRCFD)), AF_UNIX, SOCK_STREAM) as peer:
        if peer.getsockopt(SOL_SOCKET, SO_DOMAIN) == AF_UNIX:
            server = peer_of(peer)[1]
    _check_uid(server, f"a process of uid {server} answers at the socket {path}", endpoint)


def _check_uid(uid: int, what: str, endpoint: str, advice: str = "") -> None:
    """Raise ConnectError if that is another user's, of which `what` tells."""
    if uid != (me := os.geteuid()):
        text = f"{what}, and this is uid {me}: a coordinator serves its own uid only{advice}"
        raise ConnectError(text, endpoint=endpoint) from None
