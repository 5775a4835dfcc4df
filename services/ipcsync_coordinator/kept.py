"""What dead recorders left, and a GPU may still touch for them: until when it is kept, and who keeps it."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from ipcsync._board import Board
from ipcsync._linux.files import holders
from ipcsync._logs import fields
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import UNKNOWN, Recorder

log = logging.getLogger("ipcsync.coordinator")

_PATIENCE_NS = 1_000_000_000  # before the log says who keeps it


class Kept:
    """Frees what is kept once the work of its recorder is over, which a lock shows."""

    def __init__(self, registry: Registry, board: Board) -> None:
        self._registry = registry
        self._board = board
        self._since: dict[int, int] = {}  # by recorder: when it was seen first, 0 once the log has it
        self._telling: threading.Thread | None = None

    def look(self, now_ns: int) -> None:
        """Ask for each recorder that is gone whether its work is over, and say once whose is not for long."""
        held, untold = self._registry.kept.by_recorder, []
        self._since = {serial: self._since.get(serial, now_ns) for serial in held}
        for serial, slots in list(held.items()):
            if slots[0].held != UNKNOWN and self._board.is_over(serial):
                self._registry.end_held(serial)
            elif 0 < self._since[serial] < now_ns - _PATIENCE_NS:
                untold.append(serial)
        if untold and (self._telling is None or not self._telling.is_alive()):
            self._tell(untold)

    def _tell(self, serials: list[int]) -> None:
        """Log who keeps what they left: on a thread, since it looks at all processes, and on one for all of them."""
        whose = [self._registry.kept.by_recorder[serial] for serial in serials]
        left = [(slots[0].held, slots[0].recorder, len(slots)) for slots in whose]
        self._telling = threading.Thread(target=_tell, args=(left,), name="ipcsync-kept")
        with suppress(RuntimeError):  # there may be no thread: they are told of later
            self._telling.start()
            self._since.update(dict.fromkeys(serials, 0))


def _tell(left: list[tuple[int, Recorder, int]]) -> None:
    found = holders({lock for lock, _, _ in left} - {UNKNOWN})
    for lock, recorder, count in left:
        who = {"name": recorder.name, "pid": recorder.pid, "slots": count}
        if lock == UNKNOWN:
            log.warning("kept for good: whether its GPU work is over is never known", extra=fields(**who))
        else:
            pids = ",".join(map(str, found[lock])) or "unknown"
            log.warning("kept: a process forked from it has the driver's files open", extra=fields(**who, held_by=pids))
