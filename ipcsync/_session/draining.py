"""Uses of slots that were closed here and may still touch their slots, until they are released.

A use is released once no thread is inside a call of it, no queued wait is pending, and its imports are destroyed. Only
then its close is sent. Until then the use drains, and the heartbeat's thread tries again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from ipcsync._engines import Engine
from ipcsync._locks import CallLock, holding
from ipcsync._session.closes import PendingCloses
from ipcsync._shared import WeakList
from ipcsync.errors import IpcSyncError

log = logging.getLogger("ipcsync")


class Making:
    """A `with` block that may open an import or register a page of the board."""

    is_inside: bool = False

    def __enter__(self) -> None:
        self.is_inside = True

    def __exit__(self, *_: object) -> None:
        self.is_inside = False


class Draining:
    """The draining uses of one client; `lock` is its table's, `closes` gets the closes."""

    def __init__(self, lock: CallLock, closes: PendingCloses) -> None:
        self._lock = lock
        self.closes = closes
        self.engines: list[Engine] = closes.draining
        self._makings: WeakList[Making] = WeakList()

    def making(self) -> Making:
        """Have `has_any` be true within the `with` block over the result, however that ends."""
        making = Making()
        self._makings.add(making)  # the block alone holds it
        return making

    @property
    def has_any(self) -> bool:
        """Whether any use drains, or a call may make one that is to drain, since the client was closed meanwhile."""
        return bool(self.engines) or self.is_making

    @property
    def is_making(self) -> bool:
        """Whether a call is within a `making`."""
        return any(making.is_inside for making in self._makings.living())

    def add(self, engine: Engine) -> None:
        """Add a use that is about to be closed, or was."""
        if engine not in self.engines:
            self.engines.append(engine)

    def end(self, engine: Engine) -> bool:
        """Release a use if possible, and add its close; whether it was released."""
        if self._try_release(engine):
            return self._tell_released(engine)
        if not engine.is_closed:
            return False
        self._tell_draining(engine, drained=self._is_drained(engine))
        return False

    def release_all(self) -> int:
        """Try to release each use; returns how many were. The caller flushes the closes, if it may wait for a reply."""
        return sum(self.end(engine) for engine in list(self.engines))

    def await_released(self, seconds: float, pause: Callable[[float], object]) -> None:
        """Wait up to `seconds` for work in flight; say which recorders are drained, if others still drain then."""
        deadline = time.monotonic() + seconds
        length = 0.0005
        while True:
            for engine in list(self.engines):
                if self._try_release(engine):
                    self._tell_released(engine)
            if not self.has_any or time.monotonic() >= deadline:
                break
            pause(length)
            length = min(length * 2, 0.02)
        if self.has_any:
            for engine in list(self.engines):
                if self._is_drained(engine):
                    self._tell_draining(engine, drained=True)
            self.closes.flush(wait=True)

    @holding("_lock")
    def _tell_released(self, engine: Engine) -> bool:
        """Remove a released use, and add its close; False if another thread has done so."""
        if engine not in self.engines:
            return False
        self.closes.add(engine)  # first: an exception in between sends it twice rather than never
        with suppress(ValueError):  # a call within this one was first
            self.engines.remove(engine)
        return True

    @holding("_lock")
    def _tell_draining(self, engine: Engine, *, drained: bool) -> None:
        """Add a close of a use that is not released. `drained`: its recorder's work is complete, as others wait for."""
        if engine in self.engines and (not engine.has_told_closed or (drained and not engine.has_told_drained)):
            self.closes.add(engine, released=False, drained=drained)
            engine.has_told_closed = True
            engine.has_told_drained = engine.has_told_drained or drained

    def _try_release(self, engine: Engine) -> bool:
        """`Engine.try_release`, once the use is closed, which it may not be yet when it is added.

        In a broken CUDA context nothing can be released before the process ends. The error is then the driver's, or
        that of a session or coordinator which is found lost.
        """
        try:
            return engine.is_closed and engine.try_release()
        except IpcSyncError as error:
            note_failure(engine, "release", error)
            return False

    def _is_drained(self, engine: Engine) -> bool:
        """Whether a recorder that still drains has no work left."""
        try:
            return engine.has_told_drained or engine.is_drained()
        except IpcSyncError:
            return False  # `_try_release` has logged it


def note_failure(engine: Engine, what: str, error: IpcSyncError) -> None:
    """Log a warning at the first failure of an attachment, since each beat fails again; then at level debug."""
    level = logging.DEBUG if engine.has_failed else logging.WARNING
    log.log(level, "cannot %s the event %r: %s", what, engine.name, error)
    engine.has_failed = True
