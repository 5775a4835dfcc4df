"""Five sessions, each of which records one event, on a board and with no work on a GPU.

The last one is the test's; as it sees the events of the others, it waits for them.
"""

from __future__ import annotations

import time
from typing import Any

from msgspec.structs import replace

from ipcsync._board import Board, layout
from ipcsync._engines.core import Wait
from ipcsync._engines.engine import Engine
from ipcsync._linux.futex import OWNER_DIED
from ipcsync._native import context
from ipcsync._wire import messages
from ipcsync._wire.messages import Attachment
from tests.kit.boards import bits_of
from tests.unit.session.attachment_scene import Lease

COUNT, ME, BASE, KEY, STREAM = 5, 4, 100, 5, 7
OWN = 1 << ME


def serial_of(line: int) -> int:
    return (line + 1) << 16 | line


def unlisted(view: Engine, generation: int, stream: int = STREAM) -> Wait:
    """A wait that is in no list."""
    made = Wait.__new__(Wait)
    made.view, made.generation, made.key, made.stream = view, generation, KEY, stream
    return made


class Row:
    """The sessions and their events, counted from a base as in a slot's later use."""

    def __init__(self, board: Board, *, behind_all: bool = False) -> None:
        self.board = board
        self.guard: Any = Lease(board)
        self.guard.depends_on_all = behind_all
        for line in range(COUNT):
            board.session(line).assign(serial_of(line), 4711 + line, 0, 0, time.monotonic_ns(), f"s{line}")
            board.words[self._owner(line)] = 1
            slot = board.slot(line)
            slot.open(1)
            slot.recorder = serial_of(line)
            slot.publish(BASE)
            slot.store_completed(BASE)
        board.newest = COUNT
        self.line = board.slot(ME)
        self.mine = self.view(ME, recorder=True)
        self.chain = self.mine.chain
        self.theirs = [self.view(line) for line in range(ME)]

    def _owner(self, line: int) -> int:
        return (layout.HEADER + line * layout.LINE) // 8 + layout.S_OWNER

    def view(self, slot: int, *, recorder: bool = False, node: str = "") -> Any:
        reply = self.reply(slot, recorder=recorder)
        if node:
            reply = replace(reply, origin=messages.Origin(b"e" * 16, 3, 2, node))
        return Engine(self.board, self.guard, reply, 0)

    def other_recorder(self, slot: int) -> Any:
        """That event, as its recorder sees it: another one of this process."""
        return self.view(slot, recorder=True)

    def event_engine(self, *, recorder: bool = False) -> Any:
        """This test's event with a ring of three, of which none is opened."""
        reply = self.reply(ME, recorder=recorder)
        handles = [digit * 64 for digit in (b"0", b"1", b"2")]
        ring = replace(reply, engine="event", depth=3, handles=handles)
        return Engine(self.board, self.guard, ring, 0)

    def reply(self, slot: int, *, recorder: bool) -> Attachment:
        return Attachment(
            name=f"e{slot}",
            slot=slot,
            incarnation=1,
            base=BASE,
            device=context.uuid_of(0),
            engine="timeline",
            depth=1,
            recorder=recorder,
            handles=[],
        )

    def record(self, slot: int, generation: int) -> None:
        self.board.slot(slot).publish(BASE + generation)

    def complete(self, slot: int, generation: int) -> None:
        self.record(slot, generation)
        self.board.slot(slot).store_completed(BASE + generation)

    def kill(self, line: int) -> None:
        """As the kernel marks it."""
        self.board.words[self._owner(line)] |= OWNER_DIED

    def wait(self, slot: int, generation: int = 1, stream: int = STREAM) -> Wait:
        """One that this process has queued for what is recorded by then."""
        self.record(slot, max(generation, self.theirs[slot].generation))
        made = unlisted(self.theirs[slot], generation, stream)
        made.is_queued = True
        return made

    def extend(self, generation: int, *waits: Wait, stream: int = STREAM) -> None:
        """As a record on `stream` does before the driver's call; it is made then."""
        self.chain.extend(self.mine, generation, generation, stream, waits)
        self.line.publish(BASE + generation)

    def evidence(self, wait: Wait) -> int:
        """Whom a record behind that wait would depend on."""
        other = self.view(ME, recorder=True)
        other.chain.extend(other, 1, 1, STREAM, (wait,))
        (entry,) = other.chain.entries.values() or (None,)
        return 0 if entry is None else entry.bits

    def good_bits(self, own: int) -> int | None:
        """This event's bits if every session that they name lives; None if not, or if the bit of line `own` is set."""
        recorder, self.line.first_dependent = self.line.recorder, BASE + 1
        self.line.recorder = serial_of(own)
        is_clear = self.mine.is_clear(1)
        self.line.recorder = recorder
        return bits_of(self.line) if is_clear else None

    @property
    def told(self) -> tuple[int, int]:
        """(first generation that stands behind something, bits)."""
        return self.mine.first_unsettled(), bits_of(self.line)

    @property
    def open_ones(self) -> list[tuple[int, int, int]]:
        return [(entry.first, entry.last, entry.bits) for entry in self.chain.entries.values()]
