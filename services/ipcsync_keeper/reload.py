"""Reloads, as those who ask for one see them: one at a time, each with an outcome."""

from __future__ import annotations

import logging
import time

from ipcsync._board.runtime_dir import write_outcome
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields

log = logging.getLogger("ipcsync.coordinator")


class Reloads:
    """Tells the service manager of each, and leaves its outcome in `directory`.

    What is asked for while one is under way is done once more after it: only a start behind the question counts.
    """

    def __init__(self, directory: str, manager: ServiceManager) -> None:
        self._directory = directory
        self._manager = manager
        self._began_ns, self.are_wanted, self.is_under_way = 0, False, False

    def begin(self) -> None:
        """One begins."""
        self.are_wanted, self.is_under_way = False, True
        self._began_ns = time.monotonic_ns()
        self._manager.reloading()

    def end(self, why_not: str = "") -> None:
        """It is over: the new code serves, or why it does not."""
        self.is_under_way = False
        log.log(logging.ERROR if why_not else logging.INFO, "reload", extra=fields(outcome=why_not or "done"))
        try:
            write_outcome(self._directory, self._began_ns, why_not)
        except OSError as error:
            log.error("nobody is told what came of the reload", extra=fields(why=error))
        self._manager.ready(f"not reloaded: {why_not}" if why_not else "reloaded")
