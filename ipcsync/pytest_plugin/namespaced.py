"""A client with every name in a namespace, so that tests that share a coordinator are independent."""

from __future__ import annotations

from ipcsync._native import fork
from ipcsync.client import Client


class NamespacedClient(Client):
    """A client, connected as `name`, whose names of events and streams begin with `namespace` and a slash.

    Names go in without it, or with it; they come out with it, by which a process with a client of its own finds the
    event. Lists and `watch` show the namespace only, with its sessions; `stats` counts everything. Operations without a
    name (`record`, points) need no namespace.
    """

    _shows_prefix = True

    def __init__(self, endpoint: str, namespace: str, name: str, timeout: float) -> None:
        fork.arm()
        self.namespace = namespace
        prefix = f"{namespace}/"
        super().__init__(endpoint, prefix + name, prefix=prefix)
        self._begin(timeout)
