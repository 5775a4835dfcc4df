"""What dead recorders left, and a GPU may still touch for them: until when it is kept, and who keeps it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from ipcsync._board import Board, over
from ipcsync._linux.last_lock import holders
from ipcsync._logs import fields
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import UNKNOWN, Slot

log = logging.getLogger("ipcsync.coordinator")

_PATIENCE_NS = 1_000_000_000  # before the log says who keeps it


class Kept:
    """Frees what is kept once the work of its recorder is over, which a lock shows. `commit` has that take effect."""

    def __init__(self, registry: Registry, board: Board, commit: Callable[[], None]) -> None:
        self._registry = registry
        self._board = board
        self._commit = commit
        self._since: dict[int, int] = {}  # by recorder: when it was seen first, 0 once the log has it

    def look(self, now_ns: int) -> None:
        """Ask for each recorder that is gone whether its work is over, and say once whose is not for long."""
        held = self._registry.held
        for serial, slots in list(held.items()):
            lock = slots[0].held
            if lock != UNKNOWN and over.is_over(self._board, serial):
                self._registry.end_held(serial)
            elif 0 < self._since.setdefault(serial, now_ns) < now_ns - _PATIENCE_NS:
                self._since[serial] = 0
                # On a thread of its own, since it looks at all processes.
                with suppress(RuntimeError):  # there may be no thread
                    threading.Thread(target=_tell, args=(slots[0], lock, len(slots)), name="ipcsync-kept").start()
        if len(self._since) > len(held):
            self._since = {serial: since for serial, since in self._since.items() if serial in held}
        self._commit()


def _tell(slot: Slot, lock: int, count: int) -> None:
    recorder = slot.recorder
    assert recorder is not None
    who = {"name": recorder.name, "pid": recorder.pid, "slots": count}
    if lock == UNKNOWN:
        log.warning("kept for good: whether its GPU work is over is never known", extra=fields(**who))
    else:
        pids = ",".join(map(str, holders(lock))) or "unknown"
        log.warning("kept: a process forked from it has the driver's files open", extra=fields(**who, held_by=pids))
