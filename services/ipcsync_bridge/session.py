"""The bridge's session with its coordinator: that of any client, but without a driver.

A thread of its own has the lease and the socket. It sends what the loop's tasks have asked for meanwhile, many at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from ipcsync._board import OPEN, Board
from ipcsync._deadline import deadline_of
from ipcsync._inbox import LoopCalls
from ipcsync._native import fork
from ipcsync._session import handshake
from ipcsync._session.connection import Connection, Request
from ipcsync._session.lease import LONGEST_BEAT_S, SessionLease
from ipcsync._session.owner import Owner, block_signals
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Attach, Attachment, Message, Open, Welcome
from ipcsync.errors import ConnectError, IpcSyncError, WaitTimeout
from ipcsync_bridge import handover

_REQUEST_S = 5.0
_LATE_S = 0.1  # to the next look for replies to what was given up
_AGAIN_S = 0.1


class BridgeSession:
    """A session in the role of a bridge, until `close`, or until `hand_over` leaves it to other code."""

    def __init__(self, connection: Connection, welcome: Welcome, board: Board) -> None:
        self.board = board
        self.epoch = welcome.epoch
        connection.starts = lambda: board.starts
        self.feed = welcome.feed  # the endpoint of the coordinator's announcements
        self._welcome = welcome
        self._connection = connection  # of this thread before and after that of the lease, which it belongs to
        self.lease = SessionLease(self.board, welcome, connection.endpoint)
        self._owner = Owner(self.lease)
        self._is_closed = False
        # Called with what an Open or Attach that was given up has attached to after all.
        self.on_late: Callable[[Attachment], None] = lambda _: None
        self._loop_calls = LoopCalls()
        self._asked: SimpleQueue[tuple[Request, asyncio.Future[Message]]] = SimpleQueue()
        self._unanswered = 0
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._heart = threading.Thread(target=self._run, name="ipcsync-owner", daemon=True)

    @classmethod
    def opened(cls, endpoint: str, name: str, timeout: float) -> BridgeSession:
        """A new session. Raises ConnectError if there is no coordinator, or it has a bridge."""
        fork.arm()
        with contextlib.ExitStack() as undo:
            connection = Connection(endpoint)
            undo.callback(connection.close)
            welcome = handshake.greet(connection, name, timeout, None, lambda: None, driver="", role="bridge")
            undo.callback(handshake.take_leave, connection, welcome.token)
            board = handshake.open_board(welcome, endpoint)
            undo.callback(board.close)
            handshake.hold_lifeline(board, welcome.line, endpoint, timeout)
            session = cls(connection, welcome, board)
            undo.callback(session._stop)
            connection.request(messages.Ready(), welcome.token, timeout, session._check_liveness)
            session._begin()
            undo.pop_all()
        return session

    @classmethod
    def resumed(cls, endpoint: str, left: handover.Session) -> BridgeSession:
        """The session of the code that ran in this process before; its lifeline is still held."""
        fork.arm()
        board = Board(left.board, left.welcome.board)
        session = cls(Connection(endpoint, first_id=left.last_request + 1), left.welcome, board)
        session._begin()
        return session

    def _begin(self) -> None:
        self.lease.mark.show()
        self._connection.window = self._welcome.window
        self._heart.start()

    def _run(self) -> None:
        block_signals()
        self._owner.run(lambda: self._is_closed, self._at_beat, self._work)
        while not self._asked.empty():
            self._settle(*self._asked.get(), self._closed())

    def _at_beat(self) -> float:
        self._connection.drain_late()
        return _LATE_S if self._connection.has_late else LONGEST_BEAT_S

    def _work(self) -> None:
        """Send what was asked for, as long as anything was."""
        while not (self._is_closed or self._asked.empty()):
            asked = [self._asked.get() for _ in range(self._asked.qsize())]
            wanted = [(request, outcome) for request, outcome in asked if not outcome.cancelled()]
            error: IpcSyncError | None = None
            try:
                self._check_liveness()
                requests = [request for request, _ in wanted]
                self._connection.exchange(requests, self._welcome.token, deadline_of(_REQUEST_S), self._check_liveness)
            except IpcSyncError as lost:
                error = lost
            for request, outcome in wanted:
                self._settle(request, outcome, error)

    def _closed(self) -> ConnectError:
        return ConnectError("the connection was closed", endpoint=self._connection.endpoint)

    def _check_liveness(self) -> None:
        self.lease.beat_and_check()
        if self._is_closed:
            raise self._closed()

    def _settle(self, request: Request, outcome: asyncio.Future[Message], error: IpcSyncError | None) -> None:
        try:
            if error is not None and request.reply is None:
                raise copy.copy(error)
            reply: Message | IpcSyncError = self._connection.result_of(request, _REQUEST_S)
        except IpcSyncError as failure:
            reply = failure
        self._loop_calls.soon(self._give, request, outcome, reply)

    def _give(self, request: Request, outcome: asyncio.Future[Message], reply: Message | IpcSyncError) -> None:
        if outcome.cancelled():
            if request.on_late is not None:
                self._take_late(reply)
        elif isinstance(reply, IpcSyncError):
            outcome.set_exception(reply)
        else:
            outcome.set_result(reply)

    def _take_late(self, reply: Message | IpcSyncError) -> None:
        if isinstance(reply, Attachment):
            self.on_late(reply)

    def is_open(self, use: tuple[int, int]) -> bool:
        """Whether this use of a slot of the coordinator is open."""
        line = self.board.slot(use[0])
        return line.incarnation == use[1] and line.state == OPEN

    async def ask(self, body: Message) -> Message:
        """The reply's body; raises the error that it carries, WaitTimeout after 5 s, or SessionLost."""
        await self._goes_on.wait()
        self.lease.check()
        codec.check_body(body)
        if self._is_closed:
            raise self._closed()
        outcome: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        on_late = partial(self._loop_calls.soon, self._take_late) if isinstance(body, Open | Attach) else None
        self._asked.put((Request(body, on_late), outcome))
        self._owner.ring()
        self._unanswered += 1
        try:
            return await outcome
        finally:
            self._unanswered -= 1

    async def insist(self, body: Message, *refusals: type[IpcSyncError]) -> Message:
        """`ask`, again and again until the coordinator answers otherwise; for what may be done twice.

        `refusals`: as which it does not answer yet, as QuotaExceeded while its journal has no memory.
        """
        while True:
            with contextlib.suppress(WaitTimeout, ConnectError, *refusals):
                return await self.ask(body)
            await asyncio.sleep(_AGAIN_S)

    async def pause(self, timeout: float) -> bool:
        """Ask nothing more until `go_on`. False, and goes on, if not all is answered within `timeout` seconds."""
        self._goes_on.clear()
        deadline = time.monotonic() + timeout
        while self._unanswered and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        if self._unanswered:
            self.go_on()
        return not self._unanswered

    def go_on(self) -> None:
        """Ask again."""
        self._goes_on.set()

    def close(self, *, says_goodbye: bool) -> None:
        """End the session; without a goodbye, peers see a death."""
        if says_goodbye:
            self.lease.is_judged = False
            self._await_end()
            with contextlib.suppress(IpcSyncError):
                self._connection.request(messages.Bye(), self._welcome.token, 1.0)
        self._stop()
        self._connection.close()
        self.board.close()

    def hand_over(self) -> handover.Session:
        """End everything but the session, with which other code in this process goes on."""
        self._stop()
        self._connection.close()
        return handover.Session(self._welcome, self.board.descriptor, self._connection.take_id())

    def _await_end(self) -> None:
        self._is_closed = True
        self._owner.ring()
        if self._heart.ident is not None:  # it was started
            self._heart.join(5.0)

    def _stop(self) -> None:
        self._await_end()
        self.lease.stop()
