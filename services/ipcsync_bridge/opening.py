"""Opening names of another node: names that come while a question is under way are asked for together."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from ipcsync.errors import IpcSyncError, NodeLost, ProtocolError
from ipcsync_bridge import wire
from ipcsync_bridge.asking import Asking, refusal


class Opened(NamedTuple):
    """An opened use: the node's answer, the use's row in it, and when the question was sent."""

    state: wire.State
    row: wire.Row
    sent: float


class _Name(NamedTuple):
    name: str
    outcome: asyncio.Future[Opened]
    deadline: float


class Opening:
    """The names to ask for, by node. `begin` starts a task."""

    def __init__(self, asking: Asking, begin: Callable[[Coroutine[Any, Any, object]], None]) -> None:
        self._asking = asking
        self._begin = begin
        self._names: dict[str, deque[_Name]] = {}
        self._asked: set[str] = set()  # nodes that are being asked

    async def open(self, node: str, name: str, timeout: float) -> Opened:
        """Open the event of that name on a node. Raises what the node refuses it with, or NodeLost."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Opened] = loop.create_future()
        self._names.setdefault(node, deque()).append(_Name(name, outcome, time.monotonic() + timeout))
        if node not in self._asked:
            self._asked.add(node)
            self._begin(self._ask_for_all(node))
        timer = loop.call_later(timeout, _time_out, outcome, node)  # `wait_for` would cost a turn of the loop more
        try:
            return await outcome
        finally:
            timer.cancel()

    async def _ask_for_all(self, node: str) -> None:
        waiting = self._names[node]
        try:
            while waiting:
                names = [waiting.popleft() for _ in range(min(len(waiting), wire.MAX_NAMES))]
                await self._ask(node, [each for each in names if not each.outcome.done()])
        finally:
            self._asked.discard(node)
            if not waiting:
                self._names.pop(node, None)

    async def _ask(self, node: str, names: list[_Name]) -> None:
        if not names:
            return
        sent = time.monotonic()
        body = wire.Open(wire.pack_texts(each.name for each in names))
        try:
            state = await self._asking.ask(node, body, wire.State, max(each.deadline for each in names) - sent)
            outcomes = _outcomes(node, state, len(names))
        except IpcSyncError as error:
            outcomes = [copy.copy(error) for _ in names]
        for each, found in zip(names, outcomes, strict=True):
            if each.outcome.done():
                continue  # timed out
            if isinstance(found, IpcSyncError):
                each.outcome.set_exception(found)
            else:
                each.outcome.set_result(Opened(state, found, sent))


def _time_out(outcome: asyncio.Future[Opened], node: str) -> None:
    if not outcome.done():
        outcome.set_exception(NodeLost(f"node {node!r} does not answer", node=node, reason="silent"))


def _outcomes(node: str, state: wire.State, count: int) -> list[wire.Row | IpcSyncError]:
    """The outcome of each of `count` names, in order. Raises ProtocolError if the answer does not fit them."""
    texts = wire.unpack_texts(state.refused, 3 * count)
    refused = {}
    for place, kind, text in zip(texts[::3], texts[1::3], texts[2::3], strict=False):
        refused[int(place) if place.isascii() and place.isdigit() else -1] = refusal(node, wire.Refused(kind, text))
    rows = iter(wire.unpack_rows(state.rows))
    outcomes = [refused.get(place) or next(rows, None) for place in range(count)]
    found = [each for each in outcomes if each is not None]
    if len(found) < count or next(rows, None) is not None:
        raise ProtocolError(f"node {node!r} answered for other names than it was asked for", code="reply")
    return found
