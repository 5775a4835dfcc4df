"""A client's table of attachments on a real board, and a coordinator that writes down what it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ipcsync._board import Board
from ipcsync._native import context
from ipcsync._session.attachments import AttachmentTable
from ipcsync._session.references import Opening
from ipcsync._session.waits import Waits
from ipcsync._wire.messages import Attachment, Break, Close
from ipcsync.errors import (
    IpcSyncError,
)

SERIAL = 1 << 16


class Coordinator:
    """What it is told; `refusal` is what it answers instead."""

    def __init__(self) -> None:
        self.told: list[Close | Break] = []
        self.refusal: IpcSyncError | None = None

    def send(self, body: Close | Break, _timeout: float) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.told.append(body)

    def heard(self) -> list[Close | Break]:
        told, self.told = self.told, []
        return told


class Lease:
    """A session that lives."""

    stands_behind_all = False
    line_index = 0

    def check(self) -> None: ...

    def check_liveness(self) -> None: ...

    def coordinator_is_alive(self) -> bool:
        return True

    def count_full_ring(self) -> None: ...


class Scene:
    """A table, and what the coordinator would do to the board."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.coordinator = Coordinator()
        self.table = AttachmentTable(board, Lease(), self.coordinator.send, Waits())
        self.device = context.uuid_of(0)
        board.session(0).assign(SERIAL, 0, 0, 0, 1)

    def reply(self, slot: int = 0, *, recorder: bool = False, device: str | None = None) -> Attachment:
        line = self.board.slot(slot)
        if line.incarnation == 0:
            line.open(1)
            line.set_recorder(SERIAL)
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
            serials=[],
        )

    def attach_for_a_point(self, slot: int) -> None:
        self.table.add(self.reply(slot))

    def open(self, slot: int = 0, *, recorder: bool = False) -> Opening:
        opening = Opening()
        self.table.closes.change(1, lambda: self.table.add(self.reply(slot, recorder=recorder), opening))
        return opening

    @contextmanager
    def changing(self) -> Iterator[threading.Event]:
        """Another thread is within a change of the table, until the event is set."""
        entered, left = threading.Event(), threading.Event()

        def stay() -> None:
            entered.set()
            left.wait(30)

        thread = threading.Thread(target=self.table.closes.change, args=(5, stay))
        thread.start()
        entered.wait(30)
        try:
            yield left
        finally:
            left.set()
            thread.join(30)
