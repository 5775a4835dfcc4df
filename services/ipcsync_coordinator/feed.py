"""The numbered announcements: each change has the next number, and the number is repeated every second."""

from __future__ import annotations

import contextlib

import zmq

from ipcsync._wire import codec
from ipcsync._wire.messages import Announcement

MAX_SUBSCRIPTION = 512  # bytes that a subscriber may send; ZeroMQ's own greeting needs some 300
_BUDGET = 256


class Feed:
    """The XPUB socket. A subscriber that stops reading loses announcements, sees the gap, and asks for a snapshot."""

    def __init__(self, socket: zmq.Socket[bytes], number: int = 0) -> None:
        self.socket = socket
        self.number = number

    def announce(self, kind: str, **fields: object) -> None:
        """Send the next change."""
        self.number += 1
        self._send(Announcement(number=self.number, kind=kind, **fields))  # type: ignore[arg-type] # checked by msgspec

    def tick(self) -> None:
        """Repeat the current number, so that a subscriber that lost the last change learns of it."""
        self._send(Announcement(number=self.number, kind="tick"))

    def _send(self, announcement: Announcement) -> None:
        self.socket.send(codec.encode_announcement(announcement), zmq.NOBLOCK)  # XPUB drops, it never blocks

    def drain(self) -> None:
        """Read subscriptions, since ZeroMQ sends the welcome message only when they are read."""
        with contextlib.suppress(zmq.Again):  # there are no more
            for _ in range(_BUDGET):  # the rest waits for the next tick, so that no subscriber keeps the loop busy
                self.socket.recv(zmq.NOBLOCK)
