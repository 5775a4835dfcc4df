"""Connections that send what no client sends, and their end: over a connection that is cut nobody floods."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import OrderedDict

_UCRED = struct.Struct("3i")  # pid, uid, gid: what SO_PEERCRED tells


class StrikeCounter:
    """How many messages each connection sent in a row that were malformed or of no session.

    A connection is due to be cut with the `most`-th of them, and is counted anew then: a peer may choose its routing id
    and come back with it. The last `remembered` strangers are known.
    """

    def __init__(self, most: int, remembered: int) -> None:
        self._most = most
        self._remembered = remembered
        self._is_due = False
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def strike(self, routing: bytes) -> None:
        """That connection sent one more."""
        count = self._counts[routing] = self._counts.get(routing, 0) + 1
        self._counts.move_to_end(routing)
        if len(self._counts) > self._remembered:
            self._counts.popitem(last=False)
        if count == self._most:
            self._is_due = True
            del self._counts[routing]

    def clear(self, routing: bytes) -> None:
        """A session spoke over that connection."""
        if self._counts:
            self._counts.pop(routing, None)

    def take_due(self) -> bool:
        """Whether the connection that was blamed last is to be cut; asked after each message, told once."""
        is_due, self._is_due = self._is_due, False
        return is_due


def disconnect(descriptor: int, pid: int) -> bool:
    """Shut down the connection behind a descriptor of libzmq's, if process `pid` is at its other end; whether it was.

    libzmq may close its descriptor at any time, and the number may then stand for somebody else's connection: what is
    looked at and shut down is a duplicate, so that it is the same connection, and only one of that process. Nobody is
    cut whose pid is not known (0, of a pid namespace that we cannot see): it might be another.
    """
    with contextlib.suppress(OSError):  # it is gone already, or no descriptor is left to look at it with
        duplicate = os.dup(descriptor)
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        with connection:
            peer, _, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if pid and peer == pid:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False
