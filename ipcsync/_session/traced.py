"""The engines of a client that writes a trace. A client without a trace uses the plain ones, at no cost.

A queued wait counts as released when this process first learns that its point is complete, as a done callback does.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic_ns

from ipcsync._board import BROKEN, Board
from ipcsync._drivers import DriverObject
from ipcsync._engines.core import Wait
from ipcsync._engines.engine import Engine, steps
from ipcsync._session.attachments import NewEngine
from ipcsync._session.owner import SessionLease
from ipcsync._session.waits import Pending, Waits
from ipcsync._trace.file import Kind, Outcome, Use, Writer, writer_in
from ipcsync._wire.messages import Attachment
from ipcsync.errors import EventClosed, QuotaExceeded, RecorderLost, StreamCapturing, WaitTimeout

log = logging.getLogger("ipcsync")

_RECORD, _WAIT, _PASSED, _RELEASED, _SYNCHRONIZE = map(int, Kind)
_OK, _FAILED, _UNSEEN = map(int, Outcome)


def traced_engines(directory: Path, client: str, waits: Waits) -> NewEngine:
    """What makes a client's engines: traced ones, the first of which creates the process's file.

    Plain ones if it cannot be created, which is logged once.
    """
    has_stopped = False

    def make(board: Board, guard: SessionLease, attachment: Attachment, ordinal: int) -> Engine:
        nonlocal has_stopped
        try:
            if not has_stopped:
                return Traced(board, guard, attachment, ordinal, waits, writer_in(directory), client)
        except OSError as error:  # the disk is full, or the directory gone: the program goes on
            has_stopped = True
            log.warning("no trace of %r in %s: %s", client, directory, error.strerror or error)
        return Engine(board, guard, attachment, ordinal)

    return make


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
        guard: SessionLease,
        attachment: Attachment,
        ordinal: int,
        waits: Waits,
        writer: Writer,
        client: str,
    ) -> None:
        super().__init__(board, guard, attachment, ordinal)
        self._waits = waits
        name, kind = attachment.name, attachment.engine
        self.is_traced = True
        self._use = writer.name(Use(board.epoch, attachment.slot, attachment.incarnation, name, kind, client))
        self._put = writer.put
        self._ranges = _ranges(name or "(unnamed)")
        self._queued: set[tuple[int, int, int]] = set()
        """The waits that are not known to be released: generation, the stream's id, when they were queued."""
        self._looked_for = 0  # the lowest generation of them, which is the first to be complete

    # --- what is written ----------------------------------------------------------------------------------------------

    def record_next(
        self, handle: DriverObject, deadline_ns: int, timeout: float | None, further: Sequence[Wait] | None
    ) -> int:
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
        since = steps.since or began or monotonic_ns()
        try:
            with self._ranges[Kind.WAIT]:
                stream_id: int = super().queue(handle, ordinal, generation, timeout, ahead, began, what)
        except BaseException as error:
            is_step = steps.since and isinstance(error, WaitTimeout)
            if not is_step and (what == "wait" or not isinstance(error, StreamCapturing)):
                self._put(_WAIT, self._use, generation, 0, since, monotonic_ns(), _FAILED)
            raise
        now = monotonic_ns()
        if not stream_id:
            self._put(_PASSED, self._use, generation, 0, since, now)
        else:
            self._put(_WAIT, self._use, generation, stream_id, since, now)
            self._queued.add((generation, stream_id, now))
            self._look_for(generation)
        return stream_id

    def synchronize(self, generation: int, timeout: float | None = None, began: int = 0) -> None:
        since = steps.since or began or monotonic_ns()
        try:
            with self._ranges[Kind.SYNCHRONIZE]:
                super().synchronize(generation, timeout, began)
        except BaseException as error:
            if not (steps.since and isinstance(error, WaitTimeout)):
                self.synchronized(generation, since, is_complete=False)
            raise
        self.synchronized(generation, since, is_complete=True)

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None:
        """Write that a thread, or a task, has waited for `generation` since `began`."""
        self._put(_SYNCHRONIZE, self._use, generation, 0, began, monotonic_ns(), _OK if is_complete else _FAILED)

    # --- releases -----------------------------------------------------------------------------------------------------

    def _look_for(self, generation: int) -> None:
        """Learn when it is complete, unless one before it is looked for: a look at each of many would take long."""
        if 0 < self._looked_for <= generation:
            return
        self._looked_for = generation
        try:
            self._waits.add(Pending(self, generation), partial(self._learn, generation))
        except BaseException as error:
            self._looked_for = 0
            # Without a thread `try_release` writes it later, and the program goes on.
            if not isinstance(error, QuotaExceeded):
                raise

    def _learn(self, generation: int, error: Exception | None) -> None:
        """Write how the waits up to one ended; of one that this process has closed, `try_release` learns it."""
        if isinstance(error, EventClosed):
            return
        lost = _FAILED if isinstance(error, RecorderLost) else _UNSEEN  # or the session, or the coordinator
        known = max(generation, self.known_complete)
        for wait in sorted(self._queued.copy()):
            if wait[0] <= known:
                self._write_release(wait, _OK if error is None or wait[0] <= self.known_complete else lost)
        if self._looked_for == generation:
            self._looked_for = 0  # before the look at what is left: who queues one meanwhile sees that, or is seen
        if left := self._queued.copy():
            self._look_for(min(left)[0])

    def _write_release(self, wait: tuple[int, int, int], outcome: int) -> None:
        with suppress(KeyError):  # another thread has written it
            self._queued.remove(wait)
            self._put(_RELEASED, self._use, *wait, monotonic_ns(), outcome)

    def try_release(self) -> bool:
        """Release everything if no queued wait is pending; the release of each wait is then written."""
        if not super().try_release():
            return False
        # Until the coordinator is told, the slot is not reused: its state is still this use's.
        is_known = self.guard.coordinator_is_alive() and self.line.state != BROKEN
        for wait in sorted(self._queued.copy()):
            self._write_release(wait, _OK if is_known or wait[0] <= self.known_complete else _UNSEEN)
        return True
