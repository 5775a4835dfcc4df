"""Making engines from the coordinator's replies; each kind is tested once in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ipcsync._board import Board
from ipcsync._engines import Engine, Guard
from ipcsync._native import context
from ipcsync._wire.messages import Attachment
from ipcsync.errors import DeviceMismatch, DriverError, EngineMismatch, InvalidDevice

if TYPE_CHECKING:
    from ipcsync._engines.traced import Tracing


class EngineMaker:
    """Makes the engines of one client; `shown(name)` is the user's name for an event of the coordinator's name."""

    def __init__(self, board: Board, guard: Guard, tracing: Tracing | None, shown: Callable[[str], str]) -> None:
        self._board = board
        self._guard = guard
        self._tracing = tracing
        self._shown = shown
        self._works_on: set[tuple[str, int]] = set()

    def make(self, reply: Attachment) -> Engine:
        """A new engine for an attachment. Raises DeviceMismatch if this process does not see the event's device."""
        try:
            # A mirror has no GPU: its word works on every device of this process.
            ordinal = context.current_ordinal() if reply.origin is not None else context.ordinal_of(reply.device)
        except InvalidDevice as error:
            raise DeviceMismatch(f"the event {reply.name!r} is on a device that is not visible here: {error}") from None
        traced = self._tracing and self._tracing.engine(self._board, self._guard, reply, ordinal)
        engine = traced or Engine(self._board, self._guard, reply, ordinal)
        engine.name = self._shown(reply.name)
        return engine

    def test(self, engine: Engine, reply: Attachment) -> None:
        """Test an engine that was made, if it is the first of its kind. Raises EngineMismatch if it does not work here.

        Whatever it raises, the engine may be a user of an import by then: it has to be closed and released.
        """
        if (reply.engine, engine.ordinal) not in self._works_on:
            try:
                engine.open_first()
            except DriverError as error:
                raise EngineMismatch(
                    f"the event {reply.name!r} uses the engine {reply.engine!r}, which does not work in this process: "
                    f"{error}"
                ) from error
            self._works_on.add((reply.engine, engine.ordinal))
