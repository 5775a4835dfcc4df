"""Points of a use that was over, and free of all sessions, before this process saw one of them.

The coordinator remembers how a use ended until its slot is used again. That is all that is left: there is no
attachment, and nothing to ask a driver about.
"""

from __future__ import annotations

from collections.abc import Callable

from ipcsync._board import Board, peer_of
from ipcsync._deadline import deadline_of
from ipcsync._engines import Guard
from ipcsync._engines.loss import Loss
from ipcsync._native import context
from ipcsync._native.context import OnDevice
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import stream_handle
from ipcsync._wire.messages import Remains
from ipcsync.typing import StreamLike


class Finished:
    """What an attachment's engine is to a point, for a use that is over; it never changes. Thread-safe."""

    node = ""

    def __init__(self, board: Board, guard: Guard, remains: Remains, ordinal: int, name: str) -> None:
        self._board = board
        self._remains = remains
        self.guard = guard
        self.ordinal = ordinal
        self.name = name
        self.origin: tuple[bytes, int, int] = (board.epoch, remains.slot, remains.incarnation)
        self.generation: int = remains.recorded

    @property
    def label(self) -> str:
        """The event's name in texts."""
        return repr(self.name) if self.name else f"an unnamed event (slot {self._remains.slot})"

    def check(self) -> None:
        """Raise if the process was forked or the session cannot be used."""
        self.guard.session_check.check()

    def check_liveness(self, _generation: int) -> None:
        """Raise if the session or its coordinator is lost."""
        self.guard.check_liveness()

    def outcome_of(self, generation: int) -> Loss | bool:
        """True if `generation` was known complete, else why it is lost."""
        left = self._remains
        return generation <= left.good or Loss(left.cause, left.serial, left.session, left.pid)

    def query(self, generation: int, *_: object) -> bool:
        """True, or RecorderLost: there is nothing to wait for."""
        self.check()
        self.raise_if_over(generation)
        return True

    def raise_if_over(self, generation: int) -> None:
        """Raise RecorderLost if `generation` never was known complete."""
        outcome = self.outcome_of(generation)
        if isinstance(outcome, Loss):
            is_over = outcome.cause != "behind" and self.recorder_is_over()
            raise outcome.error(self.name, self.label, generation, over=True if is_over else None)

    def wait(self, generation: int, stream: StreamLike | None, timeout: float | None, _ahead: bool) -> None:
        """There is nothing to wait for. Raises for a stream that no wait may be queued on, as any wait does."""
        deadline_of(timeout)
        refuse_small_number(stream, 0)
        handle, ordinal = stream_handle(stream)
        with OnDevice(ordinal) as inside, inside:
            context.refuse_capturing(handle, "wait")
        self.query(generation)

    wait_on: Callable[..., bool] = query
    await_complete: Callable[..., bool] = query
    await_recorded: Callable[..., bool] = query

    def synchronize(self, generation: int, timeout: float | None, _began: int = 0) -> None:
        """Return, or raise RecorderLost."""
        deadline_of(timeout)
        self.query(generation)

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None:
        """No trace shows it."""

    def recorder_is_over(self) -> bool | None:
        """Whether the recorder's process and its GPU work have ended for good; None if that is never known."""
        serial = self._remains.serial
        is_over = peer_of(self._board, serial).is_over() if serial else None
        return is_over and self.guard.coordinator_is_alive()  # in this order
