"""A registry and its effects on a real board; what would reach pool, feed and session table is written down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from ipcsync._board import Board
from ipcsync._wire import codec
from ipcsync._wire.messages import Announcement
from ipcsync.typing import EngineName
from ipcsync_coordinator.effects import Effects, Feed
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import Session, Slot, Touched
from ipcsync_keeper.config import Settings


@dataclass
class Outside:
    """Pool, feed's socket, and who is told that a line is free: what reaches them is written down."""

    returned: list[Any] = field(default_factory=list)
    destroyed: list[Any] = field(default_factory=list)
    forgotten: list[Session] = field(default_factory=list)
    sent: list[Announcement] = field(default_factory=list)

    def handles(self, ring: list[int]) -> list[bytes]:
        return [{5: b"five", 6: b"six"}[serial] for serial in ring]

    def give_back(self, ring: list[Any]) -> None:
        self.returned.append(ring)

    def destroy(self, ring: list[Any]) -> None:
        self.destroyed.append(ring)

    def sweep(self, used: Iterable[int]) -> None:
        """A later coordinator destroys all others; there are none."""

    def send(self, frame: bytes, _flags: int) -> None:
        self.sent.append(codec.decode_announcement(frame))

    def heard(self) -> list[Announcement]:
        heard, self.sent = self.sent, []
        return heard


class Scene:
    """A registry and its effects on a real board."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.outside = cast(Any, Outside())
        limits = Settings(pool=4, max_sessions=4, max_attachments=3, max_streams=2)
        self.registry = Registry(limits, lambda index: self.effects.line(index).recorded)
        self.feed = Feed(self.outside, 0, lambda flush: flush(), lambda _: None)
        self.effects = Effects(board, self.outside, self.feed, self.outside.forgotten.append, self.registry.tombstones)

    def settle(self) -> None:
        """Carry out what followed."""
        touched = self.registry.touched
        self.effects.fill_in(touched.slots)
        self.effects.carry_out(touched)
        self.registry.touched = Touched()

    def session(self, name: str) -> Session:
        session = self.registry.open_session(f"id-{name}", name)
        session.pid, session.started = 17, 170
        self.settle()
        return session

    def open(self, session: Session, engine: EngineName = "event") -> Slot:
        ring = [5, 6] if engine == "event" else []
        slot = self.registry.create(session, "e", recorder=True, device="gpu", engine=engine, depth=2, ring=ring)
        self.settle()
        self.outside.heard()
        return slot
