"""Events as repeated samples show them: how often each is recorded, and for how long its work is unconfirmed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import msgspec
from msgspec.structs import asdict

from ipcsync._wire.messages import EventInfo

_RATE_S = 5.0


class Event(EventInfo, frozen=True, kw_only=True):
    """One event in one sample. `rate` in generations a second, null until two samples have it and once it is finished.

    `label` tells it from the others, also without a name. `pending_s` is for how many seconds `completed` has not grown
    while more was recorded, by the samples; work may be complete for a third of the TTL before the recorder says so.
    `lane` holds [seconds, generation, completed] of the samples of the last minute; the stream sends it once.
    """

    label: str
    rate: float | None
    pending_s: float
    lane: list[tuple[float, int, int]] | msgspec.UnsetType = msgspec.UNSET


class Tracks:
    """All events over time, with at most `samples` samples of each."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._tracks: dict[tuple[str, int, int], _Track] = {}

    def see(self, epoch: str, infos: Sequence[EventInfo], now: float) -> list[Event]:
        """Add a sample of `now`, in seconds: the events in their order. In another epoch everything begins anew."""
        known, self._tracks = self._tracks, {}
        events = []
        for info, label in zip(infos, _labels_of(infos), strict=True):
            key = epoch, info.slot, info.incarnation
            track = self._tracks[key] = known.get(key) or _Track(self._samples)
            events.append(track.see(info, label, now))
        return events


class _Track:
    """One event over time."""

    def __init__(self, samples: int) -> None:
        self._points: deque[tuple[float, int, int]] = deque(maxlen=samples)
        self._pending_since: float | None = None

    def see(self, info: EventInfo, label: str, now: float) -> Event:
        if info.state != "open" or info.completed >= info.generation:
            self._pending_since = None
        elif self._pending_since is None or info.completed != self._points[-1][2]:
            self._pending_since = now
        self._points.append((now, info.generation, info.completed))
        return Event(
            **asdict(info),
            label=label,
            rate=self._rate(now) if info.state == "open" else None,
            pending_s=0.0 if self._pending_since is None else round(now - self._pending_since, 2),
            lane=[(round(at, 2), made, done) for at, made, done in self._points],
        )

    def _rate(self, now: float) -> float | None:
        recent = [point for point in self._points if now - point[0] <= _RATE_S]
        if len(recent) < 2:
            recent = list(self._points)[-2:]
        (began, before, _), (ended, after, _) = recent[0], recent[-1]
        return round((after - before) / (ended - began), 2) if ended > began else None


def _labels_of(infos: Sequence[EventInfo]) -> list[str]:
    """Names, or recorders of unnamed events, and with the slot where two are the same."""
    labels = [
        info.name or (f"(unnamed, of {info.recorder})" if info.recorder else f"(unnamed, slot {info.slot})")
        for info in infos
    ]
    count = Counter(labels)
    return [
        f"{label} (slot {info.slot})" if count[label] > 1 else label for label, info in zip(labels, infos, strict=True)
    ]
