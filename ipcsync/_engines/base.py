"""What both engines share: the looks that every use takes, the wait for a record, and when a slot may be let go of.

A generation counts as complete here only in these cases:
- this process saw it complete before;
- the board's `completed` reached it while the slot was not broken;
- the driver called it complete, and the recorder was found alive *afterwards*;
- the slot is broken, and the watermark that the coordinator took at the break covers it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from cuda.bindings.driver import CUresult, CUstreamCaptureMode, CUstreamCaptureStatus

from ipcsync._board import BROKEN, CLOSED, INT64_MAX, OPEN, Board, Peer, SlotLine, peer_of
from ipcsync._drivers import SUCCESS, check
from ipcsync._wire.messages import Attachment
from ipcsync.errors import (
    CoordinatorLost,
    DeviceMismatch,
    DriverError,
    EventClosed,
    NotRecorder,
    RecorderLost,
    WaitTimeout,
)
from ipcsync.native import capture, context
from ipcsync.native.context import LEGACY, OnDevice
from ipcsync.native.stream import stream_handle

_SLICE_NS = 50_000_000
_FOREVER = 1 << 62
_DISABLE_TIMING = 2
_MANY_MARKERS = 16
_NOT_READY = CUresult.CUDA_ERROR_NOT_READY
_NOT_CAPTURING = CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_RELAXED = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Guard(Protocol):
    """What an engine asks of the session that it works for."""

    def check(self) -> None:
        """Raise if the process was forked or the session cannot be used; cheap, taken at every use."""

    def look(self) -> None:
        """The same and whether the coordinator lives; taken in every slice of a wait."""

    def coordinator_is_alive(self) -> bool:
        """Whether the coordinator's process lives, by the kernel's word."""

    def count_full_ring(self) -> None:
        """A record had to wait for its ring."""


class Engine(ABC):
    """One attachment's use of one slot. Thread-safe.

    `seen` is the highest generation that this process knows complete, kept for itself.
    """

    kind: str
    marks_records = False  # whether a queued record is told from a finished one only by a marker behind it

    def __init__(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> None:
        self.name = attachment.name
        self.slot = attachment.slot
        self.incarnation = attachment.incarnation
        self.depth = attachment.depth
        self.device_uuid = attachment.device
        self.ordinal = ordinal
        self.base = attachment.base
        self.is_recorder = attachment.recorder
        self.board = board
        self.line: SlotLine = board.slot(attachment.slot)
        self.guard = guard
        self.seen = 0
        self._lost_from = _FOREVER  # from this generation on, RecorderLost was raised here, and will be for ever
        self._seen_lock = threading.Lock()
        self._guard_check = guard.check
        self._words = board.words
        self._incarnation_index, self._state_index = self.line.indices
        self._driver = context.driver()
        self.is_closed = False
        self._lock = threading.Lock()  # short: around each use of an import
        self._record_lock = threading.Lock()  # one record at a time, also while it waits for the ring
        self._inside = 0  # threads in a bounded wait of the driver's, outside of the lock
        # Generations recorded here; by this session's earlier use too, if it closed and opened the event in one moment.
        self._recorded = max(self.line.recorded - self.base, 0) if attachment.recorder else 0
        self._last_stream = 0
        self._markers: dict[int, Any] = {}  # by stream id: an event behind the last wait queued there
        self._peer: Peer | None = None

    # --- looks --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if this use is over: fork, session, coordinator, closed here, or the slot used anew."""
        self._guard_check()
        if self.is_closed:
            raise EventClosed(f"the event {self.name!r} was closed in this process")
        if self._words[self._incarnation_index] != self.incarnation:
            raise EventClosed(f"the event {self.name!r} is gone: its slot is used anew")

    def _refuse_closed(self) -> None:
        """Raise EventClosed if this use was closed here.

        Asked *after* the board's words were read, it also tells that they were this use's: the slot is used anew only
        once this process has closed and let go.
        """
        if self.is_closed:
            raise EventClosed(f"the event {self.name!r} was closed in this process")

    @property
    def generation(self) -> int:
        """The last generation recorded, by whichever session."""
        return max(self.line.recorded - self.base, 0)

    @property
    def completed(self) -> int:
        """Everything up to this generation is complete."""
        self.harvest()
        return max(self.seen, min(self._board_completed(), self.generation, self._lost_from - 1))

    @property
    def state(self) -> str:
        """open, broken or closed."""
        if self.line.incarnation != self.incarnation:
            return "closed"
        return {OPEN: "open", BROKEN: "broken"}.get(self.line.state, "closed")

    def _board_completed(self) -> int:
        line = self.line
        count = line.completed  # before the state: a word that was released is seen as such
        state = line.state
        if state == BROKEN or count == INT64_MAX:
            count = line.watermark
        return count - self.base

    def is_complete(self, generation: int) -> bool:
        """Whether the board, or this process's memory, says that `generation` is complete."""
        if generation <= self.seen:
            return True
        if generation >= self._lost_from:
            self._lost(generation)
        # A recorder that died between its driver's call and the store has published nothing, complete or not.
        done = min(self._board_completed(), self.generation, self._lost_from - 1)
        self._refuse_closed()
        if generation > done:
            return False
        self._saw(done)
        return True

    def _saw(self, generation: int) -> None:
        """Remember that everything up to `generation` is complete; of two threads, neither undoes the other's."""
        with self._seen_lock:
            self.seen = max(self.seen, generation)

    def recorder_is_alive(self) -> bool:
        """Whether the recorder's process lives; True while none has come."""
        serial = self.line.recorder
        if not serial or self.is_recorder:
            return True
        if self._peer is None or self._peer.serial != serial:
            self._peer = peer_of(self.board, serial)
        return self._peer.is_alive()

    def _refuse_finished(self, generation: int) -> None:
        """Raise RecorderLost if `generation`, not complete so far, never will count: broken, or closed before it."""
        state = self.line.state
        self._refuse_closed()
        if state == OPEN:
            return
        if self.is_complete(generation):
            return
        if state == BROKEN or generation > self.generation:
            self._lost(generation)

    def _lost(self, generation: int) -> NoReturn:
        # A dying process's work may still complete before the coordinator sees the death: that counts no more here.
        self._lost_from = min(self._lost_from, generation)
        raise RecorderLost(
            f"generation {generation} of {self.name!r} will never be complete: its recorder closed or died",
            generation=generation,
        )

    def _timed_out(self, generation: int, timeout: float | None, what: str) -> NoReturn:
        raise WaitTimeout(
            f"generation {generation} of {self.name!r} was not {what} within {timeout} s",
            event=self.name,
            generation=generation,
            timeout=timeout,
        )

    # --- waits on the host --------------------------------------------------------------------------------------------

    def await_recorded(self, generation: int, deadline_ns: int, timeout: float | None) -> None:
        """Block until `generation` is recorded. WaitTimeout, RecorderLost, or what `look` raises, otherwise."""
        line, wanted = self.line, self.base + generation
        while True:
            recorded = line.recorded
            if recorded >= wanted:
                self._refuse_closed()
                return
            self._refuse_finished(generation)
            now = time.monotonic_ns()
            if now >= deadline_ns:
                self._timed_out(generation, timeout, "recorded")
            line.wait_recorded(recorded, min(_SLICE_NS, deadline_ns - now))
            if line.recorded == recorded:
                self._look(generation)

    def look(self, generation: int) -> None:
        """Raise whatever would end a wait for `generation`, which is not complete."""
        self._look(generation)
        self._refuse_finished(generation)

    def _look(self, generation: int) -> None:
        """In every slice of a wait: this session, the coordinator, and the recorder."""
        self.guard.look()
        self.check()
        self._refuse_dead(generation)

    def _refuse_dead(self, generation: int) -> None:
        """Raise RecorderLost if the recorder is dead, and `generation` not known complete."""
        is_alive = self.recorder_is_alive()
        self._refuse_closed()
        if not is_alive:
            self._refuse_unless_good(generation)

    def _refuse_unless_good(self, generation: int) -> None:
        """The recorder is dead: only what the board already says is good."""
        if not self.is_complete(generation):
            self._lost(generation)

    def synchronize(self, generation: int, timeout: float | None) -> None:
        """Block until `generation` is complete."""
        deadline = deadline_of(timeout)
        self.check()
        if self.is_complete(generation):
            return
        self.await_recorded(generation, deadline, timeout)
        while not self.is_complete(generation):
            self._refuse_finished(generation)
            with self._in_driver(generation):
                done = self._driver_wait(generation, min(deadline, time.monotonic_ns() + _SLICE_NS))
            if done:
                self._accept(generation)
                return
            self._look(generation)
            if time.monotonic_ns() >= deadline:  # only now: with a timeout of 0 too the driver was asked once
                self._timed_out(generation, timeout, "complete")

    await_complete = synchronize  # for the client's own threads, whose looks a trace does not show

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None:  # noqa: B027 - nothing by default
        """A task of an asynchronous client has waited for `generation` since `began`; told for a trace."""

    def _accept(self, generation: int) -> None:
        """The driver said complete: that counts only if the recorder lives and has its role now, after it said so."""
        is_alive = self.recorder_is_alive() and self.line.state != BROKEN
        self._refuse_closed()
        if is_alive:
            self._saw(generation)
            if self.is_recorder:
                self._tell_complete(generation)
        else:
            self._refuse_unless_good(generation)

    def query(self, generation: int) -> bool:
        """Whether `generation` is complete."""
        self.check()
        if self.is_complete(generation):
            return True
        if self.generation < generation:
            self._refuse_finished(generation)
            return False
        with self._lock:
            self.check()
            done = self._driver_query(generation)
        if done:
            self._accept(generation)
            return True
        self._refuse_finished(generation)
        return False

    @contextmanager
    def _in_driver(self, generation: int) -> Iterator[None]:
        """A bounded wait in the driver, during which the import must not be destroyed."""
        with self._lock:
            self.check()
            self._prepare(generation)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1

    # --- stream work --------------------------------------------------------------------------------------------------

    def record(self, stream: Any, timeout: float | None) -> int:
        """Record the next generation on a stream; its number."""
        if timeout is not None:
            deadline_of(timeout)  # a wrong one is refused whether or not there is room
        if stream is None:
            handle, ordinal = stream_handle(None, self.ordinal)
        else:
            handle, ordinal = stream_handle(stream)
        return self.record_on(handle, ordinal, timeout)

    def record_on(self, handle: Any, ordinal: int, timeout: float | None) -> int:
        """The same for a stream whose handle and device are known."""
        if not self.is_recorder:
            self.check()
            raise NotRecorder(f"this session did not open {self.name!r} with recorder=True")
        if not self._record_lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            self._timed_out(self._recorded + 1, timeout, "recorded: another thread's record waits for room")
        try:
            self.check()
            if ordinal != self.ordinal:
                raise DeviceMismatch(f"Event device {self.ordinal} does not match recording stream's device {ordinal}.")
            if int(handle) in LEGACY:
                with OnDevice(ordinal):
                    return self._record(handle, timeout)
            return self._record(handle, timeout)
        finally:
            self._record_lock.release()

    def _record(self, handle: Any, timeout: float | None) -> int:
        self._refuse_capturing(handle, "record")
        generation = self._recorded + 1
        self._make_room(generation, timeout)
        result = self._driver.cuStreamGetId(handle)
        stream_id = result[1] if result[0] is SUCCESS else check(result, "cuStreamGetId")
        with self._lock:
            if self.is_closed or self._words[self._state_index] != OPEN:
                self._refuse_record()
            if stream_id != self._last_stream and generation > 1:
                self._follow(handle, generation - 1)
            self._driver_record(handle, generation)
            if self.marks_records:
                self._mark(handle, stream_id, self.ordinal)
            self._recorded = generation
            self._last_stream = stream_id
            self.line.publish(self.base + generation)
        self.line.futex.wake()
        if self._words[self._state_index] != OPEN:
            self._refuse_record()
        return generation

    def _refuse_capturing(self, handle: Any, what: str) -> None:
        result = self._driver.cuStreamIsCapturing(handle)
        if result[0] is not SUCCESS or result[1] is not _NOT_CAPTURING:
            capture.refuse_capturing(handle, what)

    def _refuse_record(self) -> None:
        self.check()  # an expired session says so rather than that its event is closed
        raise EventClosed(f"the event {self.name!r} is {self.state}")

    def wait(self, generation: int, stream: Any, timeout: float | None, *, ahead: bool) -> None:
        """Have the stream's later work wait for `generation`."""
        if timeout is not None:
            deadline_of(timeout)
        self.check()
        handle, ordinal = stream_handle(stream)
        if int(handle) in LEGACY:
            with OnDevice(ordinal):
                self._wait(generation, handle, ordinal, timeout, ahead)
        else:
            self._wait(generation, handle, ordinal, timeout, ahead)

    def _wait(self, generation: int, handle: Any, ordinal: int, timeout: float | None, ahead: bool) -> int | None:
        """The id of the stream on which the wait was queued; None if there was nothing to wait for."""
        self._refuse_capturing(handle, "wait")
        if ahead:
            self._refuse_ahead()
        if self.is_complete(generation):
            return None
        if ahead:
            self._refuse_finished(generation)
        else:
            self.await_recorded(generation, deadline_of(timeout), timeout)
            self._refuse_finished(generation)
        result = self._driver.cuStreamGetId(handle)
        stream_id = result[1] if result[0] is SUCCESS else check(result, "cuStreamGetId")
        with self._lock:
            self.check()
            self._driver_stream_wait(handle, generation)
            self._mark(handle, stream_id, ordinal)
        self._refuse_finished(generation)
        self._refuse_dead(generation)  # the driver may let the stream pass what a dead process never did
        return int(stream_id)

    def _mark(self, handle: Any, stream_id: int, ordinal: int) -> None:
        """Remember behind which place of the stream the work just queued is over."""
        marker = self._markers.get(stream_id)
        if marker is None:
            if len(self._markers) >= _MANY_MARKERS:
                self._drop_markers()  # a program may make a stream for each piece of work
            with OnDevice(ordinal):
                marker = check(self._driver.cuEventCreate(_DISABLE_TIMING), "cuEventCreate")
            self._markers[stream_id] = marker
        result = self._driver.cuEventRecord(marker, handle)
        if result[0] is not SUCCESS:
            check(result, "cuEventRecord")

    # --- the end ------------------------------------------------------------------------------------------------------

    def harvest(self) -> None:
        """Tell the board what is known complete (recorder), also from the heartbeat's thread."""
        if self.is_recorder:
            with self._lock:
                self._harvest()

    def close(self) -> None:
        """End this use: later calls raise EventClosed, and those that wait now do within 50 ms."""
        self.is_closed = True
        self.line.futex.wake()

    def try_let_go(self) -> bool:
        """Let go of everything if no thread is inside the driver, no queued wait pending and no record unfinished.

        A thread that waits on the host for a record reads nothing but the board, and looks whether this use is closed
        before it believes what it read.
        """
        with self._lock:
            if self._inside:
                return False
            try:
                if self.guard.coordinator_is_alive() and not (self._is_drained() and self._drop_markers()):
                    return False
            except (DriverError, CoordinatorLost):
                if self.guard.coordinator_is_alive():
                    raise
            # Of a coordinator that is gone, nothing may be asked any more, and nobody waits for this.
            self._destroy_markers()
            self._release()
        return True

    def _destroy_markers(self) -> None:
        """Destroy the markers, be they over or not: CUDA destroys an event once it is."""
        while self._markers:
            check(self._driver.cuEventDestroy(self._markers.popitem()[1]), "cuEventDestroy")

    def _drop_markers(self) -> bool:
        """Destroy the markers that are over; whether all were. Called with the lock held."""
        for stream_id, marker in list(self._markers.items()):
            if self._is_done(marker):
                del self._markers[stream_id]
                check(self._driver.cuEventDestroy(marker), "cuEventDestroy")
        return not self._markers

    def _is_drained(self) -> bool:
        """Whether all that was recorded here is complete."""
        if not self.is_recorder or self.line.state not in (OPEN, CLOSED):
            return self._own_work_is_done()
        self._harvest()
        return self.line.completed >= self.base + self._recorded

    def _is_done(self, event: Any) -> bool:
        """Ask the driver of an event, in relaxed capture mode: some other thread may be capturing."""
        driver = self._driver
        result = driver.cuThreadExchangeStreamCaptureMode(_RELAXED)
        mode = result[1] if result[0] is SUCCESS else check(result, "cuThreadExchangeStreamCaptureMode")
        try:
            result = driver.cuEventQuery(event)
        finally:
            driver.cuThreadExchangeStreamCaptureMode(mode)
        if result[0] is SUCCESS:
            return True
        if result[0] != _NOT_READY:
            self._check(result, "cuEventQuery")
        return False

    def _check(self, result: tuple[Any, ...], call: str) -> None:
        """`check`, after a call on what the coordinator exported: if that one is lost, so is this, and that is said."""
        try:
            check(result, call)
        except DriverError:
            self.guard.look()
            raise

    # --- what an engine does ------------------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, generation: int) -> None:
        """Open what a wait for `generation` needs. Called with the lock held."""

    @abstractmethod
    def _make_room(self, generation: int, timeout: float | None) -> None:
        """Before a record: wait until `generation` may be recorded."""

    @abstractmethod
    def _driver_record(self, handle: Any, generation: int) -> None:
        """Record `generation` on the stream."""

    @abstractmethod
    def _follow(self, handle: Any, generation: int) -> None:
        """Have a new stream wait for the last record, which another stream made."""

    @abstractmethod
    def _driver_stream_wait(self, handle: Any, generation: int) -> None:
        """Queue a wait for `generation` on the stream."""

    @abstractmethod
    def _driver_query(self, generation: int) -> bool:
        """Ask the driver whether `generation`, which was recorded, is complete."""

    @abstractmethod
    def _driver_wait(self, generation: int, deadline_ns: int) -> bool:
        """Wait in the driver for `generation`, which was recorded; False if `deadline_ns` passed before."""

    @abstractmethod
    def _harvest(self) -> None:
        """Store in `completed` what is known complete. Called with the lock held."""

    @abstractmethod
    def _tell_complete(self, generation: int) -> None:
        """Tell the board what the recorder itself found complete."""

    @abstractmethod
    def _refuse_ahead(self) -> None:
        """Raise EngineMismatch if this engine cannot wait ahead of a record."""

    @abstractmethod
    def _own_work_is_done(self) -> bool:
        """Whether nothing that this process queued can still write to the slot."""

    @abstractmethod
    def _release(self) -> None:
        """Destroy the imports. Called with the lock held."""


def deadline_of(timeout: float | None) -> int:
    """CLOCK_MONOTONIC in ns at which `timeout` seconds from now are over. ValueError for a negative one or NaN."""
    if timeout is None:
        return _FOREVER
    if not timeout >= 0:
        raise ValueError(f"timeout is a number of seconds from 0 up, or None, not {timeout!r}")
    return time.monotonic_ns() + int(min(timeout, 1e9) * 1e9)
