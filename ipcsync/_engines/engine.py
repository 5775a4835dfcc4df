"""One attachment's use of one slot, with all calls on it: what the compiled core leaves to Python.

That is the arguments of calls, what is opened once (handles, the word's page, markers), why a generation is lost, and
the errors with their texts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, NoReturn, cast

from cuda.bindings.driver import CUdevice_attribute, CUipcEventHandle

from ipcsync import _drivers
from ipcsync._board import BROKEN, OPEN, Board, Peer, peer_of
from ipcsync._deadline import deadline_of
from ipcsync._drivers import EVENT_DISABLE_TIMING, STREAM_WAIT_VALUE_FLUSH, DriverObject, describe, unwrap
from ipcsync._engines.core import Core, Wait, bind_driver
from ipcsync._engines.loss import Cause, Loss, Reason
from ipcsync._native import context, pinned
from ipcsync._native.context import DEFAULT_STREAMS, OnDevice, relaxed_call
from ipcsync._native.foreign import refuse_small_number
from ipcsync._native.stream import stream_handle
from ipcsync._wire.messages import Attachment
from ipcsync.errors import (
    DeviceMismatch,
    DriverError,
    EngineMismatch,
    EventClosed,
    HandleError,
    IpcSyncError,
    NotRecorder,
    RecorderLost,
    Reentered,
    WaitTimeout,
)
from ipcsync.typing import EventState, StreamLike

if TYPE_CHECKING:
    from ipcsync._engines.core import Guard

log = logging.getLogger("ipcsync")

bind = cache(bind_driver)
"""Give the compiled core the driver's functions, once."""

_ANYWHERE: AbstractContextManager[AbstractContextManager[object]] = nullcontext(nullcontext())
_CAN_FLUSH = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES


class _Steps(threading.local):
    since = 0  # for a trace: since when this thread waits in steps, any of which may time out; 0 if it does not


steps = _Steps()


class Engine(Core):
    """One attachment's use of one slot, on either engine. Thread-safe.

    `event`: a ring of interprocess CUDA events, each opened at its first use. `timeline`: one 64-bit word of the board,
    which the recorder's stream writes, a waiter's stream waits for, and the CPU reads with one load.
    """

    _peer: Peer | None = None
    _has_logged_full = False

    def __init__(self, board: Board, guard: Guard, attachment: Attachment, ordinal: int) -> None:
        bind()
        super().__init__(board, guard, attachment, ordinal)
        self.handles: tuple[bytes, ...] = tuple(attachment.handles)
        self.has_warned_of_depth = False
        self.waiting_records: list[int] = []  # one for each that is about to record, or waits for what it follows
        # A wait for a mirror makes visible what a network card has written before.
        if self.node and context.call("cuDeviceGetAttribute", _CAN_FLUSH, context.devices()[ordinal]):
            self._flags |= STREAM_WAIT_VALUE_FLUSH

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
        if ordinal != self.ordinal:
            raise DeviceMismatch(f"Event device {self.ordinal} does not match recording stream's device {ordinal}.")
        if after:
            self.waiting_records.append(deadline)
            try:
                for view, earlier in after:
                    self._follow(view, earlier, handle, timeout, began, partial(self._check_after, after))
            finally:
                self.waiting_records.pop()
        with _within(handle, ordinal) as inside, inside:
            return self.record_next(handle, deadline, timeout, behind or None)

    def _check_after(self, after: Sequence[tuple[Engine, int]]) -> None:
        """Raise if this session is over, or a generation that a record is to follow is lost."""
        self.check_liveness(1)
        for view, earlier in after:
            outcome = view.outcome_of(earlier)
            if view.origin != self.origin:
                view.check()  # after the words were read
            if outcome is None:
                view.is_clear(earlier)  # or its recorder is asked to resolve it
            elif isinstance(outcome, Loss):
                lost = outcome.behind(f"generation {earlier} of {view.label}")
                raise self._error_of(lost, self._recorded + 1) from None

    def _follow(
        self, view: Engine, earlier: int, handle: DriverObject, timeout: float | None, began: int, check: partial[None]
    ) -> None:
        """Have the stream wait for a generation of another event, as by a wait for it, once it is recorded."""
        if view.origin == self.origin:  # the stream waits anyway
            if earlier > self._recorded:
                number = self._recorded + 1
                raise ValueError(f"generation {number} of {self.label} cannot depend on its generation {earlier}")
            return
        try:
            if view.generation < earlier:  # it may be of another client, which outlives this one
                with _within(handle, self.ordinal) as inside, inside:
                    context.refuse_capturing(handle, "record")
                view.check_liveness(earlier)  # a wait of no time would not see that the recorder is dead
                view.await_recorded(earlier, deadline_of(timeout, began), timeout, check)
            view.wait_on(earlier, handle, self.ordinal, timeout, began)
        except RecorderLost:
            self._check_after([(view, earlier)])
            raise

    def wait(self, generation: int, stream: StreamLike | None, timeout: float | None, ahead: bool) -> None:
        """Have the stream's later work wait for `generation`."""
        deadline_of(timeout)
        self.check()
        refuse_small_number(stream, 0)  # the default streams' numbers too: wait(1) was meant as a timeout
        handle, ordinal = stream_handle(stream)
        if ahead and self.kind == "event":
            raise EngineMismatch(
                f"{self.title} uses the engine 'event', and CUDA cannot wait for a record that is not made "
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
        return pinned.word(self.line.completed_address, self.board, self.ordinal)

    def open_event(self, index: int) -> DriverObject:
        """A new CUevent for the one of the ring at `index`. Raises HandleError if the driver does not open it."""
        data = _drivers.handle_from_bytes(CUipcEventHandle, self.handles[index])
        try:
            self._home = int(home := context.primary(self.ordinal))  # it never ends; records need streams of the same
            with OnDevice(self.ordinal, home) as inside, inside:
                result = relaxed_call(_drivers.load().cuIpcOpenEventHandle, data)
            return unwrap(result, "cuIpcOpenEventHandle", HandleError)
        except DriverError:
            self.guard.check_liveness()  # a lost coordinator explains the error
            raise

    def create_event(self, stream: int, ordinal: int) -> DriverObject:
        """A CUDA event for a stream's marker, of its context; on a stream of another device the driver refuses it."""
        home = None if stream in DEFAULT_STREAMS else context.call("cuStreamGetCtx", stream)
        is_there = home is not None and context.ordinal_of_context(home) == ordinal
        with OnDevice(ordinal, home if is_there else None) as inside, inside:
            return context.call("cuEventCreate", EVENT_DISABLE_TIMING)

    def peer_is_alive(self, serial: int) -> bool:
        """Whether the recorder's process lives; asks the kernel if that has not marked it."""
        return self._known(serial).is_alive()

    def session_is_alive(self, line: int) -> bool:
        serial = self.board.session(line).serial
        return bool(serial) and peer_of(self.board, serial).is_alive()

    def refuse_capturing(self, handle: int, what: str) -> None:
        """Raise StreamCapturing if that stream is captured, or the driver's error, or what explains that."""
        try:
            context.refuse_capturing(context.driver().CUstream(handle), what)
        except DriverError:
            self.guard.check_liveness()  # this process may have been forked amid the call
            raise

    @property
    def label(self) -> str:
        return repr(self.name) if self.name else f"an unnamed event (slot {self.slot})"

    @property
    def title(self) -> str:
        """The same, with its kind before a name."""
        return f"the event {self.label}" if self.name else self.label

    @property
    def state(self) -> EventState:
        if self.line.incarnation != self.incarnation:
            return "closed"
        state = self.line.state
        return "open" if state == OPEN else "broken" if state == BROKEN else "closed"

    # --- the recorder -------------------------------------------------------------------------------------------------

    def _known(self, serial: int) -> Peer:
        peer = self._peer
        if peer is None or peer.serial != serial:
            peer = self._peer = peer_of(self.board, serial)
        return peer

    def _recorder(self) -> tuple[str, int]:
        """(name or id, pid) of the session that records or recorded; ("", 0) if there is none or it is not known."""
        serial = self.line.recorder
        if not serial:
            return "", 0
        peer = self._known(serial)
        return peer.label, peer.pid

    def recorder_is_over(self) -> bool | None:
        """Whether the recorder's process and its GPU work have ended for good; None if that is never known."""
        serial = self.line.recorder
        if not serial:
            return False
        # The bridge records a mirror here, and knows nothing about the recorder's process on its own node.
        is_over = None if self.is_recorder or self.node else self._known(serial).is_over()
        return is_over and self.guard.coordinator_is_alive()  # in this order

    # --- losses -------------------------------------------------------------------------------------------------------

    def loss_of(self, generation: int) -> Loss:
        if self.is_lost(generation):
            root_cause = self.line.root_cause
            return Loss("behind", root_cause, *self.board.who(root_cause), node=self.node)
        cause: Cause = "died"
        reason: str | None = None
        state = self.line.state
        if state == BROKEN:
            cause, reason = "expired" if self.line.has_expired else "died", self.line.reason or None
        elif state == OPEN:
            reason = "bridge"  # a mirror's, whose recorder was found dead
        elif generation > self.generation:
            cause = "closed"
        if self.node:
            return Loss(cause, self.line.recorder, "", 0, node=self.node, reason=cast("Reason | None", reason))
        return Loss(cause, self.line.recorder, *self._recorder())

    def _error_of(self, loss: Loss, generation: int) -> RecorderLost:
        is_over = loss.cause != "behind" and self.recorder_is_over()
        return loss.error(self.name, self.label, generation, over=is_over or None)

    # --- errors -------------------------------------------------------------------------------------------------------

    def raise_closed(self) -> NoReturn:
        """Raise EventClosed: by this process, or by a later use of the slot."""
        how = "was closed in this process" if self.is_closed else "is gone: another event has its slot"
        raise EventClosed(f"{self.title} {how}", event=self.name)

    def raise_lost(self, generation: int) -> NoReturn:
        """Raise RecorderLost; EventClosed if this use was closed meanwhile."""
        # A dying process's work may complete before the coordinator sees the death: here it does not count any more.
        self._lost_from = min(self._lost_from, generation)
        loss = self.loss_of(generation)
        if self.is_closed:  # after the words were read
            self.raise_closed()
        raise self._error_of(loss, generation)

    def raise_driver(self, code: int, call: str) -> NoReturn:
        """Raise the driver's error; but if the coordinator is lost, or this process was forked amid the call, that."""
        self.guard.check_liveness()
        raise describe(code, call)

    def raise_reentered(self) -> NoReturn:
        raise Reentered(f"a call for {self.label} is under way on this thread, which this one interrupts")

    def raise_unknown_place(self) -> NoReturn:
        """Raise IpcSyncError: the driver refused a record and the marker behind it, and the next one is elsewhere."""
        raise IpcSyncError(
            f"the driver refused a record of {self.label} and what would show its place on its stream: record on that "
            "stream once more, or close the event and open it again"
        )

    def raise_unusable(self, why: IpcSyncError) -> NoReturn:
        """Raise EngineMismatch: the event's engine does not work in this process, or not for a stream."""
        recorder, pid = self._recorder()
        told = f", recorded by the session {recorder!r} (pid {pid or '?'})," if recorder else ""
        other = "timeline" if self.kind == "event" else "event"
        raise EngineMismatch(
            f"{self.title}{told} uses the engine {self.kind!r}, which does not work in this process (pid "
            f"{os.getpid()}): {why}; have whoever opens it first ask for engine={other!r}"
        ) from why

    def raise_not_recorder(self, who: str = "this session") -> NoReturn:
        recorder, pid = self._recorder()
        other = f"the session {recorder!r} (pid {pid or '?'}) records on it" if recorder else "no session has so far"
        raise NotRecorder(
            f"{who} did not open {self.label} with recorder=True; {other}", event=self.name, recorder=recorder, pid=pid
        )

    def raise_no_record(self) -> NoReturn:
        """Raise why there can be no further record."""
        self.check()  # first: an expired session raises SessionExpired rather than EventClosed
        if self.chain.loss is not None:
            raise self._error_of(self.chain.loss, self._recorded + 1)
        raise EventClosed(f"{self.title} is {self.state}, and takes no records: open its name again", event=self.name)

    def raise_timeout(self, generation: int, timeout: float | None, what: str) -> NoReturn:
        """Raise WaitTimeout: `generation` was not `what` ("recorded" or "complete") within `timeout`."""
        place = f" on node {self.node!r}" if self.node else ""
        text = f"generation {generation} of {self.label}{place} was not {what} within {timeout} s"
        if serial := self.line.recorder:
            self._known(serial)  # for the error of a later loss: its line may be another session's by then
        else:
            text += ": nobody has opened the event as its recorder (recorder=True)"
        raise WaitTimeout(text, event=self.name, generation=generation, timeout=timeout)

    def raise_full(self, oldest: int, timeout: float | None, is_announced: bool = False) -> NoReturn:
        """Raise WaitTimeout: the ring's `oldest` record was in the way for `timeout` seconds.

        `is_announced`: others were inside the driver for a wait for it, or for one before; else it was not complete.
        """
        told = f"generation {oldest} of {self.label}"
        why = (
            f"{told} is complete, but another process has been about to queue a stream's wait for it, or for one "
            f"before, for all of {timeout} s"
            if is_announced
            else f"all depth={self.depth} are in flight, and {told}, the oldest, was not complete within {timeout} s"
        )
        raise WaitTimeout(f"no room for a further record: {why}", event=self.name, generation=oldest, timeout=timeout)

    def note_full(self, oldest: int) -> None:
        """Log, once, that a record has waited for the `oldest` one for a while, and the way out."""
        if not self._has_logged_full:
            self._has_logged_full = True
            log.warning(
                "a record waits for room: all depth=%d are in flight, and generation %d of %s, the oldest, is not "
                "complete; until it is, the thread that records stands still. Give the event or the stream's first "
                "record a larger depth, or engine='timeline', which has no such limit",
                self.depth,
                oldest,
                self.label,
            )

    def log_nobody(self) -> None:
        """Log, once, that waits of this process have lasted for a while, and nobody is there to record."""
        log.warning(
            "still waiting for %s: nobody has opened the event as its recorder (recorder=True); is the name the "
            "same on both sides, prefix included?",
            self.label,
        )


def _within(handle: DriverObject, ordinal: int) -> AbstractContextManager[AbstractContextManager[object]]:
    """A block, entered twice, in which a context of the device is current if the stream is a default one."""
    return OnDevice(ordinal) if int(handle) in DEFAULT_STREAMS else _ANYWHERE
