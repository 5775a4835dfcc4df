"""The bridge's session with its coordinator: that of any client, but for a driver, which it has none of.

Requests come from the loop and are made by a thread, many at once; the heartbeat is another thread's, as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable

import zmq

from ipcsync._logs import fields
from ipcsync._native import fork
from ipcsync._session import handshake
from ipcsync._session.connection import Connection, Request, context
from ipcsync._session.lease import SessionLease
from ipcsync._wire import codec, messages
from ipcsync._wire.messages import Announcement, Message
from ipcsync.errors import ConnectError, IpcSyncError, SessionLost, WaitTimeout

log = logging.getLogger("ipcsync.bridge")

REQUEST_S = 5.0
_AGAIN_S = 0.1
_BUDGET = 256


class Desk:
    """One session in the role of a bridge, until `close`. ConnectError if there is no coordinator, or it has one."""

    def __init__(self, endpoint: str, name: str, timeout: float) -> None:
        fork.arm()
        self._connection = Connection(endpoint)
        try:
            welcome = handshake.greet(self._connection, name, timeout, None, lambda: None, driver="", role="bridge")
            self.board = handshake.open_board(welcome, endpoint, timeout)
        except BaseException:
            self._connection.close()
            raise
        self.epoch = welcome.epoch
        self.serial = welcome.serial
        self._feed_endpoint = welcome.feed
        self._token = welcome.token
        self._connection.window = welcome.window
        self._connection.starts = lambda: self.board.starts
        self.lease = SessionLease(self.board, welcome, endpoint, self._connection.drain_late)
        self._is_closed = False
        self._asked: queue.SimpleQueue[tuple[Request, Callable[[], object]] | None] = queue.SimpleQueue()
        self._heart = threading.Thread(
            target=self.lease.run, args=(lambda: self._is_closed,), name="ipcsync-heartbeat", daemon=True
        )
        self._clerk = threading.Thread(target=self._serve, name="ipcsync-requests", daemon=True)
        self._connection.request(messages.Ready(), self._token, timeout, self.lease.check_liveness)
        self.lease.show()
        self._heart.start()
        self._clerk.start()

    def check(self) -> None:
        """Raise what the session was lost for."""
        self.lease.check()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def ask(self, body: Message) -> Message:
        """The reply's body; raises the error that it carries, WaitTimeout, or SessionLost."""
        self.check()
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        request = Request(body)
        self._asked.put((request, lambda: loop.call_soon_threadsafe(done.set)))
        await done.wait()
        self.check()
        return self._connection.result_of(request, REQUEST_S)

    async def insist(self, body: Message) -> Message:
        """The same for what must be done, however long the coordinator does not answer: it can be done twice."""
        while (reply := await self._try(body)) is None:
            await asyncio.sleep(_AGAIN_S)
        return reply

    async def _try(self, body: Message) -> Message | None:
        try:
            return await self.ask(body)
        except (WaitTimeout, ConnectError):
            return None

    def _serve(self) -> None:
        """Make what is asked, as much at once as is there."""
        is_over = False
        while not is_over:
            batch = [self._asked.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < self._connection.window:
                    batch.append(self._asked.get_nowait())
            is_over = None in batch
            asked = [each for each in batch if each is not None]
            if asked:
                self._exchange([request for request, _ in asked])
            for _, tell in asked:
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                    tell()

    def _exchange(self, requests: list[Request]) -> None:
        try:
            self._connection.exchange(requests, self._token, REQUEST_S, self.lease.check_liveness)
        except (SessionLost, WaitTimeout):
            return  # who asked finds no reply, and looks at the session
        except IpcSyncError as error:
            log.warning("requests failed", extra=fields(why=error))

    # --- the feed -----------------------------------------------------------------------------------------------------

    def subscribe(self) -> Feed:
        """The coordinator's announcements from now on."""
        return Feed(self._feed_endpoint)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, says_goodbye: bool) -> None:
        """End the session; without a goodbye as a death would."""
        if says_goodbye:
            self.lease.say_goodbye()
            with contextlib.suppress(IpcSyncError):
                self._connection.request(messages.Bye(), self._token, 1.0)
        self._is_closed = True
        self._asked.put(None)
        self.lease.wake()
        self._heart.join(5.0)
        self._clerk.join(REQUEST_S)
        self.lease.stop()
        self._connection.close()
        self.board.close()


class Feed:
    """A subscription, drained by the loop: plain ZeroMQ, whose descriptor tells of an edge."""

    def __init__(self, endpoint: str) -> None:
        self._socket = context().socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._number = -1

    def fileno(self) -> int:
        """For the loop."""
        return int(self._socket.fd)

    def drain(self, take: Callable[[Announcement], None], resync: Callable[[], None]) -> None:
        """Hand on what is there; `resync` is called if anything was missed, or this is the beginning."""
        for _ in range(_BUDGET):
            try:
                frame = bytes(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if frame == codec.FEED_WELCOME:
                resync()
                continue
            announcement = codec.decode_announcement(frame)
            expected = self._number if announcement.kind == "tick" else self._number + 1
            if announcement.number > expected and self._number >= 0:
                resync()
            self._number = announcement.number
            if announcement.kind != "tick":
                take(announcement)

    def close(self) -> None:
        """End the subscription."""
        self._socket.close()
