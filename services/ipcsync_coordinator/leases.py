"""A session as the coordinator holds it, and who sent a frame."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ipcsync._wire import messages
from ipcsync_coordinator.liveness import Watch
from ipcsync_coordinator.registry import Session


@dataclass(eq=False)
class Lease:
    """A session as the coordinator holds it: token, TTL, its process, and the replies that a retry gets again."""

    session: Session
    token: bytes
    nonce: bytes
    ttl_ns: int
    opened_ns: int
    beat_ns: int  # the latest heartbeat seen
    watch: Watch
    hello: messages.Hello
    why_not_event: str = ""
    is_ready: bool = False
    replies: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    forgotten: int = 0  # the highest request id whose reply is no longer kept


@dataclass(frozen=True)
class Sender:
    """Who sent a frame, by the kernel's word. `routing` names one connection, and is no identity."""

    routing: bytes
    pid: int
