"""What sessions of this node want of other nodes: heard of from the coordinator, and answered by way of it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import zmq

from ipcsync._session.connection import expect, zmq_context
from ipcsync._wire import codec, messages
from ipcsync._wire.codec import Origin
from ipcsync.errors import (
    IpcSyncError,
    NodeLost,
    ProtocolError,
    QuotaExceeded,
    RecorderLost,
    SessionLost,
)
from ipcsync_bridge import wire
from ipcsync_bridge.answers import Answers
from ipcsync_bridge.exports import Follower
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.store import Names, for_each
from ipcsync_bridge.subscriber import Source, Subscriber
from ipcsync_bridge.wire import Counters

log = logging.getLogger("ipcsync.bridge")

PEERS_SHOWN = 400  # which fit in one answer

_BUDGET = 256  # announcements in one turn of the loop


@dataclass(eq=False)
class RemoteRequests:
    """Hears of wants from the coordinator's feed, which the loop reads, and serves them.

    What was missed on the feed is found by asking.
    """

    session: BridgeSession
    names: Names
    subscriber: Subscriber
    answers: Answers
    counters: Counters
    begin: Callable[[Coroutine[Any, Any, object]], None]

    def __post_init__(self) -> None:
        self.transport = self.names.transport
        self.settings = self.transport.settings
        self._handled: set[int] = set()  # the numbers of wants that are served now
        self._loop = asyncio.get_running_loop()
        self._number = -1  # of the last announcement
        self._socket = zmq_context().socket(zmq.SUB)
        self._socket.linger = 0

    def listen(self) -> None:
        self._socket.connect(self.session.lease.welcome.feed)
        self._socket.subscribe(b"")
        self._loop.add_reader(int(self._socket.fd), self.drain)  # edge-triggered
        self._loop.call_soon(self.drain)

    def close(self) -> None:
        self._loop.remove_reader(int(self._socket.fd))
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
            self._take(announcement)
        self._loop.call_soon(self.drain)

    def _take(self, announcement: messages.Announcement) -> None:
        key = (announcement.slot, announcement.incarnation)
        if announcement.kind == "wanted" and announcement.want is not None:
            self._want(announcement.want)
        elif announcement.kind == "unwanted":
            self.subscriber.mirrors.unwanted(key)
        elif announcement.kind in ("closed", "broken"):
            if self.answers.exports.get(key) is not None:
                self.answers.exports.kick()
            if key in self.names.claims:
                self.begin(self.names.release(key))

    def _read_all(self) -> None:
        """Ask for everything that an announcement may have said: this is the beginning, or some were missed."""
        self.begin(self._list_wants())
        ended = [key for key in self.names.claims if not self.session.is_open(key)]
        self.names.over.update(ended)  # at once: a claim on such a name may be served before its turn comes
        self.begin(for_each(ended, self.names.release))
        self.subscriber.mirrors.drop_unwanted()
        self.answers.exports.kick()

    async def _list_wants(self) -> None:
        for want in expect(await self.session.ask(messages.ListWants()), messages.WantList).wants:
            self._want(want)

    def _want(self, want: messages.Want) -> None:
        if want.number not in self._handled:
            self._handled.add(want.number)
            self.begin(self._serve(want))

    async def _serve(self, want: messages.Want) -> None:
        self.counters.remote_requests += 1
        try:
            reply = await self._answer_to(want)
            if reply is not None:
                await self.session.insist(messages.Answer(want.number, reply))
        finally:
            self._handled.discard(want.number)

    async def _answer_to(self, want: messages.Want) -> bytes | None:
        left = (want.deadline_ns - time.monotonic_ns()) / 1e9 - 0.02 if want.deadline_ns else 5.0
        try:
            reply = await self.serve(want, max(0.8 * left, 0.05))
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

    async def serve(self, want: messages.Want, timeout: float) -> messages.Message | None:
        """The answer to a want; None if an import has answered it."""
        if want.what == "claim":
            await self.names.claim(want, timeout)
            use = (want.slot, want.incarnation)
            if not self.session.is_open(use):  # it ended before its end could be heard to free the name
                await self.names.release(use)
            return messages.Done()
        if want.what == "events":
            return await self._list_events(want, timeout)
        if want.what == "nodes":
            return await self._list_nodes(timeout)
        if want.what == "bridge":
            return self._describe()
        await (self._attach if want.what == "attach" else self._open)(want, time.monotonic() + timeout)
        return None

    async def _list_events(self, want: messages.Want, timeout: float) -> messages.Message:
        if want.node == self.settings.node:
            return await self.session.ask(messages.ListEvents(want.name))
        listed = await wire.ask(self.transport, want.node, wire.Events(want.name), wire.Listed, timeout)
        _, reply = codec.decode_reply(listed.reply)
        if not isinstance(reply, messages.EventList):
            raise ProtocolError(f"node {want.node!r} answered with no list of events", code="reply")
        return reply

    async def _list_nodes(self, timeout: float) -> messages.NodeList:
        owners = await self.names.nodes.everybody(timeout)
        sources, now = self.subscriber.sources, time.monotonic()
        epochs = {node: bytes.fromhex(owner.epoch) for node, owner in owners.items()}
        epochs |= {node: source.epoch for node, source in sources.items()}
        epochs.pop(self.settings.node, None)
        listed = [messages.NodeInfo(self.settings.node, self.session.epoch, "known", 0, 0.0)]
        for node, epoch in sorted(epochs.items()):
            info = messages.NodeInfo(node, epoch, "known", 0)
            lost_epoch, reason = self.subscriber.lost.get(node, (b"", ""))
            if (source := sources.get(node)) is not None:
                heard_s = now - source.last_received if source.last_received else None
                info = messages.NodeInfo(node, epoch, "linked", len(source.links), heard_s)
            elif lost_epoch == epoch:
                info = messages.NodeInfo(node, epoch, "lost", 0, None, reason)
            listed.append(info)
        listed[1:] = sorted(listed[1:], key=lambda info: info.state == "known")[:PEERS_SHOWN]
        return messages.NodeList(listed)

    def _describe(self) -> messages.BridgeInfo:
        now = time.monotonic()
        sources, followers, lost = self.subscriber.sources, self.answers.followers, self.subscriber.lost
        linked = {*sources, *followers}
        shown = [*sorted(linked), *(node for node in reversed(lost) if node not in linked)][:PEERS_SHOWN]
        peers = [messages.PeerInfo(node, "lost", reason=lost[node][1]) for node in shown if node not in linked]
        for node in linked.intersection(shown):
            source = sources.get(node) or Source(node, b"", 0.0, 0.0)
            follower = followers.get(node) or Follower(node, 0.0)
            heard = max(source.last_received, follower.last_asked)
            heard_s = round(now - heard, 3) if heard else None  # none of a node that other code has left, so far
            counts = len(source.links), len(follower.keys), len(follower.rows)
            peers.append(messages.PeerInfo(node, "linked", *counts, last_heard_s=heard_s))
        return messages.BridgeInfo(
            node=self.settings.node,
            fleet=self.settings.fleet,
            pid=os.getpid(),
            server=self.transport.server,
            mirrors=len(self.subscriber.mirrors),
            exports=len(self.answers.exports),
            peers=sorted(peers, key=lambda peer: peer.name),
            counts=self.counters.counts(),
            nodes_lost=dict(self.counters.lost),
            refusals=dict(self.counters.refusals),
        )

    async def _open(self, want: messages.Want, until: float) -> None:
        if not want.node:
            claim = await self.names.find(want.name, until - time.monotonic())
            origin = Origin(bytes.fromhex(claim.epoch), claim.slot, claim.incarnation)
            if claim.node == self.settings.node:
                await self.session.ask(_import(want, origin, claim.node))
            else:
                await self._link(want, claim.node, wire.Attach(origin.epoch, origin.key), until)
        elif want.node == self.settings.node:
            await self._open_here(want)
        else:
            await self._link(want, want.node, wire.Open(want.name), until)

    async def _open_here(self, want: messages.Want) -> None:
        """Open an event of this very node: attach to it for a moment, to learn its use."""
        async with self.answers.attaching():
            # One that exists may be on the other engine: only who waits on another node needs this one.
            opened = await self.session.ask(messages.Open(want.name, default_engine="timeline"))
            attached = expect(opened, messages.Attachment)
            key = (attached.slot, attached.incarnation)
            self.answers.hold([key])
            await self.session.ask(_import(want, Origin(self.session.epoch, *key), want.node))

    async def _attach(self, want: messages.Want, until: float) -> None:
        known = self.subscriber.with_epoch(want.epoch)
        node = known.node if known else await self.names.nodes.node_of(want.epoch, until - time.monotonic())
        if node is None:
            text = "no node of the fleet has the epoch that this point is of"
            raise NodeLost(f"{text}: its coordinator has ended, or is of another fleet", reason="restarted")
        await self._link(want, node, wire.Attach(want.epoch, (want.slot, want.incarnation)), until)

    async def _link(self, want: messages.Want, node: str, question: wire.Open | wire.Attach, until: float) -> None:
        """Mirror the use that a node answers with, which answers the want."""
        sent = time.monotonic()
        state = await wire.ask(self.transport, node, question, wire.State, max(until - sent, 0.1))
        row = state.row
        if state.epoch == self.session.epoch:
            raise NodeLost(f"node {node!r} has the epoch of this very node", node=node, reason="replaced")
        if row.state == "gone":
            raise RecorderLost(f"the event of this point (slot {row.slot} of node {node!r}) is gone", cause="gone")
        source = self.subscriber.source_of(node, state, sent)
        linked, most = sum(len(each.links) for each in self.subscriber.sources.values()), self.settings.max_links
        if row.key not in source.links and linked >= most:
            raise QuotaExceeded(f"{most} events are mirrored already", limit=most)
        self.subscriber.link(source, row)  # before the request: news may come meanwhile
        origin = Origin(state.epoch, *row.key)
        try:
            attached = await self.session.ask(_import(want, origin, node))
        except IpcSyncError as error:
            if origin not in self.subscriber.mirrors:
                source.unlink(row.key)
            if isinstance(error, NodeLost) and error.reason is None:
                return  # lost for good on this node, as the coordinator has answered the session
            raise
        self.subscriber.mirror(expect(attached, messages.Attachment), row)


def _import(want: messages.Want, origin: Origin, node: str) -> messages.Import:
    return messages.Import(want.number, *origin, node, want.name)
