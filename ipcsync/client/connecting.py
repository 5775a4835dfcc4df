"""`connect`: a client, or an exception that leaves nothing behind."""

from __future__ import annotations

import os

from ipcsync._native import fork
from ipcsync.client.client import Client


def connect(
    endpoint: str | None = None,
    *,
    name: str | None = None,
    timeout: float = 5.0,
    lease_ttl: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    chains: str = "stream",
    prefix: str = "",
) -> Client:
    """Open a session with a coordinator.

    `endpoint` is $IPCSYNC_ENDPOINT by default, else the coordinator's socket in the runtime directory; `name` is what
    others see of this session; `timeout` in seconds, for a daemon that is just starting too; `lease_ttl` in seconds
    asks for another TTL than the coordinator's, which clamps it (`client.lease_ttl` is what it granted); `trace` is a
    directory to which this process writes what it does with shared events, $IPCSYNC_TRACE by default, "" for none.
    `prefix` stands before the name of every event and stream that this client opens, lists and watches; here they are
    shown without it. So two jobs that share a coordinator never meet, and neither sees the other's names.

    Raises ConnectError if there is no coordinator, or it is of another uid, protocol version or driver; ValueError for
    a timeout that is negative or NaN; OSError if nothing can be written to the trace's directory.
    """
    fork.arm()
    client = Client.__new__(Client)
    try:
        # Called by name: from a construction, a signal's handler may raise before anybody has what was constructed.
        Client.__init__(
            client,
            endpoint,
            name=name,
            timeout=timeout,
            lease_ttl=lease_ttl,
            trace=trace,
            chains=chains,
            prefix=prefix,
        )
        return client
    except BaseException:
        client._drop()
        raise
