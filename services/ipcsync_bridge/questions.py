"""Questions to other nodes, also while their bridges are being started again; names are asked for many at once."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from ipcsync import errors
from ipcsync.errors import IpcSyncError, NodeLost, ProtocolError, SessionLost
from ipcsync_bridge import wire
from ipcsync_bridge.transport import CutOff, Transport, Unavailable, Unreachable

T = TypeVar("T", bound=wire.Message)

ASK_S = 1.0
RETRY_S = 0.1


class Opened(NamedTuple):
    """An opened use: the node's answer, the use's row in it, and when the question was sent."""

    state: wire.State
    row: wire.Row
    sent: float


class _Name(NamedTuple):
    name: str
    outcome: asyncio.Future[Opened]
    deadline: float


class Questions:
    """Questions to other nodes over a transport. `begin` starts a task."""

    def __init__(
        self, transport: Transport, link_ttl: float, begin: Callable[[Coroutine[Any, Any, object]], None]
    ) -> None:
        self._transport = transport
        self._link_ttl = link_ttl
        self._begin = begin
        self._names: dict[str, deque[_Name]] = {}  # to be asked for, by node
        self._asked: set[str] = set()  # nodes that are being asked for names

    async def ask(self, node: str, body: wire.Message, kind: type[T], timeout: float) -> T:
        """A node's answer. A bridge that is being started again is waited for; NodeLost if none comes."""
        until = time.monotonic() + min(timeout, self._link_ttl)
        data = wire.encode(body)
        why = ""
        while (left := until - time.monotonic()) > 0:
            try:
                reply = wire.decode(await self._transport.ask(node, data, min(left, ASK_S)))
            except (Unreachable, TimeoutError) as error:
                why = str(error)
                await asyncio.sleep(min(RETRY_S, max(until - time.monotonic(), 0.0)))
                continue
            if isinstance(reply, wire.Refused):
                raise refusal(node, reply)
            if not isinstance(reply, kind):
                raise ProtocolError(f"node {node!r} answered {type(reply).__name__}", code="reply")
            return reply
        raise NodeLost(f"node {node!r} does not answer: {why}", node=node, reason="silent")

    async def owner_of(self, node: str, timeout: float) -> bytes | None:
        """The owner id of the bridge that answers as `node`, None if none does within `timeout` seconds.

        An answer counts however late in that time it comes. Raises Unavailable if this node is cut off, and hears none.
        """
        until = time.monotonic() + timeout
        asked: set[asyncio.Task[bytes | None]] = set()
        try:
            while (left := until - time.monotonic()) > 0:
                asked.add(asyncio.ensure_future(self._ask_owner(node, left)))
                done, asked = await asyncio.wait(asked, timeout=min(left, ASK_S), return_when=asyncio.FIRST_COMPLETED)
                for owner in [each.result() for each in done]:
                    if owner is not None:
                        return owner
                if done:
                    await asyncio.sleep(min(RETRY_S, max(until - time.monotonic(), 0.0)))
        finally:
            for each in asked:
                each.cancel()
        return None

    async def _ask_owner(self, node: str, timeout: float) -> bytes | None:
        try:
            body = wire.decode(await self._transport.ask(node, wire.encode(wire.Ping()), timeout))
        except CutOff as error:
            raise Unavailable(str(error)) from None
        except (Unreachable, TimeoutError, ProtocolError):
            return None
        return body.owner if isinstance(body, wire.Pong) else None

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
        body = wire.Open([each.name for each in names])
        try:
            state = await self.ask(node, body, wire.State, max(each.deadline for each in names) - sent)
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


def refusal(node: str, body: wire.Refused) -> IpcSyncError:
    """The error that another node refused with."""
    kind = getattr(errors, body.kind, None) if body.kind in errors.__all__ else None
    if kind is NodeLost:
        return NodeLost(body.text, node=node, reason="restarted")
    if kind is None or issubclass(kind, SessionLost):
        return IpcSyncError(f"node {node!r} refused: {body.text}")
    error = kind(body.text)
    assert isinstance(error, IpcSyncError)
    return error


def _time_out(outcome: asyncio.Future[Opened], node: str) -> None:
    if not outcome.done():
        outcome.set_exception(NodeLost(f"node {node!r} does not answer", node=node, reason="silent"))


def _outcomes(node: str, state: wire.State, count: int) -> list[wire.Row | IpcSyncError]:
    """The outcome of each of `count` names, in order. Raises ProtocolError if the answer does not fit them."""
    refused = {place: refusal(node, why) for place, why in state.refused.items()}
    rows = iter(state.rows)
    outcomes = [refused.get(place) or next(rows, None) for place in range(count)]
    found = [each for each in outcomes if each is not None]
    if len(found) < count or next(rows, None) is not None:
        raise ProtocolError(f"node {node!r} answered for other names than it was asked for", code="reply")
    return found
