"""What this node mirrors of others: what its sessions want, what news come of it, and when a node is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ipcsync import errors
from ipcsync._board.layout import REASONS
from ipcsync._wire import codec, messages
from ipcsync.errors import EventClosed, IpcSyncError, NodeLost, ProtocolError, QuotaExceeded, SessionLost
from ipcsync_bridge import handover, wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.links import Link, Source
from ipcsync_bridge.mirrors import Mirror
from ipcsync_bridge.nodes import Names
from ipcsync_bridge.session import Desk
from ipcsync_bridge.transport import Transport, Unreachable

T = TypeVar("T", bound=wire.Message)

_RETRY_S = 0.1
_ASK_S = 1.0
_MOST_LOST = 1024  # nodes of which it is known why they were lost


class Following:
    """The sources of this node's mirrors. `begin` has something done beside all else, `wake` has `look` called soon."""

    def __init__(
        self,
        settings: Settings,
        desk: Desk,
        transport: Transport,
        names: Names,
        counters: Counters,
        begin: Callable[[Coroutine[Any, Any, object]], None],
        wake: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._desk = desk
        self._transport = transport
        self._names = names
        self._counters = counters
        self._begin = begin
        self._wake = wake
        self.sources: dict[str, Source] = {}  # by node
        self._mirrors: dict[tuple[bytes, int, int], Mirror] = {}
        self._own: dict[wire.Key, Mirror] = {}  # by the slot here
        self._syncing: set[str] = set()
        self._linking = 0
        self.lost: dict[str, tuple[bytes, str]] = {}  # by node: epoch, reason

    @property
    def links(self) -> int:
        """How many mirrors there are."""
        return len(self._mirrors)

    # --- what sessions want -------------------------------------------------------------------------------------------

    async def serve(self, want: messages.Want, timeout: float) -> messages.Message | None:
        """The answer to a want; None if an import has answered it."""
        self._linking += 1
        try:
            if want.what == "attach":
                await self._attach(want, timeout)
            elif want.what == "open":
                await self._open(want, timeout)
            elif want.what == "claim":
                await self._names.claim(want, timeout)
                return messages.Done()
            elif want.what == "events":
                return await self._list_events(want, timeout)
            elif want.what == "nodes":
                return await self._list_nodes(timeout)
            return None
        finally:
            self._linking -= 1

    async def _open(self, want: messages.Want, timeout: float) -> None:
        if not want.node:
            claim = await self._names.find(want.name, timeout)
            key, epoch = (claim.slot, claim.incarnation), bytes.fromhex(claim.epoch)
            if claim.node == self._settings.node:
                await self._desk.ask(_import(want, epoch, key, claim.node))
            else:
                await self._link_by_key(want, claim.node, epoch, key, timeout)
        elif want.node == self._settings.node:
            await self._open_here(want)
        else:
            sent = time.monotonic()
            state = await self._ask(want.node, wire.Open(want.name), wire.State, timeout)
            await self._link(want, want.node, state, sent)

    async def _open_here(self, want: messages.Want) -> None:
        """This very node's: the event is attached to for a moment, to know which it is."""
        opened = await self._desk.ask(messages.Open(want.name))
        assert isinstance(opened, messages.Attachment)
        key = (opened.slot, opened.incarnation)
        try:
            await self._desk.ask(_import(want, self._desk.epoch, key, want.node))
        finally:
            self.on_visit(key)

    def on_visit(self, key: wire.Key) -> None:
        """Set by the bridge: it is attached to a use that nobody may want."""

    async def _attach(self, want: messages.Want, timeout: float) -> None:
        known = next((node for node, source in self.sources.items() if source.epoch == want.epoch), None)
        node = known or await self._names.node_of(want.epoch, timeout)
        if node is None:
            raise NodeLost(
                "no node of the fleet has the epoch that this point is of: its coordinator has ended, or is of another "
                "fleet",
                reason="restarted",
            )
        await self._link_by_key(want, node, want.epoch, (want.slot, want.incarnation), timeout)

    async def _link_by_key(self, want: messages.Want, node: str, epoch: bytes, key: wire.Key, timeout: float) -> None:
        sent = time.monotonic()
        state = await self._ask(node, wire.Attach(epoch, wire.pack_keys([key])), wire.State, timeout)
        await self._link(want, node, state, sent)

    async def _list_events(self, want: messages.Want, timeout: float) -> messages.Message:
        if want.node == self._settings.node:
            return await self._desk.ask(messages.ListEvents(want.name))
        listed = await self._ask(want.node, wire.Events(want.name), wire.Listed, timeout)
        _, reply = codec.decode_reply(listed.reply)
        if not isinstance(reply, messages.EventList):
            raise ProtocolError(f"node {want.node!r} answered with no list of events", code="reply")
        return reply

    async def _list_nodes(self, timeout: float) -> messages.NodeList:
        owners = await self._names.everybody(timeout)
        now = time.monotonic()
        own = messages.NodeInfo(self._settings.node, self._desk.epoch, "known", 0, 0.0)
        others = {node: self._info(node, bytes.fromhex(owner.epoch), now) for node, owner in owners.items()}
        for node, source in self.sources.items():
            others[node] = self._info(node, source.epoch, now)
        others.pop(self._settings.node, None)
        return messages.NodeList([own, *(others[node] for node in sorted(others))])

    def _info(self, node: str, epoch: bytes, now: float) -> messages.NodeInfo:
        source = self.sources.get(node)
        if source is not None:
            return messages.NodeInfo(node, source.epoch, "linked", len(source.links), now - source.last_heard)
        lost_epoch, reason = self.lost.get(node, (b"", ""))
        if reason and lost_epoch == epoch:
            return messages.NodeInfo(node, epoch, "lost", 0, None, reason)
        return messages.NodeInfo(node, epoch, "known", 0)

    # --- links --------------------------------------------------------------------------------------------------------

    async def _ask(self, node: str, body: wire.Message, kind: type[T], timeout: float) -> T:
        """A node's answer. A bridge that is being started again is waited for; NodeLost if none comes."""
        until = time.monotonic() + min(timeout, self._settings.link_ttl)
        data = wire.encode(body)
        why = ""
        while (left := until - time.monotonic()) > 0:
            try:
                reply = wire.decode(await self._transport.ask(node, data, min(left, _ASK_S)))
            except (Unreachable, TimeoutError) as error:
                why = str(error)
                await asyncio.sleep(min(_RETRY_S, max(until - time.monotonic(), 0.0)))
                continue
            if isinstance(reply, wire.Refused):
                raise _refusal(node, reply)
            if not isinstance(reply, kind):
                raise ProtocolError(f"node {node!r} answered {type(reply).__name__}", code="reply")
            return reply
        raise NodeLost(f"node {node!r} does not answer: {why}", node=node, reason="silent")

    def _source_of(self, node: str, state: wire.State, sent: float) -> Source:
        source = self.sources.get(node)
        if source is not None and source.epoch != state.epoch and state.term >= source.term:
            self._lose(source, "restarted")
            source = None
        if source is None:
            if len(self.sources) >= self._settings.max_nodes:
                raise QuotaExceeded(
                    f"{self._settings.max_nodes} nodes are linked already", limit=self._settings.max_nodes
                )
            ttl = self._settings.link_ttl
            source = self.sources[node] = Source(node, state.epoch, ttl, sent + ttl, term=state.term)
            source.synced(state.channel, state.number)
            source.next_ping = sent + _ASK_S
            self.lost.pop(node, None)
        if not source.is_of(state.term, state.epoch):
            raise NodeLost(f"another machine has the name of node {node!r}", node=node, reason="replaced")
        source.touch(sent)
        source.heard_answer(state.channel, state.number, time.monotonic())
        return source

    async def _link(self, want: messages.Want, node: str, state: wire.State, sent: float) -> None:
        """Mirror what a node has answered with, and so answer the want."""
        rows = wire.unpack_rows(state.rows)
        if len(rows) != 1:
            raise ProtocolError(f"node {node!r} answered with {len(rows)} events", code="reply")
        (row,) = rows
        if row.state == "gone":
            raise EventClosed(f"the event of this point (slot {row.slot} of node {node!r}) is gone")
        source = self._source_of(node, state, sent)
        if row.key not in source.links and self.links >= self._settings.max_links:
            raise QuotaExceeded(
                f"{self._settings.max_links} events are mirrored already", limit=self._settings.max_links
            )
        link = source.links.setdefault(row.key, Link(row.key))  # before the request: news may come meanwhile
        link.merge(row)
        self._wake()
        try:
            attached = await self._desk.insist(_import(want, state.epoch, row.key, node))
        except NodeLost as error:
            if (state.epoch, *row.key) not in self._mirrors:
                source.links.pop(row.key, None)  # lost for good on this node, which who asked has been told
            if error.reason is None:
                return
            raise
        except IpcSyncError:
            if (state.epoch, *row.key) not in self._mirrors:
                source.links.pop(row.key, None)
            raise
        assert isinstance(attached, messages.Attachment)
        where = (state.epoch, *row.key)
        mirror = self._mirrors.get(where)
        if mirror is None or (mirror.slot, mirror.incarnation) != (attached.slot, attached.incarnation):
            mirror = self._mirrors[where] = Mirror(self._desk.board, attached, link)
            self._own[mirror.slot, mirror.incarnation] = mirror
        if self.sources.get(node) is not source:  # it was lost meanwhile
            self._finish_soon(mirror, where, "broken", self.lost.get(node, (b"", "silent"))[1])
            return
        self._store(source, mirror)

    def _store(self, source: Source, mirror: Mirror) -> None:
        mirror.store()
        link = mirror.link
        where = (source.epoch, *link.key)
        if link.state == "broken":
            self._finish_soon(mirror, where, "broken", link.cause or "died")
        elif link.is_over:
            self._finish_soon(mirror, where, "closed", "")
        elif link.state == "closed" and not mirror.has_told_closed:
            mirror.has_told_closed = True
            self._begin(self._desk.insist(messages.Finish(mirror.slot, mirror.incarnation, "closed")))

    def _finish_soon(self, mirror: Mirror, where: tuple[bytes, int, int], state: str, reason: str) -> None:
        if mirror.ending is None:
            mirror.ending = state, reason
            self._begin(self._finish(mirror, where, state, reason))
        elif mirror.ending[0] == "unwanted":
            mirror.ending = state, reason  # if somebody wants it after all

    async def _finish(self, mirror: Mirror, where: tuple[bytes, int, int], state: str, reason: str) -> None:
        """All was stored: have the coordinator end the mirror, and let go of it."""
        use = (mirror.slot, mirror.incarnation)
        try:
            await self._desk.insist(messages.Finish(*use, state, reason))
            if state != "unwanted":
                await self._desk.insist(messages.Close(*use, drained=state == "closed"))
        except ProtocolError as error:
            if error.code != "wanted":
                raise
            if mirror.ending is not None and mirror.ending[0] != "unwanted":
                self._begin(self._finish(mirror, where, *mirror.ending))
                return
            mirror.ending = None  # somebody uses it again
            source = next((each for each in self.sources.values() if each.epoch == where[0]), None)
            if source is not None and where[1:] in source.links:
                self._store(source, mirror)
            return
        self._own.pop(use, None)
        if self._mirrors.get(where) is mirror:
            del self._mirrors[where]
            for source in self.sources.values():
                if source.epoch == where[0]:
                    source.links.pop(mirror.link.key, None)
                    self._keep(source)

    def unwanted(self, use: wire.Key) -> None:
        """The coordinator says that nobody but the bridge uses a mirror."""
        mirror = self._own.get(use)
        if mirror is not None:
            where = next((where for where, each in self._mirrors.items() if each is mirror), None)
            if where is not None:
                self._finish_soon(mirror, where, "unwanted", "")

    def drop_unwanted(self) -> None:
        """It may have been missed what the coordinator has said is unwanted: ask of each mirror."""
        for where, mirror in self._mirrors.items():
            self._finish_soon(mirror, where, "unwanted", "")

    def _keep(self, source: Source) -> None:
        """Tell a node what is still wanted of it."""
        keys = wire.pack_keys(list(source.links)[: wire.MAX_KEYS])
        self._begin(self._say(source.node, wire.Keep(source.epoch, keys)))

    async def _say(self, node: str, body: wire.Message) -> None:
        try:
            await self._transport.ask(node, wire.encode(body), None)
        except (Unreachable, TimeoutError):
            return  # a ping's answer shows later that it was not heard

    # --- news ---------------------------------------------------------------------------------------------------------

    def heard(self, sender: str, body: wire.News) -> None:
        """News of a node."""
        source = self.sources.get(sender)
        if source is None or not source.is_of(body.term, body.epoch):
            if source is not None and body.epoch != source.epoch and body.term > source.term:
                self._lose(source, "restarted")
            return
        for row in wire.unpack_rows(body.rows):
            self._merge(source, row)
        number = source.heard_news(body.channel, body.number, time.monotonic())
        if number:
            self._counters.acks += 1
            self._begin(self._say(sender, wire.Ack(body.channel, number)))
        if source.wants_sync:
            self._wake()

    def _merge(self, source: Source, row: wire.Row) -> None:
        link = source.links.get(row.key)
        if link is not None and link.merge(row):
            mirror = self._mirrors.get((source.epoch, *row.key))
            if mirror is not None:
                self._store(source, mirror)

    def over(self, sender: str, body: wire.Over) -> None:
        """A node says goodbye."""
        source = self.sources.get(sender)
        if source is not None and source.is_of(body.term, body.epoch):
            self._lose(source, body.reason if body.reason in REASONS and body.reason else "stopped")

    def _lose(self, source: Source, reason: str) -> None:
        """A node, in this epoch of it, is lost: so is all that is mirrored of it, for good."""
        if self.sources.get(source.node) is source:
            del self.sources[source.node]
        self._counters.lost[reason] += 1
        if len(self.lost) >= _MOST_LOST:
            self.lost.pop(next(iter(self.lost)))
        self.lost[source.node] = (source.epoch, reason)
        for key in source.links:
            where = (source.epoch, *key)
            mirror = self._mirrors.get(where)
            if mirror is not None:
                self._finish_soon(mirror, where, "broken", reason)
        self._begin(self._say(source.node, wire.Keep(source.epoch, b"")))

    # --- by the clock -------------------------------------------------------------------------------------------------

    def look(self, now: float) -> float:
        """Do what is due; when there is more to do."""
        due = now + 3600.0
        for source in list(self.sources.values()):
            if source.is_silent(now):
                self._lose(source, "silent")
                continue
            if not source.links and not self._linking:
                del self.sources[source.node]
                continue
            source.look(now)
            if source.wants_sync and source.node not in self._syncing:
                self._syncing.add(source.node)
                self._begin(self._sync(source))
            if now >= source.next_ping:
                source.pinged(now)
                self._begin(self._ping(source, now))
            due = min(due, source.alive_until, source.next_ping, source.looks_at or due)
        return due

    def paused(self, now: float) -> None:
        """This process stood still: nobody is judged by what was not heard meanwhile."""
        for source in self.sources.values():
            source.paused(now)
            source.wants_sync = True

    def reconnected(self, now: float) -> None:
        """What was told meanwhile is missed: ask at once."""
        for source in self.sources.values():
            source.next_ping = now
            source.wants_sync = True
        self._wake()

    async def _ping(self, source: Source, sent: float) -> None:
        self._counters.pings += 1
        try:
            data = await self._transport.ask(
                source.node, wire.encode(wire.Ping(source.channel, source.number)), self._settings.link_ttl
            )
            body = wire.decode(data)
        except Unreachable:
            self._counters.pings_lost += 1
            source.unreachable(time.monotonic())
            self._wake()
            return
        except TimeoutError:
            self._counters.pings_lost += 1
            return
        if not isinstance(body, wire.Pong) or self.sources.get(source.node) is not source:
            return
        if body.epoch != source.epoch:
            if body.term >= source.term:
                self._lose(source, "restarted")
            return
        if not source.is_of(body.term, body.epoch):
            return
        source.touch(sent)
        source.heard_answer(body.channel, body.number, time.monotonic())
        if body.links != len(source.links) and not self._linking:
            source.wants_sync = True
            self._keep(source)
        self._wake()

    async def _sync(self, source: Source) -> None:
        """Ask how all is that is mirrored of a node."""
        self._counters.resyncs += 1
        try:
            first: tuple[bytes, int] | None = None
            keys = list(source.links)
            for begin in range(0, len(keys), wire.MAX_ROWS):
                chunk = wire.pack_keys(keys[begin : begin + wire.MAX_ROWS])
                sent = time.monotonic()
                state = await self._ask(source.node, wire.Attach(source.epoch, chunk), wire.State, _ASK_S)
                if not source.is_of(state.term, state.epoch):
                    return
                source.touch(sent)
                first = first or (state.channel, state.number)
                for row in wire.unpack_rows(state.rows):
                    self._take_state(source, row)
            if first is not None:
                source.synced(*first)
        except NodeLost as error:
            if error.reason == "restarted":
                self._lose(source, "restarted")
            else:
                await asyncio.sleep(_RETRY_S)  # a ping tells when it is back, or lost
        except SessionLost:
            raise
        except IpcSyncError:
            await asyncio.sleep(_RETRY_S)
        finally:
            self._syncing.discard(source.node)
            self._wake()

    def _take_state(self, source: Source, row: wire.Row) -> None:
        if row.state != "gone":
            self._merge(source, row)
            return
        # While its bridge was away nobody kept the use there: how it ended, nobody knows.
        mirror = self._mirrors.get((source.epoch, *row.key))
        if mirror is not None:
            self._finish_soon(mirror, (source.epoch, *row.key), "broken", "bridge")

    # --- from one code to the next ------------------------------------------------------------------------------------

    def leave(self) -> tuple[list[handover.Source], list[handover.Mirror]]:
        """What the code that goes on is to know."""
        sources = [
            handover.Source(each.node, each.epoch, each.term, each.channel, each.number, each.alive_until)
            for each in self.sources.values()
        ]
        mirrors = [
            handover.Mirror(epoch, mirror.link.row, mirror.attachment, mirror.has_told_closed, mirror.ending)
            for (epoch, _, _), mirror in self._mirrors.items()
        ]
        return sources, mirrors

    def resume(self, left: handover.State, pause_s: float) -> None:
        """Go on with what other code left `pause_s` ago, in which nobody could be heard."""
        ttl = self._settings.link_ttl
        by_epoch: dict[bytes, Source] = {}
        for each in left.sources:
            source = Source(each.node, each.epoch, ttl, each.alive_until + pause_s, term=each.term)
            source.synced(each.channel, each.number)
            self.sources[each.node] = by_epoch[each.epoch] = source
        self.lost.update(left.lost)
        for known in left.mirrors:
            link = Link(known.row.key)
            link.merge(known.row)
            mirror = Mirror(self._desk.board, known.attachment, link, is_new=False)
            mirror.has_told_closed = known.has_told_closed
            where = (known.epoch, *link.key)
            self._mirrors[where] = self._own[mirror.slot, mirror.incarnation] = mirror
            if known.epoch in by_epoch:
                by_epoch[known.epoch].links[link.key] = link
            if known.ending is not None:
                self._finish_soon(mirror, where, *known.ending)


def _import(want: messages.Want, epoch: bytes, key: wire.Key, node: str) -> messages.Import:
    return messages.Import(want.number, epoch, *key, node, want.name)


def _refusal(node: str, body: wire.Refused) -> IpcSyncError:
    """What another node refused, as the error that it was there."""
    kind = getattr(errors, body.kind, None) if body.kind in errors.__all__ else None
    if kind is NodeLost:
        return NodeLost(body.text, node=node, reason="restarted")
    if kind is None or issubclass(kind, SessionLost):
        return IpcSyncError(f"node {node!r} refused: {body.text}")
    error = kind(body.text)
    assert isinstance(error, IpcSyncError)
    return error
