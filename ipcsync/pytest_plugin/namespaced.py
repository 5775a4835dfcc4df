"""A client with every name in a namespace, so that tests that share a coordinator are independent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipcsync._native import fork
from ipcsync._native.stream import Stream
from ipcsync.client import AttachmentInfo, Client, EventInfo, Notice, SessionInfo, SharedEvent


class NamespacedClient(Client):
    """A client whose names of events and streams begin with `namespace` and a slash.

    Names go in without it, or with it; they come out with it. Lists and `watch` show the namespace only, with its
    sessions; `stats` counts everything. Operations without a name (`record`, points) need no namespace.
    """

    def __init__(self, endpoint: str, namespace: str, name: str, timeout: float) -> None:
        self.namespace = namespace
        self._session_prefix = f"{namespace}/"
        super().__init__(endpoint, name=f"{namespace}/{name}", timeout=timeout)

    def _full(self, name: str) -> str:
        if not isinstance(name, str) or name.startswith(self._session_prefix):
            return name  # the client refuses another type
        return self._session_prefix + name

    def event(self, name: str, **options: Any) -> SharedEvent:
        """As `Client.event`, in the namespace."""
        return super().event(self._full(name), **options)

    def stream(self, name: str, **options: Any) -> Stream:
        """As `Client.stream`, in the namespace."""
        return super().stream(self._full(name), **options)

    def list_events(
        self, prefix: str = "", *, node: str | None = None, timeout: float | None = None
    ) -> list[EventInfo]:
        """The namespace's events whose names begin with `prefix`."""
        return super().list_events(self._full(prefix), node=node, timeout=timeout)

    def list_attachments(
        self, prefix: str = "", *, limit: int = 100_000, timeout: float | None = None
    ) -> list[AttachmentInfo]:
        """The uses of the namespace's events whose names begin with `prefix`."""
        return super().list_attachments(self._full(prefix), limit=limit, timeout=timeout)

    def list_sessions(self, *, timeout: float | None = None) -> list[SessionInfo]:
        """The namespace's sessions: the test's own client and the processes that it spawned."""
        return [row for row in super().list_sessions(timeout=timeout) if row.name.startswith(self._session_prefix)]

    def watch(self, prefix: str = "", *, timeout: float | None = None) -> Iterator[Notice]:
        """As `Client.watch`, of the namespace only."""
        return super().watch(self._full(prefix), timeout=timeout)


def connect(endpoint: str, namespace: str, name: str, timeout: float) -> NamespacedClient:
    """Open a session as `name` in a namespace; `timeout` in seconds. Raises ConnectError."""
    fork.arm()
    return NamespacedClient(endpoint, namespace, name, timeout)
