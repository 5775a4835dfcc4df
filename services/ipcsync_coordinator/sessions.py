"""All sessions by what their requests name, and the replies that a retry gets again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ipcsync_coordinator.state import Kept, Session, Use


class SessionTable:
    """All sessions, by token; iterating goes over those there are at the beginning.

    Of each, `replies` last replies are kept, and the last one of each of the `sessions` sessions that ended last.
    """

    def __init__(self, replies: int, sessions: int) -> None:
        self._most_replies = replies
        self._most_final_replies = sessions
        self._by_token: dict[bytes, Session] = {}
        self._by_nonce: dict[bytes, Session] = {}
        self._final_replies: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()  # of sessions gone, for their retry
        self.find = self._by_token.get
        self.of_nonce = self._by_nonce.get

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_token.values()))

    @property
    def has_living(self) -> bool:
        """Whether there is a session of a process that is not known to be dead."""
        return any(not session.is_dead for session in self._by_token.values())

    def bridge(self) -> Session | None:
        """The live session that links this coordinator's events with those of other nodes."""
        bridges = (session for session in self._by_token.values() if session.role == "bridge")
        return next((session for session in bridges if session.state == "live"), None)

    def add(self, session: Session) -> None:
        """Take in a new one."""
        self._by_token[session.token] = self._by_nonce[session.nonce] = session

    def forget(self, session: Session) -> None:
        """Forget one that is over."""
        del self._by_token[session.token], self._by_nonce[session.nonce]

    def keep(self, token: bytes, request_id: int, reply: Kept) -> None:
        """Keep a reply for the case that its request comes again."""
        session = self._by_token.get(token)
        if session is None:  # its own last request ended it
            if isinstance(reply, Use):
                return  # not its last one, then
            self._final_replies[token] = (request_id, reply)
            if len(self._final_replies) > self._most_final_replies:
                self._final_replies.popitem(last=False)
            return
        session.replies[request_id] = reply
        if len(session.replies) > self._most_replies:
            oldest, _ = session.replies.popitem(last=False)
            session.forgotten = max(session.forgotten, oldest)

    def replies(self) -> Iterator[tuple[bytes, int, Kept]]:
        """All replies that are kept: token, request id, reply; each session's in the order in which they were kept."""
        for token, session in self._by_token.items():
            for request_id, reply in session.replies.items():
                yield token, request_id, reply
        for token, (request_id, reply) in self._final_replies.items():
            yield token, request_id, reply

    def final_reply(self, token: bytes, request_id: int) -> bytes | None:
        """The reply to the last request of a session that is gone."""
        last_id, reply = self._final_replies.get(token, (0, b""))
        return reply if last_id == request_id else None
