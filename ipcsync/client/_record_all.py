"""Records behind many streams at once: the client has streams of its own, and makes one wait for all the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ipcsync import _drivers
from ipcsync._drivers import unwrap
from ipcsync._engines import Engine, queued
from ipcsync._engines.core import Wait
from ipcsync._native import joining
from ipcsync._native.context import OnDevice
from ipcsync._native.stream import Stream, resolve
from ipcsync.client._opening import DEFAULT_DEPTH
from ipcsync.client._unnamed import UnnamedEvents
from ipcsync.client.point import Point
from ipcsync.errors import DriverError
from ipcsync.typing import EngineChoice, StreamLike

_KEPT = 8


class Everything:
    """The two steps of `Client.record_all`: a stream is made to wait for the others, and is recorded on.

    Such a stream is used for nothing else, and for one record at a time: what another thread makes it wait for may
    never be complete. Thread-safe.
    """

    def __init__(self, unnamed: UnnamedEvents) -> None:
        self._unnamed = unnamed
        self._kept: dict[int, list[Stream]] = {}  # by context; those that no record uses now
        self._homes: dict[int, list[Stream]] = {}  # of those that one does, by their addresses

    def record(
        self,
        joined: Stream,
        waits: list[Wait],
        engine: EngineChoice,
        timeout: float | None,
        after: Sequence[tuple[Engine, int]],
    ) -> Point:
        """Record on the stream that `join` returned, behind the waits that it returned."""
        try:
            key = (joined.stream_id, 0, joined.device_index, engine)
            event = self._unnamed.events.get(key)
            if event is None or event.is_lost:
                event = self._unnamed.take(key, DEFAULT_DEPTH)
            return event._record_on(joined._handle, joined.device_index, timeout, after, waits)
        finally:
            self._give_back(joined)

    def _give_back(self, joined: Stream) -> None:
        home = self._homes.pop(joined.stream_id, None)
        if home is not None and len(home) < _KEPT:
            home.append(joined)

    def join(self, ordinal: int, streams: Sequence[Stream] | None) -> tuple[Stream, list[Wait]]:
        """A stream that waits for all work submitted to `streams` so far, and the waits that this work stands behind.

        None means all streams of a context of device `ordinal`.
        """
        joined = self._take(ordinal, must_be_idle=streams is not None)
        try:
            # The waits are read after the driver's calls: each is listed before it is queued, so all that these calls
            # cover are in the list.
            if streams is None:
                joining.wait_for_all(joined)
                return joined, queued.latest(None)
            joining.wait_for_each(joined, streams)
            keys = {queued.list_of(stream._handle, stream._index, "record") for stream in streams}
            return joined, [wait for key in keys for wait in queued.latest(key)]
        except BaseException:
            self._give_back(joined)
            raise

    def _take(self, ordinal: int, *, must_be_idle: bool) -> Stream:
        """An idle stream if there is one, else a new one, which is dropped after its record if enough are kept.

        Until `record` gives it back, no other call gets it.

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
            taken = idle if idle is not None or must_be_idle or not kept else kept[-1]
            if taken is None or not _take_out(kept, taken):
                taken = Stream(ordinal)
        self._homes[taken.stream_id] = kept
        return taken


def _take_out(kept: list[Stream], stream: Stream) -> bool:
    """Whether the stream was still there: another thread may have been first."""
    try:
        kept.remove(stream)
    except ValueError:
        return False
    return True


def chosen(streams: Iterable[StreamLike | None] | None) -> list[Stream] | None:
    """The streams that the caller of `record_all` named. ValueError for an empty list, TypeError for another type."""
    if streams is None:
        return None
    named = [resolve(stream) for stream in streams]
    if not named:
        raise ValueError("streams is empty: a point behind nothing would be complete at once; None means all of them")
    return named
