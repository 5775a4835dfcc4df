"""News to the nodes that mirror events of this one: the newest row of each use, never more.

Many rows are work for their receiver too. After a message with many, that node is sent nothing for a while, in which
rows that change again are replaced. So events that change all the time keep neither node busy.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ipcsync._inbox import Inbox
from ipcsync_bridge import wire
from ipcsync_bridge.counters import Counters
from ipcsync_bridge.exports import Export
from ipcsync_bridge.links import Follower
from ipcsync_bridge.transport import Transport

_MANY = 64  # rows of one message
_ROW_S = 20e-6  # of rest for each row of many: some three times what it costs the receiver


class Sender(Protocol):
    """What news say of their sender."""

    channel: bytes
    epoch: bytes

    @property
    def term(self) -> int:
        """Of its name."""


class Publisher:
    """The followers by node, and the task that sends them news."""

    def __init__(self, transport: Transport, sender: Sender, counters: Counters) -> None:
        self._transport = transport
        self._sender = sender
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._changes = Inbox(self._changed)
        self._is_due = asyncio.Event()
        self._failure: Exception | None = None
        self.followers: dict[str, Follower] = {}

    def changed_on_thread(self, exports: list[Export]) -> None:
        """Exports have other rows; called by the thread that looks at them."""
        self._changes.put(exports)

    def failed_on_thread(self, error: Exception) -> None:
        """A thread that looks at exports has ended; `run` raises its error."""
        self._failure = error
        self.changed_on_thread([])

    def _changed(self, exports: list[Export]) -> None:
        for export in exports:
            for node in export.followers:
                follower = self.followers.get(node)
                if follower is not None:
                    follower.put(export.row)
        self._is_due.set()

    def flush(self) -> None:
        """Have `run` look for something to send."""
        self._is_due.set()

    async def run(self) -> None:
        """Send what is due, until cancelled. Raises what has ended a thread that looks at exports."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            if self._failure is not None:
                raise self._failure
            for follower in list(self.followers.values()):
                await self._send(follower)

    async def _send(self, follower: Follower) -> None:
        sender = self._sender
        while self._loop.time() >= follower.next_send and (rows := follower.take(wire.MAX_ROWS)):
            body = wire.News(sender.term, sender.epoch, sender.channel, follower.number, wire.pack_rows(rows))
            if not await self._transport.send(follower.node, wire.encode(body)):
                follower.give_back(rows)
                return
            self._counters.news_sent += 1
            self._counters.rows_sent += len(rows)
            if len(rows) > _MANY:
                follower.next_send = self._loop.time() + _ROW_S * len(rows)
                self._loop.call_at(follower.next_send, self.flush)
