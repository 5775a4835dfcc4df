"""A client's table of attachments on a real board, and a coordinator that writes down what it is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from ipcsync._board import Board
from ipcsync._deadline import deadline_of, left_of
from ipcsync._engines.core import SessionCheck
from ipcsync._native import context, fork
from ipcsync._session.attachments import AttachmentRef, AttachmentTable
from ipcsync._session.connection import Request
from ipcsync._session.driving import Driving
from ipcsync._session.waits import Waits
from ipcsync._wire.codec import PointKey
from ipcsync._wire.messages import Attachment, Break, Close, Done
from ipcsync.errors import IpcSyncError
from tests.kit.until import until

SERIAL = 1 << 16
TOLD_S = 0.5


class Coordinator:
    """What it is told; `refusal` is what it answers instead."""

    def __init__(self) -> None:
        self.told: list[Close | Break] = []
        self.timeouts: list[float] = []
        self.refusal: IpcSyncError | None = None

    def exchange(self, requests: list[Request], _token: bytes, deadline: int, check: Callable[[], None]) -> None:
        check()
        self.timeouts.append(left_of(deadline))
        for request in requests if self.refusal is None else ():
            self.told.append(cast("Close | Break", request.body))
            request.reply = Done()

    def result_of(self, request: Request, _timeout: float) -> None:
        if request.reply is None:
            raise cast("IpcSyncError", self.refusal)

    def heard(self) -> list[Close | Break]:
        told, self.told = self.told, []
        return told


class Lease:
    """A session that lives."""

    depends_on_all = False
    line_index = full_rings = 0
    period_s = 60.0
    welcome = SimpleNamespace(token=b"")

    def __init__(self, board: Board) -> None:
        self.board = board
        self.session_check = SessionCheck(fork.arm(), board, board.session(0), 0, self.check)

    def beat(self) -> None: ...

    def check_coordinator(self) -> None: ...

    def check(self) -> None: ...

    def check_liveness(self) -> None: ...

    def coordinator_is_alive(self) -> bool:
        return True


class Scene:
    """A table and the driver's calls for it, with one thread as owner and caller, and the coordinator's board."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.coordinator = Coordinator()
        self.lease = cast("Any", Lease(board))
        connection: Any = self.coordinator
        self.table = AttachmentTable(self.lease, connection, Waits())
        owner: Any = SimpleNamespace(post=lambda call: call(), wake=self.table.beat)
        self.driving = Driving(self.table, self.lease, owner, self.lease.check)
        self.device = context.uuid_of(0)
        board.session(0).assign(SERIAL, 0, 0, 0, 1)

    def reply(self, slot: int = 0, *, recorder: bool = False, device: str | None = None) -> Attachment:
        line = self.board.slot(slot)
        if line.incarnation == 0:
            line.open(1)
            line.recorder = SERIAL
        return Attachment(
            name=f"e{slot}",
            slot=slot,
            incarnation=1,
            base=0,
            device=self.device if device is None else device,
            engine="timeline",
            depth=1,
            recorder=recorder,
            handles=[],
        )

    def find(self, use: tuple[int, int], epoch: bytes | None = None) -> AttachmentRef | None:
        """As for a point of (slot, incarnation), by default of this board."""
        return self.table.find(PointKey(self.board.epoch if epoch is None else epoch, *use, 1))

    def attach(self, slot: int = 0) -> AttachmentRef:
        """As for a point."""
        self.table.tell_all(1.0, deadline_of(1.0))
        return self.table.add(self.reply(slot), 0)

    def open(self, slot: int = 0, *, recorder: bool = False, reply: Attachment | None = None) -> AttachmentRef:
        opening = AttachmentRef()
        self.table.tell_all(1.0, deadline_of(1.0))
        self.table.add(reply or self.reply(slot, recorder=recorder), 0, opening)
        self.driving.test(opening.engine, 1.0)
        return opening

    def close(self, opening: AttachmentRef, *, wait: bool = True) -> None:
        for use in self.table.close([opening]):
            if wait:
                self.driving.settle(use)
                self.table.tell(TOLD_S)

    def look(self) -> list[Close | Break]:
        """One look of the driver's thread, and what the coordinator is told of it."""
        self.driving.look()
        self.table.tell()
        return self.coordinator.heard()

    def end(self) -> None:
        self.table.close_all()
        until(lambda: self.driving.look() is False and not self.table.is_draining, "all is released")
