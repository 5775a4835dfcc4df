"""One use of a slot, from its attachment to its release: the work that it has in the driver, and when that is over.

It may be released once its markers are complete, its records are complete, no thread is inside the driver for it, and
there is a verdict on each wait that was queued for it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from cuda.bindings.driver import CUresult, CUstreamCaptureMode

from ipcsync._board import BROKEN, CLOSED, OPEN, Board
from ipcsync._drivers import SUCCESS, DriverObject, unwrap
from ipcsync._engines import queued
from ipcsync._engines.chains import Chain
from ipcsync._engines.compiled import CallLock, park
from ipcsync._engines.loss import Loss
from ipcsync._engines.markers import Markers
from ipcsync._engines.slot_view import Guard, SlotView
from ipcsync._locks import holding, trying
from ipcsync._native import capture, context
from ipcsync._wire.messages import Attachment
from ipcsync.errors import CoordinatorLost, DriverError, IpcSyncError, Reentered
from ipcsync.typing import EngineName

log = logging.getLogger("ipcsync")

_CLOSE_S = 0.05
_NOT_READY = CUresult.CUDA_ERROR_NOT_READY
_RELAXED = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class SlotUse(SlotView, ABC):
    """One attachment's use of one slot. Thread-safe."""

    kind: EngineName

    def __init__(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> None:
        super().__init__(board, guard, attachment)
        self.ordinal = ordinal
        self._driver = context.driver()
        self._lock = CallLock()  # of what changes this use; held during a record's or a wait's driver call
        # Nothing of it is in use any more: its imports are being destroyed, and the driver is not asked about them.
        self._is_unused = False
        self._is_released = False
        # Set by the client: the drained close was sent; a failed release was logged.
        self.has_told_closed = self.has_told_drained = self.has_failed = False
        self._inside: dict[object, None] = {}  # questions to the driver and waits in it that run now, without the lock
        # Generations recorded by this session, an earlier use of the same event included.
        self._recorded = max(self.line.recorded - self.base, 0) if attachment.recorder else 0
        # The last number given to a record, whether it was made or an exception interrupted it.
        self._begun = self._recorded
        self._is_interrupted = False  # an exception ended a record, which may be made and not published
        self.chain: Chain = Chain(self)
        self.earlier: SlotUse | None = None  # the use whose chain that is, if not this one's
        self._markers: Markers = Markers(self._driver, self)

    @property
    def completed(self) -> int:
        """Everything up to this generation is complete."""
        self.publish_completed()
        return max(self.known_complete, min(self._board_completed(), self.generation, self._lost_from - 1))

    @property
    def recorded_here(self) -> int:
        """The last generation that this session recorded, published or about to be; 0 for none."""
        return self._recorded

    # --- what is published --------------------------------------------------------------------------------------------

    def publish_completed(self) -> None:
        """Publish what is complete (recorder), and a record whose call an exception interrupted before it published.

        Does nothing while another thread has the lock: a driver call may block while a stream's queue is full, and the
        heartbeat's thread must not wait for that.
        """
        if self.is_recorder:
            self._try_publish()

    @trying("_lock")
    def _try_publish(self) -> None:
        self._publish()

    def _publish(self) -> None:
        if not self._is_unused:  # the slot may be another event's by now
            self._publish_recorded()
            self._publish_completed()

    def park_pending(self) -> None:
        """Have a thread wait in the driver for records that are not complete, and wake their waiters.

        Called at each beat, so also when a waiter nudges this session.
        """
        if self.is_recorder:
            self._try_park()

    @trying("_lock")
    def _try_park(self) -> None:
        if not self._is_unused:
            events = self._pending_events()
            if events:
                park(events, self.line.completed_address)

    def _publish_recorded(self) -> None:
        """Publish a record whose call was interrupted before it did. Called with the lock held."""
        if self._is_interrupted:
            if self.line.recorded < self.base + self._recorded and self.line.state == OPEN:
                self.line.publish(self.base + self._recorded)
                self.line.futex.wake()
            self._is_interrupted = False

    @holding("_lock")
    def _doubt(self, handle: DriverObject, stream_id: int, ordinal: int) -> None:
        """An exception ends this call, which may have queued work on the stream: record a marker behind it."""
        self._markers.doubtful[stream_id] = (handle, ordinal)  # here: a deeper call may find the stack at its end
        with suppress(Exception):  # the caller raises its own exception; `try_release` tries again
            self._markers.add(handle, stream_id, ordinal)

    @holding("_lock")
    def _mark_unmarked(self) -> None:
        self._doubt_unmarked()
        with suppress(Exception):  # the caller raises its own; `try_release` tries again
            self._markers.add_doubtful()

    @property
    def unmarked_stream(self) -> int:
        """The id of a stream that may have work of a refused shortcut; 0 if there is none."""
        return self._unmarked_id if self._unmarked else 0

    def settle_unmarked(self) -> None:
        """That stream has a marker behind its work now."""
        self._unmarked = 0

    def _doubt_unmarked(self) -> None:
        """Note a stream that may have work of a refused shortcut. Called with the lock, before the markers are trusted.

        It had a marker then, so its device does not matter.
        """
        if self._unmarked:
            self._markers.doubtful[self._unmarked_id] = (self._driver.CUstream(self._unmarked), self.ordinal)
            self._unmarked = 0

    # --- the end ------------------------------------------------------------------------------------------------------

    def await_calls(self, seconds: float) -> bool:
        """Wait until no other thread is in a record's or a wait's driver call; whether none is, within `seconds`."""
        lock = self._lock
        if lock.is_mine() and lock.is_held_below():
            return True
        try:
            is_free = lock.acquire(timeout=seconds)
            if is_free:
                lock.release()
        except BaseException:
            lock.unwind()
            raise
        return is_free

    def close(self) -> None:
        """End this use: later calls raise EventClosed, and those that wait now do within 50 ms.

        A record that is under way is published when this returns, unless the driver keeps it for longer. Wait by
        `await_calls` before, with no lock held that the heartbeat's thread needs.
        """
        lock = self._lock
        within = lock.is_mine() and lock.is_held_below()
        try:
            if not within and lock.acquire(timeout=_CLOSE_S):
                self.is_closed: bool = True
                lock.release()
        except BaseException:
            if not within:
                lock.unwind()
            raise
        finally:
            self.is_closed = True
        self.line.futex.wake()

    def try_release(self) -> bool:
        """Release everything if no thread is inside the driver, no queued wait pending and no record unfinished.

        A thread that waits on the host for a record only reads the board, and checks that this use is open after each
        read, so it does not count. Does not wait for a thread that has the lock.
        """
        if not self._is_released:
            self._try_release()
        return self._is_released

    @property
    def is_released(self) -> bool:
        """Whether everything was released: nothing of this use touches the slot any more."""
        return self._is_released

    @trying("_lock")
    def _try_release(self) -> None:
        self._is_released = self._is_released or self._release()

    def _release(self) -> bool:
        if not self._is_unused and not self._end_waits():
            return False
        self._is_unused = True  # before the first import is destroyed, which may take several tries
        return self._destroy_imports()

    def _end_waits(self) -> bool:
        """Forget what was queued for this slot and destroy the markers; False while any of it is pending."""
        if self._inside or self._sleepers:
            return False
        are_decided = False
        self._doubt_unmarked()
        try:
            if self.guard.coordinator_is_alive() and not (
                self._markers.add_doubtful()
                and self._is_drained()
                and self._is_begun_drained()
                and self._markers.drop_complete()
            ):
                return False
            if self.guard.coordinator_is_alive():
                if not self._decide_waits():
                    return False
                are_decided = True
        except (DriverError, CoordinatorLost):
            if self.guard.coordinator_is_alive():
                raise
        if self._markers.has_any_parked():
            return False
        self.free_streams()
        # If the coordinator is lost, the driver must not be asked about its events, and no process waits for this
        # release.
        for wait in queued.waits_on(self):
            # One that is open though all were decided was listed just now, and is not queued: nothing is lost by it.
            wait.verdict = wait.verdict or self.fate(wait.generation) or are_decided or self._loss(wait.generation)
        queued.release(self)
        self._markers.destroy()
        return True

    def free_streams(self) -> None:
        """Let this process's streams go on that wait for this slot, if the coordinator, which would, is lost."""

    def is_drained(self) -> bool:
        """Whether this use is a recorder's and all its records are complete; other work may still be queued."""
        return bool(self._try_drained())

    @trying("_lock")
    def _try_drained(self) -> bool:
        if not self.is_recorder or self._is_unused or self.line.state not in (OPEN, CLOSED):
            return False
        if not self.guard.coordinator_is_alive():  # then the driver must not be asked about its events
            return False
        self._doubt_unmarked()
        return self._markers.add_doubtful() and self._is_drained() and self._is_begun_drained()

    def _is_drained(self) -> bool:
        """Whether all that was recorded here is complete."""
        if not self.is_recorder or self.line.state not in (OPEN, CLOSED):
            return self._is_idle()
        self._publish_completed()
        # What is left of a record that an exception ended before it was published is never settled.
        is_settled = all(entry.first > self._recorded for entry in self.chain.entries)
        return is_settled and self.line.completed >= self.base + self._recorded

    # --- what others stand behind -------------------------------------------------------------------------------------

    def accepts(self, generation: int) -> bool:
        """Whether a waiter would accept `generation` now; asks the driver, raises nothing.

        False also while another thread has the lock, and for this process's own events, which it judges itself.
        """
        return not self.is_recorder and bool(self._try_accept(generation))

    @trying("_lock")
    def _try_accept(self, generation: int) -> bool:
        return not self._is_unused and self._accepts(generation)

    def _accepts(self, generation: int) -> bool:
        try:
            if self.generation < generation or not self._driver_query(generation) or not self._is_clear(generation):
                return False
            if not self.recorder_is_alive() or self.line.state == BROKEN or self._is_orphaned:
                return False
        except IpcSyncError as error:  # calls of this event raise it
            log.debug("whether generation %d of %s is complete cannot be asked: %s", generation, self.label, error)
            return False
        self._note_complete(generation)
        return True

    def has_passed(self, stream: int) -> bool:
        """Whether the stream with that id is past all that this use queued there; asks the driver.

        False also while another thread has the lock. Raises Reentered within a call of this thread that has it.
        """
        lock = self._lock
        if lock.is_mine() and lock.is_held_below():
            raise Reentered(f"a call for {self.label} is under way on this thread, which this one interrupts")
        return self._is_unused or bool(self._try_passed(stream))

    @trying("_lock")
    def _try_passed(self, stream: int) -> bool:
        self._doubt_unmarked()
        return self._markers.has_passed(stream)

    def ordinal_of(self, stream: int) -> int:
        """The device of the stream with that id; -1 if nothing that this use queued there is pending."""
        return self._markers.ordinal_of(stream)

    def give_unpassed(self, streams: Iterable[int]) -> dict[int, Any]:
        """Of these streams, those that are not past all waits for this slot, and the markers behind these.

        The caller destroys the markers. Called with the lock held.
        """
        return self._markers.give_pending(streams)

    def _decide_waits(self) -> bool:
        """Whether each wait that was queued for this slot has a verdict; the streams have passed all of them."""
        for wait in queued.waits_on(self):
            fate = wait.known()
            earlier = wait.open_before() if isinstance(fate, Loss) else 0
            if fate is None or earlier:
                if self.is_recorder or not self._accepts(earlier or wait.generation):
                    self.behind.nudge(self.recorder)
                    return False
                if fate is None:
                    wait.verdict = True
        return True

    # --- questions to the driver --------------------------------------------------------------------------------------

    def is_done(self, event: DriverObject) -> bool:
        """Whether an event is complete; the driver is asked in relaxed mode, since another thread may capture."""
        driver, mode = self._driver, None
        try:
            mode = unwrap(driver.cuThreadExchangeStreamCaptureMode(_RELAXED), "cuThreadExchangeStreamCaptureMode")
            result = driver.cuEventQuery(event)
            driver.cuThreadExchangeStreamCaptureMode(mode)
        except BaseException:
            capture.restore(mode)
            raise
        if result[0] is SUCCESS:
            return True
        if result[0] != _NOT_READY:
            self.unwrap(result, "cuEventQuery")
        return False

    def unwrap(self, result: tuple[Any, ...], call: str) -> DriverObject:
        """`unwrap`; but if the coordinator is lost, or this process was forked amid the call, raise that instead."""
        if result[0] is SUCCESS:  # else the comparison that follows says the same, at more cost
            return result[1] if len(result) == 2 else None
        if result[0] != SUCCESS:
            self.guard.check_liveness()
        return unwrap(result, call)

    # --- what an engine does ------------------------------------------------------------------------------------------

    @abstractmethod
    def _driver_query(self, generation: int) -> bool:
        """Ask the driver whether `generation`, which was recorded, is complete."""

    def _publish_completed(self) -> None:
        """Store in `completed` what is known complete. Called with the lock held."""

    def _pending_events(self) -> list[Any]:
        """CUDA events behind what was recorded and is not complete, in order. Called with the lock held."""
        return []

    def _is_begun_drained(self) -> bool:
        """Whether an interrupted record is complete, if it was made."""
        return True

    def _is_idle(self) -> bool:
        """Whether no record of this process can touch the slot any more, apart from what the markers show."""
        return True

    def _destroy_imports(self) -> bool:
        """Destroy the imports; False while another thread opens or destroys some. Called with the lock held."""
        return True
