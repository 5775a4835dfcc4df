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


class Tracing:
    """The shared part of a client's traced engines; the first of them creates the process's file."""

    def __init__(self, directory: Path, client: str) -> None:
        self._directory = directory
        self._client = client
        self._has_stopped = False

    def engine(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> Engine:
        """A traced engine; a plain one if the process's file cannot be created, which is logged once."""
        try:
            if not self._has_stopped:
                return Traced(board, guard, attachment, ordinal, writer_in(self._directory), self._client)
        except OSError as error:  # the disk is full, or the directory gone: the program goes on
            self._has_stopped = True
            log.warning("no trace of %r in %s: %s", self._client, self._directory, error.strerror or error)
        return Engine(board, guard, attachment, ordinal)


def _ranges(event: str) -> dict[Kind, AbstractContextManager[object]]:
    """For each kind of call a block that is an NVTX range; it does nothing without the `nvtx` package or a profiler."""
    kinds = (Kind.RECORD, Kind.WAIT, Kind.SYNCHRONIZE)
    try:
        annotate = importlib.import_module("nvtx").annotate
    except (ImportError, AttributeError):  # AttributeError: some other module of that name
        return dict.fromkeys(kinds, nullcontext())
    return {kind: annotate(f"{kind.name.lower()} {event}", domain="ipcsync") for kind in kinds}


class Traced(Engine):
    """An engine whose records, waits and synchronizations are written, and shown as NVTX ranges if there are any."""

    def __init__(
        self,
        board: Board,
        guard: Guard,
        attachment: Attachment,
        ordinal: int,
        writer: Writer,
        client: str,
    ) -> None:
        super().__init__(board, guard, attachment, ordinal)
        name, kind = attachment.name, attachment.engine
        self.is_traced = True
        self._use = writer.name(Use(board.epoch, attachment.slot, attachment.incarnation, name, kind, client))
        self._put = writer.put
        self._ranges = _ranges(name or "(unnamed)")
        self.queued: set[tuple[int, int, int]] = set()
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
            self.queued.add((generation, stream_id, now))
            _releases.watch(self)
        return stream_id

    def synchronize(self, generation: int, timeout: float | None = None, began: int = 0) -> None:
        """Block until `generation` is complete."""
        began = began or monotonic_ns()
        is_complete = False
        try:
            with self._ranges[Kind.SYNCHRONIZE]:
                super().synchronize(generation, timeout, began)
            is_complete = True
        finally:
            self.synchronized(generation, began, is_complete=is_complete)

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None:
        """Write that a thread, or a task, has waited for `generation` since `began`."""
        self._put(_SYNCHRONIZE, self._use, generation, 0, began, monotonic_ns(), _OK if is_complete else _FAILED)

    # --- releases -----------------------------------------------------------------------------------------------------

    def learn_releases(self) -> bool:
        """Write the queued waits that are released; whether there were any. `try_release` writes the rest."""
        has_learned = False
        for wait in sorted(self.queued.copy()):  # the lowest generation first: none is complete before it
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
            self.queued.remove(wait)
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
        for wait in sorted(self.queued.copy()):
            self._write_release(wait, _OK if is_known or wait[0] <= self.known_complete else _UNSEEN)
        return True


class Releases:
    """The thread that polls which queued waits are released: while there are any, and for a little longer."""

    def __init__(self) -> None:
        self._engines: set[Traced] = set()
        self._until = 0
        self._pause_s = _FIRST_PAUSE_S
        self._worker = Worker("ipcsync-trace", lambda: bool(self._engines) or monotonic_ns() < self._until, self._look)

    def watch(self, engine: Traced) -> None:
        """Poll for this engine's waits."""
        self._engines.add(engine)
        self._until = monotonic_ns() + _LINGER_NS
        self._worker.ensure()

    def _look(self) -> None:
        has_learned = False
        for engine in self._engines.copy():
            self._engines.discard(engine)  # first: what is queued from now on puts it back
            has_learned = engine.learn_releases() or has_learned
            if engine.queued and not engine.is_closed:
                self._engines.add(engine)
        self._pause_s = _FIRST_PAUSE_S if has_learned else min(1.5 * self._pause_s, _LONGEST_PAUSE_S)
        time.sleep(self._pause_s)


_releases = Releases()
