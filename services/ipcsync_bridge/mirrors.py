"""Mirrors of other nodes' events: slots of this node's coordinator, on which the bridge is the recorder."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

from ipcsync._board import CLOSED, OPEN, Board
from ipcsync._linux.futex import Futex
from ipcsync._wire import messages
from ipcsync._wire.messages import Attachment
from ipcsync.errors import EventClosed, ProtocolError
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.wire import Key, Row

_MOST_EARLY = 1000


class Origin(NamedTuple):
    """The use of another node's slot."""

    epoch: bytes
    slot: int
    incarnation: int

    @property
    def key(self) -> Key:
        """Which use of that node's it is."""
        return self.slot, self.incarnation


class Mirror:
    """One mirror: `recorded`, then `completed`, then who waits is woken; a final word only after that."""

    def __init__(self, board: Board, attachment: Attachment, row: Row) -> None:
        self.row = row
        self.attachment = attachment
        self.use: Key = (attachment.slot, attachment.incarnation)
        # The state and reason that the coordinator is being asked to finish it with; and those to ask for next, if the
        # coordinator refuses because a session wants the mirror.
        self.ending: tuple[str, str] | None = None
        self.next_ending: tuple[str, str] | None = None
        self._base = attachment.base
        self._line = board.slot(attachment.slot)
        self.has_sent_closed = self._line.state == CLOSED  # by the code before this one, if it is
        self._word = Futex(self._line.completed_address)

    def store(self) -> None:
        """Store what the row says and the board does not have. Nothing once the coordinator has finished the use."""
        row, line, base = self.row, self._line, self._base
        if self.ending is not None or not self.is_open:
            return
        if base + row.recorded > line.recorded:  # what is stored never becomes less, of an earlier code here neither
            line.publish(base + row.recorded)
        if base + (completed := min(row.completed, row.recorded)) > line.completed:
            line.store_completed(base + completed)
        line.futex.wake()
        self._word.wake()
        if row.lost and base + row.lost != line.lost:
            line.lose(base + row.lost, 0)

    @property
    def is_open(self) -> bool:
        """Whether the coordinator has finished the use only as it was asked to, or not at all."""
        state = self._line.state
        is_finished = state != OPEN and not (state == CLOSED and self.has_sent_closed)
        return self._line.incarnation == self.use[1] and not is_finished


class Mirrors:
    """All mirrors of a bridge. `begin` starts a task; `on_gone` is called with each mirror that has ended."""

    def __init__(self, session: BridgeSession, begin: Callable[[Coroutine[Any, Any, object]], None]) -> None:
        self._session = session
        self._begin = begin
        self._mirrors: dict[Origin, Mirror] = {}
        self._origins: dict[Key, Origin] = {}  # by the use here
        self._early: dict[Key, None] = {}  # uses that were called unwanted before the answer that makes them known
        self.on_gone: Callable[[Origin], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._mirrors)

    def __contains__(self, origin: Origin) -> bool:
        return origin in self._mirrors

    def __iter__(self) -> Iterator[Mirror]:
        return iter(list(self._mirrors.values()))

    def put(self, origin: Origin, attached: Attachment, row: Row) -> None:
        """Add the mirror that the coordinator has made, or has attached the bridge to again."""
        mirror = self._mirrors.get(origin)
        if mirror is None or mirror.use != (attached.slot, attached.incarnation):
            mirror = self._mirrors[origin] = Mirror(self._session.board, attached, row)
            self._origins[mirror.use] = origin
            if mirror.use in self._early:
                del self._early[mirror.use]
                self.end(origin, "unwanted", "")

    def store(self, origin: Origin, news: Row | None = None) -> None:
        """Store what is known of a mirrored use; end the mirror if nothing more can come."""
        mirror = self._mirrors.get(origin)
        if mirror is None:
            return
        row = mirror.row = mirror.row if news is None else mirror.row.merged(news)
        mirror.store()
        if row.state == "broken" or not mirror.is_open:
            self.end(origin, "broken", row.cause or "died")
        elif row.has_ended:
            self.end(origin, "closed", "")
        elif row.state == "closed" and not mirror.has_sent_closed:
            mirror.has_sent_closed = True
            self._begin(self._session.insist(messages.Finish(*mirror.use, "closed")))

    def end(self, origin: Origin, state: str, reason: str) -> None:
        """End a mirror, if it exists: "broken" with a reason, "closed", or "unwanted" unless a session uses it."""
        mirror = self._mirrors.get(origin)
        if mirror is None:
            return
        if mirror.ending is None:
            mirror.ending = state, reason
            self._begin(self._finish(origin, mirror, state, reason))
        elif mirror.ending[0] == "unwanted" and (state != "unwanted" or mirror.next_ending is None):
            mirror.next_ending = state, reason

    async def _finish(self, origin: Origin, mirror: Mirror, state: str, reason: str) -> None:
        """Have the coordinator finish the mirror, and release it; everything is stored by now."""
        try:
            await self._session.insist(messages.Finish(*mirror.use, state, reason))
            if state != "unwanted":
                await self._session.insist(messages.Close(*mirror.use, drained=state == "closed"))
        except EventClosed:
            pass  # the coordinator has no such use any more
        except ProtocolError as error:
            if error.code != "wanted":
                raise
            following, mirror.ending, mirror.next_ending = mirror.next_ending, None, None
            if following is not None:
                self.end(origin, *following)
            else:
                self.store(origin)
            return
        self._origins.pop(mirror.use, None)
        if self._mirrors.get(origin) is mirror:
            del self._mirrors[origin]
            self.on_gone(origin)

    def unwanted(self, use: Key) -> None:
        """End a mirror that only the bridge uses, as the coordinator says."""
        origin = self._origins.get(use)
        if origin is not None:
            self.end(origin, "unwanted", "")
            return
        self._early[use] = None
        if len(self._early) > _MOST_EARLY:
            del self._early[next(iter(self._early))]

    def drop_unwanted(self) -> None:
        """End every mirror that no session uses: the coordinator's words about them may have been missed."""
        for origin in list(self._mirrors):
            self.end(origin, "unwanted", "")
