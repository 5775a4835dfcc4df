"""A session: its begin, its end, and the list of all."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from ipcsync._wire.messages.base import Count, Effect, Message, RequestBody, Text, Token


class Hello(RequestBody, frozen=True):
    """Open a session. `nonce` makes a retry give the same session; `lease_ttl` in seconds, None for the default."""

    effect: ClassVar[Effect] = "repeatable"
    nonce: Token
    driver: Text
    name: Annotated[str, Meta(max_length=255)] = ""
    namespace: Count = 0  # inode of the pid namespace
    time_namespace: Count = 0  # inode of the time namespace of heartbeats and deadlines; 0: the kernel has none
    shm: Text = ""  # which /dev/shm the process sees, as device:inode
    pid: Count = 0  # as the process sees itself; compared with the coordinator's own, never an identity
    lease_ttl: float | None = None
    role: Text = ""  # "bridge": it links this coordinator's events with those of other nodes


class Ready(RequestBody, frozen=True):
    """The board is mapped and the lifeline held; also the second word that makes a pidfd count."""

    effect: ClassVar[Effect] = "repeatable"


class Bye(RequestBody, frozen=True):
    """Close the session and all it has. `released`: nothing of this process can touch any slot any more."""

    released: bool = True


class ListSessions(RequestBody, frozen=True):
    """List the sessions."""

    effect: ClassVar[Effect] = "none"


class Welcome(Message, frozen=True):
    """The session that Hello opened. Times in seconds."""

    token: Token
    session: str  # its public id
    serial: Count
    line: Count
    epoch: Token
    lease_ttl: float
    heartbeat: float
    board: str
    feed: str
    driver: str
    coordinator_pid: Count
    devices: list[str]
    window: Annotated[int, Meta(ge=1)]  # how many requests may be in flight


class SessionInfo(Message, frozen=True):
    """One session. `id` is public, not its token; `pid` as the coordinator sees it (0: it cannot); times in seconds."""

    id: str
    name: str
    pid: int
    events: int
    connected_s: float
    last_seen_s: float


class SessionList(Message, frozen=True):
    """The sessions."""

    sessions: list[SessionInfo]
