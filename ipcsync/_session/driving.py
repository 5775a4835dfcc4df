"""What a session asks of the driver by itself: publication and releases, on a thread of its own.

The driver may keep that thread for as long as it likes. The session lives on meanwhile, since its owner is another one.

A use of a slot is released once no thread is inside a call of it, no queued wait is pending, and its imports are
destroyed. Until then it drains, and each look tries again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from ipcsync._engines import Guard
from ipcsync._session.attachments import AttachmentTable, Life, Use
from ipcsync._session.owner import Owner
from ipcsync.errors import IpcSyncError

T = TypeVar("T")

log = logging.getLogger("ipcsync")

_JUDGING_S = 0.001  # to the next look, while others judge what complete records here stand behind
_STANDING_S = 1.0


class Driving:
    """The driver calls of one session. `period_s` is that of the owner's beats."""

    def __init__(self, table: AttachmentTable, guard: Guard, owner: Owner, period_s: float) -> None:
        self._table = table
        self._guard = guard
        self._owner = owner
        self._period_s = period_s
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._since = 0.0  # when the look that is under way began
        self._told_of = 0.0

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's function: look, until `stop`, and once more: the streams of a session that is lost may go on."""
        seconds, goes_on = self._period_s, True
        while goes_on:
            with suppress(Empty):
                goes_on = self._wakes.get(timeout=seconds)
                while goes_on and not self._wakes.empty():
                    goes_on = self._wakes.get()
            self._since = time.monotonic()
            try:
                seconds = _JUDGING_S if self.look() else self._period_s
            except Exception:
                log.exception("the driver's thread of a session failed, and goes on")
            self._since = 0.0

    def wake(self) -> None:
        """Have the thread look now."""
        self._wakes.put(True)

    def stop(self) -> None:
        """Have the thread end; the owner makes no calls any more."""
        self._wakes.put(False)

    def standing_s(self) -> float:
        """For how many seconds the driver has kept the thread; 0 if that is not long. Logged once each time."""
        since = self._since
        seconds = time.monotonic() - since if since else 0.0
        if seconds < _STANDING_S:
            return 0.0
        if since != self._told_of:
            self._told_of = since
            log.warning(
                "the driver has kept a session's thread for more than %g s: until it returns, what is complete is "
                "published late, and nothing is released",
                _STANDING_S,
            )
        return seconds

    # --- on any thread but the owner's --------------------------------------------------------------------------------

    def look(self) -> bool:
        """Publish what is complete, and release what is closed.

        Returns whether complete records wait for another recorder's judgement, which nobody tells of.
        """
        # After the coordinator's death the driver must not be asked about its events, and nobody waits for the answer.
        is_alive = self._guard.coordinator_is_alive()
        uses = [*list(self._table.uses.values()), *self._table.ending]
        for use in uses:
            if use.life is not Life.OPEN:
                self.settle(use)
            elif is_alive:
                self._try(use, "publish what is complete of", use.engine.publish_completed)
            else:
                use.engine.free_streams()
        if any(use.engine.chain.wants_break and not use.engine.chain.has_asked for use in uses):
            self._owner.wake()
        return is_alive and any(use.engine.chain.is_due for use in uses)

    def settle(self, use: Use) -> None:
        """Release a closed use if possible, and have the owner know how far it is."""
        if (life := self.progress(use)) > use.life:
            self._owner.post(partial(self._table.advance, use, life))

    def progress(self, use: Use) -> Life:
        """How far a closed use is by now; it is released if possible."""
        if use.life is Life.RELEASED or self._try(use, "release", use.engine.try_release):
            return Life.RELEASED
        with suppress(IpcSyncError):  # which was logged just now
            if use.life < Life.DRAINED and use.engine.is_drained():
                return Life.DRAINED
        return max(use.life, Life.DRAINING)

    def _try(self, use: Use, what: str, call: Callable[[], T]) -> T | None:
        """A broken CUDA context, or an event that cannot be opened here, must not keep other events from it.

        In such a context nothing can be released before the process ends. Logged once for each use, since each look
        fails again; then at level debug.
        """
        try:
            return call()
        except IpcSyncError as error:
            level = logging.DEBUG if use.has_failed else logging.WARNING
            log.log(level, "cannot %s the event %r: %s", what, use.engine.name, error)
            use.has_failed = True
            return None
