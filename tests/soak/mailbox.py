"""How points travel between a soak's workers: a datagram socket each, whose mail is lost when it is full."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from tests.soak.session import Known

_LETTER = struct.Struct("<48sQIHB")


class Letter(NamedTuple):
    """A point's bytes, and what is known of it."""

    point: bytes
    tag: int
    cell: int
    name: int
    engine: int


class Mailbox:
    """One worker's. It takes over from the life before."""

    def __init__(self, directory: Path, index: int) -> None:
        self._directory = directory
        path = self._path(index)
        if os.path.exists(path):
            os.unlink(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(path)

    def _path(self, index: int) -> str:
        return str(self._directory / f"box-{index}")

    def fileno(self) -> int:
        """The socket's descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, peer: int, known: Known) -> None:
        """Send a point to a worker."""
        data = _LETTER.pack(bytes(known.point), known.tag, known.cell, known.name, known.engine)
        try:
            self._socket.sendto(data, self._path(peer))
        except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
            return  # the peer's box is full, or it is between two lives

    def receive(self) -> Letter | None:
        """The next letter, if there is one."""
        try:
            return Letter._make(_LETTER.unpack(self._socket.recv(_LETTER.size)))
        except BlockingIOError:
            return None
