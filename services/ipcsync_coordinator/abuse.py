"""Connections that send invalid messages are cut, so that no process can flood the coordinator."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from ipcsync_coordinator.auth import Sender

_UCRED = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class StrikeCounter:
    """Counts, for each connection, the messages in a row that were malformed or of no session.

    A connection is cut at the `most`-th of them, and its count starts again then: a peer may choose its routing id and
    return with it. The last `remembered` connections are kept.
    """

    def __init__(self, most: int, remembered: int) -> None:
        self._most = most
        self._remembered = remembered
        self._is_due = False
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def strike(self, routing: bytes) -> None:
        """Count an invalid message of that connection."""
        count = self._counts[routing] = self._counts.get(routing, 0) + 1
        self._counts.move_to_end(routing)
        if len(self._counts) > self._remembered:
            self._counts.popitem(last=False)
        if count == self._most:
            self._is_due = True
            del self._counts[routing]

    def clear(self, routing: bytes) -> None:
        """Forget the count: a session sent a valid message over that connection."""
        if self._counts:
            self._counts.pop(routing, None)

    def take_due(self) -> bool:
        """Whether the last counted connection is to be cut; asked after each message, and True once."""
        is_due, self._is_due = self._is_due, False
        return is_due


def cut(sender: Sender) -> bool:
    """Shut down the connection that a frame came by; returns whether that was possible."""
    try:
        descriptor = int(sender.frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return False  # this libzmq has no such option any more: the peer is refused, but not cut
    return disconnect(descriptor, sender.pid)


def disconnect(descriptor: int, pid: int) -> bool:
    """Shut down the connection behind a descriptor of libzmq, if process `pid` is its peer; returns whether it was.

    libzmq may close its descriptor at any time, and another connection may then get the number. So a duplicate is
    checked and shut down, which is one connection for good. A peer of unknown pid (0, of a pid namespace that is not
    visible here) is not cut, since it might be another one.
    """
    with contextlib.suppress(OSError):  # it is gone already, or there is no descriptor for the duplicate
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
