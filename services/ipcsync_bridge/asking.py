"""Asking another node, also while its bridge is being started again."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from ipcsync import errors
from ipcsync.errors import IpcSyncError, NodeLost, ProtocolError, SessionLost
from ipcsync_bridge import wire
from ipcsync_bridge.transport import CutOff, Transport, Unavailable, Unreachable

T = TypeVar("T", bound=wire.Message)

ASK_S = 1.0
RETRY_S = 0.1


class Asking:
    """Questions to other nodes over a transport."""

    def __init__(self, transport: Transport, link_ttl: float) -> None:
        self._transport = transport
        self._link_ttl = link_ttl

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

    async def say(self, node: str, body: wire.Message) -> None:
        """Send a node a message that it does not answer."""
        try:
            await self._transport.ask(node, wire.encode(body), None)
        except (Unreachable, TimeoutError):
            return  # the answer to a later ping shows that it was not received

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
            body = wire.decode(await self._transport.ask(node, wire.encode(wire.Ping(b"", 0)), timeout))
        except CutOff as error:
            raise Unavailable(str(error)) from None
        except (Unreachable, TimeoutError, ProtocolError):
            return None
        return body.owner if isinstance(body, wire.Pong) else None


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
