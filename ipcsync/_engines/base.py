"""What both engines share: queries and waits of the host, work on streams, and when a slot may be let go of."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

from cuda.bindings.driver import CUresult, CUstreamCaptureMode, CUstreamCaptureStatus

from ipcsync import _drivers
from ipcsync._board import BROKEN, CLOSED, OPEN, Board
from ipcsync._drivers import SUCCESS, DriverObject, unwrap
from ipcsync._engines import queued
from ipcsync._engines.chains import Chain
from ipcsync._engines.compiled import COMPILED, CallLock, bind_driver, is_parked, know_streams, park
from ipcsync._engines.loss import Loss
from ipcsync._engines.queued import Wait
from ipcsync._engines.slot_view import FOREVER, Guard, SlotView, deadline_of
from ipcsync._locks import holding, trying
from ipcsync._native import capture, context
from ipcsync._native.context import LEGACY, OnDevice
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import Stream, stream_handle
from ipcsync._wire.messages import Attachment
from ipcsync.errors import (
    CoordinatorLost,
    DeviceMismatch,
    DriverError,
    EventClosed,
    IpcSyncError,
    NotRecorder,
    Reentered,
)
from ipcsync.typing import EngineName, StreamLike

log = logging.getLogger("ipcsync")

_DISABLE_TIMING = 2
_MANY_MARKERS = 16
_MANY_ENTRIES = 16
_CLOSE_S = 1.0
_NOT_READY = CUresult.CUDA_ERROR_NOT_READY
_NOT_CAPTURING = CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_RELAXED = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Engine(SlotView, ABC):
    """One attachment's use of one slot. Thread-safe."""

    kind: EngineName
    is_closed: bool
    is_traced = False
    marks_records = False  # whether a queued record is told from a finished one only by a marker behind it

    def __init__(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> None:
        super().__init__(board, guard, attachment)
        self.device_uuid: str = attachment.device
        self.ordinal = ordinal
        self._driver = context.driver()
        self._lock = CallLock()  # short: around each use of an import
        self._record_lock = CallLock()  # one record at a time, also while it waits for the ring
        self._is_released = False
        # Set by the client: the drained close was sent; a failed release was logged.
        self.has_told_closed = self.has_told_drained = self.has_failed = False
        self._inside: dict[object, None] = {}  # bounded waits of the driver's that run now, outside of the lock
        # Generations recorded here; by this session's earlier use too, if it closed and opened the event in one moment.
        self._recorded = max(self.line.recorded - self.base, 0) if attachment.recorder else 0
        self._begun = self._recorded  # the last number given to a record, which was made or ended by an exception
        self._is_interrupted = False  # an exception ended a record, which may be made and not published
        self._room = FOREVER  # up to this generation a record has nothing to wait for
        self._last_stream = 0  # the id of the stream recorded on last, or that a record was begun on
        # Handles used last, as objects: a Stream keeps its own for life, so the same object is the same stream, with
        # no driver asked. Never a default stream's, which may be another one in each thread.
        self._last_handle: Any = None  # of the last record, if known to be that of `_last_stream`
        self._last_plain: Any = None  # of a wait
        self._last_waiter: tuple[Any, int] = (None, 0)  # of one that was queued, and its stream's id
        self._markers: dict[int, Any] = {}  # by stream id: an event behind the last wait queued there
        self.chain: Chain = Chain(self)
        self._last_key = (0, 0)  # a stream's id, and which list of waits it has
        # Streams, by id, where a call that an exception ended may have queued work with no marker behind it.
        self._doubtful: dict[int, tuple[Any, int]] = {}

    @property
    def completed(self) -> int:
        """Everything up to this generation is complete."""
        self.publish_completed()
        return max(self.known_complete, min(self._board_completed(), self.generation, self._lost_from - 1))

    @property
    def recorded_here(self) -> int:
        """The last generation that this session recorded, published or about to be; 0 for none."""
        return self._recorded

    # --- waits on the host --------------------------------------------------------------------------------------------

    def synchronize(self, generation: int, timeout: float | None, began: int = 0) -> None:
        """Block until `generation` is complete, at most `timeout` seconds from now, or from `began` in ns."""
        deadline = deadline_of(timeout, began)
        self.check()
        if self.is_complete(generation):
            return
        self.await_recorded(generation, deadline, timeout)
        while not self._is_complete_and_judged(generation):
            self._raise_if_finished(generation)
            if self._wait_in_driver(generation, min(deadline, time.monotonic_ns() + self.behind.slice_ns)):
                if self._confirm(generation):
                    return
                self.behind.await_answer(deadline)
            self.check_liveness(generation)
            if time.monotonic_ns() >= deadline:  # only now: with a timeout of 0 too the driver was asked once
                self.raise_timeout(generation, timeout, "complete")

    await_complete = synchronize  # for the client's own threads, which a trace does not show

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None:
        """A task of an asynchronous client has waited for `generation` since `began`; told for a trace."""

    def _is_complete_and_judged(self, generation: int) -> bool:
        """`is_complete`; the recorder itself first judges what its records stand behind."""
        if self.chain.entries:
            self.publish_completed()
        return self.is_complete(generation)

    def _confirm(self, generation: int) -> bool:
        """The driver said complete: that counts only if recorder and coordinator live now, after it said so.

        And if all is well with what it stands behind: False while nobody can tell.
        """
        if self.behind.stands(generation):
            if self.is_recorder:
                return self._is_judged(generation)
            if not self._is_clear(generation):
                return False
        is_alive = self.recorder_is_alive() and self.line.state != BROKEN
        self._raise_if_closed()
        self._raise_if_orphaned()
        if is_alive:
            self._note_complete(generation)
            if self.is_recorder:
                self._publish_known(generation)
        else:
            self._raise_unless_good(generation)
        return True

    def _is_judged(self, generation: int) -> bool:
        """Whether this recorder finds that `generation`, which stands behind something, counts."""
        if self._is_complete_and_judged(generation):
            return True
        self.behind.nudge(self.recorder)  # its other events may have to be judged first
        return False

    def query(self, generation: int) -> bool:
        """Whether `generation` is complete."""
        self.check()
        if self._is_complete_and_judged(generation):
            return True
        if self.generation < generation:
            self._raise_if_finished(generation)
            return False
        lock = self._lock
        within = lock.is_mine() and lock.is_held_below()
        try:
            with lock:
                self._raise_if_closed()
                done = self._driver_query(generation)
        except BaseException:
            if not within:
                lock.unwind()
            raise
        if done and self._confirm(generation):
            return True
        self._raise_if_finished(generation)
        return False

    def _wait_in_driver(self, generation: int, deadline_ns: int) -> bool:
        """`_driver_wait`, during which the import is not destroyed."""
        me = object()
        try:
            self._enter_driver(me, generation)
            done = self._driver_wait(generation, deadline_ns)
            self._leave_driver(me)
        except BaseException:
            self._inside.pop(me, None)
            raise
        return done

    @holding("_lock")
    def _enter_driver(self, me: object, generation: int) -> None:
        self.check()
        self._open_import(generation)
        self._inside[me] = None

    @holding("_lock")
    def _leave_driver(self, me: object) -> None:
        del self._inside[me]

    # --- stream work --------------------------------------------------------------------------------------------------

    def record(
        self,
        handle: DriverObject,
        ordinal: int,
        timeout: float | None,
        after: Sequence[tuple[Engine, int]] = (),
        behind: Sequence[Wait] = (),
    ) -> int:
        """Record the next generation on the CUstream `handle` of device `ordinal`; its number.

        It stands behind all waits queued on that stream before, behind the generations `after`, and behind the waits
        `behind`, which are those of other streams.
        """
        if timeout is not None:
            deadline_of(timeout)  # a wrong one is refused whether or not there is room
        self._guard_check()  # `check`, before the lock, which a forked child may find held for ever
        if self.is_closed:
            self._raise_closed()
        if self._words[self._incarnation_index] != self.incarnation:
            self._raise_gone()
        if not self.is_recorder:
            self._raise_not_recorder()
        lock = self._record_lock
        if lock.is_mine() and lock.is_held_below():
            raise Reentered(f"a record of {self.label} is under way on this thread, which a record here interrupts")
        try:
            if not lock.acquire(False):
                self._await_turn(timeout)
                self.check()
            if ordinal != self.ordinal:
                raise DeviceMismatch(f"Event device {self.ordinal} does not match recording stream's device {ordinal}.")
            if handle is not self._last_handle and int(handle) in LEGACY:
                with OnDevice(ordinal):
                    generation = self._record(handle, timeout, after, behind)
            else:
                generation = self._record(handle, timeout, after, behind)
                self._last_handle = handle
            lock.release()
        except BaseException:
            lock.unwind()
            raise
        return generation

    def _raise_not_recorder(self, who: str = "this session") -> NoReturn:
        recorder, pid = self._recorder()
        other = f"the session {recorder!r} (pid {pid or '?'}) records on it" if recorder else "nobody has so far"
        raise NotRecorder(
            f"{who} did not open {self.label} with recorder=True; {other}",
            event=self.name,
            recorder=recorder,
            pid=pid,
        )

    def _await_turn(self, timeout: float | None) -> None:
        if not self._record_lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            self.raise_timeout(self._recorded + 1, timeout, "recorded (another thread's record waits for room)")

    def _record(
        self,
        handle: DriverObject,
        timeout: float | None,
        after: Sequence[tuple[Engine, int]],
        behind: Sequence[Wait] = (),
    ) -> int:
        code, status = self._driver.cuStreamIsCapturing(handle)
        if status is not _NOT_CAPTURING or code is not SUCCESS:
            capture.refuse_capturing(handle, "record")
        if self._begun != self._recorded:
            self._make_record(handle, _id_of(self._driver, handle), self._begun, ())
        generation = self._begun + 1
        if generation > self._room:
            self._make_room(generation, timeout)
        if handle is self._last_handle:
            stream_id = self._last_stream
        else:
            self._last_handle = None  # this record may be a default stream's, or be interrupted: then the next one asks
            stream_id = _id_of(self._driver, handle)
        self._make_record(handle, stream_id, generation, after, behind)
        self.line.futex.wake()
        if self._words[self._state_index] != OPEN:
            self._raise_no_record()
        return generation

    def _make_record(
        self,
        handle: DriverObject,
        stream_id: int,
        generation: int,
        after: Sequence[tuple[Engine, int]],
        behind: Sequence[Wait] = (),
    ) -> None:
        """Record and publish the next generation, or the one that an exception kept from being so.

        A number is never given to two records. If an exception comes behind the driver's call, that record may have
        been made or not; the next one makes it again, behind both the place where it may be and all before it, so that
        what is said of that number is true of all work up to there.
        """
        lock = self._lock
        within = lock.is_mine() and lock.is_held_below()
        try:
            with lock:
                if self.is_closed or self._words[self._state_index] != OPEN:
                    self._raise_no_record()
                if queued.lists or self.chain.entries or after or behind:
                    self._stand_behind(handle, stream_id, generation, after, behind)
                if generation == self._begun:
                    self._follow_begun(handle, stream_id)
                elif stream_id != self._last_stream and generation > 1:
                    self._driver_stream_wait(handle, generation - 1)
                self._last_stream = stream_id
                self._begun = generation
                self._driver_record(handle, generation)
                if self.marks_records:
                    self._add_marker(handle, stream_id, self.ordinal)
                self._recorded = generation
                self.line.publish(self.base + generation)
        except BaseException:
            self._is_interrupted = True
            if not within:
                lock.unwind()
            if self.marks_records and self._begun != self._recorded:
                self._doubt(handle, stream_id, self.ordinal)
            raise

    @holding("_lock")
    def _doubt(self, handle: DriverObject, stream_id: int, ordinal: int) -> None:
        """An exception ends this call, and work of it may be queued on the stream: have a marker behind that."""
        self._doubtful[stream_id] = (handle, ordinal)
        with suppress(Exception):  # as if the one that comes after this were raised first; `try_release` tries again
            self._add_marker(handle, stream_id, ordinal)
            del self._doubtful[stream_id]

    def _settle(self) -> bool:
        """Have a marker behind all that may be queued, also where an exception kept it away; whether there is one."""
        for stream_id, (handle, ordinal) in list(self._doubtful.items()):
            if int(handle) in LEGACY:
                return False  # which may be another stream on each thread
            self._add_marker(handle, stream_id, ordinal)
            del self._doubtful[stream_id]
        return True

    def _stand_behind(
        self,
        handle: DriverObject,
        stream_id: int,
        generation: int,
        after: Sequence[tuple[Engine, int]],
        behind: Sequence[Wait],
    ) -> None:
        """Before the driver's record: tell the board what it will stand behind. Raises RecorderLost if that is lost."""
        key = self._key_of(handle, stream_id, self.ordinal)
        if not (self.chain.entries or after or behind or key in queued.lists or self.guard.stands_behind_all):
            return
        for view, point in after:
            fate = view.fate(point)
            if isinstance(fate, Loss):
                raise self._error_of(Wait(view, point, key, 0).behind(fate), generation)
            if fate is None:
                queued.add(key, view, point, 0)
        if len(self.chain.entries) >= self.chain.judge_at:
            self._publish_completed()
            self.chain.judge_at = max(_MANY_ENTRIES, 2 * len(self.chain.entries))
        waits = queued.everything() if self.guard.stands_behind_all else queued.of(key)
        self.chain.extend(generation, stream_id, dict.fromkeys((*waits, *behind)) if behind else waits)
        if stream_id != self._last_stream and self.chain.entries and generation > 1:
            queued.add(key, self, generation - 1, stream_id)  # the stream is about to wait for that

    def _key_of(self, handle: DriverObject, stream_id: int, ordinal: int) -> int:
        last_id, key = self._last_key
        if stream_id != last_id:
            key = queued.key_of(self._driver, handle, stream_id, ordinal)
            self._last_key = (stream_id, key)
        return key

    def _raise_no_record(self) -> None:
        self.check()  # an expired session says so rather than that its event is closed
        if self.chain.loss is not None:
            raise self._error_of(self.chain.loss, self._recorded + 1)
        raise EventClosed(f"the event {self.label} is {self.state}", event=self.name)

    def wait(self, generation: int, stream: StreamLike | None, timeout: float | None, ahead: bool) -> None:
        """Have the stream's later work wait for `generation`."""
        if timeout is not None:
            deadline_of(timeout)
        self._guard_check()  # `check`
        if self.is_closed:
            self._raise_closed()
        if self._words[self._incarnation_index] != self.incarnation:
            self._raise_gone()
        refuse_small_number(stream, 0)  # the default streams' too: wait(1) is a timeout that somebody meant
        handle, ordinal = stream_handle(stream)
        if handle is not self._last_plain:
            if int(handle) in LEGACY:
                with OnDevice(ordinal):
                    capture.refuse_capturing(handle, "wait")
                    self._wait(generation, handle, ordinal, timeout, ahead)
                return
            self._last_plain = handle
        code, status = self._driver.cuStreamIsCapturing(handle)
        if status is not _NOT_CAPTURING or code is not SUCCESS:
            capture.refuse_capturing(handle, "wait")
        if generation > self.known_complete or ahead or self.is_traced:
            stream_id = self._wait(generation, handle, ordinal, timeout, ahead)
            if stream_id is not None:
                self._last_waiter = (handle, stream_id)

    def _wait(
        self, generation: int, handle: DriverObject, ordinal: int, timeout: float | None, ahead: bool
    ) -> int | None:
        """The id of the stream on which the wait was queued; None if there was nothing to wait for."""
        if ahead:
            self._raise_if_ahead()
        if self.is_complete(generation):
            return None
        if ahead:
            self._raise_if_finished(generation)
        else:
            deadline = FOREVER if timeout is None else deadline_of(timeout)
            if self._words[self._recorded_index] < self.base + generation or self.is_closed:
                self.await_recorded(generation, deadline, timeout)
            if self._words[self._state_index] != OPEN:
                self._raise_if_finished(generation)
        last, last_id = self._last_waiter
        stream_id = last_id if handle is last else _id_of(self._driver, handle)
        lock = self._lock
        within = lock.is_mine() and lock.is_held_below()
        may_be_queued = False
        try:
            with lock:
                self._raise_if_closed()  # until it is, the import stays
                queued.add(self._key_of(handle, stream_id, ordinal), self, generation, stream_id)
                may_be_queued = True
                self._driver_stream_wait(handle, generation)
                self._add_marker(handle, stream_id, ordinal)
        except BaseException:
            if not within:
                lock.unwind()
            if may_be_queued:
                self._doubt(handle, stream_id, ordinal)
            raise
        self._look_after_wait(generation)
        return stream_id

    def _look_after_wait(self, generation: int) -> None:
        """The driver may let a stream pass what a dead process never did, or never exported so that it holds: raise."""
        if self._words[self._state_index] != OPEN or self.behind.stands(generation):
            self._raise_if_finished(generation)
        self._raise_if_dead(generation)
        self._raise_if_orphaned()

    def _add_marker(self, handle: DriverObject, stream_id: int, ordinal: int) -> None:
        """Remember behind which place of the stream the work just queued is over."""
        marker = self._markers.get(stream_id)
        if marker is None:
            if len(self._markers) >= _MANY_MARKERS:
                self._drop_markers()  # a program may make a stream for each piece of work
            with OnDevice(ordinal):
                marker = unwrap(self._driver.cuEventCreate(_DISABLE_TIMING), "cuEventCreate")
            marker = self._markers.setdefault(stream_id, marker)
            self._keep_marker(stream_id, marker)
        result = self._driver.cuEventRecord(marker, handle)
        if result[0] is not SUCCESS:
            unwrap(result, "cuEventRecord")

    # --- the end ------------------------------------------------------------------------------------------------------

    def publish_completed(self) -> None:
        """Tell the board what is known complete (recorder); also what a call recorded that an exception then ended.

        Nothing while another thread is at work here: a driver's call may block for as long as a stream's queue is full,
        and the heartbeat's thread must not wait for that.
        """
        if self.is_recorder:
            self._try_publish()

    @trying("_lock")
    def _try_publish(self) -> None:
        self._publish_recorded()
        self._publish_completed()

    def park_pending(self) -> None:
        """Have a thread wait in the driver for what was recorded here and is not complete, and wake who waits for it.

        At each beat, and so whenever somebody who waits nudges this session.
        """
        if self.is_recorder:
            self._try_park()

    @trying("_lock")
    def _try_park(self) -> None:
        if not self._is_released:
            events = self._pending_events()
            if events:
                park(events, self.line.completed_address)

    def _publish_recorded(self) -> None:
        """Publish what was recorded by a call that an exception ended before it could. Called with the lock held."""
        if self._is_interrupted:
            if self.line.recorded < self.base + self._recorded and self.line.state == OPEN:
                self.line.publish(self.base + self._recorded)
                self.line.futex.wake()
            self._is_interrupted = False

    def close(self) -> None:
        """End this use: later calls raise EventClosed, and those that wait now do within 50 ms.

        A record that is under way is published when this returns, unless the driver keeps it for more than a second.
        """
        lock = self._lock
        within = lock.is_mine() and lock.is_held_below()
        try:
            if not within and lock.acquire(timeout=_CLOSE_S):
                self.is_closed = True
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

        A thread that waits on the host for a record reads nothing but the board, and looks whether this use is closed
        before it believes what it read. Whoever is inside now is not waited for.
        """
        if not self._is_released:
            self._try_release()
        return self._is_released

    @trying("_lock")
    def _try_release(self) -> None:
        self._is_released = self._is_released or self._release()

    def _release(self) -> bool:
        if self._inside or self._sleepers:
            return False
        try:
            if self.guard.coordinator_is_alive() and not (
                self._settle() and self._is_drained() and self._is_begun_drained() and self._drop_markers()
            ):
                return False
            if self.guard.coordinator_is_alive() and not self._decide_waits():
                return False
        except (DriverError, CoordinatorLost):
            if self.guard.coordinator_is_alive():
                raise
        if any(map(is_parked, self._markers.values())):
            return False
        # Of a coordinator that is gone, nothing may be asked any more, and nobody waits for this.
        for wait in queued.waits_on(self):
            wait.verdict = wait.verdict or self._loss(wait.generation)
        queued.let_go(self)
        self._destroy_markers()
        return self._destroy_imports()

    def is_drained(self) -> bool:
        """Whether this use is a recorder's and all that it recorded is complete, whatever else is still queued."""
        return bool(self._try_drained())

    @trying("_lock")
    def _try_drained(self) -> bool:
        if not self.is_recorder or self._is_released or self.line.state not in (OPEN, CLOSED):
            return False
        return self._settle() and self._is_drained() and self._is_begun_drained()

    def _destroy_markers(self) -> None:
        """Destroy the markers, be they over or not: CUDA destroys an event once it is."""
        for stream_id in list(self._markers):
            self._destroy_marker(stream_id)

    def _destroy_marker(self, stream_id: int) -> None:
        # Forgotten first: an exception that comes between may cost an event, and never destroys one twice.
        self._keep_marker(stream_id, 0)
        marker = self._markers.pop(stream_id)
        unwrap(self._driver.cuEventDestroy(marker), "cuEventDestroy")

    def _drop_markers(self) -> bool:
        """Destroy the markers that are over; whether all were. Called with the lock held."""
        for stream_id, marker in list(self._markers.items()):
            if self._is_done(marker) and not is_parked(marker):
                self._destroy_marker(stream_id)
        return not self._markers

    def _is_drained(self) -> bool:
        """Whether all that was recorded here is complete."""
        if not self.is_recorder or self.line.state not in (OPEN, CLOSED):
            return self._is_idle()
        self._publish_completed()
        return not self.chain.entries and self.line.completed >= self.base + self._recorded

    # --- what others stand behind -------------------------------------------------------------------------------------

    def accepts(self, generation: int) -> bool:
        """Whether a waiter would accept `generation` now, with a look at the driver; nothing is raised.

        False too while another thread is at work here, and of an event of this process's: its own judgement tells.
        """
        return not self.is_recorder and bool(self._try_accept(generation))

    @trying("_lock")
    def _try_accept(self, generation: int) -> bool:
        return not self._is_released and self._accepts(generation)

    def _accepts(self, generation: int) -> bool:
        try:
            if self.generation < generation or not self._driver_query(generation) or not self._is_clear(generation):
                return False
            if not self.recorder_is_alive() or self.line.state == BROKEN or self._is_orphaned:
                return False
        except IpcSyncError as error:  # which this event's own calls raise
            log.debug("whether generation %d of %s is complete cannot be asked: %s", generation, self.label, error)
            return False
        self._note_complete(generation)
        return True

    def _decide_waits(self) -> bool:
        """Whether there is a verdict on each wait that was queued for this slot; all of them are over."""
        for wait in queued.waits_on(self):
            if wait.known() is None:
                if self.is_recorder or not self._accepts(wait.generation):
                    self.behind.nudge(self.recorder)
                    return False
                wait.verdict = True
        return True

    def _is_done(self, event: DriverObject) -> bool:
        """Ask the driver of an event, in relaxed capture mode: some other thread may be capturing."""
        driver, mode = self._driver, None
        try:
            result = driver.cuThreadExchangeStreamCaptureMode(_RELAXED)
            mode = result[1] if result[0] is SUCCESS else unwrap(result, "cuThreadExchangeStreamCaptureMode")
            result = driver.cuEventQuery(event)
            driver.cuThreadExchangeStreamCaptureMode(mode)
        except BaseException:
            capture.restore(mode)
            raise
        if result[0] is SUCCESS:
            return True
        if result[0] != _NOT_READY:
            self._unwrap(result, "cuEventQuery")
        return False

    def _unwrap(self, result: tuple[Any, ...], call: str) -> None:
        """`check`, after a call on what the coordinator exported: if that one is lost, so is this, and that is said."""
        try:
            unwrap(result, call)
        except DriverError:
            self.guard.check_liveness()
            raise

    def _take_shortcuts(self) -> None:
        """From now on have the compiled core make what calls it can, if there is one: on the cuda driver, untraced."""
        if _drivers.name() == "cuda" and _bind() and not self.is_traced:
            look, behind_all = getattr(self.guard, "look", None), self.guard.stands_behind_all
            self.shorten(look, self.kind == "timeline", queued.lists, queued.lists_lock, Wait, behind_all)

    def _tell_of_wait(self, stream_id: int, generation: int) -> bool:
        """Before a shortcut queues a wait: have the stream's next record stand behind it; False if it is unknown."""
        last_id, key = self._last_key
        if stream_id == last_id:
            queued.add(key, self, generation, stream_id)
        return stream_id == last_id

    # --- what an engine does ------------------------------------------------------------------------------------------

    @abstractmethod
    def _driver_record(self, handle: DriverObject, generation: int) -> None:
        """Record `generation` on the stream."""

    @abstractmethod
    def _driver_stream_wait(self, handle: DriverObject, generation: int) -> None:
        """Queue a wait for `generation` on the stream."""

    @abstractmethod
    def _driver_query(self, generation: int) -> bool:
        """Ask the driver whether `generation`, which was recorded, is complete."""

    @abstractmethod
    def _driver_wait(self, generation: int, deadline_ns: int) -> bool:
        """Wait in the driver for `generation`, which was recorded; False if `deadline_ns` passed before."""

    @abstractmethod
    def _follow_begun(self, handle: DriverObject, stream_id: int) -> None:
        """Have the stream wait for all before the record that was begun, and for that one if it was made."""

    def _is_begun_drained(self) -> bool:
        """Whether a record that was begun and not published is over, if it was made."""
        return True

    def _open_import(self, generation: int) -> None:
        """Open what a wait for `generation` needs. Called with the lock held."""

    def _make_room(self, generation: int, timeout: float | None) -> None:
        """Before a record: wait until `generation` may be recorded."""

    def _publish_completed(self) -> None:
        """Store in `completed` what is known complete. Called with the lock held."""

    def _pending_events(self) -> list[Any]:
        """CUDA events behind what was recorded and is not complete, in order. Called with the lock held."""
        return []

    def _publish_known(self, generation: int) -> None:
        """Tell the board what the recorder itself found complete."""

    def _raise_if_ahead(self) -> None:
        """Raise EngineMismatch if this engine cannot wait ahead of a record."""

    def _is_idle(self) -> bool:
        """Whether nothing that this process recorded can still touch the slot, as far as the markers do not tell."""
        return True

    def _destroy_imports(self) -> bool:
        """Destroy the imports; False while another thread opens or destroys some. Called with the lock held."""
        return True


@cache
def _bind() -> bool:
    """Whether the compiled core has the driver's functions."""
    know_streams(Stream)
    why_not = bind_driver()
    if why_not and COMPILED:
        log.warning("no call takes a shortcut: the binding does not give what the compiled core needs: %s", why_not)
    return not why_not


def _id_of(driver: DriverObject, handle: DriverObject) -> int:
    result = driver.cuStreamGetId(handle)
    return int(result[1] if result[0] is SUCCESS else unwrap(result, "cuStreamGetId"))
