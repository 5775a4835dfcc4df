"""Uses of slots that were closed here and may still touch their slots, until they are released.

The coordinator is told that a use let go of its slot only when that is true: no thread inside a call, no queued wait
pending, imports destroyed. Until then the use drains, and the heartbeat's thread tries again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ipcsync._engines import Engine
from ipcsync._locks import CallLock, holding
from ipcsync._session.closes import PendingCloses
from ipcsync.errors import IpcSyncError

log = logging.getLogger("ipcsync")

_TELL_S = 0.5


class Draining:
    """Those of one client; `lock` is its table's, `closes` takes what is to be told of them."""

    def __init__(self, lock: CallLock, closes: PendingCloses) -> None:
        self._lock = lock
        self.closes = closes
        self.engines: list[Engine] = closes.draining

    @property
    def has_any(self) -> bool:
        """Whether anything closed is still to be released."""
        return bool(self.engines)

    def add(self, engine: Engine) -> None:
        """It is about to be closed, or was."""
        if engine not in self.engines:
            self.engines.append(engine)

    def end(self, engine: Engine) -> bool:
        """Release a use that drains, if that can be, and note what is to be told of it; whether it was released."""
        if self._try_release(engine):
            return self._tell_released(engine)
        self._tell_draining(engine, drained=self._is_drained(engine))
        return False

    def release_all(self) -> int:
        """Try again to release; how many were. To be told by the caller, who may not wait for a request's reply."""
        return sum(self.end(engine) for engine in list(self.engines))

    def await_released(self, seconds: float, pause: Callable[[float], object]) -> None:
        """Wait up to `seconds` for work still in flight; what still is then is told, but for what the goodbye tells."""
        deadline = time.monotonic() + seconds
        length = 0.0005
        while True:
            for engine in list(self.engines):
                if self._try_release(engine):
                    self._tell_released(engine)
            if not self.engines or time.monotonic() >= deadline:
                break
            pause(length)
            length = min(length * 2, 0.02)
        if self.engines:
            for engine in list(self.engines):
                if self._is_drained(engine):
                    self._tell_draining(engine, drained=True)
            self.closes.flush(_TELL_S, wait=True)

    @holding("_lock")
    def _tell_released(self, engine: Engine) -> bool:
        """It drains no more; False if another thread has told that."""
        if engine not in self.engines:
            return False
        self.closes.add(engine)  # first: rather told twice than never
        self.engines.remove(engine)
        return True

    @holding("_lock")
    def _tell_draining(self, engine: Engine, *, drained: bool) -> None:
        """The use is over, though not released; and whether its recorder has no work left: others may wait for it."""
        if engine in self.engines and (not engine.has_told_closed or (drained and not engine.has_told_drained)):
            self.closes.add(engine, let_go=False, drained=drained)
            engine.has_told_closed = True
            engine.has_told_drained = engine.has_told_drained or drained

    def _try_release(self, engine: Engine) -> bool:
        """`try_release`; with a context that is broken for good nothing is released before the process ends.

        The error is then the driver's, or that of a session or coordinator which was found lost for it.
        """
        try:
            return engine.try_release()
        except IpcSyncError as error:
            note_failure(engine, "release the use", error)
            return False

    def _is_drained(self, engine: Engine) -> bool:
        """Whether a recorder that still drains has no work left."""
        try:
            return engine.has_told_drained or engine.is_drained()
        except IpcSyncError:
            return False  # `_try_release` has said it


def note_failure(engine: Engine, what: str, error: IpcSyncError) -> None:
    """Warn of the first failure of each attachment: the next beat meets the same."""
    level = logging.DEBUG if engine.has_failed else logging.WARNING
    log.log(level, "cannot %s of the event %r: %s", what, engine.name, error)
    engine.has_failed = True
