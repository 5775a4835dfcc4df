"""Whose socket a coordinator's is: a client speaks to a process of its own user only."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import zmq

from ipcsync._linux.process import peer_of
from ipcsync._wire import endpoints
from ipcsync.errors import ConnectError

_RULE = "a coordinator serves its own uid only"


def check_endpoint(endpoint: str) -> None:
    """Raise ConnectError if the socket belongs to another user, or is in a directory that this user may not search."""
    path = endpoints.socket_path(endpoint)
    try:
        status = os.stat(path)
    except PermissionError:
        for parent in reversed(Path(path).parents):  # the first that this user may not search
            if os.access(parent, os.X_OK, effective_ids=True):
                continue
            owner, me = parent.stat().st_uid, os.geteuid()
            if owner == me:
                text = f"the directory {parent} has a mode that excludes its own user"
            else:
                text = (
                    f"the directory {parent} belongs to uid {owner}, and this is uid {me}: {_RULE}; start one as this "
                    "user (ipcsync coordinator), or run this process as that one"
                )
            raise ConnectError(text, endpoint=endpoint) from None
        return
    except OSError:
        return  # not there yet: connecting waits for it
    if status.st_uid != os.geteuid():
        raise ConnectError(
            f"the socket {path} belongs to uid {status.st_uid}, and this is uid {os.geteuid()}: {_RULE}",
            endpoint=endpoint,
        )


def check_server(frame: zmq.Frame, endpoint: str) -> None:
    """Raise ConnectError if another user's process sent this frame, or could do so from the socket's directory.

    Until there is a socket, another user may make the directory, and there is nothing to be checked before.
    """
    path = endpoints.socket_path(endpoint)
    me = os.geteuid()
    owner = me
    with suppress(OSError):  # it was removed meanwhile
        owner = os.stat(os.path.dirname(path) or ".").st_uid
    if owner != me:
        raise ConnectError(
            f"the directory of the socket {path} belongs to uid {owner}, and this is uid {me}: {_RULE}",
            endpoint=endpoint,
        )
    server = _uid_of_peer(frame)
    if server not in (me, None):
        raise ConnectError(
            f"a process of uid {server} answers at the socket {path}, and this is uid {me}: {_RULE}",
            endpoint=endpoint,
        )


def _uid_of_peer(frame: zmq.Frame) -> int | None:
    """The uid of the process that listens where a frame came from; None if the connection is gone by now."""
    try:
        # A duplicate, since libzmq may close its own, and the number may then be another file's.
        duplicate = os.dup(int(frame.get(zmq.SRCFD)))
    except (zmq.ZMQError, ValueError, OSError):
        return None
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None
    with connection:
        if connection.family != socket.AF_UNIX:
            return None
        return peer_of(connection)[1]
