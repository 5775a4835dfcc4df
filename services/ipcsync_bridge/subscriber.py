"""The nodes whose events this one mirrors: their news, their pings, and when one is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ipcsync._board.layout import REASONS
from ipcsync._wire.messages import Attachment
from ipcsync.errors import IpcSyncError, NodeLost, QuotaExceeded, SessionLost
from ipcsync_bridge import handover, wire
from ipcsync_bridge.config import Settings
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.links import Source
from ipcsync_bridge.mirrors import Mirrors, Origin
from ipcsync_bridge.questions import ASK_S, RETRY_S, Questions
from ipcsync_bridge.transport import Transport, Unreachable

_KEEP_S = 0.1  # between two messages to a node that say what is still wanted
_MOST_LOST = 1024  # nodes whose reason is remembered
_MOST_EARLY = 1000


@dataclass(eq=False)
class Subscriber:
    """The sources of this node's mirrors. `begin` does something beside all else, `wake` has `do_due` called soon."""

    settings: Settings
    transport: Transport
    questions: Questions
    mirrors: Mirrors
    counters: Counters
    begin: Callable[[Coroutine[Any, Any, object]], None]
    wake: Callable[[], None]
    sources: dict[str, Source] = field(default_factory=dict)  # by node
    lost: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # by node: epoch, reason

    def __post_init__(self) -> None:
        self._syncing: set[str] = set()
        self._keeping: set[str] = set()  # nodes that are soon sent what is still wanted
        self._linking = 0
        self._early: dict[Origin, wire.Row] = {}  # news that came before the answer that makes their use known
        self.mirrors.on_gone = self._release

    def last_received(self, node: str) -> float:
        """When something was received from a node, on CLOCK_MONOTONIC; 0 if none of its events is mirrored here."""
        source = self.sources.get(node)
        return 0.0 if source is None else source.last_received

    # --- links --------------------------------------------------------------------------------------------------------

    @contextmanager
    def linking(self) -> Iterator[None]:
        """Keep sources that have no links, while something may be linked inside the block."""
        self._linking += 1
        try:
            yield
        finally:
            self._linking -= 1
            if not self._linking:
                self._early.clear()

    def source_of(self, node: str, state: wire.State, sent: float) -> Source:
        """The source that a node's answer is of, to a question that was `sent` then. QuotaExceeded, NodeLost."""
        source = self.sources.get(node)
        if source is not None and source.epoch != state.epoch and state.term >= source.term:
            self._lose(source, "restarted")
            source = None
        if source is None:
            if len(self.sources) >= self.settings.max_nodes:
                raise QuotaExceeded(
                    f"{self.settings.max_nodes} nodes are linked already", limit=self.settings.max_nodes
                )
            ttl = self.settings.link_ttl
            source = self.sources[node] = Source(node, state.epoch, ttl, sent + ttl, term=state.term, life=state.life)
            source.pinged(sent)
            self.lost.pop(node, None)
            self.wake()  # it is looked at in time
        if not source.is_of(state.term, state.epoch):
            raise NodeLost(f"another machine has the name of node {node!r}", node=node, reason="replaced")
        source.answered(state.life, sent, time.monotonic())
        if source.wants_sync:
            self.wake()
        return source

    def link(self, source: Source, row: wire.Row) -> None:
        """Link a use of a source, of which `row` is known: its news count from now on."""
        early = self._early.get(Origin(source.epoch, *row.key), wire.Row(*row.key))
        source.links[row.key] = source.links.get(row.key, early).merged(row)

    def mirror(self, attached: Attachment, row: wire.Row) -> None:
        """Store on a mirror that the coordinator has made what is known: at least `row`. End it if its node is lost."""
        assert attached.origin is not None
        origin = Origin(attached.origin.epoch, attached.origin.slot, attached.origin.incarnation)
        source = next((each for each in self.sources.values() if each.epoch == origin.epoch), None)
        if source is not None and row.key not in source.links:  # an earlier mirror of the use has ended meanwhile
            source.links[row.key] = row
            source.wants_sync = True  # the node may know that it is not wanted
            self.wake()
        row = row if source is None else source.links[row.key]
        self.mirrors.put(origin, attached, row)
        if source is not None:
            self.mirrors.store(origin, row)
        else:
            self.mirrors.end(origin, "broken", self.lost.get(attached.origin.node, (b"", "silent"))[1])

    def _release(self, origin: Origin) -> None:
        """A mirror has ended: its news are not wanted any more."""
        for source in self.sources.values():
            if source.epoch == origin.epoch:
                source.links.pop(origin.key, None)
                if source.node not in self._keeping:
                    self._keeping.add(source.node)
                    self.begin(self._keep_soon(source))

    async def _keep_soon(self, source: Source) -> None:
        await asyncio.sleep(_KEEP_S)
        self._keeping.discard(source.node)
        if self.sources.get(source.node) is source:
            self._keep(source)

    def _keep(self, source: Source) -> None:
        """Tell a node which of its uses are still wanted; not while they are more than one message holds."""
        if len(source.links) <= wire.MAX_KEYS:
            keys = list(source.links)
            self.begin(self.transport.send(source.node, wire.encode(wire.Keep(source.epoch, keys))))

    # --- news ---------------------------------------------------------------------------------------------------------

    def receive(self, sender: str, body: wire.News) -> None:
        """Take in a node's news."""
        source = self.sources.get(sender)
        rows = body.rows
        if source is not None and body.epoch != source.epoch and body.term > source.term:
            self._lose(source, "restarted")
        if source is not None and source.is_of(body.term, body.epoch):
            source.last_received = time.monotonic()
            rows = [row for row in rows if not self._merge(source, row)]
        for row in rows if self._linking else ():
            self._remember(Origin(body.epoch, *row.key), row)

    def _merge(self, source: Source, row: wire.Row) -> bool:
        """Merge the row of a use that is linked; False if it is not."""
        known = source.links.get(row.key)
        if known is not None and (merged := known.merged(row)) != known:
            source.links[row.key] = merged
            self.mirrors.store(Origin(source.epoch, *row.key), merged)
        return known is not None

    def _remember(self, origin: Origin, row: wire.Row) -> None:
        """Keep news for `link`, since their use may be being linked just now."""
        if origin in self._early or len(self._early) < _MOST_EARLY:
            self._early[origin] = self._early.get(origin, wire.Row(*row.key)).merged(row)

    def over(self, sender: str, body: wire.Over) -> None:
        """Take in a node's goodbye."""
        source = self.sources.get(sender)
        if source is not None and source.is_of(body.term, body.epoch):
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
        self.begin(self.transport.send(source.node, wire.encode(wire.Keep(source.epoch, []))))

    # --- by the clock -------------------------------------------------------------------------------------------------

    def do_due(self, now: float) -> float:
        """Do what is due, and return when the next thing is."""
        due = now + 3600.0
        for source in list(self.sources.values()):
            if source.is_silent(now):
                self._lose(source, "silent")
                continue
            if source.wants_sync and source.node not in self._syncing:
                self._syncing.add(source.node)
                source.wants_sync = False
                self.begin(self._sync(source))
            if now >= source.next_ping:
                source.pinged(now)
                self.begin(self._ping(source, now))
            due = min(due, source.alive_until, source.next_ping)
        return due

    def paused(self, now: float) -> None:
        """Note that this process stood still: silence meanwhile does not count."""
        for source in self.sources.values():
            source.paused(now)

    def reconnected(self, now: float) -> None:
        """Ask at once for the news that were missed while the connection was away."""
        for source in self.sources.values():
            source.next_ping = now
            source.wants_sync = True
        self.wake()

    async def _ping(self, source: Source, sent: float) -> None:
        self.counters.pings += 1
        try:
            body = wire.decode(await self.transport.ask(source.node, wire.encode(wire.Ping()), self.settings.link_ttl))
        except Unreachable:
            self.counters.pings_lost += 1
            source.unreachable(time.monotonic())
            self.wake()
            return
        except TimeoutError:
            self.counters.pings_lost += 1
            return
        if not isinstance(body, wire.Pong) or self.sources.get(source.node) is not source:
            return
        if body.epoch != source.epoch:
            if body.term >= source.term:
                self._lose(source, "restarted")
            return
        if not source.is_of(body.term, body.epoch):
            return
        source.answered(body.life, sent, time.monotonic())
        is_unequal = body.links != len(source.links)
        if is_unequal and (source.was_unequal or not self._linking):  # else by what is being opened just now
            source.wants_sync = True
            self._keep(source)
        source.was_unequal = is_unequal
        if not (source.links or body.links or self._linking or source.node in self._syncing):
            del self.sources[source.node]  # not before: what says that nothing is wanted may not have come
        self.wake()

    async def _sync(self, source: Source) -> None:
        """Ask for the state of all links to a node."""
        self.counters.resyncs += 1
        is_done = False
        try:
            life = b""
            keys = list(source.links)
            for begin in range(0, len(keys), wire.MAX_ROWS):
                chunk = keys[begin : begin + wire.MAX_ROWS]
                sent = time.monotonic()
                state = await self.questions.ask(source.node, wire.Attach(source.epoch, chunk), wire.State, ASK_S)
                if not source.is_of(state.term, state.epoch):
                    await asyncio.sleep(RETRY_S)
                    return
                source.touch(sent)
                life = life or state.life  # a later one, of another bridge, says nothing of the links before it
                for row in state.rows:
                    self._take_state(source, row)
            source.life = life or source.life
            is_done = True
        except NodeLost as error:
            if error.reason == "restarted":
                self._lose(source, "restarted")
            else:
                await asyncio.sleep(RETRY_S)  # a ping finds out when it is back, or lost
        except SessionLost:
            raise
        except IpcSyncError:
            await asyncio.sleep(RETRY_S)
        finally:
            source.wants_sync |= not is_done
            self._syncing.discard(source.node)
            self.wake()

    def _take_state(self, source: Source, row: wire.Row) -> None:
        if row.state != "gone":
            self._merge(source, row)
        else:  # its bridge was away, so the use was not kept there, and how it ended is unknown
            self.mirrors.end(Origin(source.epoch, *row.key), "broken", "bridge")

    # --- from one code to the next ------------------------------------------------------------------------------------

    def resume(self, left: handover.State, now: float) -> None:
        """Go on with what other code left; meanwhile no node could be heard."""
        self.lost.update(left.lost)
        for source in left.sources:
            self.sources[source.node] = source
            source.ttl_s = self.settings.link_ttl
        self.paused(now)
        for attached in left.mirrors:
            assert attached.origin is not None
            self.mirror(attached, wire.Row(attached.origin.slot, attached.origin.incarnation))
