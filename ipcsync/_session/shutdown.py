"""The end of a client's session: the goodbye, said until a living coordinator took it, and what is given up last."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ipcsync._native import pinned
from ipcsync._session.attachments import AttachmentTable
from ipcsync._session.connection import Connection
from ipcsync._session.lease import SessionLease
from ipcsync._wire import messages
from ipcsync.errors import ConnectError, IpcSyncError, WaitTimeout

log = logging.getLogger("ipcsync")


class Shutdown:
    """Ends one session once its client is closed, on the heartbeat's thread.

    `forget_child` undoes what the client asked for at a fork.
    """

    def __init__(self, connection: Connection, token: bytes, lease: SessionLease, attachments: AttachmentTable) -> None:
        self._connection = connection
        self._token = token
        self._lease = lease
        self._attachments = attachments
        self._has_said_goodbye = False
        self._has_begun = False
        self.forget_child: Callable[[], None] = lambda: None

    def begin(self, beat: Callable[[], None]) -> None:
        """Say goodbye, if there is a coordinator to hear it; whatever could be let go of has been."""
        self._lease.say_goodbye()
        if self._lease.coordinator_is_alive():
            self._say_goodbye(1.0, beat)
        self._has_begun = True

    def at_beat(self) -> None:
        """Say goodbye again, if the coordinator did not take it."""
        if self._has_begun and not self._has_said_goodbye:
            self._say_goodbye(0.05)

    def _say_goodbye(self, timeout: float, beat: Callable[[], None] | None = None) -> None:
        """Tell the coordinator that the session is over, or all of it but what still drains.

        A later beat does if the coordinator is silent.
        """
        let_go = not self._attachments.draining.has_any
        try:
            self._connection.request(messages.Bye(let_go=let_go), self._token, timeout, beat)
        except (WaitTimeout, ConnectError) as error:
            log.info("the coordinator did not take the goodbye: %s", error)
            return
        except IpcSyncError as error:
            log.info("the coordinator knows nothing of the session any more: %s", error)
        self._has_said_goodbye = True
        if let_go:
            self._attachments.closes.drop()

    def is_over(self) -> bool:
        """Whether nothing is left to be let go of or to be told to a coordinator that lives."""
        if not self._lease.coordinator_is_alive():
            return True
        return (
            self._has_said_goodbye and not self._attachments.draining.has_any and not self._attachments.closes.has_any
        )

    def end(self) -> None:
        """Give everything up."""
        self._attachments.closes.end()
        self._lease.stop()
        self._connection.close()
        self.forget_child()
        # While the coordinator lives, attachments are released only when nothing of theirs is queued any more. Of a
        # lost one, work queued here may still write the board's words: then those pages stay as they are.
        board, is_quiet = self._lease.board, self._lease.coordinator_is_alive()
        is_pinned = pinned.is_any(board.address, board.length)
        board.close(keep_mapping=is_pinned and not (is_quiet and pinned.unpin(board.address, board.length)))
