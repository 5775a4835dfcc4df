"""The nodes whose events this one mirrors: their news, their pings, and when one is lost."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ipcsync._board.layout import REASONS
from ipcsync._logs import fields
from ipcsync._wire.messages import Attachment
from ipcsync.errors import IpcSyncError, NodeLost, QuotaExceeded
from ipcsync_bridge import handover, questions, wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.links import Source
from ipcsync_bridge.mirrors import Mirrors, Origin
from ipcsync_bridge.transport import Transport

log = logging.getLogger("ipcsync.bridge")

_MOST_LOST = 1024  # nodes whose reason is remembered
_MOST_EARLY = 1000
_PING_S = 10.0  # for an answer to a ping, beside which others are sent


@dataclass(eq=False)
class Subscriber:
    """The sources of this node's mirrors. `begin` does something beside all else."""

    settings: Settings
    transport: Transport
    mirrors: Mirrors
    counters: Counters
    begin: Callable[[Coroutine[Any, Any, object]], None]
    sources: dict[str, Source] = field(default_factory=dict)  # by node
    lost: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # by node: epoch, reason

    def __post_init__(self) -> None:
        self._early: dict[tuple[str, Origin], wire.Row] = {}  # by node: news before the answer that makes a use known
        self._forgot = -math.inf  # when some of these were dropped for newer ones
        self.mirrors.on_gone = self.unlink

    def last_received(self, node: str) -> float:
        """When something was received from a node, on CLOCK_MONOTONIC; 0 if none of its events is mirrored here."""
        source = self.sources.get(node)
        return 0.0 if source is None else source.last_received

    def source_of(self, node: str, state: wire.State, sent: float) -> Source:
        """The source that a node's answer is of, to a question that was `sent` then. QuotaExceeded, NodeLost."""
        source = self._present(node, state)
        if source is None:
            if node in self.sources:
                raise NodeLost(f"another machine has the name of node {node!r}", node=node, reason="replaced")
            if len(self.sources) >= (most := self.settings.max_nodes):
                raise QuotaExceeded(f"{most} nodes are linked already", limit=most)
            source = self._add(node, state.epoch, state.term)
        source.touch(sent)
        source.last_received = time.monotonic()
        return source

    def _present(self, node: str, body: wire.State | wire.Pong | wire.News | wire.Over) -> Source | None:
        """The source that a message is of; None if it is of none, or of another life of the node than the present one.

        An answer is to a question of the present one, so it tells of a restart even if the store has lost the term.
        """
        source = self.sources.get(node)
        if source is None:
            return None
        is_answer = isinstance(body, wire.State | wire.Pong)
        if body.epoch != source.epoch and body.term >= source.term + (not is_answer):
            self._lose(source, "restarted")
        return source if source.is_of(body.term, body.epoch) else None

    def _add(self, node: str, epoch: bytes, term: int = 0) -> Source:
        """Begin to ping a node, which has a whole TTL for its first answer: its messages may be long under way."""
        ttl = self.settings.link_ttl
        source = self.sources[node] = Source(node, epoch, ttl, time.monotonic() + ttl, term=term)
        self.lost.pop(node, None)
        self.begin(self._keep(source))
        return source

    def link(self, source: Source, row: wire.Row) -> None:
        """Link a use of a source, of which `row` is known: its news count from now on."""
        early = self._early.pop((source.node, Origin(source.epoch, *row.key)), row)
        source.link(row.merged(early))
        if time.monotonic() - self._forgot < self.settings.link_ttl:
            source.has_missed = True  # what was told of it before this answer, which is no older than a TTL

    def mirror(self, attached: Attachment, row: wire.Row) -> None:
        """Store on a mirror that the coordinator has made what is known: at least `row`. End it if its node is lost."""
        assert attached.origin is not None
        origin = Origin(attached.origin.epoch, attached.origin.slot, attached.origin.incarnation)
        source = next((each for each in self.sources.values() if each.epoch == origin.epoch), None)
        if source is not None and row.key not in source.links:  # an earlier mirror of the use has ended meanwhile
            self.link(source, row)
            source.has_missed = True  # what was told of it in between
        row = row if source is None else source.links[row.key]
        self.mirrors.put(origin, attached, row)
        if source is not None:
            self._store(origin, row)
        else:
            self.mirrors.end(origin, "broken", self.lost.get(attached.origin.node, (b"", "silent"))[1])

    def unlink(self, origin: Origin) -> None:
        """Want no news of a use any more: its mirror has ended."""
        for source in self.sources.values():
            if source.epoch == origin.epoch:
                self._remember((source.node, origin), source.links.get(origin.key, wire.Row(*origin.key)))
                source.unlink(origin.key)

    def receive(self, sender: str, body: wire.News) -> None:
        """Take in a node's news."""
        rows = body.rows
        if (source := self._present(sender, body)) is not None:
            source.last_received = time.monotonic()
            rows = [row for row in rows if not self._merge(source, row)]
        for row in rows:
            self._remember((sender, Origin(body.epoch, *row.key)), row)

    def _merge(self, source: Source, row: wire.Row) -> bool:
        """Merge the row of a use that is linked; False if it is not."""
        known = source.links.get(row.key)
        if known is None:
            return False
        is_gone = row.state == "gone" and not known.has_ended
        merged = known._replace(state="gone") if is_gone else known.merged(row)
        if merged != known:
            source.links[row.key] = merged
            self._store(Origin(source.epoch, *row.key), merged)
        return True

    def _store(self, origin: Origin, row: wire.Row) -> None:
        if row.state == "gone":  # its bridge was away, so the use was not kept there, and how it ended is unknown
            self.mirrors.end(origin, "broken", "bridge")
        else:
            self.mirrors.store(origin, row)

    def _remember(self, use: tuple[str, Origin], row: wire.Row) -> None:
        """Keep what is known for `link`, since its use may be being linked just now."""
        self._early[use] = self._early.pop(use, wire.Row(*row.key)).merged(row)
        if len(self._early) > _MOST_EARLY:
            del self._early[next(iter(self._early))]
            self._forgot = time.monotonic()

    def over(self, sender: str, body: wire.Over) -> None:
        """Take in a node's goodbye."""
        if (source := self._present(sender, body)) is not None:
            self._lose(source, body.reason if body.reason in REASONS and body.reason else "stopped")

    def _lose(self, source: Source, reason: str) -> None:
        """Lose a node in this epoch, and with it all of its mirrors, for good."""
        if self.sources.get(source.node) is source:
            del self.sources[source.node]
        if not source.links:
            return
        self.counters.lost[reason] += 1
        self.lost.pop(source.node, None)  # the newest is the last one
        if len(self.lost) >= _MOST_LOST:
            self.lost.pop(next(iter(self.lost)))
        self.lost[source.node] = (source.epoch, reason)
        for key in source.links:
            self.mirrors.end(Origin(source.epoch, *key), "broken", reason)

    def lose_silent(self, now: float) -> float:
        """Lose the nodes that have been silent for their TTL, and return when the next one will have been."""
        for source in [each for each in self.sources.values() if now >= each.alive_until]:
            self._lose(source, "silent")
        return min((source.alive_until for source in self.sources.values()), default=math.inf)

    def paused(self, now: float) -> None:
        """Note that this process stood still until `now`: silence before does not count."""
        for source in self.sources.values():
            source.touch(now)

    async def _keep(self, source: Source) -> None:
        """Ping a node until it is lost, or nothing is wanted of it, whether or not it has answered the last one."""
        while self.sources.get(source.node) is source:
            self.begin(self._ping(source))
            await asyncio.sleep(source.ping_s)

    async def _ping(self, source: Source) -> None:
        """Ask a node whether it is there, and tell it which news are wanted, if it does not know."""
        self.counters.pings += 1
        if not await self._ask(source, wire.Ping(), min(source.ttl_s, _PING_S)):
            self.counters.pings_lost += 1
        elif source.known_version != source.version and len(source.links) <= wire.MAX_KEYS:
            self.counters.resyncs += source.has_missed or source.known_version == 0
            body = wire.Follow(source.epoch, source.version, source.has_missed, list(source.links))
            await self._ask(source, body, source.ping_s)  # it is pinged meanwhile: to follow much may take long

    async def _ask(self, source: Source, body: wire.Ping | wire.Follow, timeout: float) -> bool:
        """Whether a node answers as it does to a ping; takes in what it says."""
        sent = time.monotonic()
        try:
            pong = await questions.ask(self.transport, source.node, body, wire.Pong, timeout)
        except IpcSyncError as error:
            log.debug("not answered", extra=fields(node=source.node, what=type(body).__name__, why=error))
            return False
        if self.sources.get(source.node) is source and self._present(source.node, pong) is source:
            source.answered(pong.version, sent, time.monotonic())
            if not source.links and pong.version == source.version:
                del self.sources[source.node]  # not before: what says that nothing is wanted may not have come
        return True

    def resume(self, left: handover.State) -> None:
        """Go on with what other code left; meanwhile no node could be heard."""
        self.lost.update(left.lost)
        for attached in left.mirrors:
            assert attached.origin is not None
            epoch, node = attached.origin.epoch, attached.origin.node
            if node not in self.sources and self.lost.get(node, (b"", ""))[0] != epoch:
                self._add(node, epoch).has_missed = True
            self.mirror(attached, wire.Row(attached.origin.slot, attached.origin.incarnation))
