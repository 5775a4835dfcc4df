"""A use's view of its slot on the board: what is recorded and complete, the state, and whether the recorder lives.

A generation counts as complete here only in these cases:
- this process saw it complete before;
- the board's `completed` reached it while the slot was not broken;
- the driver called it complete, and the recorder and the coordinator were found alive *afterwards*;
- the slot is broken, and the watermark that the coordinator took at the break covers it.
"""

from __future__ import annotations

import logging
import time
from typing import NoReturn, Protocol, cast

from ipcsync._board import BROKEN, CLOSED, INT64_MAX, OPEN, Board, Peer, SlotLine, peer_of
from ipcsync._deadline import FOREVER
from ipcsync._engines.behind import Behind
from ipcsync._engines.compiled import Core
from ipcsync._engines.loss import Cause, Loss, Reason
from ipcsync._wire.messages import Attachment
from ipcsync.errors import EventClosed, RecorderLost, WaitTimeout
from ipcsync.typing import EventState

SLICE_NS = 50_000_000
FULL_NS = 100_000_000  # for which a record waits for room before it is logged
NOBODY_NS = 10_000_000_000  # for which a wait by name without a recorder is quiet

log = logging.getLogger("ipcsync")


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

    stands_behind_all: bool
    """Whether each record of the session stands behind every wait of the process, whatever its stream."""


class SlotView(Core):
    """One attachment's view of one slot. Thread-safe.

    `known_complete` is the highest generation that this process knows to be complete.
    """

    def __init__(self, board: Board, guard: Guard, attachment: Attachment) -> None:
        super().__init__()
        self.name: str = attachment.name
        self.slot: int = attachment.slot
        self.incarnation: int = attachment.incarnation
        self.base: int = attachment.base
        self.is_recorder: bool = attachment.recorder
        origin = attachment.origin
        self.has_told_depth = self._has_told_full = False
        self._waits_since = 0  # when this process first waited while nobody recorded, in ns
        self.node: str = "" if origin is None else origin.node  # where the event is recorded, "" for this node
        self.origin: tuple[bytes, int, int] = (
            (board.epoch, self.slot, self.incarnation)
            if origin is None
            else (origin.epoch, origin.slot, origin.incarnation)
        )
        """(epoch, slot, incarnation) in its points, the same on every node."""
        self.depth: int = attachment.depth
        self.board = board
        self.line: SlotLine = board.slot(attachment.slot)
        self.guard = guard
        self.is_closed: bool = False
        # The first generation for which RecorderLost was raised here; later ones are lost too.
        self._lost_from = FOREVER
        self._guard_check = guard.check
        self._words = board.words
        self._incarnation_index, self._state_index, self._recorder_index = self.line.coordinators_indices
        self._recorded_index, self._completed_index = self.line.recorders_indices
        self._behind_index, _, self._lost_index = self.line.chain_indices
        self._peer: Peer | None = None
        self.behind: Behind = Behind(board, self.line, self.base)
        self._header = board.header
        # Without a mark, never equal: then the kernel is always asked.
        self._living_header = board.running_header if board.has_mark else memoryview(b"")

    def check(self) -> None:
        """Raise if this use is over: by a fork, the session, the coordinator, a close, or a later use of the slot."""
        self._guard_check()
        if self.is_closed:
            self._raise_closed()
        if self._words[self._incarnation_index] != self.incarnation:
            self._raise_gone()

    @property
    def label(self) -> str:
        """The event's name in texts."""
        return repr(self.name) if self.name else f"an unnamed event (slot {self.slot})"

    def _raise_closed(self) -> NoReturn:
        raise EventClosed(f"the event {self.label} was closed in this process", event=self.name)

    def _raise_gone(self) -> NoReturn:
        raise EventClosed(f"the event {self.label} is gone: another event has its slot", event=self.name)

    def _raise_if_closed(self) -> None:
        """Raise EventClosed if this use was closed here.

        Called *after* reading words of the board, it also proves that they were this use's: the slot is reused only
        once this process has closed and released it.
        """
        if self.is_closed:
            self._raise_closed()

    @property
    def generation(self) -> int:
        """The last generation recorded, by whichever session."""
        return max(self.line.recorded - self.base, 0)

    @property
    def state(self) -> EventState:
        """open, broken or closed."""
        if self.line.incarnation != self.incarnation:
            return "closed"
        state = self.line.state
        return "open" if state == OPEN else "broken" if state == BROKEN else "closed"

    def _board_completed(self) -> int:
        words = self._words
        count = words[self._completed_index]  # before the state, which shows that the word was released
        if words[self._state_index] == BROKEN or count == INT64_MAX:
            count = self.line.watermark
        return count - self.base

    def is_complete(self, generation: int) -> bool:
        """Whether the board, or this process's memory, says that `generation` is complete."""
        if generation <= self.known_complete or self._knows_complete(generation):
            return True
        if generation >= self._lost_from:
            self._raise_lost(generation)
        done = self._board_completed()
        if done < generation:
            is_lost = self._words[self._lost_index] and self.behind.is_lost(generation)
            if self.is_closed:
                self._raise_closed()
            if is_lost:
                self._raise_lost(generation)
            return False
        # A recorder that died between its driver's call and the store has published nothing, complete or not.
        done = min(done, self.generation, self._lost_from - 1)
        self._raise_if_closed()
        if generation > done:
            return False
        self._note_complete(done)
        return True

    @property
    def _is_orphaned(self) -> bool:
        """Whether the coordinator has died or stopped: then a driver may say anything about its CUDA events.

        The kernel marks the header before it tears down a dying process's exports. Costs about 0.1 µs.
        """
        return self._header != self._living_header and not self.guard.coordinator_is_alive()

    def _raise_if_orphaned(self) -> None:
        """Raise CoordinatorLost if the coordinator is lost; called after a driver's answer about its events."""
        if self._is_orphaned:
            self.guard.check_liveness()
            self._raise_if_closed()  # a closed client does not watch its coordinator any more

    def recorder_is_alive(self) -> bool:
        """Whether the recorder's process lives; True while there is no recorder."""
        serial = self._words[self._recorder_index]
        if not serial or self.is_recorder:
            if not serial:
                self._note_nobody()
            return True
        peer = self._peer
        if peer is None or peer.serial != serial:
            peer = self._known(serial)
        return peer.is_alive()

    def recorder_is_over(self) -> bool | None:
        """Whether the recorder's process and its GPU work have ended for good; None if that is never known."""
        serial = self._words[self._recorder_index]
        if not serial:
            return False
        # The bridge records a mirror here, and knows nothing about the recorder's process on its own node.
        is_over = None if self.is_recorder or self.node else self._known(serial).is_over()
        return is_over and not self._is_orphaned  # in this order

    @property
    def recorder(self) -> int:
        """The serial of the session that records, 0 while there is none."""
        return int(self._words[self._recorder_index])

    def _nudge_address(self) -> int:
        """Address of the recorder's nudge; 0 if there is no recorder, or none on this board."""
        serial = self.recorder
        index = serial & 0xFFFF
        return self.board.session(index).nudge_address if serial and index < self.board.sessions else 0

    def fate(self, generation: int) -> Loss | bool | None:
        """The fate of `generation`, by the board and this process's memory: True (good), a Loss, or None (open).

        Raises nothing; this use may be closed already, since records that stand behind it ask.
        """
        if generation <= self.known_complete or self._is_on_board(generation):
            return True
        state = self._words[self._state_index]
        has_ended = (
            state == BROKEN or (state == CLOSED and generation > self.generation) or self._lost_from <= generation
        )
        if has_ended or not self.recorder_is_alive() or self.behind.is_lost(generation):
            return self._is_on_board(generation) or self._loss(generation)
        if self._is_orphaned:  # no later answer about it counts, so it would stay open for ever
            return self._is_on_board(generation) or self._loss(generation)._replace(cause="orphaned")
        return None

    def open_before(self, generation: int, since: int) -> int:
        """The last generation from `since` on and before `generation`, which is lost, that is open; 0 if none is.

        There may be one: a later record may stand behind something that an earlier one does not.
        """
        last = min(generation, self.generation + 1, self._first_lost()) - 1
        while last >= since:
            fate = self.fate(last)
            if fate is None:
                return last
            first = self._first_lost()  # its recorder may have found an earlier one lost meanwhile
            if fate is True or first > last:
                return 0
            last = first - 1
        return 0

    def _first_lost(self) -> int:
        return min(self._lost_from, self.behind.lost_from or FOREVER)

    def _is_on_board(self, generation: int) -> bool:
        return generation <= min(self._board_completed(), self.generation, self._lost_from - 1)

    def _is_clear(self, generation: int) -> bool:
        """Whether all is well with what `generation` stands behind; else its recorder is asked to judge."""
        if not self.behind.stands(generation):
            return True
        serial = self.recorder
        if self.behind.is_clear(serial):
            return True
        self.behind.nudge(serial)
        return False

    def _raise_if_finished(self, generation: int) -> None:
        """Raise RecorderLost if `generation` is not complete and never will be: broken, or closed before it."""
        state = self._words[self._state_index]
        if self.is_closed:
            self._raise_closed()
        if state == OPEN:
            self._is_clear(generation)  # nudges the recorder: a stuck stream must not hide a loss
            return
        if self.is_complete(generation):
            return
        if state == BROKEN or generation > self.generation:
            self._raise_lost(generation)

    def _raise_lost(self, generation: int) -> NoReturn:
        # A dying process's work may complete before the coordinator sees the death: here it does not count any more.
        self._lost_from = min(self._lost_from, generation)
        loss = self._loss(generation)
        self._raise_if_closed()  # after the words were read
        raise self._error_of(loss, generation)

    def _loss(self, generation: int) -> Loss:
        """Why `generation` is lost."""
        if self.behind.is_lost(generation):
            culprit = self.line.culprit
            return Loss("behind", culprit, *self.board.who(culprit), node=self.node)
        if self.node:
            return Loss(self._cause(generation), self.recorder, "", 0, node=self.node, reason=self._reason())
        return Loss(self._cause(generation), self.recorder, *self._recorder())

    def _error_of(self, loss: Loss, generation: int) -> RecorderLost:
        """The RecorderLost for a loss."""
        is_over = loss.cause != "behind" and self.recorder_is_over()
        return loss.error(self.name, self.label, generation, over=True if is_over else None)

    def _recorder(self) -> tuple[str, int]:
        """(name or id, pid) of the session that records or recorded; ("", 0) if there is none or it is not known."""
        serial = self._words[self._recorder_index]
        if not serial:
            return "", 0
        peer = self._known(serial)
        return peer.label, peer.pid

    def _known(self, serial: int) -> Peer:
        peer = self._peer
        if peer is None or peer.serial != serial:
            peer = self._peer = peer_of(self.board, serial)
        return peer

    def _reason(self) -> Reason | None:
        """Why the node of a mirror is lost, None if only the recorder there is.

        A mirror that is not broken, while its recorder was found dead, has lost its bridge.
        """
        state = self._words[self._state_index]
        if state == BROKEN:
            return cast("Reason", self.line.reason or None)
        return "bridge" if state == OPEN else None

    def _cause(self, generation: int) -> Cause:
        state = self._words[self._state_index]
        if state == BROKEN:
            return "expired" if self.line.has_expired else "died"
        return "closed" if state != OPEN and generation > self.generation else "died"

    def raise_timeout(self, generation: int, timeout: float | None, what: str) -> NoReturn:
        """Raise WaitTimeout: `generation` was not `what` ("recorded" or "complete") within `timeout`."""
        text = f"generation {generation} of {self.label} was not {what} within {timeout} s"
        if serial := self.recorder:
            self._known(serial)  # for the error of a later loss: its line may be another session's by then
        else:
            text += ": nobody has opened the event as its recorder (recorder=True)"
        raise WaitTimeout(text, event=self.name, generation=generation, timeout=timeout)

    def raise_full(self, oldest: int, timeout: float | None) -> NoReturn:
        """Raise WaitTimeout: the ring is full, and its `oldest` record was not complete within `timeout` seconds."""
        raise WaitTimeout(
            f"no room for a further record: all depth={self.depth} are in flight, and generation {oldest} of "
            f"{self.label}, the oldest, was not complete within {timeout} s",
            event=self.name,
            generation=oldest,
            timeout=timeout,
        )

    def note_full(self, oldest: int) -> None:
        """Log, once, that a record has waited for the `oldest` one for a while, and the way out."""
        if not self._has_told_full:
            self._has_told_full = True
            log.warning(
                "a record waits for room: all depth=%d are in flight, and generation %d of %s, the oldest, is not "
                "complete; until it is, the thread that records stands still. Give the event or the stream's first "
                "record a larger depth, or engine='timeline', which has no such limit",
                self.depth,
                oldest,
                self.label,
            )

    def raise_visited(self, oldest: int, timeout: float | None) -> NoReturn:
        """Raise WaitTimeout: other processes are inside the driver for a wait for `oldest`, or a generation before."""
        raise WaitTimeout(
            f"no room for a further record: generation {oldest} of {self.label} is complete, but another process has "
            f"been about to queue a stream's wait for it, or for one before, for all of {timeout} s",
            event=self.name,
            generation=oldest,
            timeout=timeout,
        )

    # --- the wait for a record ----------------------------------------------------------------------------------------

    def await_recorded(self, generation: int, deadline_ns: int, timeout: float | None) -> None:
        """Block until `generation` is recorded; else WaitTimeout, RecorderLost, or an error of `check_liveness`."""
        line, wanted = self.line, self.base + generation
        while True:
            recorded = self._words[self._recorded_index]
            if recorded >= wanted:
                if self.is_closed:
                    self._raise_closed()
                return
            self._raise_if_finished(generation)
            now = time.monotonic_ns()
            if now >= deadline_ns:
                self.raise_timeout(generation, timeout, "recorded")
            line.wait_recorded(recorded, min(SLICE_NS, deadline_ns - now))
            if self._words[self._recorded_index] == recorded:
                self.check_liveness(generation)

    def raise_if_over(self, generation: int) -> None:
        """Raise the error that would end a wait for `generation`, if any; it is not complete."""
        self.check_liveness(generation)
        self._raise_if_finished(generation)

    def check_liveness(self, generation: int) -> None:
        """Check this session, the coordinator and the recorder; called in every slice of a wait."""
        self.guard.check_liveness()
        self.check()
        self._raise_if_dead(generation)

    def _note_nobody(self) -> None:
        """Log, once, that waits of this process have lasted for a while, and nobody is there to record."""
        now = time.monotonic_ns()
        self._waits_since = self._waits_since or now
        if now - self._waits_since > NOBODY_NS:
            self._waits_since = FOREVER
            log.warning(
                "still waiting for %s: nobody has opened the event as its recorder (recorder=True); is the name the "
                "same on both sides, prefix included?",
                self.label,
            )

    def _raise_if_dead(self, generation: int) -> None:
        """Raise RecorderLost if the recorder is dead, and `generation` not known complete."""
        is_alive = self.recorder_is_alive()
        if self.is_closed:
            self._raise_closed()
        if not is_alive:
            self._raise_unless_good(generation)

    def _raise_unless_good(self, generation: int) -> None:
        """Raise RecorderLost unless the board says that `generation` is complete; the recorder is dead."""
        if not self.is_complete(generation):
            self._raise_lost(generation)
