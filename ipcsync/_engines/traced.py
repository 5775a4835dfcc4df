"""The engines of a client that writes a trace. A client without a trace uses the plain ones, at no cost.

A queued wait counts as released when this process first learns that its point is complete: a thread polls while waits
are queued. That is 1 to 10 ms after the GPU completed it, later for longer waits.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from time import monotonic_ns

from ipcsync._board import BROKEN, Board
from ipcsync._drivers import DriverObject
from ipcsync._engines.core import Wait
from ipcsync._engines.engine import Engine, Guard
from ipcsync._shared import items_of
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


class Range:
    """An NVTX range of this thread, as long as the block. Without a profiler it does nothing."""

    def __init__(self, domain: DriverObject, label: str) -> None:
        self._domain = domain
        self._label = domain.get_event_attributes(message=label)

    def __enter__(self) -> None:
        self._domain.push_range(self._label)

    def __exit__(self, *_: object) -> None:
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
        use = Use(
            board.epoch, attachment.slot, attachment.incarnation, attachment.name, attachment.engine, self._client
        )
        return Traced(board, guard, attachment, ordinal, writer, use, self._domain)

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
    """NVTX's domain of ipcsync, None without the `nvtx` package."""
    try:
        return importlib.import_module("nvtx").get_domain("ipcsync")
    except (ImportError, AttributeError):  # AttributeError: some other module of that name
        return None


class Traced(Engine):
    """An engine whose records, waits and synchronizations are written, and shown as NVTX ranges if there are any."""

    def __init__(
        self,
        board: Board,
        guard: Guard,
        attachment: Attachment,
        ordinal: int,
        writer: Writer,
        use: Use,
        domain: DriverObject | None,
    ) -> None:
        super().__init__(board, guard, attachment, ordinal)
        self.is_traced = True
        self._put = writer.put
        self._use = writer.name(use)
        name = use.event or "(unnamed)"
        self._ranges: dict[Kind, AbstractContextManager[None]] = {
            kind: nullcontext() if domain is None else Range(domain, f"{kind.name.lower()} {name}")
            for kind in (Kind.RECORD, Kind.WAIT, Kind.SYNCHRONIZE)
        }
        self._queued: set[tuple[int, int, int]] = set()
        """The waits that are not known to be released: generation, the stream's id, when they were queued."""

    # --- what is written ----------------------------------------------------------------------------------------------

    def record_next(
        self, handle: DriverObject, deadline_ns: int, timeout: float | None, further: Sequence[Wait] | None
    ) -> int:
        """Record the next generation, and write that."""
        since = monotonic_ns()
        with self._ranges[Kind.RECORD]:
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
            with self._ranges[Kind.WAIT]:
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
            self._queued.add((generation, stream_id, now))
            _releases.watch(self)
        return stream_id

    def synchronize(self, generation: int, timeout: float | None = None, began: int = 0) -> None:
        """Block until `generation` is complete."""
        began = began or monotonic_ns()
        try:
            with self._ranges[Kind.SYNCHRONIZE]:
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
        return bool(self._queued)

    def learn_releases(self) -> bool:
        """Write the queued waits that are released; whether there were any. `try_release` writes the rest."""
        has_learned = False
        for wait in sorted(self._queued.copy()):  # the lowest generation first: none is complete before it
            outcome = None if self.is_closed else self._outcome(wait[0])
            if outcome is None:
                break
            self._write_release(wait, outcome)
            has_learned = True
        return has_learned

    def _outcome(self, generation: int) -> int | None:
        """How a queued wait for `generation` ended, None if it did not."""
        try:
            return _OK if generation <= self.known_complete or self.query(generation, 0) else None
        except EventClosed:
            return None if self.is_closed else _UNSEEN
        except RecorderLost:
            return _FAILED
        except IpcSyncError:  # the session or the coordinator is lost; the next call raises it
            return _UNSEEN

    def _write_release(self, wait: tuple[int, int, int], outcome: int) -> None:
        with suppress(KeyError):  # another thread has written it
            self._queued.remove(wait)
            self._put(_RELEASED, self._use, *wait, monotonic_ns(), outcome)

    def close(self) -> None:
        """Close this use; releases up to now are written first."""
        self.learn_releases()
        super().close()

    def try_release(self) -> bool:
        """Release everything if no queued wait is pending; the release of each wait is then written."""
        if not super().try_release():
            return False
        # Until the coordinator is told, the slot is not reused: its state is still this use's.
        is_known = self.guard.coordinator_is_alive() and self.line.state != BROKEN
        for wait in sorted(self._queued.copy()):
            self._write_release(wait, _OK if is_known or wait[0] <= self.known_complete else _UNSEEN)
        return True


class Releases:
    """The thread that polls which queued waits are released: while there are any, and for a little longer."""

    def __init__(self) -> None:
        self._engines: dict[Traced, int] = {}  # and when a wait was last queued there
        self._pause_s = _FIRST_PAUSE_S
        self._worker = Worker("ipcsync-trace", lambda: bool(self._engines), self._look)

    def watch(self, engine: Traced) -> None:
        """Poll for this engine's waits, until it has had none for a while."""
        self._engines[engine] = monotonic_ns()
        self._worker.ensure()

    def _look(self) -> None:
        has_learned = False
        for engine, since in items_of(self._engines):
            try:
                has_learned = engine.learn_releases() or has_learned
            except Exception:
                log.exception("the trace cannot tell which waits on %r are released", engine.name)
            if engine.is_closed or (not engine.has_queued_waits and monotonic_ns() - since > _LINGER_NS):
                self._engines.pop(engine, None)
                if engine.has_queued_waits and not engine.is_closed:  # queued just now: before it was taken out
                    self.watch(engine)
        self._pause_s = _FIRST_PAUSE_S if has_learned else min(1.5 * self._pause_s, _LONGEST_PAUSE_S)
        time.sleep(self._pause_s)


_releases = Releases()
