"""Rates of events from repeated samples: how often each is recorded, and how long its work is pending."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ipcsync._wire.messages import EventInfo

_RATE_S = 5.0


@dataclass
class Track:
    """One event over time. `points` holds (when, generation, completed) of the last samples, the oldest first."""

    info: EventInfo
    points: deque[tuple[float, int, int]]
    # Records a second over the last few seconds; None after one sample, and for an event that is not open.
    rate: float | None = None
    _pending_since: float | None = field(default=None, repr=False)

    def see(self, info: EventInfo, now: float) -> None:
        """Add a sample."""
        is_pending = info.state == "open" and info.completed < info.generation
        if not is_pending:
            self._pending_since = None
        elif self._pending_since is None or info.completed != self.info.completed:
            self._pending_since = now
        self.info = info
        self.points.append((now, info.generation, info.completed))
        self.rate = self._rate(now) if info.state == "open" else None

    def _rate(self, now: float) -> float | None:
        if len(self.points) < 2:
            return None
        recent = [point for point in self.points if now - point[0] <= _RATE_S]
        first, last = (recent if len(recent) > 1 else list(self.points)[-2:])[0], self.points[-1]
        return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else None

    @property
    def pending_s(self) -> float:
        """Seconds since `completed` last grew, while more was recorded; by the samples.

        The recorder publishes `completed` when it records, synchronizes or closes, and else every third of its TTL: the
        work may have been complete for that long.
        """
        return self.points[-1][0] - self._pending_since if self._pending_since is not None else 0.0


class Tracks:
    """All events over time, with at most `samples` samples of each."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._tracks: dict[tuple[str, int, int], Track] = {}

    def see(self, epoch: str, events: Iterable[EventInfo], now: float) -> list[Track]:
        """Add a sample of `now`, in seconds; returns the tracks of the present events, in their order.

        In another epoch everything begins anew.
        """
        known, self._tracks = self._tracks, {}
        for info in events:
            key = (epoch, info.slot, info.incarnation)
            track = known.get(key) or Track(info, deque(maxlen=self._samples))
            track.see(info, now)
            self._tracks[key] = track
        return list(self._tracks.values())
