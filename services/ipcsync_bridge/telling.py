"""What other nodes are told: for each that mirrors events of this one, never more than the newest of each use.

Many rows are work for who hears them too. After many, that node is told nothing for a while, in which what changes
again takes no more room; so neither node is kept busy by events that change all the time.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ipcsync_bridge import wire
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.exports import Export
from ipcsync_bridge.links import Follower
from ipcsync_bridge.transport import Transport

_MANY = 64  # rows of one message
_ROW_S = 20e-6  # for each row of many: some three times what it costs who hears it


class Sender(Protocol):
    """By what news are known as this node's."""

    channel: bytes
    epoch: bytes

    @property
    def term(self) -> int:
        """Of its name."""


class Telling:
    """The followers by node, and the task that tells them."""

    def __init__(self, transport: Transport, sender: Sender, counters: Counters) -> None:
        self._transport = transport
        self._sender = sender
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._is_due = asyncio.Event()
        self.followers: dict[str, Follower] = {}

    def changed_on_thread(self, exports: list[Export]) -> None:
        """Exports have other rows: said by a thread that looks at them."""
        try:
            self._loop.call_soon_threadsafe(self._changed, exports)
        except RuntimeError:
            return  # the loop has ended

    def _changed(self, exports: list[Export]) -> None:
        for export in exports:
            for node in export.followers:
                follower = self.followers.get(node)
                if follower is not None:
                    follower.put(export.row)
        self._is_due.set()

    def flush(self) -> None:
        """Something may be told now."""
        self._is_due.set()

    async def run(self) -> None:
        """Tell what is due, until cancelled."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            for follower in list(self.followers.values()):
                await self._tell(follower)

    async def _tell(self, follower: Follower) -> None:
        sender = self._sender
        while self._loop.time() >= follower.next_tell and (rows := follower.take(wire.MAX_ROWS)):
            body = wire.News(sender.term, sender.epoch, sender.channel, follower.number, wire.pack_rows(rows))
            if not await self._transport.tell(follower.node, wire.encode(body)):
                follower.give_back(rows)
                return
            self._counters.tells += 1
            self._counters.rows_told += len(rows)
            if len(rows) > _MANY:
                follower.next_tell = self._loop.time() + _ROW_S * len(rows)
                self._loop.call_at(follower.next_tell, self.flush)
