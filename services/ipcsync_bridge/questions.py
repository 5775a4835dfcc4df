"""Questions to other nodes, and the errors that they are refused with."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from ipcsync._wire import codec, messages
from ipcsync.errors import CoordinatorLost, IpcSyncError, NodeLost, ProtocolError, SessionLost
from ipcsync_bridge import wire
from ipcsync_bridge.transport import RETRY_S, CutOff, Transport, Unavailable

T = TypeVar("T", bound=wire.Message)


async def ask(transport: Transport, node: str, body: wire.Message, kind: type[T], timeout: float) -> T:
    """A node's answer. NodeLost if none comes in `timeout` seconds, or in a link's TTL."""
    try:
        data = await transport.ask(node, wire.encode(body), min(timeout, transport.settings.link_ttl))
    except (CutOff, TimeoutError) as error:
        raise NodeLost(f"node {node!r} does not answer: {error}", node=node, reason="silent") from None
    reply = wire.decode(data)
    if isinstance(reply, wire.Refused):
        raise refusal(node, reply)
    if not isinstance(reply, kind):
        raise ProtocolError(f"node {node!r} answered {type(reply).__name__}", code="reply")
    return reply


async def owner_of(transport: Transport, node: str, timeout: float) -> bytes | None:
    """The owner id of the bridge that answers as `node`, None if none does within `timeout` seconds.

    An answer counts however late in that time it comes. Raises Unavailable if this node is cut off, and hears none.
    """
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        try:
            body = wire.decode(await transport.ask(node, wire.encode(wire.Ping()), left))
            if isinstance(body, wire.Pong):
                return body.owner
        except CutOff as error:
            raise Unavailable(str(error)) from None
        except TimeoutError:
            break
        except ProtocolError:
            pass  # an answer that cannot be read names no owner: it is asked again
        await asyncio.sleep(RETRY_S)
    return None


def refusal(node: str, body: wire.Refused) -> IpcSyncError:
    """The error that another node refused with."""
    error = codec.error_of(messages.Failure(body.kind, body.text, {}))
    if isinstance(error, NodeLost):
        return NodeLost(body.text, node=node, reason="restarted")
    if isinstance(error, CoordinatorLost):  # its bridge's, which ends with it
        return NodeLost(f"the coordinator of node {node!r} has ended", node=node, reason="restarted")
    if type(error) is IpcSyncError or isinstance(error, SessionLost):
        return IpcSyncError(f"node {node!r} refused: {body.text}")
    return error
