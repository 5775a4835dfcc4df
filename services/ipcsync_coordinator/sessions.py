"""Sessions as the coordinator holds them, the replies that a retry gets again, and who sent a frame."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from ipcsync._board import Peer
from ipcsync_coordinator.liveness import ProcessWatch
from ipcsync_coordinator.state import Session


class Use(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The attachment of a reply, which is put together again for a retry: a deep ring's handles take 70 KB."""

    slot: int
    incarnation: int
    is_recorder: bool


Kept: TypeAlias = bytes | Use
"""A reply as it is kept: a short frame, or what an attachment's is made from."""


@dataclass(eq=False)
class SessionEntry:
    """A session with what this coordinator alone has of it: its process, and the replies that a retry gets again."""

    session: Session
    watch: ProcessWatch
    beat_ns: int  # the latest heartbeat seen
    peer: Peer | None = None  # says whether its process lives, once that is ready
    is_dead: bool = False  # its process is, and not gone yet
    replies: OrderedDict[int, Kept] = field(default_factory=OrderedDict)
    deadline_ns: int = 0  # of its last request; all requests of one call have the same


class SessionTable:
    """All sessions, by token; iterating goes over those there are at the beginning.

    Of each, `replies` last replies are kept, and the last one of each of the `sessions` sessions that ended last.
    """

    def __init__(self, replies: int, sessions: int) -> None:
        self._most_replies = replies
        self._most_final_replies = sessions
        self._by_token: dict[bytes, SessionEntry] = {}
        self._by_serial: dict[int, SessionEntry] = {}
        self._by_nonce: dict[bytes, SessionEntry] = {}
        self._final_replies: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()  # of sessions gone, for their retry
        self.find = self._by_token.get
        self.of_nonce = self._by_nonce.get
        self.of_serial = self._by_serial.get

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[SessionEntry]:
        return iter(list(self._by_token.values()))

    @property
    def has_living(self) -> bool:
        """Whether there is a session of a process that is not known to be dead."""
        return any(not entry.is_dead for entry in self._by_token.values())

    def bridge(self) -> SessionEntry | None:
        """The live session that links this coordinator's events with those of other nodes."""
        bridges = (entry for entry in self._by_token.values() if entry.session.role == "bridge")
        return next((entry for entry in bridges if entry.session.state == "live"), None)

    def add(self, entry: SessionEntry) -> None:
        """Take in a new one."""
        session = entry.session
        self._by_token[session.token] = self._by_serial[session.serial] = self._by_nonce[session.nonce] = entry

    def forget(self, serial: int) -> SessionEntry | None:
        """The entry of the session with that number, which has no place here any more."""
        entry = self._by_serial.pop(serial, None)
        if entry is not None:
            del self._by_token[entry.session.token], self._by_nonce[entry.session.nonce]
        return entry

    def keep(self, token: bytes, request_id: int, reply: Kept) -> None:
        """Keep a reply for the case that its request comes again."""
        entry = self._by_token.get(token)
        if entry is None:  # its own last request ended it
            if isinstance(reply, Use):
                return  # not its last one, then
            self._final_replies[token] = (request_id, reply)
            if len(self._final_replies) > self._most_final_replies:
                self._final_replies.popitem(last=False)
            return
        entry.replies[request_id] = reply
        if len(entry.replies) > self._most_replies:
            oldest, _ = entry.replies.popitem(last=False)
            entry.session.forgotten = max(entry.session.forgotten, oldest)

    def replies(self) -> Iterator[tuple[bytes, int, Kept]]:
        """All replies that are kept: token, request id, reply; each session's in the order in which they were kept."""
        for token, entry in self._by_token.items():
            for request_id, reply in entry.replies.items():
                yield token, request_id, reply
        for token, (request_id, reply) in self._final_replies.items():
            yield token, request_id, reply

    def final_reply(self, token: bytes, request_id: int) -> bytes | None:
        """The reply to the last request of a session that is gone."""
        last_id, reply = self._final_replies.get(token, (0, b""))
        return reply if last_id == request_id else None
