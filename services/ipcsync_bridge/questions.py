"""Questions to other nodes, also while their bridges are being started again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TypeVar

from ipcsync._wire import codec, messages
from ipcsync.errors import IpcSyncError, NodeLost, ProtocolError, SessionLost
from ipcsync_bridge import wire
from ipcsync_bridge.transport import CutOff, Transport, Unavailable, Unreachable

T = TypeVar("T", bound=wire.Message)

ASK_S = 1.0
RETRY_S = 0.1


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions to other nodes over a transport."""

    transport: Transport
    link_ttl: float

    @property
    def _again_s(self) -> float:
        """After how long without an answer a question is sent again."""
        return min(ASK_S, self.link_ttl / 4)

    async def ask(self, node: str, body: wire.Message, kind: type[T], timeout: float) -> T:
        """A node's answer. A bridge that is being started again is waited for; NodeLost if none comes."""
        until = time.monotonic() + min(timeout, self.link_ttl)
        data = wire.encode(body)
        why = ""
        while (left := until - time.monotonic()) > 0:
            try:
                reply = wire.decode(await self.transport.ask(node, data, left, self._again_s))
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
        while (left := until - time.monotonic()) > 0:
            try:
                body = wire.decode(await self.transport.ask(node, wire.encode(wire.Ping()), left, self._again_s))
                if isinstance(body, wire.Pong):
                    return body.owner
            except CutOff as error:
                raise Unavailable(str(error)) from None
            except TimeoutError:
                return None
            except (Unreachable, ProtocolError):
                pass
            await asyncio.sleep(min(RETRY_S, max(until - time.monotonic(), 0.0)))
        return None


def refusal(node: str, body: wire.Refused) -> IpcSyncError:
    """The error that another node refused with."""
    error = codec.error_of(messages.Failure(body.kind, body.text, {}))
    if isinstance(error, NodeLost):
        return NodeLost(body.text, node=node, reason="restarted")
    if type(error) is IpcSyncError or isinstance(error, SessionLost):
        return IpcSyncError(f"node {node!r} refused: {body.text}")
    return error
