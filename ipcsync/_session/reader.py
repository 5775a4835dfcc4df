"""Questions to a coordinator, without a session: they are answered while all sessions are taken, and to root."""

from __future__ import annotations

import os
from typing import TypeVar, cast

from ipcsync._closing import Closing
from ipcsync._session import no_answer
from ipcsync._session.connection import Connection, expect
from ipcsync._session.handshake import of_this_version
from ipcsync._session.server import check_endpoint
from ipcsync._wire import endpoints, messages
from ipcsync._wire.messages import AttachmentInfo, BridgeInfo, EventInfo, Message, NodeInfo, SessionInfo
from ipcsync.errors import ConnectError, WaitTimeout
from ipcsync.typing import CoordinatorStats

_M = TypeVar("_M", bound=Message)


class Reader(Closing):
    """Asks one endpoint's coordinator what there is, each time within `timeout` seconds. Not thread-safe.

    Each call raises ConnectError, with the reason, if none answers; at once if there is no socket. A list has at most
    the coordinator's limit of rows; `stats` has the numbers. It takes no session, loads no driver, and goes on with the
    coordinator that follows one that has ended. A context manager that closes it.
    """

    def __init__(self, endpoint: str, timeout: float) -> None:
        self._path = endpoints.socket_path(endpoint)
        self.endpoint = endpoint
        self.timeout = timeout
        self._connection: Connection | None = None
        self._asked = 0

    def stats(self) -> CoordinatorStats:
        """The coordinator's counts."""
        return cast("CoordinatorStats", self._answer(messages.Stats(), messages.Counters).stats)

    def list_events(self) -> list[EventInfo]:
        """The shared events, those in quarantine included."""
        return self._answer(messages.ListEvents(), messages.EventList).events

    def list_sessions(self) -> list[SessionInfo]:
        """The live sessions."""
        return self._answer(messages.ListSessions(), messages.SessionList).sessions

    def list_attachments(self, limit: int) -> list[AttachmentInfo]:
        """Who records and who waits on the events."""
        return self._answer(messages.ListAttachments("", limit), messages.AttachmentList).attachments

    def bridge(self, timeout: float) -> BridgeInfo:
        """The bridge beside the coordinator. NoBridge if there is none, WaitTimeout if it does not answer."""
        return self._ask(messages.Remote("bridge"), messages.BridgeInfo, timeout)

    def nodes(self) -> list[NodeInfo]:
        """The nodes of the fleet, this one first; raises as `bridge`, and FleetUnavailable."""
        self.stats()  # whether there is a coordinator: the next answer is the bridge's
        return self._ask(messages.Remote("nodes"), messages.NodeList, self.timeout).nodes

    def _answer(self, body: Message, kind: type[_M]) -> _M:
        try:
            return self._ask(body, kind, self.timeout)
        except WaitTimeout:
            self.close()
            raise self._nobody(f"answered at {self.endpoint} within {self.timeout:g} s") from None

    def _ask(self, body: Message, kind: type[_M], timeout: float) -> _M:
        if self._connection is None:
            checks_owner = os.geteuid() != 0
            if checks_owner:
                check_endpoint(self.endpoint)
            if not os.path.exists(self._path):
                raise self._nobody(f"at {self.endpoint}")
            self._connection = Connection(self.endpoint, checks_owner=checks_owner)
            self._connection.starts = lambda: self._asked  # so that it looks at each answer's process
        self._asked += 1
        with of_this_version(f"the coordinator at {self.endpoint}", self.endpoint):
            return expect(self._connection.request(body, b"", timeout), kind)

    def _nobody(self, where: str) -> ConnectError:
        return ConnectError(f"no coordinator {where}: {no_answer.why(self.endpoint)}", endpoint=self.endpoint)

    def close(self) -> None:
        """Close the connection; the next question opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
