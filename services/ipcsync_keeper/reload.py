"""Reloads: one at a time, each with an outcome."""

from __future__ import annotations

import logging
import time

from ipcsync._board.runtime_dir import write_outcome
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields

log = logging.getLogger("ipcsync.coordinator")


class Reloads:
    """Reports each reload to the service manager, and writes its outcome into `directory`.

    If a reload is asked for while one is under way, another one follows: only a start after the request counts.
    """

    def __init__(self, directory: str, manager: ServiceManager) -> None:
        self._directory = directory
        self._manager = manager
        self._began_ns, self.are_wanted, self.is_under_way = 0, False, False

    def begin(self) -> None:
        """Begin a reload."""
        self.are_wanted, self.is_under_way = False, True
        self._began_ns = time.monotonic_ns()
        self._manager.reloading()

    def end(self, why_not: str | None = None) -> None:
        """End a reload: the new code serves, or `why_not` says why it does not."""
        self.is_under_way = False
        log.log(logging.ERROR if why_not else logging.INFO, "reload", extra=fields(outcome=why_not or "done"))
        try:
            write_outcome(self._directory, self._began_ns, why_not)
        except OSError as error:
            log.error("the outcome of the reload cannot be written", extra=fields(why=error))
        self._manager.ready(f"not reloaded: {why_not}" if why_not else "reloaded")
