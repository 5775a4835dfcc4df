"""What both engines share: record and wait on streams, query and wait on the host.

The steps of each call, and their order, are those of `tests/faults/board_model.py`, and `test_board_order` compares the
two. The compiled core takes most calls, and leaves the others to this module.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import NoReturn

from ipcsync._board import BROKEN, OPEN, Board
from ipcsync._deadline import FOREVER, deadline_of
from ipcsync._drivers import DriverObject
from ipcsync._engines import queued
from ipcsync._engines.chains import Entry
from ipcsync._engines.compiled import CallLock, Links, bind_driver, know_streams
from ipcsync._engines.loss import Loss
from ipcsync._engines.queued_wait import Wait
from ipcsync._engines.slot_use import SlotUse
from ipcsync._engines.slot_view import Guard
from ipcsync._locks import attempt, holding, take
from ipcsync._native import capture
from ipcsync._native.context import LEGACY, OnDevice
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import Stream, parts_of, stream_handle
from ipcsync._wire.messages import Attachment
from ipcsync.errors import DeviceMismatch, EventClosed, NotRecorder, RecorderLost, Reentered
from ipcsync.typing import StreamLike

log = logging.getLogger("ipcsync")

_MANY_ENTRIES = 16
PATIENCE_S = 0.05  # for the lock: longer than any call has it whose driver call does not block


class Engine(SlotUse):
    """One attachment's use of one slot, with all calls on it. Thread-safe."""

    is_closed: bool
    is_traced = False
    marks_records = False  # whether a marker behind each record is needed to see that it has left the stream

    def __init__(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> None:
        super().__init__(board, guard, attachment, ordinal)
        self._record_lock = CallLock()  # one record at a time, also while it waits for the ring
        self._room = FOREVER
        self._last_stream = 0  # the id of the stream recorded on last, or that a record was begun on
        self._last_key = (0, 0)  # a stream's id, and which list of waits it has
        # A handle and its stream's id. A Stream keeps its handle, one object, for life, so the driver is asked once.
        # Never a default stream's, which may be another stream on each thread.
        self._known_stream: tuple[DriverObject, int] = (None, 0)

    # --- waits on the host --------------------------------------------------------------------------------------------

    def synchronize(self, generation: int, timeout: float | None, began: int = 0) -> None:
        """Block until `generation` is complete, at most `timeout` seconds from now, or from `began` in ns."""
        self.await_complete(generation, timeout, began)

    def await_complete(
        self, generation: int, timeout: float | None, began: int = 0, patience_s: float = PATIENCE_S
    ) -> None:
        """As `synchronize`, and for the client's own threads, of which a trace does not show it.

        If another thread's driver call blocks, each step that needs its lock may take `patience_s` longer.
        """
        deadline = deadline_of(timeout, began)
        self.check()
        if self.is_complete(generation):
            return
        self.await_recorded(generation, deadline, timeout)
        while not self._is_complete_and_judged(generation, patience_s):
            self._raise_if_finished(generation)
            until = min(deadline, time.monotonic_ns() + self.behind.slice_ns)
            if self._wait_in_driver(generation, until, patience_s):
                if self._confirm(generation, patience_s):
                    return
                self.behind.await_answer(deadline)
            self.check_liveness(generation)
            if time.monotonic_ns() >= deadline:  # only now: the driver is asked once even with a timeout of 0
                self.raise_timeout(generation, timeout, "complete")

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None:
        """For a trace: a task of an asynchronous client has waited for `generation` since `began`."""

    def _is_complete_and_judged(self, generation: int, patience_s: float) -> bool:
        """`is_complete`; the recorder itself first judges what its records stand behind, if it gets the lock for it."""
        if self.is_recorder and self.chain.is_open:
            attempt(self._lock, patience_s, self._publish)
        return self.is_complete(generation)

    def _confirm(self, generation: int, patience_s: float) -> bool:
        """After the driver said complete: whether that counts. Recorder and coordinator must live now, after it.

        What the generation stands behind must be good too: False while that is unknown.
        """
        if self.behind.stands(generation):
            if self.is_recorder:
                return self._is_judged(generation, patience_s)
            if not self._is_clear(generation):
                return False
        is_alive = self.recorder_is_alive() and self.line.state != BROKEN
        self._raise_if_closed()
        self._raise_if_orphaned()
        if is_alive:
            self._note_complete(generation)
            if self.is_recorder:
                self._publish_known(generation, patience_s)
        else:
            self._raise_unless_good(generation)
        return True

    def _is_judged(self, generation: int, patience_s: float) -> bool:
        """Whether this recorder finds that `generation`, which stands behind something, counts."""
        if self._is_complete_and_judged(generation, patience_s):
            return True
        self.behind.nudge(self.recorder)  # the recorder may have to judge its other events first
        return False

    def query(self, generation: int, patience_s: float = PATIENCE_S) -> bool:
        """Whether `generation` is complete.

        Another thread's driver call that blocks may keep what has to be opened or judged first. For each `patience_s`
        seconds are waited, then this is False.
        """
        self.check()
        if generation <= self.known_complete or self._is_complete_and_judged(generation, patience_s):
            return True
        if self.generation < generation:
            self._raise_if_finished(generation)
            return False
        is_done = self._in_driver(self._driver_query, generation, patience_s)
        if is_done and self._confirm(generation, patience_s):
            return True
        self._raise_if_finished(generation)
        return False

    def _wait_in_driver(self, generation: int, deadline_ns: int, patience_s: float = PATIENCE_S) -> bool:
        """`_driver_wait`, during which the import is not destroyed."""
        return self._in_driver(lambda number: self._driver_wait(number, deadline_ns), generation, patience_s)

    def _in_driver(self, ask: Callable[[int], bool], generation: int, patience_s: float) -> bool:
        """`ask(generation)`, during which the import is not destroyed; False if that cannot be opened now.

        It does not wait for the lock, unless the import is not open yet: another thread may have it for as long as a
        record's driver call blocks, since a stream's queue is full.
        """
        me = object()
        try:
            self._inside[me] = None
            self.check()  # in this order: a release looks at `_inside` after the close
            is_done = self._has_import(generation, patience_s) and ask(generation)
            del self._inside[me]
        except BaseException:
            self._inside.pop(me, None)
            raise
        return is_done

    # --- stream work --------------------------------------------------------------------------------------------------

    def record(
        self,
        handle: DriverObject,
        ordinal: int,
        timeout: float | None,
        after: Sequence[tuple[Engine, int]] = (),
        behind: Sequence[Wait] = (),
    ) -> int:
        """Record the next generation on the CUstream `handle` of device `ordinal`; returns its number.

        It stands behind all waits queued on that stream earlier, behind the generations `after`, which the stream is
        made to wait for, and behind the waits `behind`, which are those of other streams.
        """
        if timeout is not None:
            deadline_of(timeout)  # raises for an invalid one, also if there is room
        self.check()  # before the lock, which may be held for ever in a forked child
        if not self.is_recorder:
            self.raise_not_recorder()
        began = (
            0  # the wait for room: it is part of that for this call's turn, or of those for `after`, if there is one
        )
        if after:
            began = time.monotonic_ns()
            self._wait_for(after, handle, ordinal, timeout, began)
        lock = self._record_lock
        if lock.is_mine() and lock.is_held_below():
            raise Reentered(f"a record of {self.label} is under way on this thread, and this record interrupts it")
        try:
            if not lock.acquire(False):
                began = began or time.monotonic_ns()
                self._await_turn(timeout)
                self.check()
            with lock:
                lock.release()
                return self._record_in_turn(handle, ordinal, timeout, behind, began)
        except BaseException:
            lock.unwind()
            raise

    def _wait_for(
        self,
        after: Sequence[tuple[Engine, int]],
        handle: DriverObject,
        ordinal: int,
        timeout: float | None,
        began: int,
    ) -> None:
        """Have the stream wait for these generations, as by a wait for each; of this event's, a record does anyway."""
        for view, generation in after:
            if view.origin == self.origin:
                if generation > self._recorded:
                    number = self._recorded + 1
                    raise ValueError(
                        f"generation {number} of {self.label} cannot stand behind its generation {generation}"
                    )
                continue
            try:
                view.wait_on(generation, handle, ordinal, timeout, began)
            except RecorderLost:
                fate = view.fate(generation)
                view.check()  # after the words were read
                if not isinstance(fate, Loss):
                    raise
                raise self._error_of(Wait(view, generation, 0, 0).behind(fate), self._recorded + 1) from None

    def _record_in_turn(
        self,
        handle: DriverObject,
        ordinal: int,
        timeout: float | None,
        behind: Sequence[Wait],
        began: int,
    ) -> int:
        if ordinal != self.ordinal:
            raise DeviceMismatch(f"Event device {self.ordinal} does not match recording stream's device {ordinal}.")
        if not self._is_default(handle):
            return self._record(handle, timeout, behind, began)
        with OnDevice(ordinal) as inside, inside:
            return self._record(handle, timeout, behind, began)

    def raise_not_recorder(self, who: str = "this session") -> NoReturn:
        recorder, pid = self._recorder()
        other = f"the session {recorder!r} (pid {pid or '?'}) records on it" if recorder else "no session has so far"
        raise NotRecorder(
            f"{who} did not open {self.label} with recorder=True; {other}",
            event=self.name,
            recorder=recorder,
            pid=pid,
        )

    @property
    def may_be_recorded(self) -> bool:
        """Whether an exception ended a record that the GPU may have all the same: then it will write that number."""
        return self.marks_records and self._begun != self._recorded

    def _await_turn(self, timeout: float | None) -> None:
        if not take(self._record_lock, -1.0 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            self.raise_no_turn(timeout)

    def raise_no_turn(self, timeout: float | None, why: str = "another thread's record waits for room") -> NoReturn:
        """Raise WaitTimeout: another thread's record of this event was under way for `timeout` seconds."""
        self.raise_timeout(self._recorded + 1, timeout, f"recorded ({why})")

    @property
    def oldest_in_the_way(self) -> int:
        """The generation that has to be complete before there is room for a further record; 0 if none has to be."""
        return 0

    def _record(
        self,
        handle: DriverObject,
        timeout: float | None,
        behind: Sequence[Wait],
        began: int,
    ) -> int:
        capture.refuse_capturing(handle, "record", self._driver)
        if self._begun != self._recorded:
            self._make_record(handle, self._id_of(handle), self._begun, behind)  # it may be a reservation's
        generation = self._begun + 1
        if generation > self._room and self._make_room(generation, timeout, began):
            capture.refuse_capturing(handle, "record", self._driver)  # again: another thread may have begun one
        self._make_record(handle, self._id_of(handle), generation, behind)
        self.line.futex.wake()
        if self._words[self._state_index] != OPEN:
            self._raise_no_record()
        return generation

    def _make_record(
        self,
        handle: DriverObject,
        stream_id: int,
        generation: int,
        behind: Sequence[Wait] = (),
    ) -> None:
        """Record and publish `generation`: the next one, or one whose record an exception interrupted.

        A number is never given to two records. After an exception in or behind the driver's call, it is unknown whether
        that record was made. So the next call makes it again, behind its possible place and all records before it, and
        then one with a number of its own. On the event engine the number is complete with the second place; on timeline
        the first one, if it was made, writes the word.
        """
        lock = self._lock
        within = lock.is_mine() and lock.is_held_below()
        is_inside = within
        try:
            if not within:
                take(lock)
            with lock:
                if not within:
                    lock.release()
                is_inside = True
                if self.is_closed or self._words[self._state_index] != OPEN:
                    self._raise_no_record()
                followed = None
                if queued.changed or queued.lists or self.chain.entries or behind:
                    followed = self._stand_behind(handle, stream_id, generation, behind)
                if generation == self._begun:
                    if self._unmarked:
                        self._mark_unmarked()
                    self._follow_begun(handle, stream_id)
                elif stream_id != self._last_stream and generation > 1:
                    self._driver_stream_wait(handle, generation - 1)
                if followed is not None and followed.generation == generation - 1:
                    followed.is_queued = True
                self._last_stream = stream_id
                self._begun = generation
                self._driver_record(handle, generation)
                if self.marks_records:
                    self._markers.add(handle, stream_id, self.ordinal)
                self._recorded = generation
                self.line.publish(self.base + generation)
        except BaseException:
            self._is_interrupted = True
            if not within:
                lock.unwind()
            if is_inside:  # else another thread has the lock, and nothing was done
                self._tidy_up(handle, stream_id, generation)
            raise

    def _tidy_up(self, handle: DriverObject, stream_id: int, generation: int) -> None:
        """After an exception in a record."""
        if self.chain.entries and self._begun < generation:
            self._unprove(generation)
        if self.marks_records and self._begun != self._recorded:
            self._doubt(handle, stream_id, self.ordinal)

    def _raise_refused(self, code: int, call: str) -> None:
        """Raise the driver's error of a shortcut, of which the stream may have work all the same."""
        self._mark_unmarked()
        self.unwrap((code,), call)

    @holding("_lock")
    def _unprove(self, generation: int) -> None:
        """The driver was not asked for this record: the next one of that number may be on another stream."""
        self.chain.unprove(generation)

    def _stand_behind(
        self,
        handle: DriverObject,
        stream_id: int,
        generation: int,
        behind: Sequence[Wait],
    ) -> Wait | None:
        """Before the driver's record: store what it will stand behind. Raises RecorderLost if any of that is lost.

        Returns the listed wait for the previous record, if the stream is about to wait for that.
        """
        key = self._key_of(handle, stream_id, self.ordinal)
        is_behind = self.chain.entries or behind or queued.changed or key in queued.lists
        if not (is_behind or self.guard.stands_behind_all):
            return None
        if len(self.chain.entries) >= self.chain.judge_at:
            self._publish_completed()
            self.chain.judge_at = max(_MANY_ENTRIES, 2 * len(self.chain.entries))
        waits = self.chain.listed(None if self.guard.stands_behind_all else key)
        self.chain.extend(generation, stream_id, dict.fromkeys((*waits, *behind)) if behind else waits)
        if stream_id != self._last_stream and self.chain.entries and generation > 1:
            return queued.add(key, self, generation - 1, stream_id)
        return None

    def _key_of(self, handle: DriverObject, stream_id: int, ordinal: int) -> int:
        last_id, key = self._last_key
        if stream_id != last_id:
            flags = self.unwrap(self._driver.cuStreamGetFlags(handle), "cuStreamGetFlags")
            key = queued.key_of(flags, stream_id, ordinal)
            self._last_key = (stream_id, key)
        return key

    def _raise_no_record(self) -> None:
        self.check()  # first: an expired session raises SessionExpired rather than EventClosed
        if self.chain.loss is not None:
            raise self._error_of(self.chain.loss, self._recorded + 1)
        raise EventClosed(
            f"the event {self.label} is {self.state}, and takes no more records: open its name again", event=self.name
        )

    def wait(self, generation: int, stream: StreamLike | None, timeout: float | None, ahead: bool) -> None:
        """Have the stream's later work wait for `generation`."""
        if timeout is not None:
            deadline_of(timeout)
        self.check()
        if type(stream) is Stream:
            handle, ordinal, is_default = parts_of(stream)
        else:
            refuse_small_number(stream, 0)  # the default streams' numbers too: wait(1) was meant as a timeout
            handle, ordinal = stream_handle(stream)
            is_default = self._is_default(handle)
        if is_default:
            with OnDevice(ordinal) as inside, inside:
                capture.refuse_capturing(handle, "wait", self._driver)
                self._wait(generation, handle, ordinal, timeout, ahead)
        else:
            capture.refuse_capturing(handle, "wait", self._driver)
            if generation > self.known_complete or ahead or self.is_traced:  # a trace shows it all the same
                self._wait(generation, handle, ordinal, timeout, ahead)

    def wait_on(self, generation: int, handle: DriverObject, ordinal: int, timeout: float | None, began: int) -> None:
        """As `wait`, on the CUstream `handle` of device `ordinal`; `timeout` counts from `began` in ns."""
        self.check()
        with OnDevice(ordinal) as inside, inside:
            capture.refuse_capturing(handle, "record", self._driver)
            self._wait(generation, handle, ordinal, timeout, ahead=False, began=began)

    def _wait(
        self, generation: int, handle: DriverObject, ordinal: int, timeout: float | None, ahead: bool, began: int = 0
    ) -> int | None:
        """The id of the stream on which the wait was queued; None if there was nothing to wait for."""
        if ahead:
            self._raise_if_ahead()
        if generation <= self.known_complete or self.is_complete(generation):
            return None
        if ahead:
            self._raise_if_finished(generation)
        elif self._is_over(generation, handle, timeout, began):
            return None
        stream_id = self._id_of(handle)
        lock = self._lock
        within = lock.is_mine() and lock.is_held_below()
        may_be_queued = False
        try:
            if not within:
                take(lock)
            with lock:
                if not within:
                    lock.release()
                self._raise_if_closed()  # while it is open, the import stays
                listed = queued.add(self._key_of(handle, stream_id, ordinal), self, generation, stream_id)
                may_be_queued = True
                if not self._queue_wait(handle, generation, within):
                    return None
                if listed.generation == generation:
                    listed.is_queued = True
                self._markers.add(handle, stream_id, ordinal)
        except BaseException:
            if not within:
                lock.unwind()
                self._end_visit()
            if may_be_queued:
                self._doubt(handle, stream_id, ordinal)
            raise
        self._check_after_wait(generation)
        return stream_id

    def _is_over(self, generation: int, handle: DriverObject, timeout: float | None, began: int) -> bool:
        """Wait until it is recorded, so that a stream can wait for it; whether it is found complete then.

        Raises the error of one that never will be complete.
        """
        if self._words[self._recorded_index] < self.base + generation or self.is_closed:
            self.await_recorded(generation, deadline_of(timeout, began), timeout)
            capture.refuse_capturing(handle, "wait", self._driver)  # again: another thread may have begun one
        if self._words[self._state_index] != OPEN:
            self._raise_if_finished(generation)
        return False

    def _queue_wait(self, handle: DriverObject, generation: int, within: bool) -> bool:  # noqa: ARG002 - the event engine's
        """Queue a wait for `generation` on the stream; False if that is complete by now, so that there is none.

        `within`: this call interrupts another one of its thread that may be just here.
        """
        self._driver_stream_wait(handle, generation)
        return True

    def _end_visit(self) -> None:
        """Undo what an exception in `_queue_wait` may have left."""

    def _check_after_wait(self, generation: int) -> None:
        """Raise if the queued wait may end wrongly: a driver may let a stream pass a dead process's work or exports."""
        words = self._words
        if words[self._state_index] != OPEN or (words[self._behind_index] and self.behind.stands(generation)):
            self._raise_if_finished(generation)
            self.is_complete(generation)  # raises if its recorder has said that it is lost
        self._raise_if_dead(generation)
        if self._header != self._living_header:
            self._raise_if_orphaned()

    def _is_default(self, handle: DriverObject) -> bool:
        """Whether the handle is a default stream's, and so means that of the current device."""
        return handle is not self._known_stream[0] and int(handle) in LEGACY

    def _id_of(self, handle: DriverObject) -> int:
        known, stream_id = self._known_stream
        if handle is not known:
            stream_id = int(self.unwrap(self._driver.cuStreamGetId(handle), "cuStreamGetId"))
            if int(handle) not in LEGACY:
                self._known_stream = (handle, stream_id)
        return stream_id

    # --- shortcuts ----------------------------------------------------------------------------------------------------

    def _take_shortcuts(self) -> None:
        """Let the compiled core take calls from now on, without a trace."""
        if _bind() and not self.is_traced:
            links = Links(
                waits=queued.lists,
                changed=queued.changed,
                lock=queued.lists_lock,
                drop=queued.drop,
                make_wait=Wait,
                chain=self.chain,
                make_entry=Entry,
                behind_all=self.guard.stands_behind_all,
            )
            self.shorten(getattr(self.guard, "session_check", None), self.kind == "timeline", links)

    def _note_wait(self, stream_id: int, key: int, generation: int) -> Wait:
        """Before a shortcut queues a wait: have the stream's next record stand behind it."""
        return queued.add(key, self, generation, stream_id)

    # --- what an engine does ------------------------------------------------------------------------------------------

    @abstractmethod
    def _driver_record(self, handle: DriverObject, generation: int) -> None:
        """Record `generation` on the stream."""

    @abstractmethod
    def _driver_stream_wait(self, handle: DriverObject, generation: int) -> None:
        """Queue a wait for `generation` on the stream."""

    @abstractmethod
    def _driver_wait(self, generation: int, deadline_ns: int) -> bool:
        """Wait in the driver for `generation`, which was recorded; False if `deadline_ns` passed before."""

    def _follow_begun(self, handle: DriverObject, stream_id: int) -> None:  # noqa: ARG002 - for the engines
        """Have the stream wait for all records before the interrupted one, and for that one if it was made."""
        if self._begun > 1:
            self._driver_stream_wait(handle, self._begun - 1)

    def _has_import(self, generation: int, patience_s: float) -> bool:  # noqa: ARG002 - the event engine's
        """Whether what a wait for `generation` needs is open; False if another thread has the lock for so long."""
        return True

    def _make_room(self, generation: int, timeout: float | None, began: int) -> bool:  # noqa: ARG002 - there always is
        """Wait until there is room for a record of `generation`, `timeout` seconds from now or from `began` in ns.

        Returns whether it had to wait.
        """
        return False

    def _publish_known(self, generation: int, patience_s: float) -> None:
        """Store in `completed` what the recorder itself found complete; a later look does if a driver call blocks."""

    def _raise_if_ahead(self) -> None:
        """Raise EngineMismatch if this engine cannot wait ahead of a record."""


@cache
def _bind() -> bool:
    """Give the compiled core the driver's functions; whether the binding has what it needs."""
    know_streams(Stream)
    why_not = bind_driver()
    if why_not is not None:
        log.warning("the compiled core takes no calls: the binding lacks a function that it needs: %s", why_not)
    return why_not is None
