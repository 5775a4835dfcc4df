"""Done callbacks, on a thread of the client: never inside a driver's callback, where Python has deadlocked others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipcsync.errors import IpcSyncError, WaitTimeout

if TYPE_CHECKING:
    from ipcsync.client.point import Point

log = logging.getLogger("ipcsync")

_ALONE_S = 0.05
_AMONG_S = 0.001


class Callbacks:
    """Points with callbacks, waited for by one thread that is started with the first and ends when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Point, Callable[[Point], object]]] = []
        self._thread: threading.Thread | None = None

    def add(self, point: Point, fn: Callable[[Point], object]) -> None:
        """Call `fn(point)` once it is done or can never be."""
        with self._lock:
            self._waiting.append((point, fn))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ipcsync-callbacks", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                waiting = list(self._waiting)
                if not waiting:
                    self._thread = None
                    return
            done = [entry for entry in waiting if self._is_done(entry[0], 0)]
            if not done:
                # Round robin would starve none, but the first is the likeliest to come first.
                self._is_done(waiting[0][0], _ALONE_S if len(waiting) == 1 else _AMONG_S)
                continue
            with self._lock:
                for entry in done:
                    self._waiting.remove(entry)
            for point, fn in done:
                _call(fn, point)

    @staticmethod
    def _is_done(point: Point, timeout: float) -> bool:
        try:
            if timeout == 0:
                return point.query()
            point.synchronize(timeout)
        except WaitTimeout:
            return False
        except IpcSyncError:
            return True  # it can never be: `exception()` says why
        return True

    def join(self, timeout: float) -> None:
        """Wait until every callback was called; the client is closed, so each of them is due."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)


def _call(fn: Callable[[Point], object], point: Point) -> None:
    try:
        fn(point)
    except Exception:
        log.exception("the done callback %r of %r failed", fn, point)
