"""The `event` engine: generation g is a record of the ring's event number (g - 1) mod depth.

A record into a full ring first waits on the host for the oldest record. So a point's CUDA event is recorded again only
once the point is complete. A stream's wait is queued after a look that found it pending. If it completes between that
look and the driver's call, the recorder, before its ring goes round, waits until the call is made: else the stream
would wait for a later record.
"""

from __future__ import annotations

import time
from typing import Any

from ipcsync import _drivers
from ipcsync._board import BROKEN, OPEN, Board, peer_of
from ipcsync._board.fence import fence
from ipcsync._deadline import deadline_of
from ipcsync._drivers import DriverObject
from ipcsync._engines import imports
from ipcsync._engines.base import PATIENCE_S, Engine
from ipcsync._engines.slot_view import FULL_NS, SLICE_NS, Guard
from ipcsync._locks import holding, taking, trying, under_within
from ipcsync._native import capture, fork
from ipcsync._wire.messages import Attachment
from ipcsync.errors import DriverError, EngineMismatch, Reentered
from ipcsync.typing import EngineName

_LEAST_NS = 5_000_000  # for which a record waits for others' driver calls even if its timeout is shorter
_PATIENCE_NS = 1_000_000_000  # for which a visit is waited for: its process may be stopped, its stream's queue be full
_LONGEST_PAUSE_S = 0.001
_LONGEST_LOOK_NS = 20_000_000  # between two looks at a visit; what is longer is this process's own pause


class EventEngine(Engine):
    """A ring of interprocess CUDA events, each opened at its first use."""

    kind: EngineName = "event"

    def __init__(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> None:
        super().__init__(board, guard, attachment, ordinal)
        self.handles: tuple[bytes, ...] = tuple(attachment.handles)
        self._serials = attachment.serials
        self._ring: list[Any] = [None] * attachment.depth
        # Generations recorded here that are known complete.
        self._completed = min(max(self.line.completed - self.base, 0), self._recorded)
        self._fork_mark = fork.mark().byte
        self._is_queueing = False  # a wait of this session's, here in Python
        self._watched: dict[tuple[int, int], int] = {}  # for how long records have waited for each visit, in ns
        self._room = 0
        self._raise_room()
        self._take_shortcuts()

    @holding("_lock")
    def open_first(self) -> None:
        """Open the ring's first handle, to test that handles open in this process. Raises HandleError."""
        self._event(1)

    def _event(self, generation: int, patience_s: float | None = None) -> DriverObject:
        """The generation's CUevent, opened now if it was not; None if another thread opens one for `patience_s`."""
        index = (generation - 1) % self.depth
        event = self._ring[index]
        if event is None:
            try:
                event = imports.acquire(self, self._key(index), self.handles[index], self.ordinal, patience_s)
            except DriverError:
                self.guard.check_liveness()  # a lost coordinator explains the error
                raise
            if event is not None:
                self._ring[index] = event
                self._keep_event(index, event)
        return event

    def _has_import(self, generation: int, patience_s: float) -> bool:
        if self._ring[(generation - 1) % self.depth] is not None:
            return True
        return under_within(self._lock, patience_s, self._event, generation, patience_s) is not None

    def _make_room(self, generation: int, timeout: float | None, began: int) -> bool:
        lock = self._lock
        if self._is_queueing and lock.is_mine() and lock.is_held_below():
            raise Reentered(f"a wait for {self.label} is under way on this thread, and this record interrupts it")
        oldest = generation - self.depth
        self._find_room(is_first=True)
        if generation <= self._room:
            return False
        deadline = deadline_of(timeout, began)
        if oldest > self._completed:
            self.guard.count_full_ring()
            self._await_completed(oldest, timeout, deadline)
        if generation > self._room:
            self._await_leave(oldest, timeout, deadline)
        return True

    @property
    def oldest_in_the_way(self) -> int:
        oldest = self._recorded + 1 - self.depth
        return oldest if oldest > self._completed else 0

    def _await_completed(self, oldest: int, timeout: float | None, deadline: int) -> None:
        first = time.monotonic_ns()
        while oldest > self._completed:
            now = time.monotonic_ns()
            if now >= deadline:
                self.raise_full(oldest, timeout)
            if now - first > FULL_NS:
                self.note_full(oldest)
            is_done = self._wait_in_driver(oldest, min(deadline, now + SLICE_NS))
            self.guard.check_liveness()
            self._find_room(is_first=False)
            if is_done and oldest > self._completed:  # it stands behind something that is not judged yet
                self.behind.nudge(self.recorder)
                self.behind.await_answer(deadline)

    def _await_leave(self, oldest: int, timeout: float | None, deadline: int) -> None:
        """Wait while a process may be about to queue a wait for a complete generation whose CUDA event is next."""
        done, visits = self._completed, self._visits()
        last, pause_s = time.monotonic_ns(), 0.0
        deadline = max(deadline, last + _LEAST_NS)
        while visits := visits & self._visits():
            now = time.monotonic_ns()
            for visit in visits:  # while this process is stopped, it does not watch
                self._watched[visit] += min(now - last, _LONGEST_LOOK_NS)
            if now >= deadline:
                self.raise_visited(oldest, timeout)
            last = now
            time.sleep(pause_s)
            pause_s = min(2 * pause_s + 1e-5, _LONGEST_PAUSE_S)
            self._find_room(is_first=False)
            if pause_s == _LONGEST_PAUSE_S:
                self._watched |= {visit: _PATIENCE_NS for visit in visits if not self._is_alive(visit[0])}
        self._give_room(done)

    def _visits(self) -> set[tuple[int, int]]:
        """The visits to wait for: a session's line, and its byte. One takes microseconds.

        Not those that were watched for `_PATIENCE_NS`, nor those of processes found dead, which the coordinator ends.
        """
        self._watched = {visit: self._watched.get(visit, 0) for visit in self.line.visits().items()}
        self._note_visits(bool(self._watched))
        return {visit for visit, watched in self._watched.items() if watched < _PATIENCE_NS}

    def _is_alive(self, session: int) -> bool:
        serial = self.board.session(session).serial
        return bool(serial) and peer_of(self.board, serial).is_alive()

    @taking("_lock")
    def _give_room(self, done: int) -> None:
        self._room = max(self._room, done + self.depth)

    def _raise_room(self) -> None:
        """Let records go on behind what is complete, unless somebody may be about to queue a wait for that."""
        done = self._completed  # before the look, within which a signal's handler may store more
        if self._room < done + self.depth and not self._visits():
            self._room = max(self._room, done + self.depth)

    @taking("_lock")
    def _find_room(self, *, is_first: bool) -> None:
        if is_first:
            self._raise_if_closed()
        else:
            self.check()
            if self.line.state != OPEN:
                self._raise_no_record()
        self._publish_completed()
        if self.chain.loss is not None:
            self._raise_no_record()
        self._raise_room()

    def _driver_record(self, handle: DriverObject, generation: int) -> None:
        self.unwrap(self._driver.cuEventRecord(self._event(generation), handle), "cuEventRecord")

    def _driver_stream_wait(self, handle: DriverObject, generation: int) -> None:
        self.unwrap(self._driver.cuStreamWaitEvent(handle, self._event(generation), 0), "cuStreamWaitEvent")

    def _is_over(self, generation: int, handle: DriverObject, timeout: float | None, began: int) -> bool:
        super()._is_over(generation, handle, timeout, began)
        # A question to the driver costs less than a wait that it has to queue. If the ring went round meanwhile, it is
        # about a later record: not complete then, as far as is known.
        return self._in_driver(self._driver_query, generation, PATIENCE_S) and self._confirm(generation, PATIENCE_S)

    def _queue_wait(self, handle: DriverObject, generation: int, within: bool) -> bool:
        if self._ring[(generation - 1) % self.depth] is None:
            self._event(generation)  # before the visit: opening one takes long
        # What the call below has said holds for this one, if it is on the board; a recorder says nothing there.
        is_inner = within and (self._is_queueing if self.is_recorder else self.line.is_on_visit(self.guard.line_index))
        try:
            if not is_inner:
                self._is_queueing = True
                if not self.is_recorder:  # which records under the same lock as this
                    if not self._fork_mark[0]:
                        fork.check()  # a child's visit would be its parent's
                    self.line.enter(self.guard.line_index)
            # The recorder stores what is complete before it looks at the visits.
            if self._words[self._completed_index] >= self.base + generation and self.is_complete(generation):
                return False
            self._driver_stream_wait(handle, generation)
            return True
        finally:
            if not is_inner:
                self._leave()

    @trying("_lock")
    def _end_visit(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._is_queueing = False
        if not self.is_recorder and self._fork_mark[0]:
            self.line.leave(self.guard.line_index)

    def _follow_begun(self, handle: DriverObject, stream_id: int) -> None:
        super()._follow_begun(handle, stream_id)
        if stream_id != self._last_stream:
            self._driver_stream_wait(handle, self._begun)  # if it was not made, its CUDA event is an older record's

    def _is_begun_drained(self) -> bool:
        return self._begun == self._recorded or self._driver_query(self._begun)

    def _driver_query(self, generation: int) -> bool:
        return self.is_done(self._event(generation))

    def _driver_wait(self, generation: int, deadline_ns: int) -> bool:
        event = self._event(generation)
        if self.is_done(event):  # often it is complete already
            return True
        if self._await_work(
            event, self.line.completed_address, self.base + generation, deadline_ns, self._nudge_address()
        ):
            return self.is_done(event)
        try:
            return bool(capture.relaxed_call(_drivers.wait_event, event, deadline_ns))
        except DriverError:
            self.guard.check_liveness()
            raise

    def _pending_events(self) -> list[Any]:
        return [self._event(number) for number in range(self._completed + 1, self._recorded + 1)]

    def _publish_completed(self) -> None:
        done = self._completed
        if done < self._recorded:
            newest = self._recorded  # before the question, within which a signal's handler may record
            if self._driver_query(newest):
                done = newest  # the newest: each generation is complete only after all before it
            else:
                while done + 1 < self._recorded and self._driver_query(done + 1):
                    done += 1
        if not self.chain.is_open:
            self._store(done)
        elif not self._is_orphaned and self.line.state != BROKEN:  # a broken one's watermark says what counts
            self._store(self.chain.judge(done))
            self.chain.store()

    def _store(self, done: int) -> None:
        if done <= self._completed or self._is_orphaned:
            return
        is_broken = self.line.state == BROKEN
        if fence:
            fence()
        # A signal's handler may have stored more by now, and the word never goes back: no call from here to the store.
        if done > self._completed:
            if not is_broken:
                self._words[self._completed_index] = self.base + done
            self._completed = done
        self._note_complete(done)

    def _publish_known(self, generation: int, patience_s: float) -> None:
        under_within(self._lock, patience_s, self._store_known, generation)

    def _store_known(self, generation: int) -> None:
        if not self.is_closed:  # else it may be released, and the slot used by another event
            self._store(generation)

    def _raise_if_ahead(self) -> None:
        raise EngineMismatch(
            f"the event {self.label} uses the engine 'event', and CUDA cannot wait for a record that is not made "
            "yet: open it with engine='timeline' to wait ahead"
        )

    def _is_idle(self) -> bool:
        return self._completed == self._recorded or self._driver_query(self._recorded)

    def _key(self, index: int) -> tuple[bytes, int]:
        return self.board.epoch, self._serials[index]

    def _destroy_imports(self) -> bool:
        for index in range(self.depth):
            self._keep_event(index, 0)
        # All of them, not only those in the ring: an exception may have come between opening one and storing it there.
        return all(imports.release(self, self._key(index)) for index in range(self.depth))
