"""Metrics of requests: how many, how they ended, and how long they took."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, defaultdict

from ipcsync._logs import fields, is_round
from ipcsync.errors import IpcSyncError, ProtocolError

log = logging.getLogger("ipcsync.coordinator")

BOUNDS_S = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 500e-3, 1.0)
"""Upper bounds, in seconds, of the buckets for a request's time."""


class Metrics:
    """Counts of requests and refusals, of results by operation, and a histogram of the time that each frame took."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter({"pidfd": 0, "ttl": 0})
        self.resyncs = 0
        self.results: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By operation: "ok", the name of an error, "late" or "internal"."""
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def count_refusal(self, error: IpcSyncError, op: str = "") -> None:
        """Count a refused request, with its operation if that is known."""
        code = error.code if isinstance(error, ProtocolError) else ""
        self.refusals[code or type(error).__name__] += 1
        if op:
            self.results[op][type(error).__name__] += 1

    def refuse(self, reason: str, **more: object) -> None:
        """Count a refusal that is of no request, and log some of them."""
        self.refusals[reason] += 1
        if is_round(self.refusals[reason]):
            log.warning("refused", extra=fields(reason=reason, count=self.refusals[reason], **more))

    def observe(self, seconds: float) -> None:
        """Add the time that a frame took, valid or not."""
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def stats(self) -> dict[str, object]:
        """All metrics, for `Client.stats`; a latency's counts are not cumulative, the last is above every bound."""
        return {
            "requests": dict(self.requests),
            "refusals": dict(self.refusals),
            "deaths": dict(self.deaths),
            "resyncs": self.resyncs,
            "results": {op: dict(counter) for op, counter in self.results.items()},
            "latency": {"bounds_s": list(BOUNDS_S), "counts": list(self._buckets), "sum_s": self._sum_s},
        }
