"""A client with every name in a namespace, so that tests that share a coordinator are independent."""

from __future__ import annotations

from ipcsync._native import fork
from ipcsync._wire.names import plain
from ipcsync.client import Client
from ipcsync.client._options import ConnectOptions
from ipcsync.client.event import Naming


class Namespace(Naming):
    """Names go in without the namespace, or with it, as other clients have them; they come out with it."""

    def full(self, name: str) -> str:
        """As `Naming.full`; a name that is in the namespace stays as it is."""
        return super().full(plain(name).removeprefix(self.prefix))

    def begin(self, prefix: str) -> str:
        """As `Naming.begin`; a prefix that is in the namespace stays as it is."""
        return super().begin(plain(prefix, "prefix").removeprefix(self.prefix))

    def shown(self, name: str) -> str:
        """The whole name, by which a process with a client of its own finds the event."""
        return name


class NamespacedClient(Client):
    """A client, connected as `name`, whose names of events and streams begin with `namespace` and a slash.

    Names go in without it, or with it; they come out with it. Lists and `watch` show the namespace only, with its
    sessions; `stats` counts everything. Operations without a name (`record`, points) need no namespace.
    """

    def __init__(self, endpoint: str, namespace: str, name: str, timeout: float) -> None:
        fork.arm()
        self.namespace = namespace
        prefix = self._session_prefix = f"{namespace}/"
        super().__init__(ConnectOptions(endpoint, prefix + name, timeout), Namespace(prefix))
