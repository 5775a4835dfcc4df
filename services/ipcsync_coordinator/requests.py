"""The socket that requests come in by and replies go out by: a ROUTER, drained from the loop.

ZeroMQ's descriptor is edge-triggered: after each drain `zmq.EVENTS` is looked at again, and a drain ends after a budget
so that no peer keeps the loop to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from ipcsync_coordinator.config import Settings
from ipcsync_coordinator.dispatcher import Dispatcher
from ipcsync_coordinator.leases import Sender
from ipcsync_coordinator.strangers import Strangers, cut

_BUDGET = 256
_LOOK_EVERY = 8
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # as numbers: an enum costs as much as the call


class Requests:
    """A bound ROUTER and who is served over it. `refuse` counts, by reason, what is not, and logs some with fields."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        settings: Settings,
        dispatcher: Dispatcher,
        strangers: Strangers,
        refuse: Callable[..., None],
    ) -> None:
        self.socket = socket
        self._max_frames = settings.max_frames
        self._dispatcher = dispatcher
        self._strangers = strangers
        self._refuse = refuse

    def drain(self) -> bool:
        """Answer what is there; whether there may be more."""
        socket = self.socket
        for count in range(_BUDGET):
            if count % _LOOK_EVERY == 0:
                # Unasked, ZeroMQ looks every 100 frames whether somebody else sent something: too late beside a flood.
                socket.getsockopt(zmq.EVENTS)
            try:
                routing = socket.recv(_NOW)
            except zmq.Again:
                return False
            self._serve(routing)
        return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _serve(self, routing: bytes) -> None:
        frame = self.socket.recv(_NOW, copy=False)  # a ROUTER never gives a routing id alone
        sender = Sender(routing, frame)
        if frame.more and self._drop_rest() >= self._max_frames:
            self._refuse("too_many_frames")
            self._strangers.blame(routing)
        else:
            reply = self._dispatcher.handle(frame.bytes, sender, time.monotonic_ns())
            if reply is not None:
                self._send(routing, reply)
        if self._strangers.take_due():
            self._cut(sender)

    def _drop_rest(self) -> int:
        """How many frames came behind the first."""
        count = 1
        while self.socket.recv(_NOW, copy=False).more:
            count += 1
        return count

    def _send(self, routing: bytes, reply: bytes) -> None:
        try:
            self.socket.send(routing, _MORE)
            self.socket.send(reply, _NOW)
        except zmq.Again:
            self._refuse("slow_client")  # it does not read its replies: dropped, never waited for
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._refuse("gone_client")

    def _cut(self, sender: Sender) -> None:
        try:
            descriptor = int(sender.frame.get(zmq.SRCFD))
        except (zmq.ZMQError, ValueError):
            return  # this libzmq does not tell (it calls the option deprecated): the stranger is refused, not cut off
        if cut(descriptor, sender.pid):
            self._refuse("stranger", pid=sender.pid)
