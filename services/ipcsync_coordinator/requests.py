"""The socket that requests come in by and replies go out by: a ROUTER, drained from the loop.

ZeroMQ's descriptor is edge-triggered: after each drain, and after its replies, whose sending takes in what tells of new
requests, `zmq.EVENTS` is looked at again. A drain ends after a budget, so that no peer keeps the loop to itself.

A client's first reply of a drain is sent at once, those behind it when nothing more is there, or before the first
request that is taken 2 ms later: a client with many requests in flight would else be woken for each single one, and
take the processor from us.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from ipcsync_coordinator.abuse import StrikeCounter, disconnect
from ipcsync_coordinator.auth import Sender
from ipcsync_coordinator.config import Settings
from ipcsync_coordinator.dispatcher import Dispatcher

_BUDGET = 512
_HOLD_NS = 2_000_000
_LOOK_EVERY = 8
_EVENTS, _IN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # as numbers: an enum costs as much as the call


class Requests:
    """A bound ROUTER and who is served over it. `refuse` counts, by reason, what is not, and logs some with fields."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        settings: Settings,
        dispatcher: Dispatcher,
        strikes: StrikeCounter,
        refuse: Callable[..., None],
    ) -> None:
        self.socket = socket
        self._max_frames = settings.max_frames
        self._dispatcher = dispatcher
        self._strikes = strikes
        self._refuse = refuse
        self._held: dict[bytes, list[bytes]] = {}  # replies behind the first of a drain, by routing id
        self._send_at = 0

    def drain(self) -> bool:
        """Answer what is there; whether there may be more."""
        if self._serve_up_to(1) and self._has_more():  # mostly not: who sends one request waits for its reply
            self._serve_up_to(_BUDGET)
            return self._has_more()
        return False

    def _has_more(self) -> bool:
        return bool(self.socket.getsockopt(_EVENTS) & _IN)  # type: ignore[operator] # an int

    def _serve_up_to(self, most: int) -> bool:
        """Answer so many requests; whether there were as many."""
        try:
            for count in range(1, most + 1):
                if count % _LOOK_EVERY == 0:
                    # Unasked, ZeroMQ looks every 100 frames whether somebody else sent something: too late in a flood.
                    self._has_more()
                try:
                    routing = self.socket.recv(_NOW)
                except zmq.Again:
                    return False
                self._serve(routing)
        finally:
            self._send_replies()
        return True

    def _serve(self, routing: bytes) -> None:
        frame = self.socket.recv(_NOW, copy=False)  # a ROUTER never gives a routing id alone
        sender = Sender(routing, frame)
        if frame.more and self._drop_rest() >= self._max_frames:
            self._refuse("too_many_frames")
            self._strikes.strike(routing)
        else:
            now_ns = time.monotonic_ns()
            if now_ns > self._send_at:
                self._send_replies()
                self._send_at = now_ns + _HOLD_NS
            reply = self._dispatcher.handle(frame.bytes, sender, now_ns)
            if reply is not None:
                self._answer(routing, reply)
        if self._strikes.take_due():
            self._cut(sender)

    def _drop_rest(self) -> int:
        """How many frames came behind the first."""
        count = 1
        while self.socket.recv(_NOW, copy=False).more:
            count += 1
        return count

    def _answer(self, routing: bytes, reply: bytes) -> None:
        """Send a client's first reply of a drain at once, and hold those behind it."""
        held = self._held.get(routing)
        if held is None:
            self._held[routing] = []
            self.send(routing, reply)
        else:
            held.append(reply)

    def _send_replies(self) -> None:
        """What is held for one client goes together: it wakes once, and not once for each between the others'."""
        while self._held:
            routing = next(iter(self._held))
            for reply in self._held.pop(routing):
                self.send(routing, reply)

    def send(self, routing: bytes, reply: bytes) -> None:
        """Send a reply now, whenever its request came."""
        try:
            try:
                self.socket.send(routing, _MORE)
            except zmq.Again:
                self._has_more()  # takes in how much the client has read meanwhile
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
        if disconnect(descriptor, sender.pid):
            self._refuse("stranger", pid=sender.pid)
