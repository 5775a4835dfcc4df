"""`connect`: it returns a client, or raises and leaves nothing open."""

from __future__ import annotations

import os

from ipcsync._native import fork
from ipcsync.client._opening import ConnectOptions
from ipcsync.client.client import Client
from ipcsync.typing import Chains, EngineChoice


def connect(
    endpoint: str | None = None,
    *,
    name: str | None = None,
    timeout: float = 5.0,
    lease_ttl: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    chains: Chains = "stream",
    prefix: str = "",
    engine: EngineChoice = "auto",
) -> Client:
    """Open a session with a coordinator.

    `endpoint` is $IPCSYNC_ENDPOINT by default, else the coordinator's socket in the runtime directory. `name` is the
    session's name for others. `timeout` in seconds, also for a daemon that is just starting; later requests have
    `client.timeout`. `lease_ttl` in seconds asks for another TTL than the coordinator's default;
    `client.lease_ttl` is the granted one, from 0.2 to 3600. `trace` is a directory for a trace of this process's calls
    on shared events, $IPCSYNC_TRACE by default, "" for none. `chains` is "stream", or "session": each record then
    stands behind every wait of the process, whatever its stream. `prefix` is put before the name of every event and
    stream that this client opens, lists and watches, and is left out in what it returns: two jobs with their own
    prefixes share a coordinator and never see each other's names. `engine` is that of every event that this client
    creates, named or not, unless a call names another one: "event", "timeline", or "auto", which takes $IPCSYNC_ENGINE,
    and without that lets the coordinator choose. An event that exists keeps its engine.

    The client lives until its `close`, also if the program keeps no reference to it, which gives a ResourceWarning:
    leave a `with` block, or close it.

    Raises ConnectError if there is no coordinator, or it is of another uid, protocol version or driver; QuotaExceeded
    if it has as many sessions as it may, or this process has too few descriptors, threads or memory left; IpcSyncError
    where gevent or eventlet has replaced the threads; ProtocolError for an invalid name, prefix or TTL; ValueError for
    a timeout that is negative or NaN, and for another `chains` or `engine`; OSError if the trace's directory is not
    writable; NoDriver, and ForkedProcessError in a process forked after CUDA or ipcsync was used.
    """
    fork.arm()
    client = Client.__new__(Client)
    try:
        # Not `Client(…)`: an exception of a signal's handler could come before its result has a name here.
        Client.__init__(client, ConnectOptions(endpoint, name, timeout, lease_ttl, trace, chains, prefix, engine))
        return client
    except BaseException:
        client._drop()
        raise
