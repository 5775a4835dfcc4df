"""The numbered announcements: each change has the next number, and the number is repeated every second.

They go out after the replies to the requests that they follow from, and many together: a subscriber wakes once for
them, and who waits for a reply does not compete with it for the processor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import zmq

from ipcsync._wire import codec
from ipcsync._wire.messages import Announcement

MAX_SUBSCRIPTION = 512  # bytes that a subscriber may send; ZeroMQ's own greeting needs some 300
# Of one connection. While it finds one ZeroMQ reads on, before it gives any to us: with 16 that cost up to 300 MB.
UNREAD_SUBSCRIPTIONS = 1
_BUDGET = 256
_SUBSCRIBES = b"\x01"


class Feed:
    """The XPUB socket. A subscriber that stops reading loses announcements, sees the gap, and asks for a snapshot.

    `soon` is given `flush` to call it once the replies are sent, unless something else does so before. `on_topic` is
    called for a subscription to a topic, with its frame: there are none, and ZeroMQ keeps some memory for each.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        number: int,
        soon: Callable[[Callable[[], None]], object],
        on_topic: Callable[[zmq.Frame], object],
    ) -> None:
        self.socket = socket
        self.number = number
        self._soon = soon
        self._on_topic = on_topic
        self._frames: list[bytes] = []

    def announce(self, kind: str, **fields: object) -> None:
        """Have the next change sent soon."""
        self.number += 1
        self._put(Announcement(number=self.number, kind=kind, **fields))  # type: ignore[arg-type] # checked by msgspec

    def tick(self) -> None:
        """Repeat the current number, so that a subscriber that lost the last change learns of it."""
        self._put(Announcement(number=self.number, kind="tick"))

    def _put(self, announcement: Announcement) -> None:
        self._frames.append(codec.encode_announcement(announcement))
        if len(self._frames) == 1:
            self._soon(self.flush)

    def has_any(self) -> bool:
        """Whether something was announced and is not sent yet."""
        return bool(self._frames)

    def flush(self) -> None:
        """Send what was announced."""
        frames, self._frames = self._frames, []
        for frame in frames:
            self.socket.send(frame, zmq.NOBLOCK)  # XPUB drops, it never blocks

    def close(self) -> None:
        """Send what was announced, and nothing more."""
        self.flush()
        self._soon = lambda _: None
        self.socket.close()

    def drain(self) -> None:
        """Take in subscriptions. Who subscribes is sent the number at once, and from then on every change."""
        subscribed = False
        with contextlib.suppress(zmq.Again):  # there are no more
            for _ in range(_BUDGET):  # the rest waits for the next tick, so that no subscriber keeps the loop busy
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
                if frame.bytes[:1] == _SUBSCRIBES:
                    subscribed = True
                    if len(frame) > 1:
                        self._on_topic(frame)
        if subscribed:
            self.tick()
