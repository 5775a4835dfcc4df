"""How slow this machine is just now: what a wake-up of another process takes, measured all the time beside a test.

News of a death pass through a dozen processes and threads, each of which the machine has to wake. So what a promise
bounds by a time on a machine of its own takes longer on a busy one by as much as that many wake-ups take there. A call
that has a timeout passes through few.
"""

from __future__ import annotations

import subprocess
import threading
import time

from tests.kit.until import until

_WAKE_UPS = 24  # of those that news of a death take, twice as many
FEW_WAKE_UPS = 4
_PERIOD_S = 0.02
_LEAST_S = 0.3  # two cores, shared with others


class Machine:
    """A process that is woken again and again, and how long each of that took."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._trips: list[tuple[float, float]] = []  # when each ended, and how long it took
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        there, back = self._process.stdin, self._process.stdout
        assert there is not None
        assert back is not None
        while not self._is_over.is_set():
            due = time.monotonic() + _PERIOD_S
            self._is_over.wait(_PERIOD_S)
            there.write(b"x")
            back.read(1)
            now = time.monotonic()
            self._trips.append((now, now - due))  # with this thread's own wake-up

    def allowance(self, since: float, wake_ups: int = _WAKE_UPS) -> float:
        """Seconds that what happened since then may have taken longer than on a machine of its own."""
        now = time.monotonic()
        until(lambda: self._trips and self._trips[-1][0] > now, "a wake-up")  # one under way knows of a pause just over
        worst = max((took for ended, took in self._trips if ended >= since), default=0.0)
        return max(_LEAST_S, wake_ups * worst)

    def bound(self, seconds: float, since: float) -> float:
        """What a promise of so many seconds is here and now, for what happened since then."""
        return seconds + self.allowance(since)

    def limit(self, seconds: float, since: float, wake_ups: int = _WAKE_UPS) -> float:
        """The same for a bound that has some room in it: more than that only on a machine that is slow."""
        return seconds - _LEAST_S + self.allowance(since, wake_ups)

    def close(self) -> None:
        """End it."""
        self._is_over.set()
        self._thread.join()
        self._process.kill()
        self._process.communicate()
