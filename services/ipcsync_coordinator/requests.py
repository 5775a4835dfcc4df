"""The socket of requests and replies: a ROUTER, drained from the loop.

ZeroMQ's descriptor is edge-triggered, and sending replies may consume the signal of new requests. So `zmq.EVENTS` is
read again after each drain and after its replies. A drain ends after a budget of requests and of time, so that no peer
keeps the loop busy.

A client's first reply of a drain is sent at once; the later ones are held until there is no further request, or for
2 ms. While many clients have many requests in flight, each has one reply in 2 ms, since ZeroMQ takes their requests in
turn. Such a call waits for all of its replies, so these are held until there are several, until the drain ends, or
until others are to be told of something.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from ipcsync_coordinator.dispatcher import Dispatcher
from ipcsync_coordinator.feed import Feed
from ipcsync_coordinator.limits import Sender, StrikeCounter, Unread, cut
from ipcsync_keeper.config import Settings

_BUDGET = 512
_LONGEST_NS = 50_000_000  # for the budget: some requests take 10 ms
_HOLD_NS = 2_000_000
_LOOK_EVERY = 8
_SEVERAL = 16  # of a window of 64
_EVENTS, _IN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # ints, since an enum costs as much as the call


class Requests:
    """A bound ROUTER and its peers. `refuse` counts refusals by reason, and logs some of them with fields.

    What others are told of these requests, on the `feed`, goes out once held replies have been sent.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        settings: Settings,
        dispatcher: Dispatcher,
        strikes: StrikeCounter,
        refuse: Callable[..., None],
        feed: Feed,
    ) -> None:
        self.socket = socket
        self._max_frames = settings.max_frames
        self._dispatcher = dispatcher
        self._strikes = strikes
        self._unread = Unread(settings.max_sessions)
        self._refuse = refuse
        self._feed = feed
        self._is_serving = False
        self._held: dict[bytes, list[bytes]] = {}  # later replies of a drain, by routing id
        self._wait_for_many: set[bytes] = set()  # those of them whose last request was one of many
        self._send_at = 0

    def drain(self) -> bool:
        """Answer the waiting requests; returns whether there may be more."""
        if self._serve_up_to(1) and self._has_more():  # usually not: most clients send one request and wait
            self._serve_up_to(_BUDGET)
            return self._has_more()
        return False

    def _has_more(self) -> bool:
        return bool(self.socket.getsockopt(_EVENTS) & _IN)  # type: ignore[operator] # an int

    def _serve_up_to(self, most: int) -> bool:
        """Answer so many requests, or those of a moment; whether there may be more."""
        self._is_serving = True
        until_ns = time.monotonic_ns() + _LONGEST_NS
        try:
            for count in range(1, most + 1):
                if count % _LOOK_EVERY == 0:
                    # By itself ZeroMQ looks for other senders only every 100 frames: too late in a flood.
                    self._has_more()
                try:
                    routing = self.socket.recv(_NOW)
                except zmq.Again:
                    return False
                self._serve(routing)
                if time.monotonic_ns() > until_ns:
                    break
        finally:
            self._is_serving = False
            self._send_replies()
        return True

    def _serve(self, routing: bytes) -> None:
        frame = self.socket.recv(_NOW, copy=False)  # a ROUTER never delivers a routing id alone
        sender = Sender(routing, frame)
        if frame.more and self._drop_rest() >= self._max_frames:
            self._refuse("too_many_frames")
            self._strikes.strike(routing)
        else:
            now_ns = time.monotonic_ns()
            if now_ns > self._send_at:
                self._send_replies(0 if self._feed.has_any() else _SEVERAL)
                self._send_at = now_ns + _HOLD_NS
            reply = self._dispatcher.handle(frame.bytes, sender, now_ns)
            if reply is not None and not self._unread.admits(sender, len(reply)):
                self._refuse("slow_client")  # as where its queue is full: it asks again
            elif reply is not None:
                self._answer(routing, reply, is_one_of_many=self._dispatcher.is_one_of_many)
        if self._strikes.take_due():
            cut(sender, "stranger", self._refuse)

    def _drop_rest(self) -> int:
        """Read the frames after the first; returns how many."""
        count = 1
        while self.socket.recv(_NOW, copy=False).more:
            count += 1
        return count

    def _answer(self, routing: bytes, reply: bytes, *, is_one_of_many: bool = False) -> None:
        """Send a client's first reply of a drain at once, and hold the later ones, and those of a call among others."""
        held = self._held.get(routing)
        if is_one_of_many:
            self._wait_for_many.add(routing)
            if held is None and self._held:
                held = self._held[routing] = []
        else:
            self._wait_for_many.discard(routing)
        if held is None:
            self._held[routing] = []
            self.send(routing, reply)
        else:
            held.append(reply)

    def _send_replies(self, least: int = 0) -> None:
        """Send the held replies, those of one client together, so that it wakes once; of a call, `least` or more."""
        for routing in list(self._held):
            if routing not in self._wait_for_many or len(self._held[routing]) >= least:
                self._wait_for_many.discard(routing)
                for reply in self._held.pop(routing):
                    self.send(routing, reply)
        if not self._held:
            self._feed.flush()

    def deliver(self, routing: bytes, reply: bytes) -> None:
        """Send the reply to an earlier request; during a drain it is one of that drain's."""
        (self._answer if self._is_serving else self.send)(routing, reply)

    def send(self, routing: bytes, reply: bytes) -> None:
        """Send a reply now."""
        try:
            try:
                self.socket.send(routing, _MORE)
            except zmq.Again:
                self._has_more()  # ZeroMQ learns here how much the client has read
                self.socket.send(routing, _MORE)
            self.socket.send(reply, _NOW)
        except zmq.Again:
            self._refuse("slow_client")  # it does not read its replies, so they are dropped
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._refuse("gone_client")
