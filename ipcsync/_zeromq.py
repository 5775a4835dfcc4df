"""ZeroMQ's contexts."""

from __future__ import annotations

import zmq

from ipcsync import _room as room

_DESCRIPTORS, _THREADS = 8, 3  # libzmq 4.3.5 takes 5 and 2, and a socket one descriptor more
_SOCKETS = 1023  # libzmq's default


def new_context(sockets: int = _SOCKETS) -> zmq.Context[zmq.Socket[bytes]]:
    """A context for that many sockets. QuotaExceeded if this process lacks what it takes: libzmq would abort."""
    room.look("ZeroMQ", descriptors=_DESCRIPTORS, threads=_THREADS)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, sockets)
    context.socket(zmq.PAIR).close()  # it starts with its first socket: now, while there is room
    return context
