"""The nodes whose events this one mirrors, their news and pings, and the mirrors: slots of this node's coordinator.

What travels are facts that only grow: "of this use, all up to g is complete". So news may be repeated, late or in
another order, and merging them is a maximum within one identity. What is lost is sent again.

Which uses are wanted of a node has a number, which each change of it changes. The node answers each ping with the
number of what it sends news of; while that is not the present one, or 0 after a restart, it is sent all of it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ipcsync._board import CLOSED, OPEN, Board
from ipcsync._board.layout import REASONS
from ipcsync._linux.futex import Futex
from ipcsync._logs import fields
from ipcsync._wire import messages
from ipcsync._wire.codec import Origin
from ipcsync._wire.messages import Attachment
from ipcsync.errors import EventClosed, IpcSyncError, NodeLost, ProtocolError, QuotaExceeded
from ipcsync_bridge import upgrade, wire
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.transport import Transport
from ipcsync_bridge.wire import UNSURE, Counters, Key, Row

log = logging.getLogger("ipcsync.bridge")

_MOST_LOST = 1024  # nodes whose reason is remembered
_MOST_EARLY = 1000
_PING_S = 1.0
_PINGS = 4  # at least, in a TTL
_PONG_S = 10.0  # for an answer to a ping, beside which others are sent


class Mirror:
    """One mirror: `recorded`, then `completed`, then who waits is woken; a final word only after that."""

    def __init__(self, board: Board, attachment: Attachment, row: Row) -> None:
        self.row = row
        self.attachment = attachment
        self.use: Key = (attachment.slot, attachment.incarnation)
        self.ending: tuple[messages.MirrorEnd, str] | None = None  # how it is being finished, and the reason
        self._base = attachment.base
        self._line = board.slot(attachment.slot)
        self.has_sent_closed = self._line.state == CLOSED  # by the code before this one, if it is
        self._word = Futex(self._line.completed_address)

    def store(self) -> None:
        """Store what the row says and the board does not have. Nothing once the coordinator has finished the use."""
        row, line, base = self.row, self._line, self._base
        if self.ending is not None or not self.is_open:
            return
        if base + row.recorded > line.recorded:  # what is stored never becomes less, of an earlier code here neither
            line.publish(base + row.recorded)
        if base + (completed := min(row.completed, row.recorded)) > line.completed:
            line.store_completed(base + completed)
        line.futex.wake()
        self._word.wake()
        if row.lost and base + row.lost != line.lost:
            line.lose(base + row.lost, 0)

    @property
    def is_open(self) -> bool:
        """Whether the coordinator has finished the use only as it was asked to, or not at all."""
        state = self._line.state
        is_finished = state != OPEN and not (state == CLOSED and self.has_sent_closed)
        return self._line.incarnation == self.use[1] and not is_finished


class Mirrors(dict[Origin, Mirror]):
    """All mirrors of a bridge. `begin` starts a task; `on_gone` is called with each mirror that has ended."""

    def __init__(self, session: BridgeSession, begin: Callable[[Coroutine[Any, Any, object]], None]) -> None:
        super().__init__()
        self._session = session
        self._begin = begin
        self._origins: dict[Key, Origin] = {}  # by the use here
        self._early: dict[Key, None] = {}  # uses that were called unwanted before the answer that makes them known
        self.on_gone: Callable[[Origin], None] = lambda _: None

    def put(self, origin: Origin, attached: Attachment, row: Row) -> None:
        """Add the mirror that the coordinator has made, or has attached the bridge to again."""
        mirror = self.get(origin)
        if mirror is None or mirror.use != (attached.slot, attached.incarnation):
            mirror = self[origin] = Mirror(self._session.board, attached, row)
            self._origins[mirror.use] = origin
            if mirror.use in self._early:
                del self._early[mirror.use]
                self.end(origin, "unwanted", "")

    def store(self, origin: Origin, news: Row | None = None) -> None:
        """Store what is known of a mirrored use; end the mirror if nothing more can come."""
        if (mirror := self.get(origin)) is None:
            return
        row = mirror.row = mirror.row.merged(news or mirror.row)
        mirror.store()
        if row.state == "broken" or not mirror.is_open:
            self.end(origin, "broken", row.cause or "died")
        elif row.has_ended:
            self.end(origin, "closed", "")
        elif row.state == "closed" and not mirror.has_sent_closed and mirror.ending is None:  # so it is stored
            mirror.has_sent_closed = True
            self._begin(self._session.insist(messages.Finish(*mirror.use, "closed")))

    def end(self, origin: Origin, state: messages.MirrorEnd, reason: str) -> None:
        """End a mirror, if it exists: "broken" with a reason, "closed", or "unwanted" unless a session uses it."""
        mirror = self.get(origin)
        if mirror is None or (mirror.ending is not None and mirror.ending[0] != "unwanted"):
            return
        is_under_way, mirror.ending = mirror.ending is not None, (state, reason)
        if not is_under_way:
            self._begin(self._finish(origin, mirror, mirror.ending))

    async def _finish(self, origin: Origin, mirror: Mirror, asked: tuple[messages.MirrorEnd, str]) -> None:
        """Have the coordinator finish the mirror, and release it; everything is stored by now."""
        state, reason = asked
        try:
            await self._session.insist(messages.Finish(*mirror.use, state, reason))
            if state != "unwanted":
                await self._session.insist(messages.Close(*mirror.use, drained=state == "closed"))
        except EventClosed:
            pass  # the coordinator has no such use any more
        except ProtocolError as error:
            if error.code != "wanted":
                raise
            following, mirror.ending = mirror.ending, None  # a session wants it
            self.store(origin)  # what has come meanwhile, before a last word
            if following is not None and following is not asked:
                self.end(origin, *following)
            return
        self._origins.pop(mirror.use, None)
        if self.get(origin) is mirror:
            del self[origin]
            self.on_gone(origin)

    def unwanted(self, use: Key) -> None:
        """End a mirror that only the bridge uses, as the coordinator says."""
        if (origin := self._origins.get(use)) is not None:
            self.end(origin, "unwanted", "")
            return
        self._early[use] = None
        if len(self._early) > _MOST_EARLY:
            del self._early[next(iter(self._early))]

    def drop_unwanted(self) -> None:
        """End every mirror that no session uses: the coordinator's words about them may have been missed."""
        for origin in list(self):
            self.end(origin, "unwanted", "")


# --- the nodes that they are of ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Source:
    """A node, in one epoch of it, of whose events some are mirrored here.

    It counts as alive until the sending of the last ping that it answered, and `ttl_s` from there.
    """

    node: str
    epoch: bytes
    ttl_s: float
    alive_until: float
    links: dict[Key, Row] = field(default_factory=dict)  # what is known of its uses
    term: int = 0
    last_received: float = 0.0
    version: int = field(default_factory=lambda: 2 + secrets.randbits(61))  # of which uses are wanted
    known_version: int = UNSURE  # which it sends news of, as it last said
    has_missed: bool = False  # news that it has sent may not have come to this code, until it sends all again

    @property
    def ping_s(self) -> float:
        return min(_PING_S, self.ttl_s / _PINGS)

    def link(self, row: Row) -> None:
        """Want the news of a use, of which `row` is known."""
        self.links[row.key] = self.links.get(row.key, row).merged(row)
        self.version += 1

    def unlink(self, key: Key) -> None:
        self.links.pop(key, None)
        self.version += 1

    def touch(self, now: float) -> None:
        self.alive_until = max(self.alive_until, now + self.ttl_s)

    def is_of(self, term: int, epoch: bytes) -> bool:
        """Whether a message with these is from this life of the node; one with a lower term is not."""
        if epoch != self.epoch or term < self.term:
            return False
        self.term = term
        return True

    def answered(self, version: int, sent: float, now: float) -> None:
        """Note an answer to what was `sent` then, and which version of what is wanted it names."""
        self.touch(sent)
        self.last_received = now
        self.known_version = version
        self.has_missed &= version != self.version


@dataclass(eq=False)
class Subscriber:
    """The sources of this node's mirrors. `begin` does something beside all else."""

    transport: Transport
    mirrors: Mirrors
    counters: Counters
    begin: Callable[[Coroutine[Any, Any, object]], None]
    sources: dict[str, Source] = field(default_factory=dict)  # by node
    lost: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # by node: epoch, reason

    def __post_init__(self) -> None:
        self.settings = self.transport.settings
        self._early: dict[tuple[str, Origin], Row] = {}  # by node: news before the answer that makes a use known
        self._forgot = -math.inf  # when some of these were dropped for newer ones
        self.mirrors.on_gone = self.unlink

    def last_received(self, node: str) -> float:
        """When something was received from a node, on CLOCK_MONOTONIC; 0 if none of its events is mirrored here."""
        source = self.sources.get(node)
        return 0.0 if source is None else source.last_received

    def with_epoch(self, epoch: bytes) -> Source | None:
        return next((source for source in self.sources.values() if source.epoch == epoch), None)

    def source_of(self, node: str, state: wire.State, sent: float) -> Source:
        """The source that a node's answer is of, to a question that was `sent` then. QuotaExceeded, NodeLost."""
        source = self._present(node, state)
        if source is None:
            if node in self.sources:
                raise NodeLost(f"another machine has the name of node {node!r}", node=node, reason="replaced")
            if len(self.sources) >= (most := self.settings.max_nodes):
                raise QuotaExceeded(f"{most} nodes are linked already", limit=most)
            if (other := self.with_epoch(state.epoch)) is not None:  # each mirror is known by its node's epoch
                text = f"node {node!r} has the epoch of node {other.node!r}, which is not lost so far: ask again"
                raise NodeLost(text, node=node, reason="replaced")
            source = self._add(node, state.epoch, state.term)
        source.touch(sent)
        source.last_received = time.monotonic()
        return source

    def _present(self, node: str, body: wire.FromNode) -> Source | None:
        """The source that a message is of; None if it is of none, or of another life of the node than the present one.

        An answer is to a question of the present one, so it tells of a restart even if the store has lost the term.
        """
        if (source := self.sources.get(node)) is None:
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

    def link(self, source: Source, row: Row) -> None:
        """Link a use of a source, of which `row` is known: its news count from now on."""
        early = self._early.pop((source.node, Origin(source.epoch, *row.key)), row)
        source.link(row.merged(early))
        if time.monotonic() - self._forgot < self.settings.link_ttl:
            source.has_missed = True  # what was told of it before this answer, which is no older than a TTL

    def mirror(self, attached: Attachment, row: Row) -> None:
        """Store on a mirror that the coordinator has made what is known: at least `row`. End it if its node is lost."""
        assert attached.origin is not None
        origin = Origin(attached.origin.epoch, attached.origin.slot, attached.origin.incarnation)
        source = self.with_epoch(origin.epoch)
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
        if (source := self.with_epoch(origin.epoch)) is not None:
            self._remember((source.node, origin), source.links.get(origin.key, Row(*origin.key)))
            source.unlink(origin.key)

    def receive(self, sender: str, body: wire.News) -> None:
        rows = body.rows
        if (source := self._present(sender, body)) is not None:
            source.last_received = time.monotonic()
            rows = [row for row in rows if not self._merge(source, row)]
        for row in rows:
            self._remember((sender, Origin(body.epoch, *row.key)), row)

    def _merge(self, source: Source, row: Row) -> bool:
        """Merge the row of a use that is linked; False if it is not."""
        if (known := source.links.get(row.key)) is None:
            return False
        is_gone = row.state == "gone" and not known.has_ended
        merged = source.links[row.key] = known._replace(state="gone") if is_gone else known.merged(row)
        self._store(Origin(source.epoch, *row.key), merged)  # again too: an answer's row was perhaps only linked
        return True

    def _store(self, origin: Origin, row: Row) -> None:
        if row.state == "gone":  # its bridge was away, so the use was not kept there, and how it ended is unknown
            self.mirrors.end(origin, "broken", "bridge")
        else:
            self.mirrors.store(origin, row)

    def _remember(self, use: tuple[str, Origin], row: Row) -> None:
        """Keep what is known for `link`, since its use may be being linked just now."""
        self._early[use] = self._early.pop(use, Row(*row.key)).merged(row)
        if len(self._early) > _MOST_EARLY:
            del self._early[next(iter(self._early))]
            self._forgot = time.monotonic()

    def over(self, sender: str, body: wire.Over) -> None:
        if (source := self._present(sender, body)) is not None:
            self._lose(source, body.reason if body.reason in REASONS and body.reason else "stopped")

    def _lose(self, source: Source, reason: str) -> None:
        """Lose a node in this epoch, and with it all of its mirrors, for good."""
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
        if not await self._ask(source, wire.Ping(), min(source.ttl_s, _PONG_S)):
            self.counters.pings_lost += 1
        elif source.known_version != source.version:
            self.counters.resyncs += source.has_missed or source.known_version == 0
            body = wire.Follow(source.epoch, source.version, source.has_missed, list(source.links))
            await self._ask(source, body, source.ping_s)  # it is pinged meanwhile: to follow much may take long

    async def _ask(self, source: Source, body: wire.Ping | wire.Follow, timeout: float) -> bool:
        """Whether a node answers as it does to a ping; takes in what it says."""
        sent = time.monotonic()
        try:
            pong = await wire.ask(self.transport, source.node, body, wire.Pong, timeout)
        except IpcSyncError as error:
            log.debug("not answered", extra=fields(node=source.node, what=type(body).__name__, why=error))
            return False
        if self.sources.get(source.node) is source and self._present(source.node, pong) is source:
            source.answered(pong.version, sent, time.monotonic())
            if not source.links and pong.version == source.version:
                del self.sources[source.node]  # not before: what says that nothing is wanted may not have come
        return True

    def resume(self, left: upgrade.State) -> None:
        """Go on with what other code left; meanwhile no node could be heard."""
        self.lost.update(left.lost)
        for attached in reversed(left.mirrors):  # the newest is of the present epoch of its node
            assert attached.origin is not None
            epoch, node = attached.origin.epoch, attached.origin.node
            if node not in self.sources and self.lost.get(node, (b"", ""))[0] != epoch:
                self._add(node, epoch).has_missed = True
            self.mirror(attached, Row(attached.origin.slot, attached.origin.incarnation))
