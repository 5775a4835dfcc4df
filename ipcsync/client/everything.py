"""Records behind many streams at once: streams of the client's own, each made to wait for the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync._engines import Engine, queued
from ipcsync._engines.queued import Wait
from ipcsync._native import joining
from ipcsync._native.context import OnDevice
from ipcsync._native.stream import Stream, resolve
from ipcsync.client.point import Point
from ipcsync.client.unnamed import UNNAMED_DEPTH, UnnamedEvents
from ipcsync.errors import DriverError
from ipcsync.typing import EngineChoice, StreamLike

_KEPT = 8


class Everything:
    """The two steps of `Client.record_all`: a stream is made to wait for the others, and is recorded on.

    Nothing else is done on such a stream. Thread-safe: two that share one wait for more than they need to.
    """

    def __init__(self, unnamed: UnnamedEvents) -> None:
        self._unnamed = unnamed
        self._kept: dict[int, list[Stream]] = {}  # by context

    def record(
        self,
        joined: Stream,
        waits: Sequence[Wait],
        engine: EngineChoice,
        timeout: float | None,
        after: Sequence[tuple[Engine, int]],
    ) -> Point:
        """Record on a stream that `join` gave, behind the waits that it gave."""
        key = (joined.stream_id, 0, joined.device_index, engine)
        event = self._unnamed.events.get(key)
        if event is None or event.is_lost:
            event = self._unnamed.take(key, UNNAMED_DEPTH)
        return event._record_on(joined._handle, joined.device_index, timeout, after, waits)

    def join(self, ordinal: int, streams: Sequence[Stream] | None) -> tuple[Stream, list[Wait]]:
        """A stream behind all that was submitted to `streams` so far, or to a context of device `ordinal` for None.

        And the waits that all of that stands behind.
        """
        if streams is None:
            joined = self._take(ordinal, must_be_idle=False)
            joining.wait_for_all(joined)
            return joined, queued.everything()
        joined = self._take(ordinal, must_be_idle=True)
        joining.wait_for_each(joined, streams)
        # Looked at behind the driver's calls: a wait that one of them covers was told before it was queued.
        return joined, [wait for stream in streams for wait in queued.on_stream(stream._handle, stream._index)]

    def _take(self, ordinal: int, *, must_be_idle: bool) -> Stream:
        """One that waits for nothing any more if there is one: one that does may do so for ever, a recorder being dead.

        If there is none, a new one, which ends with its record unless few are kept. For what is behind everything, and
        so behind these streams too, one that waits is as good.
        """
        with OnDevice(ordinal):
            kept = self._kept.setdefault(int(unwrap(_drivers.load().cuCtxGetCurrent(), "cuCtxGetCurrent")), [])
            try:
                idle = next((stream for stream in kept if stream.query()), None)
            except DriverError:  # their context was destroyed, and another one has its address
                kept.clear()
                idle = None
            if idle is not None:
                return idle
            if kept and not must_be_idle:
                return kept[-1]
            made = Stream(ordinal)
        if len(kept) < _KEPT:
            kept.append(made)
        return made


def chosen(streams: Iterable[StreamLike | None] | None) -> list[Stream] | None:
    """The streams that the caller of `record_all` named. ValueError for none at all, TypeError for another type."""
    if streams is None:
        return None
    named = [resolve(stream) for stream in streams]
    if not named:
        raise ValueError("streams is empty: a point behind nothing would be complete at once; None means all of them")
    return named
