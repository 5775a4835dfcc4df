"""The `timeline` engine: generation g is complete when a 64-bit word of the board is at least base + g.

The recorder's stream writes the word (cuStreamWriteValue64), a waiter's stream waits for it (cuStreamWaitValue64, GEQ),
and the CPU reads it with one load. It needs no handle, holds across GPUs and containers, and can be waited for before
the record. Streams that share a hardware queue can deadlock on such waits (NVIDIA's reference warns of it): CUDA does
not know the order that they create.
"""

from __future__ import annotations

import time
from typing import Any

from cuda.bindings.driver import CUdevice_attribute

from ipcsync._board import BROKEN, INT64_MAX, Board
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._drivers.constants import STREAM_WAIT_VALUE_FLUSH, STREAM_WAIT_VALUE_GEQ
from ipcsync._engines import queued
from ipcsync._engines.base import Engine
from ipcsync._engines.slot_view import Guard
from ipcsync._linux.futex import Futex
from ipcsync._locks import holding
from ipcsync._native import pinned
from ipcsync._native.context import OnDevice
from ipcsync._wire.messages import Attachment
from ipcsync.errors import IpcSyncError
from ipcsync.typing import EngineName

_SPIN_NS = 20_000
_CAN_FLUSH = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES


class TimelineEngine(Engine):
    """One word, which only the recorder's streams write while the event is open."""

    kind: EngineName = "timeline"
    marks_records = True
    handles: tuple[bytes, ...] = ()

    def __init__(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> None:
        super().__init__(board, guard, attachment, ordinal)
        self._address = 0  # of the word, for this process's device: the registration is portable
        self._word_futex = Futex(self.line.completed_address)
        self._flags = STREAM_WAIT_VALUE_GEQ
        if self.node:
            self._flags |= self._flush()
        else:
            self._take_shortcuts()

    def _flush(self) -> int:
        """For mirrors: the flag that makes a network card's earlier writes visible after a wait, if there is one."""
        device = unwrap(self._driver.cuDeviceGet(self.ordinal), "cuDeviceGet")
        can = unwrap(self._driver.cuDeviceGetAttribute(_CAN_FLUSH, device), "cuDeviceGetAttribute")
        return STREAM_WAIT_VALUE_FLUSH if can else 0

    @holding("_lock")
    def open_first(self) -> None:
        """Register the word's page on the event's device, to test that this works. Raises DriverError."""
        self._pointer()

    def _pointer(self) -> int:
        with OnDevice(self.ordinal) as inside, inside:  # the caller's thread may have no context yet
            self._address = pinned.word(self.line.completed_address)
        return self._address

    def _driver_record(self, handle: DriverObject, generation: int) -> None:
        address = self._address or self._pointer()
        self.unwrap(
            self._driver.cuStreamWriteValue64(handle, address, self.base + generation, 0), "cuStreamWriteValue64"
        )

    def _driver_stream_wait(self, handle: DriverObject, generation: int) -> None:
        address = self._address or self._pointer()
        self.unwrap(
            self._driver.cuStreamWaitValue64(handle, address, self.base + generation, self._flags),
            "cuStreamWaitValue64",
        )

    def _follow_begun(self, handle: DriverObject, stream_id: int) -> None:
        if stream_id != self._last_stream:
            if self._last_stream in self._markers.doubtful:
                raise IpcSyncError(
                    f"a record of {self.label} was interrupted twice, and its place on its stream is unknown: record "
                    "on that stream once more, or close the event and open it again"
                )
            marker = self._markers.get(self._last_stream)
            if marker is not None:  # else all work on that stream was found complete
                self.unwrap(self._driver.cuStreamWaitEvent(handle, marker, 0), "cuStreamWaitEvent")
        super()._follow_begun(handle, stream_id)

    def _board_completed(self) -> int:
        """As the base's; but the GPU writes the word also if a wait before it was lost, so the chain is checked."""
        done = super()._board_completed()
        first = self._words[self._behind_index] - self.base
        if first <= 0 or done < first:  # behind nothing, or not yet there
            return done
        if self._words[self._state_index] != BROKEN and not self._is_clear(done):
            return first - 1
        # An event may break between any two of these looks: then its watermark says what counts, and not its word.
        return super()._board_completed() if self._words[self._state_index] == BROKEN else done

    def free_streams(self) -> None:
        """Release the word, as the coordinator does at a break, if it is lost and streams of this process wait.

        The board is void, so nobody reads more from the word than that. Only a kernel's word that the coordinator has
        ended, or its own, counts: one that is silent may release it with a watermark yet. A dead process's late write
        may lower the word, so this is repeated.
        """
        if self.line.completed == INT64_MAX or self.guard.coordinator_is_alive():
            return
        if any(wait.stream and wait.known() is not True for wait in queued.waits_on(self)):
            self.line.store_completed(INT64_MAX)

    def _publish_completed(self) -> None:
        if not self.chain.is_open:
            return
        count = self.line.completed
        if self.line.state != BROKEN and count != INT64_MAX and not self._is_orphaned:
            self.chain.judge(min(count - self.base, self._recorded))
            self.chain.store()

    def _pending_events(self) -> list[Any]:
        marker = self._markers.get(self._last_stream)  # behind the newest record; waiters for older ones poll
        is_pending = self.line.completed < self.base + self._recorded
        return [marker] if is_pending and marker is not None else []

    def _driver_query(self, generation: int) -> bool:
        return self._is_on_board(generation)

    def _driver_wait(self, generation: int, deadline_ns: int) -> bool:
        """Poll for about 20 µs, then with sleeps that grow to 1 ms."""
        start = time.monotonic_ns()
        while not self.is_complete(generation):
            now = time.monotonic_ns()
            if now >= deadline_ns:
                return False
            if now - start > _SPIN_NS:
                seen = self.line.completed
                if seen - self.base >= generation:
                    # Released or broken, which the caller sees; else it stands behind something.
                    return seen != INT64_MAX and self.line.state != BROKEN
                wanted = self.base + generation
                if not self._await_work(0, self.line.completed_address, wanted, deadline_ns, self._nudge_address()):
                    pause = min(max((now - start) // 32, 50_000), 1_000_000)
                    self._word_futex.wait(seen & 0xFFFFFFFF, min(pause, deadline_ns - now))
        return True
