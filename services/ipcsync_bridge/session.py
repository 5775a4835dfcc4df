"""The bridge's session with its coordinator: that of any client, but without a driver.

A thread of its own has the lease and the socket. It sends what the loop's tasks have asked for meanwhile, many at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import threading
import time
from queue import SimpleQueue

from ipcsync._board import OPEN, Board
from ipcsync._deadline import deadline_of, left_of
from ipcsync._inbox import LoopCalls
from ipcsync._native import fork
from ipcsync._session import handshake
from ipcsync._session.connection import Connection, Request
from ipcsync._session.owner import LONGEST_BEAT_S, Owner, SessionLease, block_signals
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Message, Welcome
from ipcsync.errors import ConnectError, IpcSyncError, QuotaExceeded
from ipcsync_bridge import upgrade

_AGAIN_S = 0.1


class BridgeSession:
    """A session in the role of a bridge, until `close`, or until `hand_over` leaves it to other code."""

    def __init__(self, connection: Connection, welcome: Welcome, board: Board) -> None:
        self.board = board
        self.epoch = welcome.epoch
        connection.starts = lambda: board.starts
        self._connection = connection  # of this thread before and after that of the lease, which it belongs to
        self.lease = SessionLease(self.board, welcome, connection.endpoint)
        self._owner = Owner(self.lease)
        self._loop_calls = LoopCalls()
        self._asked: SimpleQueue[tuple[Request, asyncio.Future[IpcSyncError | None]]] = SimpleQueue()
        self._unanswered = 0
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._heart = threading.Thread(target=self._run, name="ipcsync-owner", daemon=True)

    @classmethod
    def opened(cls, endpoint: str, name: str, timeout: float) -> BridgeSession:
        """A new session. Raises ConnectError if there is no coordinator, or it has a bridge."""
        fork.arm()
        deadline = deadline_of(timeout)
        with contextlib.ExitStack() as undo:
            connection = Connection(endpoint)
            undo.callback(connection.close)
            welcome = handshake.greet(connection, name, timeout, None, lambda: None, driver="", role="bridge")
            undo.callback(handshake.take_leave, connection, welcome.token)
            board = handshake.open_board(welcome, endpoint)
            undo.callback(board.close)
            handshake.hold_lifeline(board, welcome, endpoint, deadline)
            session = cls(connection, welcome, board)
            undo.callback(session._stop)
            connection.request(messages.Ready(), welcome.token, left_of(deadline), session.lease.beat_and_check)
            session._begin()
            undo.pop_all()
        return session

    @classmethod
    def resumed(cls, endpoint: str, left: upgrade.Session) -> BridgeSession:
        """The session of the code that ran in this process before; its lifeline is still held."""
        fork.arm()
        board = Board(left.board, left.welcome.board)
        session = cls(Connection(endpoint, first_id=left.last_request + 1), left.welcome, board)
        session._begin()
        return session

    def _begin(self) -> None:
        self.lease.mark.show()
        self._connection.window = self.lease.welcome.window
        self._heart.start()

    def _run(self) -> None:
        block_signals()
        self._owner.run(lambda: not self.lease.is_judged, lambda: LONGEST_BEAT_S, self._work)
        self._work()  # what was asked last is refused

    def _work(self) -> None:
        while not self._asked.empty():
            asked = [self._asked.get() for _ in range(self._asked.qsize())]
            error: IpcSyncError | None = None
            try:
                self.lease.beat_and_check()
                requests, token = [request for request, _ in asked], self.lease.welcome.token
                self._connection.exchange(requests, token, deadline_of(math.inf), self.lease.beat_and_check)
            except IpcSyncError as lost:
                error = lost
            for _, outcome in asked:
                self._loop_calls.soon(_give, outcome, error)

    def is_open(self, use: tuple[int, int]) -> bool:
        if use[0] >= self.board.slots:
            return False  # of a key that anybody may have written
        line = self.board.slot(use[0])
        return line.incarnation == use[1] and line.state == OPEN

    async def ask(self, body: Message) -> Message:
        """The reply's body; raises the error that it carries, or SessionLost.

        It is not given up: what the coordinator attaches to or makes is known here. Who asked has a timeout of its own.
        """
        await self._goes_on.wait()
        self.lease.check()
        codec.check_body(body)
        request, outcome = Request(body), asyncio.get_running_loop().create_future()
        self._asked.put((request, outcome))
        self._owner.ring()
        self._unanswered += 1
        try:
            error: IpcSyncError | None = await outcome
        finally:
            self._unanswered -= 1
        if error is not None and request.reply is None:
            raise copy.copy(error)  # each with a traceback of its own
        return self._connection.result_of(request, math.inf)

    async def insist(self, body: Message) -> Message:
        """`ask`, again and again while the coordinator refuses as QuotaExceeded: its journal has no memory then."""
        while True:
            with contextlib.suppress(QuotaExceeded):
                return await self.ask(body)
            await asyncio.sleep(_AGAIN_S)

    async def pause(self, timeout: float) -> bool:
        """Ask nothing more. False, and goes on, if not all is answered within `timeout` seconds."""
        self._goes_on.clear()
        deadline = time.monotonic() + timeout
        while self._unanswered and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        if self._unanswered:
            self._goes_on.set()
        return not self._unanswered

    def close(self, *, says_goodbye: bool) -> None:
        """End the session; without a goodbye, peers see a death."""
        if says_goodbye:
            self._await_end()
            with contextlib.suppress(IpcSyncError):
                self._connection.request(messages.Bye(), self.lease.welcome.token, 1.0)
        self._stop()
        self._connection.close()
        self.board.close()

    def hand_over(self) -> upgrade.Session:
        """End everything but the session, with which other code in this process goes on."""
        self._stop()
        self._connection.close()
        return upgrade.Session(self.lease.welcome, self.board.descriptor, next(self._connection.ids))

    def _await_end(self) -> None:
        self.lease.lose(ConnectError("the connection was closed", endpoint=self.lease.endpoint))
        self.lease.is_judged = False
        self._owner.ring()
        if self._heart.ident is not None:  # it was started
            self._heart.join(5.0)

    def _stop(self) -> None:
        self._await_end()
        self.lease.mark.end()


def _give(outcome: asyncio.Future[IpcSyncError | None], error: IpcSyncError | None) -> None:
    if not outcome.cancelled():
        outcome.set_result(error)
