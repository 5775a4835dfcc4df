"""The feed: a snapshot, and the announcement of each change."""

from __future__ import annotations

from typing import ClassVar, Literal

from ipcsync._wire.messages.base import Count, Effect, Message, Name, RequestBody
from ipcsync._wire.messages.events import EventInfo
from ipcsync._wire.messages.fleet import Want
from ipcsync._wire.messages.sessions import SessionInfo
from ipcsync.typing import EngineName


class Snapshot(RequestBody, frozen=True):
    """All that is open, with the feed number up to which that holds. `is_resync`: because of a gap in the feed."""

    effect: ClassVar[Effect] = "none"
    prefix: Name = ""
    is_resync: bool = False


class SnapshotReply(Message, frozen=True):
    """A snapshot, and the number of the last announcement that it holds."""

    number: Count
    events: list[EventInfo]
    sessions: list[SessionInfo]


class Announcement(Message, frozen=True):
    """One change. kind: opened, closed, broken, session_opened, session_closed, or tick (the number again).

    Of an event's end, `session` is its recorder's name or else its id, `pid` that process (0: unknown), and `cause` is
    "closed", "died", "expired", or "behind" for work behind what was lost; of a session's end, `pid` and `cause` are
    its own. `cause` is empty for an event without a recorder, and may be another node's reason.

    For the bridge: wanted, with the `want`; and unwanted, a mirror that no other session uses any more.
    """

    number: Count
    kind: str
    name: str = ""
    slot: Count = 0
    incarnation: Count = 0
    device: str = ""
    engine: EngineName | Literal[""] = ""
    handles: list[bytes] = []
    session: str = ""
    want: Want | None = None
    pid: Count = 0
    cause: str = ""
