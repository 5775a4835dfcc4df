"""How a process gets a client: by `connect`, or the one that its libraries share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ipcsync._native import fork
from ipcsync._threads import outer, under
from ipcsync._wire import names
from ipcsync.client.client import Client
from ipcsync.errors import ClientClosed, ForkedProcessError, IpcSyncError
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
    depth: int | None = None,
) -> Client:
    """Open a session with a coordinator.

    `endpoint` is $IPCSYNC_ENDPOINT by default, else the coordinator's socket in the runtime directory. `name` is the
    session's name for others. `timeout` in seconds, also for a daemon that just starts; later requests have
    `client.timeout`. `lease_ttl` in seconds asks for another TTL than the coordinator's default; `client.lease_ttl` is
    the granted one, from 0.2 to 3600. `trace` is a directory for a trace of this process's calls on shared events,
    $IPCSYNC_TRACE by default, "" for none. `chains` is "stream", or "session": each record then depends on every wait
    of the process, whatever its stream. `prefix` is put before the name of every event and stream that this client
    opens, lists and watches, and is left out in what it returns: two jobs with their own prefixes share a coordinator
    and never meet each other's events. `engine` is that of every event that this client creates, named or not, unless
    a call names another one: "event", "timeline", or "auto", which takes $IPCSYNC_ENGINE, and without that "timeline"
    where it works, else "event". `depth`, 1 to 1024, is likewise how many records may be in flight on the `event`
    engine: by default $IPCSYNC_DEPTH, else 16. An event that exists keeps both.

    The client lives until its `close`, also if the program keeps no reference to it, which gives a ResourceWarning.

    Raises ConnectError if there is no coordinator, or it is of another uid, protocol version or driver; QuotaExceeded
    if it has as many sessions as it may, or this process has too few descriptors, threads or memory left; IpcSyncError
    where gevent or eventlet has replaced threads; ProtocolError for an invalid name, prefix or TTL; ValueError for a
    timeout that is negative or NaN, and for another `chains`, `engine` or `depth`; OSError if the trace's directory is
    not writable; NoDriver, and ForkedProcessError in a process forked after CUDA or ipcsync was used.
    """
    fork.arm()
    client = Client(endpoint, name, prefix=prefix, chains=chains, engine=engine, depth=depth)
    try:
        client._begin(timeout, lease_ttl, trace)
        return client
    except BaseException:
        client._session.drop()
        raise


# --- the default client -----------------------------------------------------------------------------------------------

_client: Client | None = None
_listeners: list[Callable[[Client], object]] = []
_told = 0  # how many of them were told of this client


def default_client(*, on_connect: Callable[[Client], object] | None = None) -> Client:
    """This process's own client: connected at first use, and a new one once its session is lost or it was closed.

    It takes the coordinator of $IPCSYNC_ENDPOINT or of the runtime directory, as `connect` does, and is named by the
    program and its pid ("trainer-4711"), which is what others read in lists and errors. Events and points of a lost
    session stay lost: compare `client.session_id` with the one you kept, or give `on_connect`. It is called once with
    the present client, at once, and once with each later one, by the call that connects it. That call raises its
    exceptions; the next one then tells those that were not told yet. It is kept for the life of the process: give a
    function of a module, not a new one each time. Of threads that ask at the same time one connects and tells; the
    others wait until it has, and get the same client.

    In a child forked before the first use it is the child's own. Raises as `connect`; in later ones ForkedProcessError.
    """
    if not (on_connect is None or callable(on_connect)):
        raise TypeError(f"on_connect is a function that takes a client, but got {type(on_connect).__name__}")
    fork.arm()  # before the lock, which may be held for ever in a forked child
    return under(outer, _get, on_connect)  # reentrant: a finalizer may ask in the middle of a connect


def _name() -> str:
    """The program's name and the pid; of a module that is run by `-m`, the module's."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = "" if spec is None else spec.name.removesuffix(".__main__")
    if program in ("", "__main__"):
        program = os.path.basename((sys.argv or [""])[0]).removesuffix(".py")
    name = f"{program}-{os.getpid()}"
    return name if program not in ("", "-c", "-") and names.why_not(name) is None else f"python-{os.getpid()}"


def _get(on_connect: Callable[[Client], object] | None) -> Client:
    global _told  # noqa: PLW0603 - one a process
    client = _present() or _connect()
    if on_connect is not None and on_connect not in _listeners:
        _listeners.append(on_connect)
    # One may ask for the client too, and so tell others, or connect another one.
    while _told < len(_listeners) and client is _client:
        _told += 1
        _listeners[_told - 1](client)
    return client


def _present() -> Client | None:
    """The client of the last call, if its session lives; else None, and that client is closed."""
    global _client  # noqa: PLW0603 - one a process
    client = _client
    if client is None:
        return None
    try:
        client._session.check_liveness()
    except ForkedProcessError:
        raise
    except IpcSyncError as error:
        if not isinstance(error, ClientClosed):
            client.close()
        if _client is client:  # a call within this one may have connected another one
            _client = None
    return _client


def _connect() -> Client:
    global _client, _told  # noqa: PLW0603 - one a process
    client = Client(name=_name())
    try:
        client._begin()
        if _client is not None:  # a call within this one, on the same thread, was first
            client.close()
            return _client
        _told = 0  # first: an exception in between leaves no client
        _client = client
    except BaseException:
        if _client is not client:
            client._session.drop()
        raise
    return client
