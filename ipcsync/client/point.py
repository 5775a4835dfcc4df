"""Points, each one generation of one shared event: every wait is for a point, or for many."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from ipcsync._deadline import deadline_of, left_of, pauses
from ipcsync._engines import Engine
from ipcsync._engines.core import PointBase, shortened
from ipcsync._engines.engine import steps
from ipcsync._native import fork
from ipcsync._native.context import OnDevice, call
from ipcsync._native.pinned import take
from ipcsync._native.stream import Stream, stream_handle
from ipcsync._session.attachments import AttachmentRef
from ipcsync._session.session import is_here, living, session_of
from ipcsync._session.waits import Pending
from ipcsync._threads import CallLock, under
from ipcsync._wire import codec as wire
from ipcsync._wire.codec import PointKey
from ipcsync.client._twins import PointView, several
from ipcsync.errors import ClientClosed, EngineMismatch, EventClosed, RecorderLost, SessionLost, WaitTimeout
from ipcsync.typing import StreamLike

_SLICE_S = 0.05
_PASSING_S = 1.0  # within which streams pass each other, or never do
_STREAMS = 3  # that are asked whether they do
OVER = RecorderLost, SessionLost, ClientClosed, EventClosed  # what ends a point's use
LEAST_S = 0.05  # for a point's first question to the coordinator, also of a call that only looks

_asking = CallLock()
_passing: set[int] = set()  # contexts, whose streams pass each other


@shortened("wait query synchronize")
class Point(PointBase, PointView):
    """A record of a shared event, made already or not. Immutable and hashable; equal points are the same record.

    `bytes(point)` is 48 bytes to send in a message; `client.point(data)` makes a point of them, in any process with a
    client of the same coordinator. It pickles too: an unpickled point belongs to the process's client of that
    coordinator. Its use raises ConnectError if it has none, StalePoint if all are of one other without a bridge.

    Each use raises EventClosed if the event was closed here, CoordinatorLost or SessionExpired if the client's session
    is over, and ForkedProcessError in a forked child. The first use of an unpickled one also raises as `Client.point`.
    """

    __slots__ = ("__weakref__", "_unbound")

    _attached: AttachmentRef | None
    _unbound: PointKey  # if `_attached` is None: the point was unpickled and not used yet

    def _bound(self, longest_s: float | None = None) -> AttachmentRef:
        """The attachment, asked for at the first use: within the session's timeout, and `longest_s` if that is less.

        Another node has the session's timeout in any case: shorter, its silence would be taken for its loss.
        """
        if self._attached is None:
            key = self._unbound
            session = session_of(key.epoch)
            is_short = longest_s is not None and key.epoch == session.epoch
            seconds = min(max(longest_s or 0, LEAST_S), session.timeout) if is_short else None
            self._attached = session.attach(key, seconds)
        return self._attached

    def _bound_within(self, timeout: float | None) -> tuple[AttachmentRef, float | None]:
        """The attachment, and what that leaves of a wait's timeout."""
        if self._attached is not None:
            return self._attached, timeout
        deadline = deadline_of(timeout)
        return self._bound(timeout), left_of(deadline)

    @property
    def _key(self) -> PointKey:
        if self._attached is None:
            return self._unbound
        return PointKey(*self._attached.engine.origin, self._generation)

    def wait(self, stream: StreamLike | None = None, *, timeout: float | None = None, ahead: bool = False) -> None:
        """Have all work submitted to `stream` from now on wait for this point, without waiting for it on the host.

        The host blocks only until the record is made, at most `timeout` seconds (None: as long as recorder and
        coordinator live). `ahead=True` does not block even for that, on the `timeline` engine only; it is dangerous: a
        queued wait blocks its stream, and every stream that shares a hardware queue with it, until the recorder
        records, closes or dies. So it is refused for an event that this process records, with chains="session", and
        where a few streams of its context, asked at the first such call, do not pass each other
        (CUDA_DEVICE_MAX_CONNECTIONS=1).

        If the recorder dies after its record, a queued wait of the `event` engine may block the stream's later work for
        ever, also if this call raises: go on with another stream.

        Raises RecorderLost if the record will never come or never counts, WaitTimeout, StreamCapturing for a stream
        that is being captured, EngineMismatch for `ahead` where it is refused, TypeError for an argument that is not
        a stream, ValueError for a timeout that is negative or NaN.
        """
        attached, timeout = self._bound_within(timeout)
        engine = attached.engine
        if ahead:
            engine.check()
            if isinstance(engine, Engine) and engine.kind != "event":  # else its use is over, or the engine says more
                check_recorder(engine)
                check_passing(stream_handle(stream)[1])
        engine.wait(self._generation, stream, timeout, ahead)

    def query(self) -> bool:
        """Whether it is complete; False also while it is not recorded. Raises RecorderLost if it never will be."""
        return self._bound().engine.query(self._generation)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it is complete, with the GIL released, at most `timeout` seconds (None: as long as it can be).

        Raises RecorderLost if it never will be, WaitTimeout, and ValueError for a timeout that is negative or NaN.
        """
        attached, timeout = self._bound_within(timeout)
        attached.engine.synchronize(self._generation, timeout)

    def add_done_callback(self, fn: Callable[[Point], object]) -> None:
        """Have `fn(point)` called once on a thread of the client, when the point is complete or can never be.

        `exception()` says which, and why. What `fn` raises is logged. QuotaExceeded if no thread can be started.
        """
        if not callable(fn):
            raise TypeError(f"a callback is callable, but got {type(fn).__name__}")
        attached = self._bound()
        attached.engine.check()
        attached.waits.add(Pending(attached.engine, self._generation), lambda _: fn(self), is_callback=True)

    def exception(self) -> RecorderLost | SessionLost | ClientClosed | EventClosed | None:
        """Why the point can never be complete, or not be used here any more; None if it is, or still can be.

        RecorderLost, SessionLost, ClientClosed and EventClosed are returned. What says nothing of the point is raised,
        as WaitTimeout if the coordinator does not answer an unpickled point's first use.
        """
        try:
            self._raise_if_over()
        except OVER as error:
            return error
        return None

    def _raise_if_over(self) -> None:
        if not self.query():
            self._bound().engine.check_liveness(self._generation)  # the recorder may have died this moment

    def __bytes__(self) -> bytes:
        fork.check()
        return wire.pack(self._key)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Point) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        name = self._attached.engine.name if self._attached is not None else ""
        return f"<ipcsync.Point {name or f'slot {self._key.slot}'} generation={self._generation}>"

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return _unpickle, (bytes(self),)


def _unpickle(data: bytes) -> Point:
    point = Point.__new__(Point)
    point._attached = None
    point._unbound = wire.unpack(data)
    point._generation = point._unbound.generation
    return point


def bound(points: Iterable[Point], timeout: float | None) -> tuple[list[tuple[Engine, int]], float | None]:
    """What each point is to an engine, and what is left of a timeout. Raises as its use; TypeError for what is none."""
    found: list[tuple[Engine, int]] = []
    for point in several(points, "after", "points"):
        if not isinstance(point, Point):
            raise TypeError(f"after takes points, but got {type(point).__name__}")
        attached, timeout = point._bound_within(timeout)
        attached.engine.check()
        found.append((attached.engine, point.generation))
    return found, timeout


def looks(engine: Engine, timeout: float | None) -> Iterator[tuple[bool, float]]:
    """Whether a lost recorder's GPU work has ended, look by look, each with the seconds to sleep behind it.

    It ends after `timeout` seconds, and where that is never known. Raises what ends any wait.
    """
    for pause_s in pauses(timeout, 0.001, 0.02):  # the kernel's wait for a file lock has no timeout
        is_over = engine.recorder_is_over()
        engine.guard.check_liveness()
        engine.check()  # after the look: it proves that the words were this use's
        if is_over is None:
            return
        yield is_over, pause_s


# --- waits ahead of their records -------------------------------------------------------------------------------------


def check_recorder(engine: Engine) -> None:
    """Raise EngineMismatch if this process records the event, or each of its records depends on all waits."""
    if any(session.lease.depends_on_all and not session.is_closed for session in living.copy()):
        raise EngineMismatch("ahead=True is not for chains='session': a record would depend on what is made behind it")
    if engine.is_recorder or is_here(engine.board.epoch, engine.line.recorder):
        raise EngineMismatch(
            f"{engine.label} is recorded in this process, where a stream that waits ahead may share a hardware queue "
            "with the one that is to record, and hold it back: record first, and wait without ahead=True"
        )


def check_passing(ordinal: int) -> None:
    """Raise EngineMismatch if streams of the current context of device `ordinal` do not pass each other.

    Streams share hardware queues, and in one queue what waits for a word stops everything behind it. The environment's
    CUDA_DEVICE_MAX_CONNECTIONS does not tell how many there are, so three streams are asked; once, if they do.
    """
    with OnDevice(ordinal) as inside, inside:
        here = int(call("cuCtxGetCurrent"))
        if here in _passing or under(_asking, _pass_each_other, ordinal):
            _passing.add(here)
            return
    raise EngineMismatch(
        "ahead=True needs streams that pass one that waits, and those of this context share a hardware queue: set "
        "CUDA_DEVICE_MAX_CONNECTIONS to 8 or more before CUDA is initialised"
    )


def _pass_each_other(ordinal: int) -> bool:
    """Each stream waits for a word that the next one writes, so the first goes on only if all pass each other."""
    streams = [Stream(ordinal) for _ in range(_STREAMS)]
    row = [take(ordinal, "lane", 8) for _ in streams]
    cells = [ctypes.c_uint64.from_address(host) for host, _ in row]
    try:
        for number, stream in enumerate(streams):
            if number < _STREAMS - 1:
                call("cuStreamWaitValue64", stream._handle, row[number + 1][1], 1, 0)
            call("cuStreamWriteValue64", stream._handle, row[number][1], 1, 0)
        for pause_s in pauses(_PASSING_S, 50e-6, 50e-6):
            if cells[0].value:
                break
            time.sleep(pause_s)
        return bool(cells[0].value)
    finally:
        for cell in cells:
            cell.value = 1


# --- one wait for many points, for example of all readers of a buffer -------------------------------------------------


def synchronize_all(
    points: Iterable[Point], *, timeout: float | None = None, lost: Literal["raise", "skip"] = "raise"
) -> list[Point]:
    """Block until every point is complete, at most `timeout` seconds in all (None: as long as that can be).

    `lost="raise"` raises RecorderLost as soon as one of them can never be complete, whichever it is; `lost="skip"`
    leaves such points out. Returns the points that were left out, in order. Their recorder's work may still be under
    way: see `RecorderLost.over` before you reuse its memory.

    Raises as `Point.synchronize`, WaitTimeout for the first that is not complete, ValueError for an invalid `lost`.
    """
    return _each(points, lambda point, seconds: point.synchronize(seconds), timeout, lost)


def wait_all(
    points: Iterable[Point],
    stream: StreamLike | None = None,
    *,
    timeout: float | None = None,
    lost: Literal["raise", "skip"] = "raise",
) -> list[Point]:
    """Have all work submitted to `stream` from now on wait for every point.

    The host blocks only until each record is made, at most `timeout` seconds in all. `lost` and the result are as in
    `synchronize_all`. If it raises, the stream may wait for some of the points already. If a recorder dies once the
    driver has the wait, also with `lost="skip"`, the stream waits for lost work: its next record raises
    RecorderLost, until `Client.resume`. Wait for such points on the host instead, by `synchronize_all`.

    Raises as `Point.wait`, WaitTimeout for the first that is not recorded, ValueError for an invalid `lost`.
    """
    return _each(points, lambda point, seconds: point.wait(stream, timeout=seconds), timeout, lost)


def _each(
    points: Iterable[Point], wait: Callable[[Point, float], object], timeout: float | None, lost: str
) -> list[Point]:
    if lost not in ("raise", "skip"):
        raise ValueError(f"lost is 'raise' or 'skip', but got {lost!r}")
    deadline = deadline_of(timeout)
    asked = several(points, "points", "ipcsync.Points")
    for point in asked:
        if not isinstance(point, Point):
            hint = ": an asynchronous client has methods of the same name"
            name = type(point).__name__
            raise TypeError(f"points are ipcsync.Points, but got {name}{hint if name == 'AsyncPoint' else ''}")
    skipped = set[int]()  # by their ids
    for place, point in enumerate(asked):
        since = time.monotonic_ns()
        while id(point) not in skipped:
            left_s = left_of(deadline)
            seconds = min(_SLICE_S, left_s)
            try:
                steps.since = since
                wait(point, seconds)
                break
            except RecorderLost:
                if lost == "raise":
                    raise
                skipped.add(id(point))
            except WaitTimeout as error:
                if left_s <= _SLICE_S:
                    text = str(error).replace(f"within {seconds} s", f"within {timeout} s")
                    raise WaitTimeout(text, event=error.event, generation=error.generation, timeout=timeout) from None
                skipped.update(_lost(asked[place + 1 :], deadline, lost))  # while this one is still to come
            finally:
                steps.since = 0
    return [point for point in asked if id(point) in skipped]


def _lost(points: Iterable[Point], deadline_ns: int, lost: str) -> Iterator[int]:
    """Those that can never be complete, by their ids. Once the coordinator is silent, no further one is attached to."""
    answers = True
    for point in points:
        left_s = left_of(deadline_ns)
        if point._attached is None and not (answers and left_s):
            continue
        try:
            point._bound(min(_SLICE_S, left_s))
            point._raise_if_over()
        except WaitTimeout:
            answers = False
        except RecorderLost:
            if lost == "raise":
                raise
            yield id(point)
