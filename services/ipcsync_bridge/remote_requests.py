"""Questions of this node's sessions to other nodes, answered by way of the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ipcsync._wire import codec, messages
from ipcsync.errors import EngineMismatch, IpcSyncError, NodeLost, ProtocolError, QuotaExceeded, RecorderLost
from ipcsync_bridge import wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.mirrors import Mirrors, Origin
from ipcsync_bridge.names import Names
from ipcsync_bridge.questions import Questions
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.store import Nodes
from ipcsync_bridge.subscriber import Subscriber


@dataclass(frozen=True, eq=False)
class RemoteRequests:
    """Serves wants. `visit` is called with a use that is attached to for a moment; `describe` describes the bridge."""

    settings: Settings
    session: BridgeSession
    nodes: Nodes
    names: Names
    questions: Questions
    mirrors: Mirrors
    subscriber: Subscriber
    visit: Callable[[wire.Key], None]
    describe: Callable[[], messages.BridgeInfo]

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
            return self.describe()
        await (self._attach if want.what == "attach" else self._open)(want, timeout)
        return None

    # --- lists --------------------------------------------------------------------------------------------------------

    async def _list_events(self, want: messages.Want, timeout: float) -> messages.Message:
        if want.node == self.settings.node:
            return await self.session.ask(messages.ListEvents(want.name))
        listed = await self.questions.ask(want.node, wire.Events(want.name), wire.Listed, timeout)
        _, reply = codec.decode_reply(listed.reply)
        if not isinstance(reply, messages.EventList):
            raise ProtocolError(f"node {want.node!r} answered with no list of events", code="reply")
        return reply

    async def _list_nodes(self, timeout: float) -> messages.NodeList:
        owners = await self.nodes.everybody(timeout)
        now = time.monotonic()
        own = messages.NodeInfo(self.settings.node, self.session.epoch, "known", 0, 0.0)
        others = {node: self._info(node, bytes.fromhex(owner.epoch), now) for node, owner in owners.items()}
        for node, source in self.subscriber.sources.items():
            others[node] = self._info(node, source.epoch, now)
        others.pop(self.settings.node, None)
        return messages.NodeList([own, *(others[node] for node in sorted(others))])

    def _info(self, node: str, epoch: bytes, now: float) -> messages.NodeInfo:
        source = self.subscriber.sources.get(node)
        if source is not None:
            return messages.NodeInfo(node, source.epoch, "linked", len(source.links), now - source.last_received)
        lost_epoch, reason = self.subscriber.lost.get(node, (b"", ""))
        if reason and lost_epoch == epoch:
            return messages.NodeInfo(node, epoch, "lost", 0, None, reason)
        return messages.NodeInfo(node, epoch, "known", 0)

    # --- uses of events -----------------------------------------------------------------------------------------------

    async def _open(self, want: messages.Want, timeout: float) -> None:
        if not want.node:
            claim = await self.names.find(want.name, timeout)
            origin = Origin(bytes.fromhex(claim.epoch), claim.slot, claim.incarnation)
            if claim.node == self.settings.node:
                await self.session.ask(_import(want, origin, claim.node))
            else:
                await self._link(want, claim.node, wire.Attach(origin.epoch, origin.key), timeout)
        elif want.node == self.settings.node:
            await self._open_here(want)
        else:
            await self._link(want, want.node, wire.Open(want.name), timeout)

    async def _open_here(self, want: messages.Want) -> None:
        """Open an event of this very node: attach to it for a moment, to learn its use."""
        try:
            opened = await self.session.ask(messages.Open(want.name, engine="timeline"))
        except EngineMismatch:  # it exists, and only who waits on another node needs this engine
            opened = await self.session.ask(messages.Open(want.name))
        assert isinstance(opened, messages.Attachment)
        key = (opened.slot, opened.incarnation)
        try:
            await self.session.ask(_import(want, Origin(self.session.epoch, *key), want.node))
        finally:
            self.visit(key)

    async def _attach(self, want: messages.Want, timeout: float) -> None:
        sources = self.subscriber.sources
        known = next((node for node, source in sources.items() if source.epoch == want.epoch), None)
        node = known or await self.nodes.node_of(want.epoch, timeout)
        if node is None:
            raise NodeLost(
                "no node of the fleet has the epoch that this point is of: its coordinator has ended, or is of another "
                "fleet",
                reason="restarted",
            )
        await self._link(want, node, wire.Attach(want.epoch, (want.slot, want.incarnation)), timeout)

    async def _link(self, want: messages.Want, node: str, question: wire.Open | wire.Attach, timeout: float) -> None:
        """Mirror the use that a node answers with, which answers the want."""
        sent = time.monotonic()
        state = await self.questions.ask(node, question, wire.State, timeout)
        row = state.row
        if row.state == "gone":
            raise RecorderLost(f"the event of this point (slot {row.slot} of node {node!r}) is gone", cause="gone")
        source = self.subscriber.source_of(node, state, sent)
        if row.key not in source.links and len(self.mirrors) >= self.settings.max_links:
            raise QuotaExceeded(f"{self.settings.max_links} events are mirrored already", limit=self.settings.max_links)
        self.subscriber.link(source, row)  # before the request: news may come meanwhile
        origin = Origin(state.epoch, *row.key)
        try:
            # Insisted on: a mirror that was made without an answer to this bridge would get no news.
            attached = await self.session.insist(_import(want, origin, node))
        except IpcSyncError as error:
            if origin not in self.mirrors:
                source.unlink(row.key)
            if isinstance(error, NodeLost) and error.reason is None:
                return  # lost for good on this node, as the coordinator has answered the session
            raise
        assert isinstance(attached, messages.Attachment)
        self.subscriber.mirror(attached, row)


def _import(want: messages.Want, origin: Origin, node: str) -> messages.Import:
    return messages.Import(want.number, *origin, node, want.name)
