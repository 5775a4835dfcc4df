"""Records behind many streams at once: the client has streams of its own, and makes one wait for all the others."""

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

    Such a stream is used for nothing else. Thread-safe: two threads may share one, whose points then wait for more than
    they have to.
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
        """Record on the stream that `join` returned, behind the waits that it returned."""
        key = (joined.stream_id, 0, joined.device_index, engine)
        event = self._unnamed.events.get(key)
        if event is None or event.is_lost:
            event = self._unnamed.take(key, UNNAMED_DEPTH)
        return event._record_on(joined._handle, joined.device_index, timeout, after, waits)

    def join(self, ordinal: int, streams: Sequence[Stream] | None) -> tuple[Stream, list[Wait]]:
        """A stream that waits for all work submitted to `streams` so far, and the waits that this work stands behind.

        None means all streams of a context of device `ordinal`.
        """
        if streams is None:
            joined = self._take(ordinal, must_be_idle=False)
            joining.wait_for_all(joined)
            return joined, queued.everything()
        joined = self._take(ordinal, must_be_idle=True)
        joining.wait_for_each(joined, streams)
        # Read after the driver's calls: a wait is listed before it is queued, so all that they cover are in the list.
        return joined, [wait for stream in streams for wait in queued.on_stream(stream._handle, stream._index)]

    def _take(self, ordinal: int, *, must_be_idle: bool) -> Stream:
        """An idle stream if there is one, else a new one, which is dropped after its record if enough are kept.

        A stream that still waits may do so for ever, since a recorder may be dead. It serves as well as an idle one for
        a record of everything, which stands behind the kept streams too.
        """
        with OnDevice(ordinal) as inside, inside:
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
    """The streams that the caller of `record_all` named. ValueError for an empty list, TypeError for another type."""
    if streams is None:
        return None
    named = [resolve(stream) for stream in streams]
    if not named:
        raise ValueError("streams is empty: a point behind nothing would be complete at once; None means all of them")
    return named
