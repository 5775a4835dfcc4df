"""One attachment's use of one slot, with all calls on it: what the compiled core leaves to Python.

That is the arguments of calls, and what is opened once: handles, the word's page, markers. `outcome` has the errors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

from cuda.bindings.driver import CUdevice_attribute

from ipcsync._board import Board, peer_of
from ipcsync._deadline import deadline_of
from ipcsync._drivers import DriverObject, unwrap
from ipcsync._drivers.constants import EVENT_DISABLE_TIMING, STREAM_WAIT_VALUE_FLUSH
from ipcsync._engines import imports
from ipcsync._engines.core import Wait, bind_driver, know_streams
from ipcsync._engines.loss import Loss
from ipcsync._engines.outcome import Outcome
from ipcsync._native import capture, context, fork, pinned
from ipcsync._native.context import LEGACY, OnDevice
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import Stream, stream_handle
from ipcsync._wire.messages import Attachment
from ipcsync.errors import DeviceMismatch, DriverError, EngineMismatch, NoDriver, RecorderLost
from ipcsync.typing import StreamLike

_ANYWHERE: AbstractContextManager[AbstractContextManager[object]] = nullcontext(nullcontext())
_CAN_FLUSH = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES


class Guard(Protocol):
    """The part of a session that its uses need."""

    def check(self) -> None:
        """Raise if the process was forked or the session cannot be used; cheap, called at every use."""

    def check_liveness(self) -> None:
        """As `check`, and whether the coordinator lives; called in every slice of a wait."""

    def coordinator_is_alive(self) -> bool:
        """Whether the coordinator has not stopped, and its process lives; asks the kernel."""

    def count_full_ring(self) -> None:
        """Count a record that had to wait for room in its ring."""

    line_index: int
    """Which line of the board is the session's."""

    depends_on_all: bool
    """Whether each record of the session depends on every wait of the process, whatever its stream."""


class Engine(Outcome):
    """One attachment's use of one slot, on either engine. Thread-safe.

    `event`: a ring of interprocess CUDA events, each opened at its first use. `timeline`: one 64-bit word of the board,
    which the recorder's stream writes (cuStreamWriteValue64), a waiter's stream waits for (cuStreamWaitValue64, GEQ),
    and the CPU reads with one load. It needs no handle, holds across GPUs and containers, and can be waited for before
    the record. Streams that share a hardware queue can deadlock on such waits (NVIDIA's reference warns of it): CUDA
    does not know the order that they create.
    """

    name: str

    def __init__(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> None:
        bind()
        super().__init__(board, guard, attachment, ordinal, fork.mark())
        self._driver = context.driver()
        self.handles: tuple[bytes, ...] = tuple(attachment.handles)
        self._serials = attachment.serials
        self.has_warned_of_depth = False
        if self.node:
            self._flags |= self._flush()

    def _flush(self) -> int:
        """For mirrors: the flag that makes a network card's earlier writes visible after a wait, if there is one."""
        device = unwrap(self._driver.cuDeviceGet(self.ordinal), "cuDeviceGet")
        can = unwrap(self._driver.cuDeviceGetAttribute(_CAN_FLUSH, device), "cuDeviceGetAttribute")
        return STREAM_WAIT_VALUE_FLUSH if can else 0

    # --- calls --------------------------------------------------------------------------------------------------------

    def record(
        self,
        handle: DriverObject,
        ordinal: int,
        timeout: float | None,
        after: Sequence[tuple[Engine, int]] = (),
        behind: Sequence[Wait] = (),
    ) -> int:
        """Record the next generation on the CUstream `handle` of device `ordinal`; returns its number.

        It depends on all waits queued on that stream earlier, behind the generations `after`, which the stream is
        made to wait for, and behind the waits `behind`, which are those of other streams.
        """
        began = time.monotonic_ns()
        deadline = deadline_of(timeout, began)
        self.check()
        if not self.is_recorder:
            self.raise_not_recorder()
        for view, earlier in after:  # as by a wait for each; for this event's own the stream waits anyway
            if view.origin == self.origin:
                if earlier > self._recorded:
                    number = self._recorded + 1
                    raise ValueError(f"generation {number} of {self.label} cannot depend on its generation {earlier}")
                continue
            try:
                view.wait_on(earlier, handle, ordinal, timeout, began)
            except RecorderLost:
                outcome = view.outcome_of(earlier)
                view.check()  # after the words were read
                if not isinstance(outcome, Loss):
                    raise
                raise self._error_of(Wait(view, earlier, 0, 0).behind(outcome), self._recorded + 1) from None
        if ordinal != self.ordinal:
            raise DeviceMismatch(f"Event device {self.ordinal} does not match recording stream's device {ordinal}.")
        with _within(handle, ordinal) as inside, inside:
            return self.record_next(handle, deadline, timeout, behind or None)

    def wait(self, generation: int, stream: StreamLike | None, timeout: float | None, ahead: bool) -> None:
        """Have the stream's later work wait for `generation`."""
        deadline_of(timeout)
        self.check()
        refuse_small_number(stream, 0)  # the default streams' numbers too: wait(1) was meant as a timeout
        handle, ordinal = stream_handle(stream)
        if ahead and self.kind == "event":
            raise EngineMismatch(
                f"the event {self.label} uses the engine 'event', and CUDA cannot wait for a record that is not made "
                "yet: open it with engine='timeline' to wait ahead"
            )
        with _within(handle, ordinal) as inside, inside:
            self.queue(handle, ordinal, generation, timeout, ahead, 0)

    def wait_on(self, generation: int, handle: DriverObject, ordinal: int, timeout: float | None, began: int) -> None:
        """As `wait`, on the CUstream `handle` of device `ordinal`; `timeout` counts from `began` in ns."""
        self.check()
        with _within(handle, ordinal) as inside, inside:
            self.queue(handle, ordinal, generation, timeout, ahead=False, began=began, what="record")

    def synchronized(self, generation: int, began: int, *, is_complete: bool) -> None:
        """For a trace: a task of an asynchronous client has waited for `generation` since `began`."""

    # --- what the core asks for ---------------------------------------------------------------------------------------

    def open_word(self) -> int:
        """The device pointer of the word, whose page is registered on the event's device: for all of the process's."""
        with OnDevice(self.ordinal) as inside, inside:  # the caller's thread may have no context yet
            return pinned.word(self.line.completed_address)

    def open_event(self, index: int, patience_s: float | None) -> DriverObject | None:
        """The CUevent of the ring at `index`; None if another thread opens one for `patience_s`."""
        try:
            return imports.acquire(self, self._key(index), self.handles[index], self.ordinal, patience_s)
        except DriverError:
            self.guard.check_liveness()  # a lost coordinator explains the error
            raise

    def close_event(self, index: int) -> bool | None:
        """Close it, for this use; falsy while another thread opens or destroys some."""
        return imports.release(self, self._key(index))

    def close_events(self) -> bool:
        """Close all of them; False while another thread opens or destroys some."""
        return all(self.close_event(index) for index in range(len(self.handles)))

    def _key(self, index: int) -> tuple[bytes, int]:
        return self.board.epoch, self._serials[index]

    def create_event(self, ordinal: int) -> DriverObject:
        """A CUDA event of this process, for a marker on a stream of that device."""
        with OnDevice(ordinal) as inside, inside:
            return unwrap(self._driver.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")

    def peer_is_alive(self, serial: int) -> bool:
        """Whether the recorder's process lives; asks the kernel if that has not marked it."""
        return self._known(serial).is_alive()

    def session_is_alive(self, line: int) -> bool:
        """Whether the session of that line lives."""
        serial = self.board.session(line).serial
        return bool(serial) and peer_of(self.board, serial).is_alive()

    def refuse_capturing(self, handle: int, what: str) -> None:
        """Raise StreamCapturing if that stream is captured, or the driver's error, or what explains that."""
        try:
            capture.refuse_capturing(self._driver.CUstream(handle), what)
        except DriverError:
            self.guard.check_liveness()  # this process may have been forked amid the call
            raise


def _within(handle: DriverObject, ordinal: int) -> AbstractContextManager[AbstractContextManager[object]]:
    """A block, entered twice, in which a context of the device is current if the stream is a default one."""
    return OnDevice(ordinal) if int(handle) in LEGACY else _ANYWHERE


@cache
def bind() -> None:
    """Give the compiled core the driver's functions."""
    know_streams(Stream)
    why_not = bind_driver()
    if why_not is not None:
        raise NoDriver(f"the binding lacks a function that ipcsync needs: {why_not}: install a newer cuda-bindings")
