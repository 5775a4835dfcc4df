"""How calls end that do not succeed: why a generation is lost, the errors and their texts, and what is logged."""

from __future__ import annotations

import logging
import os
from typing import NoReturn, cast

from cuda.bindings.driver import CUresult

from ipcsync._board import BROKEN, OPEN, Peer, peer_of
from ipcsync._drivers import unwrap
from ipcsync._engines.core import Core
from ipcsync._engines.loss import Cause, Loss, Reason
from ipcsync.errors import (
    DriverError,
    EngineMismatch,
    EventClosed,
    IpcSyncError,
    NotRecorder,
    RecorderLost,
    Reentered,
    WaitTimeout,
)
from ipcsync.typing import EngineName, EventState

log = logging.getLogger("ipcsync")


class Outcome(Core):
    """A use of a slot that can say how its calls end; the compiled core calls these when it has to."""

    kind: EngineName
    _peer: Peer | None = None
    _has_logged_full = False

    @property
    def label(self) -> str:
        """The event's name in texts."""
        return repr(self.name) if self.name else f"an unnamed event (slot {self.slot})"

    @property
    def state(self) -> EventState:
        """open, broken or closed."""
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
        serial = self.recorder
        if not serial:
            return "", 0
        peer = self._known(serial)
        return peer.label, peer.pid

    def recorder_is_over(self) -> bool | None:
        """Whether the recorder's process and its GPU work have ended for good; None if that is never known."""
        serial = self.recorder
        if not serial:
            return False
        # The bridge records a mirror here, and knows nothing about the recorder's process on its own node.
        is_over = None if self.is_recorder or self.node else self._known(serial).is_over()
        return is_over and self.guard.coordinator_is_alive()  # in this order

    # --- losses -------------------------------------------------------------------------------------------------------

    def loss_of(self, generation: int) -> Loss:
        """Why `generation` is lost."""
        if self.dependencies.is_lost(generation):
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
            return Loss(cause, self.recorder, "", 0, node=self.node, reason=cast("Reason | None", reason))
        return Loss(cause, self.recorder, *self._recorder())

    def _error_of(self, loss: Loss, generation: int) -> RecorderLost:
        """The RecorderLost for a loss."""
        is_over = loss.cause != "behind" and self.recorder_is_over()
        return loss.error(self.name, self.label, generation, over=True if is_over else None)

    # --- errors -------------------------------------------------------------------------------------------------------

    def raise_closed(self) -> NoReturn:
        """Raise EventClosed: by this process, or by a later use of the slot."""
        how = "was closed in this process" if self.is_closed else "is gone: another event has its slot"
        raise EventClosed(f"the event {self.label} {how}", event=self.name)

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
        unwrap((CUresult(code),), call)
        raise AssertionError

    def raise_reentered(self) -> NoReturn:
        """Raise Reentered."""
        raise Reentered(f"a call for {self.label} is under way on this thread, which this one interrupts")

    def raise_unknown_place(self) -> NoReturn:
        """Raise IpcSyncError: the driver refused a record and the marker behind it, and the next one is elsewhere."""
        raise IpcSyncError(
            f"the driver refused a record of {self.label} and what would show its place on its stream: record on that "
            "stream once more, or close the event and open it again"
        )

    def raise_unusable(self, why: DriverError) -> NoReturn:
        """Raise EngineMismatch: the event's engine does not work in this process."""
        recorder, pid = self._recorder()
        told = f", recorded by the session {recorder!r} (pid {pid or '?'})," if recorder else ""
        other = "timeline" if self.kind == "event" else "event"
        raise EngineMismatch(
            f"the event {self.label}{told} uses the engine {self.kind!r}, which does not work in this process (pid "
            f"{os.getpid()}): {why}; have whoever opens it first ask for engine={other!r}"
        ) from why

    def raise_not_recorder(self, who: str = "this session") -> NoReturn:
        """Raise NotRecorder."""
        recorder, pid = self._recorder()
        other = f"the session {recorder!r} (pid {pid or '?'}) records on it" if recorder else "no session has so far"
        raise NotRecorder(
            f"{who} did not open {self.label} with recorder=True; {other}",
            event=self.name,
            recorder=recorder,
            pid=pid,
        )

    def raise_no_record(self) -> NoReturn:
        """Raise why there can be no further record."""
        self.check()  # first: an expired session raises SessionExpired rather than EventClosed
        if self.chain.loss is not None:
            raise self._error_of(self.chain.loss, self._recorded + 1)
        raise EventClosed(
            f"the event {self.label} is {self.state}, and takes no more records: open its name again", event=self.name
        )

    def raise_timeout(self, generation: int, timeout: float | None, what: str) -> NoReturn:
        """Raise WaitTimeout: `generation` was not `what` ("recorded" or "complete") within `timeout`."""
        text = f"generation {generation} of {self.label} was not {what} within {timeout} s"
        if serial := self.recorder:
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
        raise WaitTimeout(
            f"no room for a further record: {why}", event=self.name, generation=oldest, timeout=timeout
        )

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
