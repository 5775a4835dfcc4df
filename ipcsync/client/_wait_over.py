"""Whether a lost recorder's GPU work has ended for good, so that memory that it could write may be reused."""

from __future__ import annotations

import time

from ipcsync._deadline import deadline_of
from ipcsync._engines import Engine

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class Polling:
    """Repeated looks, for at most `timeout` seconds; the caller sleeps `pause_s` between them.

    The kernel has no wait for a file lock with a timeout.
    """

    def __init__(self, engine: Engine, timeout: float | None) -> None:
        self._engine = engine
        self._deadline = deadline_of(timeout)
        self._next_s = _FIRST_PAUSE_S
        self.pause_s: float = 0.0
        self.is_over: bool = False

    def has_ended(self) -> bool:
        """Look once. True if the recorder's process is over (`is_over`), if that is never known, or if the time is up.

        Raises the errors that end any wait.
        """
        is_over = self._engine.recorder_is_over()
        self._engine.guard.check_liveness()
        self._engine.check()  # after the look: it proves that the words were this use's
        self.is_over = bool(is_over)
        left_s = (self._deadline - time.monotonic_ns()) / 1e9
        if is_over or is_over is None or left_s <= 0:
            return True
        self.pause_s = min(self._next_s, left_s)
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)
        return False


def wait(engine: Engine, timeout: float | None) -> bool:
    """Block until the recorder's process is over; False if that is not known within `timeout` seconds, or never."""
    polling = Polling(engine, timeout)
    while not polling.has_ended():
        time.sleep(polling.pause_s)
    return polling.is_over
