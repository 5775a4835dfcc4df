"""The messages between two neighbours of the pipeline, over a socket pair that keeps messages whole.

A side sees the end of the pair when the other one dies.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_FRAME = struct.Struct("<BxHIQQ48s")
NO_POINT = bytes(48)


class Kind(IntEnum):
    """The kind of a message."""

    CHUNK = 1  # downstream: a chunk lies in a buffer once its point is complete
    END = 2  # downstream: no more chunks
    TAKEN = 3  # upstream: the reader of the chunk has begun; its writer may go on
    FREE = 4  # upstream: the same, and the buffer may be written again once the point is complete


class Message(NamedTuple):
    """One message. `sent_ns` is CLOCK_MONOTONIC; NO_POINT stands for work that is complete already."""

    kind: Kind
    buffer: int = 0
    length: int = 0
    chunk: int = 0
    sent_ns: int = 0
    point: bytes = NO_POINT


class NeighbourGoneError(Exception):
    """The process at the other end of a link is gone. The parent process reports why."""


class Link:
    """One end of a link."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message; NeighbourGoneError if the other end is gone."""
        try:
            self._socket.send(_FRAME.pack(*message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise NeighbourGoneError from error

    def receive(self) -> Message:
        """The next message, waited for; NeighbourGoneError at the end."""
        try:
            data = self._socket.recv(_FRAME.size)
        except ConnectionResetError as error:
            raise NeighbourGoneError from error
        if not data:
            raise NeighbourGoneError
        kind, *fields = _FRAME.unpack(data)
        return Message(Kind(kind), *fields)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def hear(control: Connection) -> dict[str, Any] | None:
    """The next message on the pipe between a stage and its parent, waited for; None at the end."""
    try:
        return dict(control.recv())
    except (EOFError, ConnectionResetError):
        return None


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep messages whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
