"""Questions of this node's sessions to other nodes, answered by way of the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable

from ipcsync._wire import codec, messages
from ipcsync.errors import EngineMismatch, IpcSyncError, NodeLost, ProtocolError, QuotaExceeded, RecorderLost
from ipcsync_bridge import wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.mirrors import Mirrors, Origin
from ipcsync_bridge.names import Names
from ipcsync_bridge.questions import Opened, Openings, Questions
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.store import Nodes
from ipcsync_bridge.subscriber import Subscriber


class RemoteRequests:
    """Serves wants. `visit` is called with a use that is attached to for a moment; `describe` describes the bridge."""

    def __init__(
        self,
        settings: Settings,
        session: BridgeSession,
        nodes: Nodes,
        names: Names,
        questions: Questions,
        opening: Openings,
        mirrors: Mirrors,
        subscriber: Subscriber,
        *,
        visit: Callable[[wire.Key], None],
        describe: Callable[[], messages.BridgeInfo],
    ) -> None:
        self._settings = settings
        self._session = session
        self._nodes = nodes
        self._names = names
        self._questions = questions
        self._opening = opening
        self._mirrors = mirrors
        self._subscriber = subscriber
        self._visit = visit
        self._describe = describe

    async def serve(self, want: messages.Want, timeout: float) -> messages.Message | None:
        """The answer to a want; None if an import has answered it."""
        if want.what == "claim":
            await self._names.claim(want, timeout)
            use = (want.slot, want.incarnation)
            if not self._session.is_open(use):  # it ended before its end could be heard to free the name
                await self._names.release(use)
            return messages.Done()
        if want.what == "events":
            return await self._list_events(want, timeout)
        if want.what == "nodes":
            return await self._list_nodes(timeout)
        if want.what == "bridge":
            return self._describe()
        with self._subscriber.linking():
            await (self._attach if want.what == "attach" else self._open)(want, timeout)
        return None

    # --- lists --------------------------------------------------------------------------------------------------------

    async def _list_events(self, want: messages.Want, timeout: float) -> messages.Message:
        if want.node == self._settings.node:
            return await self._session.ask(messages.ListEvents(want.name))
        listed = await self._questions.ask(want.node, wire.Events(want.name), wire.Listed, timeout)
        _, reply = codec.decode_reply(listed.reply)
        if not isinstance(reply, messages.EventList):
            raise ProtocolError(f"node {want.node!r} answered with no list of events", code="reply")
        return reply

    async def _list_nodes(self, timeout: float) -> messages.NodeList:
        owners = await self._nodes.everybody(timeout)
        now = time.monotonic()
        own = messages.NodeInfo(self._settings.node, self._session.epoch, "known", 0, 0.0)
        others = {node: self._info(node, bytes.fromhex(owner.epoch), now) for node, owner in owners.items()}
        for node, source in self._subscriber.sources.items():
            others[node] = self._info(node, source.epoch, now)
        others.pop(self._settings.node, None)
        return messages.NodeList([own, *(others[node] for node in sorted(others))])

    def _info(self, node: str, epoch: bytes, now: float) -> messages.NodeInfo:
        source = self._subscriber.sources.get(node)
        if source is not None:
            return messages.NodeInfo(node, source.epoch, "linked", len(source.links), now - source.last_received)
        lost_epoch, reason = self._subscriber.lost.get(node, (b"", ""))
        if reason and lost_epoch == epoch:
            return messages.NodeInfo(node, epoch, "lost", 0, None, reason)
        return messages.NodeInfo(node, epoch, "known", 0)

    # --- uses of events -----------------------------------------------------------------------------------------------

    async def _open(self, want: messages.Want, timeout: float) -> None:
        if not want.node:
            claim = await self._names.find(want.name, timeout)
            key, epoch = (claim.slot, claim.incarnation), bytes.fromhex(claim.epoch)
            if claim.node == self._settings.node:
                await self._session.ask(_import(want, Origin(epoch, *key), claim.node))
            else:
                await self._link_by_key(want, claim.node, epoch, key, timeout)
        elif want.node == self._settings.node:
            await self._open_here(want)
        else:
            await self._link(want, want.node, await self._opening.open(want.node, want.name, timeout))

    async def _open_here(self, want: messages.Want) -> None:
        """Open an event of this very node: attach to it for a moment, to learn its use."""
        try:
            opened = await self._session.ask(messages.Open(want.name, engine="timeline"))
        except EngineMismatch:  # it exists, and only who waits on another node needs this engine
            opened = await self._session.ask(messages.Open(want.name))
        assert isinstance(opened, messages.Attachment)
        key = (opened.slot, opened.incarnation)
        try:
            await self._session.ask(_import(want, Origin(self._session.epoch, *key), want.node))
        finally:
            self._visit(key)

    async def _attach(self, want: messages.Want, timeout: float) -> None:
        sources = self._subscriber.sources
        known = next((node for node, source in sources.items() if source.epoch == want.epoch), None)
        node = known or await self._nodes.node_of(want.epoch, timeout)
        if node is None:
            raise NodeLost(
                "no node of the fleet has the epoch that this point is of: its coordinator has ended, or is of another "
                "fleet",
                reason="restarted",
            )
        await self._link_by_key(want, node, want.epoch, (want.slot, want.incarnation), timeout)

    async def _link_by_key(self, want: messages.Want, node: str, epoch: bytes, key: wire.Key, timeout: float) -> None:
        sent = time.monotonic()
        state = await self._questions.ask(node, wire.Attach(epoch, wire.pack_keys([key])), wire.State, timeout)
        rows = wire.unpack_rows(state.rows)
        if len(rows) != 1:
            raise ProtocolError(f"node {node!r} answered with {len(rows)} events", code="reply")
        await self._link(want, node, Opened(state, rows[0], sent))

    async def _link(self, want: messages.Want, node: str, opened: Opened) -> None:
        """Mirror the use that a node has answered with, which answers the want."""
        state, row, sent = opened
        if row.state == "gone":
            raise RecorderLost(f"the event of this point (slot {row.slot} of node {node!r}) is gone", cause="gone")
        source = self._subscriber.source_of(node, state, sent)
        if row.key not in source.links and len(self._mirrors) >= self._settings.max_links:
            raise QuotaExceeded(
                f"{self._settings.max_links} events are mirrored already", limit=self._settings.max_links
            )
        link = self._subscriber.link(source, row)  # before the request: news may come meanwhile
        origin = Origin(state.epoch, *row.key)
        try:
            # Insisted on: a mirror that was made without an answer to this bridge would get no news.
            attached = await self._session.insist(_import(want, origin, node))
        except IpcSyncError as error:
            if origin not in self._mirrors:
                source.links.pop(row.key, None)
            if isinstance(error, NodeLost) and error.reason is None:
                return  # lost for good on this node, as the coordinator has answered the session
            raise
        assert isinstance(attached, messages.Attachment)
        self._mirrors.put(origin, attached, link)
        self._subscriber.keep(source, link)
        if self._subscriber.sources.get(node) is source:
            self._mirrors.store(origin)
        else:  # it was lost meanwhile
            self._mirrors.end(origin, "broken", self._subscriber.lost.get(node, (b"", "silent"))[1])


def _import(want: messages.Want, origin: Origin, node: str) -> messages.Import:
    return messages.Import(want.number, *origin, node, want.name)
