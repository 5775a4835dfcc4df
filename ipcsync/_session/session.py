"""One session with a coordinator, from the handshake to the goodbye: requests, attachments, waits, and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from ipcsync._board import Board
from ipcsync._engines import deadline_of
from ipcsync._native import device as devices
from ipcsync._native import fork
from ipcsync._native.context import count, uuid_of
from ipcsync._session import feed, handshake, sessions
from ipcsync._session.attachments import AttachmentRef, AttachmentTable
from ipcsync._session.connection import Connection, context
from ipcsync._session.feed import Notice
from ipcsync._session.handshake import expect
from ipcsync._session.lease import SessionLease
from ipcsync._session.shutdown import Shutdown
from ipcsync._session.waits import Waits
from ipcsync._wire import messages
from ipcsync._wire.messages import Message
from ipcsync._wire.point import PointKey
from ipcsync.errors import ClientClosed, CoordinatorLost, IpcSyncError

if TYPE_CHECKING:
    from ipcsync._engines.traced import Tracing

_M = TypeVar("_M", bound=Message)

DEFAULT_TIMEOUT_S = 5.0
_DRAIN_S = 1.0


class Session:
    """One session, with a lease that lives as long as this process does. Thread-safe.

    Construction raises ConnectError if there is no coordinator, or it is of another uid, protocol version or driver.
    """

    def __init__(
        self,
        endpoint: str,
        name: str = "",
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        lease_ttl: float | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.name = name
        self.timeout = DEFAULT_TIMEOUT_S  # of requests that say nothing else
        self.is_closed = False
        self._closing = threading.Lock()
        self.waits = Waits()
        self.connection = Connection(endpoint)
        try:
            welcome = handshake.greet(self.connection, name, timeout, lease_ttl)
            board = handshake.open_board(welcome, endpoint, timeout)
            try:
                self._begin(board, welcome, timeout, tracing)
            except BaseException:
                board.close()  # and with it the lifeline, so that the line can be another session's
                raise
        except BaseException:
            self.connection.close()
            raise
        self._shutdown.forget_child = fork.at_child(self.lease.drop_in_child)
        devices.collectors.append(self.attachments.collect)
        sessions.add(self)

    def _begin(self, board: Board, welcome: messages.Welcome, timeout: float, tracing: Tracing | None) -> None:
        self.epoch = welcome.epoch
        self.lease_ttl = welcome.lease_ttl
        self.id = welcome.session
        self.token = welcome.token
        self.feed_endpoint = welcome.feed
        self.connection.window = welcome.window
        self.connection.starts = lambda: board.starts
        self._sees_all_devices = {uuid_of(ordinal) for ordinal in range(count())}.issuperset(welcome.devices)
        self.lease = SessionLease(board, welcome, self.endpoint, self._at_beat)
        self.attachments = AttachmentTable(board, self.lease, self._send_close, self.waits, tracing)
        self._shutdown = Shutdown(self.connection, welcome.token, self.lease, self.attachments)
        try:
            self.connection.request(messages.Ready(), self.token, timeout, self.lease.check_liveness)
            self.lease.start()
        except BaseException:
            self.lease.stop()
            raise

    def check(self) -> None:
        """Raise ForkedProcessError, ClientClosed, or what the session was lost for."""
        fork.check()
        if self.is_closed:
            who = f"the client {self.name!r}" if self.name else "this client"
            raise ClientClosed(
                f"{who} of {self.endpoint} was closed by this process; connect anew",
                client=self.name,
                endpoint=self.endpoint,
            )
        self.lease.check()

    def check_liveness(self) -> None:
        """`check`, and ask whether the coordinator's process lives."""
        self.check()
        self.lease.check_liveness()

    @property
    def is_connected(self) -> bool:
        """Whether the session lives, as far as is known; asks nobody."""
        return not self.is_closed and not fork.is_in_bad_fork() and self.lease.is_good

    def _at_beat(self) -> None:
        """From the heartbeat's thread."""
        self.connection.drain_late()
        self.attachments.beat()
        self.attachments.flush_closes(0.05, wait=False)
        self._shutdown.at_beat()

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, body: Message, kind: type[_M], timeout: float | None = None, **options: Any) -> _M:
        """Send a request and return its reply, which is a `kind`; the error that it carries is raised.

        `timeout` in seconds, the session's own by default.
        """
        self.check()
        seconds = self.timeout if timeout is None else timeout
        return expect(self.connection.request(body, self.token, seconds, self.lease.check_liveness, **options), kind)

    def _send_close(self, body: messages.Close | messages.Break, timeout: float) -> None:
        self.connection.request(body, self.token, timeout, self.lease.check_coordinator)

    def open(self, bodies: Sequence[messages.Open], timeout: float | None = None) -> list[AttachmentRef]:
        """Attach to what `bodies` name, in their order: all, or none, within `timeout` seconds in all."""
        timeout = self.timeout if timeout is None else timeout
        with self.attachments.change(timeout), ExitStack() as before:
            self.attachments.flush_closes_or_raise(timeout)
            named_by_recorder = [body for body in bodies if body.recorder and body.name]
            if named_by_recorder and not self._sees_all_devices:
                # Attach as a waiter first: if this process cannot use the event, leaving later as its recorder would
                # close it for everybody.
                for ref in self._open([replace(body, recorder=False) for body in named_by_recorder], timeout):
                    before.callback(ref.close)
            return self._open(bodies, timeout)

    def _open(self, bodies: Sequence[messages.Open], timeout: float) -> list[AttachmentRef]:
        """`open` without its order towards other requests; if any reply is an error, the first of them is raised."""
        self.check()
        answers = self.connection.request_many(
            bodies, self.token, timeout, self.lease.check_liveness, on_late=self._give_back
        )
        opened: list[AttachmentRef] = []
        try:
            for answer in answers:
                if isinstance(answer, IpcSyncError):
                    raise answer
                opened.append(self.attachments.add(expect(answer, messages.Attachment), opened=True))
        except BaseException:
            for answer in answers[len(opened) + 1 :]:  # that one itself was given back, or is an error
                if not isinstance(answer, IpcSyncError):
                    self._give_back(answer)
            for ref in opened:
                ref.close()
            self.attachments.flush_closes(0.5, wait=True)
            raise
        return opened

    def attach(self, key: PointKey, timeout: float | None = None) -> AttachmentRef:
        """The attachment to a point's event. Asks the coordinator only at the first sight of the event.

        Raises CoordinatorLost for a point of another coordinator or epoch, EventClosed if the event is gone.
        """
        self.check()
        if key.epoch != self.epoch:
            raise CoordinatorLost(
                f"this point is of another coordinator than the one at {self.endpoint}, or of one that has restarted "
                "since",
                endpoint=self.endpoint,
            )
        where = (key.slot, key.incarnation)
        found = self.attachments.find(where)
        if found is not None:
            return found
        timeout = self.timeout if timeout is None else timeout
        with self.attachments.change(timeout):
            found = self.attachments.find(where)
            if found is not None:
                return found
            self.attachments.flush_closes_or_raise(timeout)
            body = messages.Attach(key.slot, key.incarnation)
            reply = self.request(body, messages.Attachment, timeout, on_late=self._give_back)
            return self.attachments.add(reply, opened=False)

    def _give_back(self, late: Message) -> None:
        """Release an attachment whose request was given up."""
        if isinstance(late, messages.Attachment):
            self.attachments.give_back(late)

    def notices(
        self, prefix: str, session_prefix: str, timeout: float | None, look: Callable[[], None] | None = None
    ) -> Iterator[Notice]:
        """The feed: a snapshot, then every change; ends when nothing came for `timeout` seconds, or `look` raises."""
        deadline_of(timeout)
        self.check()
        return feed.watch(
            context(),
            self.feed_endpoint,
            feed.Replay(prefix, session_prefix),
            timeout,
            lambda is_resync: self.request(messages.Snapshot(prefix, is_resync), messages.SnapshotReply),
            self.check_liveness if look is None else look,
        )

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session; twice does nothing, and so does a call in a forked child. Waits up to 1 s for its work."""
        if fork.is_in_bad_fork():
            return
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
        self.attachments.close_all(_DRAIN_S)
        self.waits.join(1.0)
        self._shutdown.begin()
        devices.collectors.remove(self.attachments.collect)
        sessions.remove(self)
        self._shutdown.finish()

    def __repr__(self) -> str:
        return f"<session {self.name!r} {'connected' if self.is_connected else 'closed'} {self.endpoint}>"
