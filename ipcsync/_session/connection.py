"""The request socket: one request at a time, each retried under its own id until its reply or its deadline.

At any moment one thread is inside the socket, the one that holds the lock; a control request is rare, and handing it to
a thread of its own would cost twice its round trip.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import zmq
from zmq.backend import zmq_poll

from ipcsync._wire import codec, endpoints
from ipcsync._wire.messages import Failure, Message
from ipcsync.errors import ConnectError, IpcSyncError, ProtocolError, SessionLost, WaitTimeout

_RETRY_NS = 1_000_000_000
_SLICE_NS = 50_000_000
_LONGEST_S = 1e9
_NOW, _IN, _IN_OR_OUT = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)  # an enum costs in each call

_context_lock = threading.Lock()
_context: zmq.Context[zmq.Socket[bytes]] | None = None


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """The ZeroMQ context of this process's clients."""
    global _context  # noqa: PLW0603 - one I/O thread for all clients
    with _context_lock:
        if _context is None:
            _context = zmq.Context()
        return _context


def check_endpoint(endpoint: str) -> None:
    """Raise ConnectError if the socket belongs to somebody else."""
    path = endpoints.socket_path(endpoint)
    try:
        status = os.stat(path)
    except OSError:
        return  # not there yet: connecting waits for it
    if status.st_uid != os.geteuid():
        raise ConnectError(
            f"the socket {path} belongs to uid {status.st_uid}, and this is uid {os.geteuid()}: "
            "a coordinator serves its own uid only",
            endpoint=endpoint,
        )


@dataclass
class _Late:
    """A request that was given up, who wants to know what came of it, and which coordinator it was sent to."""

    frame: bytes
    on_late: Callable[[Message], None]
    sent_to: int


def _unknown() -> int:
    return 0


class Connection:
    """A DEALER socket to one coordinator. Thread-safe."""

    def __init__(self, endpoint: str) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self.sent = 0
        self.window = 1  # how many requests may be in flight, as the coordinator says
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._late: dict[int, _Late] = {}
        self.starts: Callable[[], int] = _unknown
        """How many coordinators have served; when that changes, what is unanswered is sent again under the same ids."""
        self._socket: zmq.Socket[bytes] | None = context().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue a request for a daemon that is not there yet
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_REPLY)
        self._socket.connect(endpoint)

    def request(
        self,
        body: Message,
        token: bytes,
        timeout: float,
        look: Callable[[], None] | None = None,
        on_late: Callable[[Message], None] | None = None,
    ) -> Message:
        """Send a request and return its reply's body; the error that it carries is raised.

        `look` is called in every slice of the wait and may raise. WaitTimeout after `timeout` seconds; a reply that
        comes later is handed to `on_late`. ValueError for a timeout that is negative or NaN.
        """
        (answer,) = self.request_many([body], token, timeout, look, on_late)
        if isinstance(answer, IpcSyncError):
            raise answer
        return answer

    def request_many(
        self,
        bodies: Sequence[Message],
        token: bytes,
        timeout: float,
        look: Callable[[], None] | None = None,
        on_late: Callable[[Message], None] | None = None,
    ) -> list[Message | IpcSyncError]:
        """Send requests, many before the first is answered; what came of each, in their order, errors not raised.

        The same as `request` otherwise. What got no answer within `timeout` seconds in all is a WaitTimeout.
        """
        if not timeout >= 0:
            raise ValueError(f"timeout is a number of seconds from 0 up, not {timeout!r}")
        for body in bodies:
            codec.check_body(body)  # here: who sends on and on what cannot be is cut off
        timeout = min(timeout, _LONGEST_S)
        deadline = time.monotonic_ns() + int(timeout * 1e9)
        if not self._lock.acquire(timeout=timeout):
            raise WaitTimeout(f"another request kept the connection for {timeout} s", timeout=timeout)
        replies: list[Message | None] = []
        try:
            for first in range(0, len(bodies), self.window):
                replies += self._exchange(bodies[first : first + self.window], token, deadline, look, on_late)
        except BaseException:
            for reply in replies:
                if reply is not None and on_late is not None:
                    on_late(reply)
            raise
        finally:
            self._lock.release()
        return [self._answer(reply, timeout) for reply in replies]

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
        self,
        bodies: Sequence[Message],
        token: bytes,
        deadline: int,
        look: Callable[[], None] | None,
        on_late: Callable[[Message], None] | None,
    ) -> list[Message | None]:
        socket = self._open_socket()
        frames = {
            id_: codec.encode_request(id_, body, token, deadline) for body, id_ in zip(bodies, self._ids, strict=False)
        }
        replies: dict[int, Message] = {}
        resend_at = sent_to = 0
        was_sent = is_over = False
        sent_before = self.sent
        try:
            while len(replies) < len(frames) and (now := time.monotonic_ns()) < deadline:
                if now >= resend_at or sent_to != self.starts():
                    # The same ids: if only a reply was lost, the coordinator gives it again and does nothing twice.
                    sent_to = self.starts()
                    missing = [frames[id_] for id_ in frames if id_ not in replies]
                    was_sent = self._send_late_again(socket) and self._try_send(socket, missing)
                    resend_at = now + _RETRY_NS if was_sent else 0
                slice_ms = max(1, min(_SLICE_NS, deadline - now) // 1_000_000)
                if not was_sent:
                    socket.poll(slice_ms, _IN_OR_OUT)
                self._receive(socket, frames, replies, slice_ms if was_sent else 0)
                if look is not None and len(replies) < len(frames):
                    look()
            if len(replies) < len(frames):
                self._receive(socket, frames, replies)  # a process that was stopped meanwhile may find its reply here
            is_over = True
        finally:
            if on_late is not None and self.sent > sent_before:  # what nobody waits for, also if this was interrupted
                given_up = {id_: frame for id_, frame in frames.items() if id_ not in replies}
                self._late.update((id_, _Late(frame, on_late, sent_to)) for id_, frame in given_up.items())
                for reply in () if is_over else replies.values():
                    on_late(reply)
        return [replies.get(id_) for id_ in frames]

    def _open_socket(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            raise ConnectError("the connection was closed", endpoint=self.endpoint)
        return self._socket

    def _try_send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        """Whether they were sent, or as many as there was room for: the others are sent again with those that were."""
        for count, frame in enumerate(frames):
            try:
                socket.send(frame, _NOW)
            except zmq.Again:
                return count > 0  # nobody is connected right now
            self.sent += 1
        return True

    def _receive(
        self, socket: zmq.Socket[bytes], wanted: Collection[int], replies: dict[int, Message], wait_ms: int = 0
    ) -> None:
        """Take in the replies that are there, waiting for the first; late ones among them go where they belong.

        It ends with the last of the `wanted` ones.
        """
        # A poll, whose limit holds through signals: a blocking receive begins its own anew after each.
        if wait_ms and not zmq_poll([(socket, _IN)], wait_ms):
            return
        while True:
            try:
                frame = socket.recv(_NOW, copy=False)
            except zmq.Again:
                return
            if frame.more:
                raise ProtocolError("a reply of several frames", code="malformed")
            request_id, body = codec.decode_reply(frame.buffer)
            if request_id in wanted:
                replies[request_id] = body
                if len(replies) == len(wanted):
                    return
                continue
            late = self._late.pop(request_id, None)
            if late is not None:
                late.on_late(body)

    def _send_late_again(self, socket: zmq.Socket[bytes]) -> bool:
        """Ask a new coordinator what became of what was given up; whether all that is to be asked was sent.

        It knows what its predecessor did, and drops what was not done, since nobody waits for that any more.
        """
        starts = self.starts()
        for late in list(self._late.values()):
            if late.sent_to != starts:
                if not self._try_send(socket, [late.frame]):
                    return False
                late.sent_to = starts
        return True

    def drain_late(self) -> None:
        """Take in replies that came after their request was given up; nothing if a request is under way."""
        if not self._late or not self._lock.acquire(blocking=False):
            return
        try:
            if self._socket is not None:
                self._send_late_again(self._socket)
                self._receive(self._socket, (), {})
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the socket; twice does nothing."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
