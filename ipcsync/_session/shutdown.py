"""The end of a session: the goodbye, repeated until a living coordinator has taken it, and the final release."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ipcsync._native import pinned
from ipcsync._session.attachments import AttachmentTable
from ipcsync._session.connection import Connection
from ipcsync._session.lease import SessionLease
from ipcsync._wire import messages
from ipcsync.errors import ConnectError, IpcSyncError, QuotaExceeded, WaitTimeout

log = logging.getLogger("ipcsync")


class Shutdown:
    """Ends one session once its client is closed, on the heartbeat's thread.

    `forget_child` ends that forked children close the board's descriptor.
    """

    def __init__(
        self,
        connection: Connection,
        token: bytes,
        lease: SessionLease,
        attachments: AttachmentTable,
        forget_child: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._token = token
        self._lease = lease
        self._attachments = attachments
        self._has_said_goodbye = False
        self._has_begun = False
        self._forget_child = forget_child

    def begin(self, beat: Callable[[], None]) -> None:
        """Say goodbye, if the coordinator lives. Everything that could be released was released before."""
        self._lease.say_goodbye()
        if self._lease.coordinator_is_alive():
            self._say_goodbye(1.0, beat)
        self._has_begun = True

    def at_beat(self) -> None:
        """Say goodbye again, if the coordinator did not take it; while records drain, show that this process runs."""
        if self._has_begun and not self._has_said_goodbye:
            self._say_goodbye(0.05)
        if self._attachments.draining.has_any:
            self._lease.show_heartbeat()

    def _say_goodbye(self, timeout: float, beat: Callable[[], None] | None = None) -> None:
        """Tell the coordinator that the session is over, except for what still drains.

        If the coordinator does not answer, a later beat repeats it.
        """
        released = not self._attachments.draining.has_any
        try:
            self._connection.request(messages.Bye(released=released), self._token, timeout, beat)
        except (WaitTimeout, ConnectError, QuotaExceeded) as error:
            log.info("the coordinator did not take the goodbye: %s", error)
            return
        except IpcSyncError as error:
            log.info("the coordinator does not know the session any more: %s", error)
        self._has_said_goodbye = True
        if released:
            self._attachments.closes.drop()

    def is_complete(self) -> bool:
        """Whether everything is released, and a living coordinator was told of it."""
        if not self._lease.coordinator_is_alive():
            return True
        return (
            self._has_said_goodbye and not self._attachments.draining.has_any and not self._attachments.closes.has_any
        )

    def end(self) -> None:
        """Release everything."""
        self._attachments.closes.end()
        self._lease.stop()
        self._connection.close()
        # While the coordinator lives, attachments are released only once none of their work is queued. If it is lost,
        # work queued here may still write the board's words: then those pages stay registered and mapped.
        board, is_quiet = self._lease.board, self._lease.coordinator_is_alive()
        is_making = self._attachments.draining.is_making  # which may register a page at any moment
        is_pinned = pinned.is_any(board.address, board.length)
        is_unpinned = not is_pinned or (is_quiet and pinned.unpin(board.address, board.length))
        board.close(keep_mapping=is_making or not is_unpinned)
        self._forget_child()  # only now: a child's copy of the descriptor keeps the lifeline
