"""News to the nodes that mirror events of this one: the newest row of each use, never more.

A node has one message at a time, and answers it. One without an answer is sent again, with what is newer by then. So
none is missed, and a slow node is sent fewer. Many rows are work for their receiver too: after a message with many it
gets none for a while, so events that change all the time keep neither node busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ipcsync_bridge import wire
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.exports import Export
from ipcsync_bridge.links import Follower
from ipcsync_bridge.store import Identity
from ipcsync_bridge.transport import CutOff, Transport

_ANSWER_S = 1.0
_MANY = 64  # rows of one message
_ROW_S = 20e-6  # of rest for each row of many: some three times what it costs the receiver


@dataclass(eq=False)
class Publisher:
    """The followers by node, and a task for each that is to be sent news. `begin` starts one; `failed` is its end."""

    transport: Transport
    identity: Identity
    counters: Counters
    begin: Callable[[Coroutine[Any, Any, object]], None]
    failed: Callable[[Exception], None]
    followers: dict[str, Follower] = field(default_factory=dict)

    def changed(self, exports: list[Export]) -> None:
        """Send the rows of exports, which have changed, to those who follow them."""
        for export in exports:
            for follower in export.followers:
                self.put(follower, export.row)

    def put(self, follower: Follower, row: wire.Row) -> None:
        """Send a follower this state of a use."""
        self.counters.conflated += follower.put(row)
        if not follower.is_sent_to:
            follower.is_sent_to = True
            self.begin(self._send_all(follower))

    async def _send_all(self, follower: Follower) -> None:
        try:
            while rows := follower.take(wire.MAX_ROWS):
                await self._send(follower, wire.News(self.identity.term, self.identity.epoch, rows))
        except Exception as error:  # noqa: BLE001 - who trusts this node's pings must not go on
            self.failed(error)
        finally:
            follower.is_sent_to = False

    async def _send(self, follower: Follower, news: wire.News) -> None:
        try:
            await self.transport.ask(follower.node, wire.encode(news), _ANSWER_S)
        except (CutOff, TimeoutError):
            return  # it may have been lost
        follower.acked()
        self.counters.news_sent += 1
        self.counters.rows_sent += len(news.rows)
        if len(news.rows) > _MANY:
            await asyncio.sleep(_ROW_S * len(news.rows))
