"""What other nodes are told: whether this one is alive, its events, and the news of those that they mirror.

Of each use a node is sent the newest row, never more. It has one message at a time, and answers it. One without an
answer is sent again, with what is newer by then. So none is missed, and a slow node is sent fewer. After a message with
many rows it gets none for a while: events that change all the time keep neither node busy.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace

from ipcsync._inbox import Inbox
from ipcsync._session.connection import expect
from ipcsync._wire import messages
from ipcsync._wire.messages import Attachment
from ipcsync.errors import (
    EngineMismatch,
    EventClosed,
    IpcSyncError,
    NodeLost,
    ProtocolError,
    QuotaExceeded,
    RecorderLost,
)
from ipcsync_bridge import wire
from ipcsync_bridge.exports import Export, Exports, Follower
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.store import Identity
from ipcsync_bridge.transport import Answer, CutOff, Transport
from ipcsync_bridge.wire import UNSURE, Counters

_ONLY_TIMELINE = (
    "the event {name!r} of node {node!r} uses the engine 'event', and only what is on 'timeline' can be waited for on "
    "other nodes: record it with engine='timeline'"
)
_MOST_OPENING = 1_024  # questions at once that need the coordinator
_ANSWER_S = 1.0
_MANY = 64  # rows of one message
_ROW_S = 20e-6  # of rest for each row of many: some three times what it costs the receiver
_Question: TypeAlias = wire.Open | wire.Attach | wire.Events | wire.Follow


@dataclass(eq=False)
class Answers:
    """The questions of other nodes, the exports that follow from them, and their news, by a task for each follower.

    `begin` starts a task; `failed` is called with the error that ends such a one.
    """

    session: BridgeSession
    transport: Transport
    identity: Identity
    counters: Counters
    begin: Callable[[Coroutine[Any, Any, object]], None]
    failed: Callable[[Exception], None]
    followers: dict[str, Follower] = field(default_factory=dict)  # by node

    def __post_init__(self) -> None:
        self.settings = self.transport.settings
        self.exports = Exports(self.session.board, Inbox(self._changed).put, Inbox(self.failed).put)
        self._opening = 0  # questions that need the coordinator
        self._attaching = 0  # of them, those that may attach to something just now
        self._has_attached = asyncio.Event()
        self._closing = asyncio.Lock()  # held while something is closed
        self.held: dict[wire.Key, float] = {}  # attached to, and from when on it is closed unless a node follows it

    def asked(self, sender: str, body: wire.Message, answer: Answer | None, now: float) -> None:
        """Answer a question, or begin to. Raises ProtocolError if the message is not a question."""
        if (follower := self.followers.get(sender)) is not None:
            follower.last_asked = now
        if answer is None:
            raise ProtocolError(f"{type(body).__name__} without an answer", code="invalid")
        if isinstance(body, wire.Ping):
            self.begin(answer(wire.encode(self._pong(follower))))
        elif not isinstance(body, wire.Open | wire.Attach | wire.Events | wire.Follow):
            raise ProtocolError(f"{type(body).__name__} is not a request", code="invalid")
        elif self._opening < _MOST_OPENING:
            self._opening += 1
            self.begin(self._answer(sender, body, answer, now))
        else:
            self.begin(answer(_refusal(QuotaExceeded("too many questions are under way", limit=_MOST_OPENING))))

    def _pong(self, follower: Follower | None) -> wire.Pong:
        me = self.identity
        return wire.Pong(me.term, me.epoch, me.owner, 0 if follower is None else follower.version)

    async def _answer(self, sender: str, body: _Question, answer: Answer, now: float) -> None:
        try:
            async with self.attaching():
                data = wire.encode(await self._reply_to(sender, body, now))
        except IpcSyncError as error:
            data = _refusal(error)
        finally:
            self._opening -= 1
        await answer(data)

    async def _reply_to(self, sender: str, body: _Question, now: float) -> wire.Message:
        if isinstance(body, wire.Events):
            return await self._list(body.prefix)
        if isinstance(body, wire.Follow):
            return await self._follow(sender, body, now)
        if isinstance(body, wire.Attach) and body.epoch != self.session.epoch:
            node = self.settings.node
            raise NodeLost(f"node {node!r} has another coordinator now", node=node, reason="restarted")
        found = await (self._open(body.name) if isinstance(body, wire.Open) else self._by_key(body.key))
        if isinstance(found, Export):
            found = self._add(self._follower(sender, now), found)
        return wire.State(self.identity.term, self.identity.epoch, found)

    async def _follow(self, sender: str, body: wire.Follow, now: float) -> wire.Pong:
        """Send a node the news of all that it wants, and of nothing else.

        `max_nodes` limits those that open an event: one that was refused here would be pinged, and hear nothing.
        """
        if body.epoch == self.session.epoch:
            follower = self.followers.setdefault(sender, Follower(sender, now))
            wanted = set(body.keys)
            fresh = wanted if body.is_afresh else wanted - follower.keys.keys()
            is_told = all(await asyncio.gather(*[self._follow_use(follower, key) for key in fresh]))
            self._drop(follower, follower.unwanted(wanted, now))
            # Another message may have dropped some of them meanwhile.
            follower.version = body.version if is_told and follower.keys.keys() == wanted else UNSURE
            if self.followers.get(sender) is not follower:  # forgotten meanwhile
                self._drop(follower, set(follower.keys))
        return self._pong(self.followers.get(sender))

    async def _follow_use(self, follower: Follower, key: wire.Key) -> bool:
        """Send a node the state of a use, and its news. One that this bridge refuses is gone, as all others go on.

        False if the coordinator has no room for it now, as for its journal: the node's next ping asks again.
        """
        gone = wire.Row(*key, state="gone")
        try:
            found = await self._by_key(key)
        except EngineMismatch:
            found = gone
        except QuotaExceeded:
            return False
        try:
            row = found if isinstance(found, wire.Row) else self._add(follower, found)
        except QuotaExceeded:
            row = gone
        follower.answered(key, time.monotonic())
        self._put(follower, row)
        return True

    def _add(self, follower: Follower, export: Export) -> wire.Row:
        """Send a node the news of an export from now on; its present row."""
        if export.key not in follower.keys and len(follower.keys) >= self.settings.max_links:
            most = self.settings.max_links
            raise QuotaExceeded(f"node {follower.node!r} waits for {most} events here already", limit=most)
        follower.answered(export.key, time.monotonic())
        export.followers.add(follower)
        return export.read()[0]

    def _follower(self, sender: str, now: float) -> Follower:
        if (follower := self.followers.get(sender)) is None:
            if len(self.followers) >= (most := self.settings.max_nodes):
                raise QuotaExceeded(f"{most} nodes wait for events of {self.settings.node!r} already", limit=most)
            follower = self.followers[sender] = Follower(sender, now)
        return follower

    async def _open(self, name: str) -> Export:
        if not self.settings.exports_name(name):
            raise EventClosed(f"node {self.settings.node!r} exports no event named {name!r} (--export)", event=name)
        attached = expect(await self.session.ask(messages.Open(name, default_engine="timeline")), Attachment)
        self.hold([(attached.slot, attached.incarnation)])
        return self._export(attached)

    def _export(self, attached: Attachment) -> Export:
        if attached.engine != "timeline":
            raise EngineMismatch(_ONLY_TIMELINE.format(name=attached.name, node=self.settings.node))
        return self.exports.put(attached)

    async def _by_key(self, key: wire.Key) -> Export | wire.Row:
        if (known := self.exports.get(key)) is not None:
            return known
        gone = wire.Row(*key, state="gone")
        try:
            reply = await self.session.ask(messages.Attach(*key))
        except RecorderLost:
            return gone
        if isinstance(reply, messages.Remains):
            return _what_remains(reply) if self.settings.exports_name(reply.name) else gone
        reply = expect(reply, Attachment)
        self.hold([key])
        return self._export(reply) if self.settings.exports_name(reply.name) else gone

    async def _list(self, prefix: str) -> wire.Listed:
        reply = expect(await self.session.ask(messages.ListEvents(prefix)), messages.EventList)
        rows = [
            replace(row, node=self.settings.node)
            for row in reply.events
            if row.engine == "timeline" and not row.node and row.name and self.settings.exports_name(row.name)
        ]
        return wire.Listed(wire.encode_reply(messages.EventList(rows)))

    # --- news ---------------------------------------------------------------------------------------------------------

    def _changed(self, exports: list[Export]) -> None:
        for export, follower in [(one, each) for one in exports for each in one.followers]:
            self._put(follower, export.row)

    def _put(self, follower: Follower, row: wire.Row) -> None:
        self.counters.conflated += follower.put(row)
        if not follower.is_sent_to:
            follower.is_sent_to = True
            self.begin(self._send_all(follower))

    async def _send_all(self, follower: Follower) -> None:
        try:
            while rows := follower.take(wire.MAX_ROWS):
                news = wire.encode(wire.News(self.identity.term, self.identity.epoch, rows))
                with suppress(CutOff, TimeoutError):  # it may have been lost
                    await self.transport.ask(follower.node, news, _ANSWER_S)
                    follower.acked()
                    self.counters.news_sent += 1
                    self.counters.rows_sent += len(rows)
                    if len(rows) > _MANY:
                        await asyncio.sleep(_ROW_S * len(rows))
        except Exception as error:  # noqa: BLE001 - who trusts this node's pings must not go on
            self.failed(error)
        finally:
            follower.is_sent_to = False

    # --- what is attached to ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def attaching(self) -> AsyncIterator[None]:
        """While something may be attached to. Nothing is closed then, as it might be that, by a request behind it."""
        async with self._closing:
            self._attaching += 1
        try:
            yield
        finally:
            self._attaching -= 1
            self._has_attached.set()

    def hold(self, keys: Iterable[wire.Key], until: float = 0.0) -> None:
        """Note that the bridge is attached to these; from `until` on `close_unused` releases what no node follows."""
        self.held.update(dict.fromkeys(keys, until))

    def _drop(self, follower: Follower, keys: set[wire.Key]) -> None:
        for key in keys:
            follower.drop(key)
            if (export := self.exports.get(key)) is not None:
                export.followers.discard(follower)

    def forget(self, follower: Follower) -> None:
        """Drop a node that has asked nothing for long."""
        self._drop(follower, set(follower.keys))
        del self.followers[follower.node]

    async def close_unused(self) -> None:
        """Release what no node follows. What attaches to something waits meanwhile."""
        now = time.monotonic()
        if self._closing.locked() or not self._unused(now):
            return
        async with self._closing:
            while self._attaching:
                self._has_attached.clear()
                await self._has_attached.wait()
            closing = self._unused(now)
            self.hold(closing, math.inf)  # other code is to close what this one has not, and what is held anew stays
            for key in closing:
                self.exports.drop(key)
            closes = [self.session.ask(messages.Close(*key)) for key in closing]
            replies = await asyncio.gather(*closes, return_exceptions=True)
            for key, reply in zip(closing, replies, strict=True):
                if isinstance(reply, QuotaExceeded):
                    self.hold([key])  # closed later, unless it is exported by then
                elif self.held.get(key) == math.inf:
                    del self.held[key]

    def _unused(self, now: float) -> list[wire.Key]:
        due = [key for key, until in self.held.items() if now >= until]
        return [key for key in due if (export := self.exports.get(key)) is None or not export.followers]


def _what_remains(left: messages.Remains) -> wire.Row:
    if left.cause == "closed":
        return wire.Row(left.slot, left.incarnation, left.recorded, left.good, state="closed")
    lost = left.good + 1 if left.cause == "behind" else 0
    cause: wire.CauseName = "expired" if left.cause == "expired" else "died"
    return wire.Row(left.slot, left.incarnation, left.recorded, left.good, lost, "broken", cause)


def _refusal(error: IpcSyncError) -> bytes:
    return wire.encode(wire.Refused(type(error).__name__, str(error)[:1000]))
