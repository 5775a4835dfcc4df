"""How patient a keeper is with coordinators that end. Told the time, in seconds."""

from __future__ import annotations

_QUICK_S = 10.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MOST_FAILURES = 3


class Restarts:
    """When the next coordinator is started, and whether there is any sense in another one.

    An end within 10 s and without a reply came to nothing: the next start waits, longer each time. Three such ends in a
    row that were the coordinator's own doing are enough. SIGKILL is somebody else's, and says nothing of what is tried.
    """

    def __init__(self) -> None:
        self.at = 0.0  # when the next one is started
        self._fruitless = self._failures = 0

    def see_end(self, lived_s: float, now: float, *, has_replied: bool, is_own_doing: bool) -> bool:
        """A coordinator ended; whether the next one would fare as those before."""
        if lived_s >= _QUICK_S or has_replied:
            self._fruitless = self._failures = 0
            self.at = now
        else:
            self._failures += is_own_doing
            self.see_none_started(now)
        return self._failures >= _MOST_FAILURES

    def see_none_started(self, now: float) -> None:
        """The machine has no process to spare, which is nobody's failure."""
        self.at = now + min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(self._fruitless, 10))
        self._fruitless += 1
