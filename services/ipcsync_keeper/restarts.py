"""When the next coordinator is started: after a death, or for new code."""

from __future__ import annotations

from collections.abc import Mapping

from ipcsync_keeper.config import FIXED

_QUICK_S = 10.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MOST_FAILURES = 3


class Restarts:
    """When the next coordinator is started, and whether another one is at all: a pure state machine; times in seconds.

    An end within 10 s and without a reply is a failure: the next start waits, longer each time. Three failures in a row
    end it. An end by SIGKILL does not count as one, since it comes from outside.
    """

    def __init__(self) -> None:
        self.at = 0.0  # when the next one is started
        self._fruitless = self._failures = 0

    def see_end(self, lived_s: float, now: float, *, has_replied: bool, is_own_doing: bool) -> bool:
        """Note the end of a coordinator; returns whether to give up."""
        if lived_s >= _QUICK_S or has_replied:
            self._fruitless = self._failures = 0
            self.at = now
        else:
            self._failures += is_own_doing
            self.see_none_started(now)
        return self._failures >= _MOST_FAILURES

    def see_none_started(self, now: float) -> None:
        """Note that none could be started, or that it ended before its greeting: neither counts as a failure."""
        self.at = now + min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(self._fruitless, 10))
        self._fruitless += 1


def differences(first: Mapping[str, object], last: Mapping[str, object], new: Mapping[str, object]) -> str:
    """What a reload to `new` settings changes of the last ones, and what it cannot, by the first; empty for nothing."""
    taken, left = (
        ", ".join(f"{name} {old[name]} -> {new[name]}" for name in sorted(names & old.keys()) if old[name] != new[name])
        for old, names in ((last, new.keys() - FIXED), (first, new.keys() & FIXED))
    )
    return "; ".join(filter(None, (taken, left and f"not before a restart: {left}")))
