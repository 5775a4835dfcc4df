"""The engines of a client that writes a trace. A client without a trace uses the plain ones, at no cost.

A queued wait counts as released when this process first learns that its point is complete: a thread polls while waits
are queued. That is 1 to 10 ms after the GPU completed it, later for longer waits.
"""

from __future__ import annotations

import heapq
import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import monotonic_ns

from ipcsync._board import BROKEN, Board
from ipcsync._drivers import DriverObject
from ipcsync._engines.core import Wait
from ipcsync._engines.engine import Engine, Guard
from ipcsync._locks import CallLock, under
from ipcsync._trace.layout import Kind, Outcome
from ipcsync._trace.writer import Use, Writer, writer_in
from ipcsync._wire.messages import Attachment
from ipcsync._worker import Worker
from ipcsync.errors import EventClosed, IpcSyncError, RecorderLost, StreamCapturing

log = logging.getLogger("ipcsync")

_RECORD, _WAIT, _PASSED, _RELEASED, _SYNCHRONIZE = map(int, Kind)
_OK, _FAILED, _UNSEEN = map(int, Outcome)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.01
_LINGER_NS = 50_000_000
_NO_RANGE = nullcontext()


class Ranges:
    """NVTX ranges around the calls on one event."""

    def __init__(self, domain: DriverObject, event: str) -> None:
        self._domain = domain
        self._labels = {
            kind: domain.get_event_attributes(message=f"{kind.name.lower()} {event or '(unnamed)'}")
            for kind in (Kind.RECORD, Kind.WAIT, Kind.SYNCHRONIZE)
        }

    @contextmanager
    def around(self, kind: Kind) -> Iterator[None]:
        """A range of this thread, as long as the block."""
        self._domain.push_range(self._labels[kind])
        try:
            yield
        finally:
            self._domain.pop_range()


class Tracing:
    """The shared part of a client's traced engines; the first of them creates the process's file."""

    def __init__(self, directory: Path, client: str) -> None:
        self._directory = directory
        self._client = client
        self._domain = _nvtx_domain()
        self._has_stopped = False

    def engine(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> Traced | None:
        """A traced engine; None if the process's file cannot be created, which is logged once."""
        writer = self._writer()
        if writer is None:
            return None
        engine = Traced(board, guard, attachment, ordinal)
        use = Use(
            board.epoch, attachment.slot, attachment.incarnation, attachment.name, attachment.engine, self._client
        )
        engine.begin_trace(writer, use, Ranges(self._domain, attachment.name) if self._domain is not None else None)
        return engine

    def _writer(self) -> Writer | None:
        if self._has_stopped:
            return None
        try:
            return writer_in(self._directory)
        except OSError as error:  # the disk is full, or the directory gone: the program goes on
            self._has_stopped = True
            log.warning("no trace of %r in %s: %s", self._client, self._directory, error.strerror or error)
            return None


def _nvtx_domain() -> DriverObject:
    """NVTX's domain of ipcsync, None without the `nvtx` package. Without a profiler its ranges do nothing."""
    try:
        return importlib.import_module("nvtx").get_domain("ipcsync")
    except (ImportError, AttributeError):  # AttributeError: some other module of that name
        return None


class Traced(Engine):
    """An engine whose records, waits and synchronizations are written, and shown as NVTX ranges if there are any."""

    def begin_trace(self, writer: Writer, use: Use, ranges: Ranges | None) -> None:
        """Start writing."""
        self.is_traced = True
        self._put = writer.put
        self._use = writer.name(use)
        self._ranges = ranges
        self._queued: deque[tuple[int, int, int]] = deque()  # (generation, stream's id, time) of new waits
        self._held: list[tuple[int, int, int]] = []  # the others, as a heap
        self._learning = CallLock()
        self._releases = _releases
        self.is_watched = False

    def _range(self, kind: Kind) -> AbstractContextManager[None]:
        """An NVTX range around the block, if there are any."""
        return _NO_RANGE if self._ranges is None else self._ranges.around(kind)

    # --- what is written ----------------------------------------------------------------------------------------------

    def record_next(
        self, handle: DriverObject, deadline_ns: int, timeout: float | None, further: Sequence[Wait] | None
    ) -> int:
        """Record the next generation, and write that."""
        since = monotonic_ns()
        with self._range(Kind.RECORD):
            generation: int = super().record_next(handle, deadline_ns, timeout, further)
        self._put(_RECORD, self._use, generation, self.last_stream, since, monotonic_ns())
        return generation

    def queue(
        self,
        handle: DriverObject,
        ordinal: int,
        generation: int,
        timeout: float | None,
        ahead: bool,
        began: int,
        what: str = "wait",
    ) -> int:
        """Queue a wait, and write that; of one that was complete at once too."""
        since = began or monotonic_ns()
        try:
            with self._range(Kind.WAIT):
                stream_id: int = super().queue(handle, ordinal, generation, timeout, ahead, began, what)
        except BaseException as error:
            if what == "wait" or not isinstance(error, StreamCapturing):
                self._put(_WAIT, self._use, generation, 0, since, monotonic_ns(), _FAILED)
            raise
        now = monotonic_ns()
        if not stream_id:
            self._put(_PASSED, self._use, generation, 0, since, now)
        else:
            self._put(_WAIT, self._use, generation, stream_id, since, now)
            self._queued.append((generation, stream_id, now))
            if not self.is_watched:
                self._releases.watch(self)
        return stream_id

    def synchronize(self, generation: int, timeout: float | None = None, began: int = 0) -> None:
        """Block until `generation` is complete."""
        began = began or monotonic_ns()
        try:
            with self._range(Kind.SYNCHRONIZE):
                super().synchronize(generation, timeout, began)
        except BaseException:
            self._put(_SYNCHRONIZE, self._use, generation, 0, began, monotonic_ns(), _FAILED)
            raise
        self._put(_SYNCHRONIZE, self._use, generation, 0, began, monotonic_ns())

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None:
        """Write that a task, not a thread, has waited for `generation` since `began`."""
        self._put(_SYNCHRONIZE, self._use, generation, 0, began, monotonic_ns(), _OK if is_complete else _FAILED)

    # --- releases -----------------------------------------------------------------------------------------------------

    @property
    def has_queued_waits(self) -> bool:
        """Whether any queued wait is not known to be released."""
        return bool(self._queued or self._held)

    def learn_releases(self) -> int:
        """Write the queued waits that are released; returns how many. `try_release` writes the rest of a closed use."""
        return under(self._learning, self._learn)

    def _learn(self) -> int:
        count = 0
        while self._queued:
            heapq.heappush(self._held, self._queued.popleft())
        while self._held and not self.is_closed:  # the lowest generation first: none is complete before it
            generation = self._held[0][0]
            outcome = _OK if generation <= self.known_complete else self._outcome(generation)
            if outcome is None:
                break
            self._write_release(outcome)
            count += 1
        return count

    def _outcome(self, generation: int) -> int | None:
        """How a queued wait for `generation` ended, None if it did not."""
        try:
            return _OK if self.query(generation, 0) else None
        except EventClosed:
            return None if self.is_closed else _UNSEEN
        except RecorderLost:
            return _FAILED
        except IpcSyncError:  # the session or the coordinator is lost; the next call raises it
            return _UNSEEN

    def _write_release(self, outcome: int) -> None:
        generation, stream_id, began = heapq.heappop(self._held)
        self._put(_RELEASED, self._use, generation, stream_id, began, monotonic_ns(), outcome)

    def close(self) -> None:
        """Close this use; releases up to now are written first."""
        self.learn_releases()
        super().close()

    def try_release(self) -> bool:
        """Release everything if no queued wait is pending; the release of each wait is then written."""
        if not super().try_release():
            return False
        under(self._learning, self._write_rest)
        return True

    def _write_rest(self) -> None:
        # Until the coordinator is told, the slot is not reused: its state is still this use's.
        is_known = self.guard.coordinator_is_alive() and self.line.state != BROKEN
        while self._queued:
            heapq.heappush(self._held, self._queued.popleft())
        while self._held:
            self._write_release(_OK if is_known or self._held[0][0] <= self.known_complete else _UNSEEN)


class Releases:
    """The thread that polls which queued waits are released; started with the first, asleep while there is none."""

    def __init__(self) -> None:
        self._lock = CallLock()
        self._engines: dict[Traced, int] = {}  # and when a wait was last queued there
        self._wake = threading.Event()
        self._worker = Worker("ipcsync-trace", lambda: True, self._run)

    def watch(self, engine: Traced) -> None:
        """Poll for this engine's waits, until it has had none for a while."""
        with self._lock:
            self._engines[engine] = monotonic_ns()
            self._worker.ensure()
            self._wake.set()
            engine.is_watched = True

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            self._wake.wait()
            with self._lock:
                engines = list(self._engines)
                if not engines:
                    self._wake.clear()
            learned = sum(self._ask(engine) for engine in engines)
            pause = _FIRST_PAUSE_S if learned else min(1.5 * pause, _LONGEST_PAUSE_S)
            time.sleep(pause)

    def _ask(self, engine: Traced) -> int:
        learned = 0
        try:
            learned = engine.learn_releases()
        except Exception:
            log.exception("the trace cannot tell which waits on %r are released", engine.name)
        now = monotonic_ns()
        with self._lock:
            if engine.has_queued_waits and not engine.is_closed:
                self._engines[engine] = now
            elif now - self._engines[engine] > _LINGER_NS or engine.is_closed:
                # In this order: a thread that queues a wait reads the mark afterwards.
                engine.is_watched = False
                if not engine.has_queued_waits or engine.is_closed:
                    del self._engines[engine]
                else:
                    engine.is_watched = True
        return learned


_releases = Releases()
