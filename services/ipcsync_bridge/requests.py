"""Requests to the coordinator, made by the loop: many at once, with no thread between.

Each is sent again under its own id until its reply or its deadline, as those of any client: at once if another
coordinator serves now, else each second.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq

from ipcsync._logs import fields
from ipcsync._session.connection import dealer
from ipcsync._wire import codec
from ipcsync._wire.messages import Attach, Attachment, Failure, Message, Open
from ipcsync.errors import ConnectError, IpcSyncError, ProtocolError, SessionLost, WaitTimeout

log = logging.getLogger("ipcsync.bridge")

REQUEST_S = 5.0
_AGAIN_S = 1.0
_LATE_S, _LATE_CHECK_S = 60.0, 0.1  # for the reply to a request that was given up, if no other is under way
_CHECK_S = 0.01  # as often as a client looks whether its coordinator lives, or another one follows it
_NOW = int(zmq.NOBLOCK)


@dataclass(eq=False)
class _Request:
    """A request that is not answered yet. `sent_to` is the number of the coordinator that has it, -1 if none has."""

    id: int
    frame: bytes
    outcome: asyncio.Future[Message]
    deadline: float
    attaches: bool
    sent_to: int = -1
    sent_at: float = 0.0


class Requests:
    """One session's requests over a socket of its own.

    `take_id` gives unused ids, `starts` tells how many coordinators have served, and `check` raises SessionLost.
    `on_late` gets what a request attached to that was given up: whoever asked knows nothing of it.
    """

    def __init__(
        self,
        endpoint: str,
        token: bytes,
        window: int,
        take_id: Callable[[], int],
        starts: Callable[[], int],
        check: Callable[[], None],
        on_late: Callable[[Attachment], None],
    ) -> None:
        self._endpoint = endpoint
        self._token = token
        self._window = window
        self._take_id = take_id
        self._starts = starts
        self._check = check
        self._on_late = on_late
        self._late: dict[int, _Request] = {}  # given up, and maybe done
        self._sent: dict[int, _Request] = {}  # at most `window`, some of which the socket has not taken yet
        self._queue: deque[_Request] = deque()
        self._is_ticking = self._is_reading = False
        self._loop = asyncio.get_running_loop()
        self._socket = dealer(endpoint)
        self._loop.add_reader(int(self._socket.fd), self._on_edge)

    def close(self) -> None:
        """Close the socket; what is not answered fails."""
        self._loop.remove_reader(int(self._socket.fd))
        self._socket.close()
        self._fail(ConnectError("the connection was closed", endpoint=self._endpoint))

    async def ask(self, body: Message) -> Message:
        """The reply's body; raises the error that it carries, WaitTimeout after 5 s, or SessionLost."""
        return await self._outcome_of(self._begin(body))

    async def ask_all(self, bodies: Iterable[Message]) -> list[Message | IpcSyncError]:
        """For each request its reply's body, or the error that `ask` raises. All are sent at once."""
        requests = [self._begin(body) for body in bodies]
        try:
            return [await self._value_of(request) for request in requests]
        finally:
            for request in requests:  # of those no longer awaited
                self._drop(request)
                request.outcome.cancel()

    async def _value_of(self, request: _Request) -> Message | IpcSyncError:
        try:
            return await self._outcome_of(request)
        except IpcSyncError as error:
            return error

    def _begin(self, body: Message) -> _Request:
        codec.check_body(body)
        now = time.monotonic()
        id_, deadline = self._take_id(), now + REQUEST_S
        frame = codec.encode_request(id_, body, self._token, int(deadline * 1e9))
        request = _Request(id_, frame, self._loop.create_future(), deadline, isinstance(body, Open | Attach))
        self._queue.append(request)
        self._send_queued(now)
        if not self._is_ticking:
            self._is_ticking = True
            self._loop.call_later(_CHECK_S, self._on_tick)
        return request

    async def _outcome_of(self, request: _Request) -> Message:
        try:
            reply = await request.outcome
        finally:
            self._drop(request)
        if isinstance(reply, Failure):
            raise self._error_of(reply)
        return reply

    def _error_of(self, failure: Failure) -> IpcSyncError:
        error = codec.error_of(failure)
        if isinstance(error, SessionLost):
            error.endpoint = self._endpoint
        return error

    def _drop(self, request: _Request) -> None:
        """Give a request up, if it is not answered."""
        if self._sent.pop(request.id, None) is not None:
            if request.attaches and request.sent_to >= 0:
                request.deadline = time.monotonic() + _LATE_S
                self._late[request.id] = request
        elif request in self._queue:
            self._queue.remove(request)  # cancelled before its turn came

    # --- the socket ---------------------------------------------------------------------------------------------------

    def _send_queued(self, now: float) -> None:
        while self._queue and len(self._sent) < self._window:
            request = self._queue.popleft()
            self._sent[request.id] = request
            self._send(request, now)
        if not self._is_reading:  # a send may consume the edge of the descriptor that announced a reply
            self._is_reading = True
            self._loop.call_soon(self._read)

    def _send(self, request: _Request, now: float) -> bool:
        """Whether the socket took it; it does not while no coordinator is connected."""
        starts = self._starts()
        try:
            self._socket.send(request.frame, _NOW)
        except zmq.Again:
            return False
        request.sent_to, request.sent_at = starts, now
        return True

    def _on_edge(self) -> None:
        self._read()
        if any(request.sent_to < 0 for request in self._sent.values()):
            self._send_again(time.monotonic())

    def _read(self) -> None:
        self._is_reading = False
        while not self._socket.closed:
            try:
                frame = self._socket.recv(_NOW)
            except zmq.Again:
                break
            try:
                id_, body = codec.decode_reply(frame)
            except ProtocolError as error:
                log.warning("invalid reply", extra=fields(why=error))
                continue
            request = self._sent.pop(id_, None)
            if request is not None and not request.outcome.done():
                request.outcome.set_result(body)
            elif (request or self._late.pop(id_, None)) is not None and isinstance(body, Attachment):
                self._on_late(body)
        if self._queue and len(self._sent) < self._window:
            self._send_queued(time.monotonic())

    # --- by the clock -------------------------------------------------------------------------------------------------

    def _on_tick(self) -> None:
        """While requests are unanswered: send them again, time them out, or fail them if the session is lost."""
        self._is_ticking = bool(self._sent or self._queue or self._late)
        if not self._is_ticking or self._socket.closed:
            return
        self._loop.call_later(_CHECK_S if self._sent or self._queue else _LATE_CHECK_S, self._on_tick)
        self._read()
        now = time.monotonic()
        try:
            self._check()
        except IpcSyncError as error:
            self._fail(error)
            return
        late = [request for request in (*self._sent.values(), *self._queue) if now >= request.deadline]
        for request in late:
            self._drop(request)
            self._end(
                request,
                WaitTimeout(
                    f"the coordinator at {self._endpoint} did not answer within {REQUEST_S} s", timeout=REQUEST_S
                ),
            )
        self._late = {id_: request for id_, request in self._late.items() if now < request.deadline}
        self._send_again(now)
        self._send_queued(now)

    def _send_again(self, now: float) -> None:
        """Send under the same ids: if only a reply was lost, the coordinator sends it again and does nothing twice."""
        starts = self._starts()
        late = [request for request in self._late.values() if request.sent_to != starts]  # once to each coordinator
        due = [each for each in self._sent.values() if each.sent_to != starts or now - each.sent_at >= _AGAIN_S]
        for request in (*due, *late):
            if not self._send(request, now):
                return

    def _fail(self, error: IpcSyncError) -> None:
        requests = [*self._sent.values(), *self._queue]
        self._sent.clear()
        self._queue.clear()
        self._late.clear()
        for request in requests:
            self._end(request, copy.copy(error))

    def _end(self, request: _Request, error: IpcSyncError) -> None:
        if not request.outcome.done():
            request.outcome.set_exception(error)
