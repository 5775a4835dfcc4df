"""What the coordinator announces to its bridge: what sessions want, and what has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import zmq

from ipcsync._session.connection import zmq_context
from ipcsync._wire import codec, messages
from ipcsync.errors import IpcSyncError, SessionLost
from ipcsync_bridge import wire
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.exports import Exports
from ipcsync_bridge.mirrors import Mirrors
from ipcsync_bridge.names import Names
from ipcsync_bridge.remote_requests import RemoteRequests
from ipcsync_bridge.session import BridgeSession

log = logging.getLogger("ipcsync.bridge")

_BUDGET = 256  # announcements in one turn of the loop


@dataclass(eq=False)
class Announcements:
    """A subscription to the coordinator's feed, read by the loop. What was missed there is found by asking."""

    session: BridgeSession
    remote_requests: RemoteRequests
    names: Names
    mirrors: Mirrors
    exports: Exports
    counters: Counters
    begin: Callable[[Coroutine[Any, Any, object]], None]

    def __post_init__(self) -> None:
        self._handled: set[int] = set()  # the numbers of wants that are served now
        self._loop = asyncio.get_running_loop()
        self._number = -1  # of the last announcement
        self._socket = zmq_context().socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.connect(self.session.feed)
        self._socket.subscribe(b"")
        self._descriptor = int(self._socket.fd)  # edge-triggered
        self._loop.add_reader(self._descriptor, self.drain)
        self._loop.call_soon(self.drain)

    def close(self) -> None:
        """End the subscription."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def drain(self) -> None:
        """Take in what is there. It is also called now and then, in case an edge of the descriptor was missed."""
        for _ in range(_BUDGET):
            if self._socket.closed:
                return
            try:
                frame = bytes(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            announcement = codec.decode_announcement(frame)
            if announcement.number > (self._number if announcement.kind == "tick" else self._number + 1):
                self._read_all()
            self._number = announcement.number
            if announcement.kind != "tick":
                self._take(announcement)
        self._loop.call_soon(self.drain)

    def _take(self, announcement: messages.Announcement) -> None:
        key = (announcement.slot, announcement.incarnation)
        if announcement.kind == "wanted" and announcement.want is not None:
            self._want(announcement.want)
        elif announcement.kind == "unwanted":
            self.mirrors.unwanted(key)
        elif announcement.kind in ("closed", "broken"):
            if self.exports.get(key) is not None:
                self.exports.kick()
            if key in self.names.claims:
                self.begin(self.names.release(key))

    def _read_all(self) -> None:
        """Ask for everything that an announcement may have said: this is the beginning, or some were missed."""
        self.begin(self._list_wants())
        self.begin(self._check_claims())
        self.mirrors.drop_unwanted()
        self.exports.kick()

    async def _check_claims(self) -> None:
        """Free the names whose events have ended."""
        for key in list(self.names.claims):
            if not self.session.is_open(key):
                await self.names.release(key)

    # --- wants --------------------------------------------------------------------------------------------------------

    async def _list_wants(self) -> None:
        reply = await self.session.insist(messages.ListWants())
        assert isinstance(reply, messages.WantList)
        for want in reply.wants:
            self._want(want)
        self._handled &= {want.number for want in reply.wants}

    def _want(self, want: messages.Want) -> None:
        if want.number not in self._handled:
            self._handled.add(want.number)
            self.begin(self._serve(want))

    async def _serve(self, want: messages.Want) -> None:
        self.counters.remote_requests += 1
        try:
            reply = await self._answer_to(want)
            if reply is not None:
                await self.session.insist_till_done(messages.Answer(want.number, reply))
        finally:
            self._handled.discard(want.number)

    async def _answer_to(self, want: messages.Want) -> bytes | None:
        left = (want.deadline_ns - time.monotonic_ns()) / 1e9 - 0.02 if want.deadline_ns else 5.0
        try:
            reply = await self.remote_requests.serve(want, max(0.8 * left, 0.05))
            return None if reply is None else wire.encode_reply(reply)
        except SessionLost:
            raise
        except IpcSyncError as error:
            failure = error
        except Exception as error:  # a mistake of this code: who waits is answered all the same
            log.exception("failed")
            failure = IpcSyncError(f"the bridge failed: {type(error).__name__} ({error})")
        self.counters.refusals[type(failure).__name__] += 1
        return wire.encode_reply(codec.failure_of(failure))
