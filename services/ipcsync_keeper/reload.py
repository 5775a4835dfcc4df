"""Reloads: one at a time, each with an outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from ipcsync._board.runtime_dir import Outcome, write_outcome
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields
from ipcsync_keeper.config import FIXED

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

    def end(self, why_not: str | None = None, note: str = "") -> None:
        """End a reload: the new code serves, and `note` says what changed; or `why_not` says why it does not."""
        self.is_under_way = False
        more = {"note": note} if note else {}
        log.log(logging.ERROR if why_not else logging.INFO, "reload", extra=fields(outcome=why_not or "done", **more))
        try:
            write_outcome(self._directory, Outcome(self._began_ns, why_not or "", note))
        except OSError as error:
            log.error("the outcome of the reload cannot be written", extra=fields(why=error))
        done = f"reloaded: {note}" if note else "reloaded"
        self._manager.ready(f"not reloaded: {why_not}" if why_not else done)


def differences(first: Mapping[str, object], last: Mapping[str, object], new: Mapping[str, object]) -> str:
    """What a reload to `new` settings changes of the last ones, and what it cannot, by the first; empty for nothing."""
    taken = _differing(last, new, new.keys() - FIXED)
    left = _differing(first, new, FIXED)
    return "; ".join([*([taken] if taken else []), *([f"not before a restart: {left}"] if left else [])])


def _differing(old: Mapping[str, object], new: Mapping[str, object], names: AbstractSet[str]) -> str:
    return ", ".join(
        f"{name} {old[name]} -> {new[name]}"
        for name in sorted(names)
        if name in old and name in new and old[name] != new[name]
    )
