"""What is interrupted, and what must hold afterwards, each time."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._engines import queued
from ipcsync._locks import Unwinding
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults.interrupt_locks import locks_of, module_locks, reservation_locks
from tests.kit.until import until

Call = Callable[[], Any]

LONG_TTL_S = 600.0  # a session that is left open does not expire within a test


class BrokenInvariantError(AssertionError):
    """An invariant does not hold."""


class Stage:
    """One process with a recorder and a peer, and the events that the calls are made on."""

    def __init__(self, coordinator: ipcsync.Coordinator, engine: EngineName) -> None:
        self.coordinator = coordinator
        self.engine = engine
        self.wait_s = 10.0
        self.client = ipcsync.connect(coordinator.endpoint, name="interrupted")
        self.peer = ipcsync.connect(coordinator.endpoint, name="peer")
        self.stream, self.other = ipcsync.Stream(), ipcsync.Stream()
        self._count = 0
        self._reservations: weakref.WeakSet[ipcsync.Reservation] = weakref.WeakSet()
        self._open()

    def close(self) -> None:
        """End both sessions."""
        self.client.close()
        self.peer.close()

    def name(self) -> str:
        """A name that no event had before."""
        self._count += 1
        return f"{self.engine}-{self._count}"

    def renew(self) -> None:
        """New events, of which nothing is known."""
        self.event.close()
        self.seen.close()
        self._open()

    def _open(self) -> None:
        name = self.name()
        self.event = self.client.event(name, recorder=True, engine=self.engine)
        self.seen = self.peer.event(name, engine=self.engine)
        self.highest = 0

    def reserve(self) -> ipcsync.Reservation:
        """A reservation of the client, whose lock is looked at too."""
        reservation = self.client.reserve(engine=self.engine)
        self._reservations.add(reservation)
        return reservation

    def gated(self, call: Callable[[], ipcsync.Point]) -> ipcsync.Point:
        """The point of a record behind a closed gate, which is seen not to be complete before the gate opens."""
        with StreamGate(self.stream) as gate:
            point = call()
            self.require(not point.query(), "the recorder takes a record behind a closed gate for complete")
            self.require(not self.peer.point(bytes(point)).query(), "the peer takes it for complete")
            gate.open()
        point.synchronize(self.wait_s)
        self.peer.point(bytes(point)).synchronize(self.wait_s)
        return point

    @property
    def unnamed(self) -> int:
        """How many unnamed events the client has."""
        return len([row for row in self.peer.list_events() if not row.name and row.recorder == self.client.name])

    def require(self, condition: object, what: str) -> None:
        """An invariant."""
        if not condition:
            raise BrokenInvariantError(what)

    def pending(self) -> str:
        """What the client has not given back yet, and what the coordinator has of it."""
        session, table = self.client._session, self.client._session.attachments
        late = [request.id for request in session.connection._late.values()]
        rows = [(row.name, row.recorder, row.state) for row in self.peer.list_events() if not row.name]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            names.get(ident): " < ".join(
                f"{os.path.basename(each.filename)}:{each.lineno} {each.name}"
                for each in reversed(traceback.extract_stack(frame)[-8:])
            )
            for ident, frame in sys._current_frames().items()
        }
        return (
            f"late {late}, closes {table.closes._pending}, drains {table.draining.engines}, unnamed {len(rows)}\n"
            f"{queued.lists_lock}; this is {threading.get_ident()}; threads {stacks}"
        )

    # --- what must hold after any call --------------------------------------------------------------------------------

    def check(self) -> None:
        """No lock is kept, the thread's own state is as it was, and the event's records go on in truth."""
        self.check_locks()
        self.check_thread()
        before = max(self.highest, self.event.generation)
        point = self.gated(lambda: self.event.record(self.stream, timeout=self.wait_s))
        self.require(point.generation > before, f"generation {point.generation} was given to a record before")
        for generation in range(max(1, self.highest), point.generation):
            self.seen.at(generation).synchronize(self.wait_s)  # one that an exception ended too
        self.highest = point.generation
        engines = (self.event._engine, self.seen._engine)
        self.require(not any(engine._inside for engine in engines), "a bounded wait of nobody's")
        self.require(not any(engine._markers.doubtful for engine in engines), "queued work without a marker")

    def check_locks(self) -> None:
        """This thread holds no lock of ours."""
        kept = self.kept()
        self.require(not kept, f"kept: {kept}")

    def kept(self) -> list[str]:
        """The names of the locks of ours that this thread holds."""
        return [name for name, lock in self.locks() if lock.is_mine()]

    def unwind(self) -> None:
        """Release what this thread keeps of ours, as a mistake that was planted leaves it."""
        for _, lock in self.locks():
            lock.unwind()

    def locks(self) -> list[tuple[str, Unwinding]]:
        """Every lock that a call on this stage may take, by its name."""
        clients = (self.client, self.peer)
        of_clients = [each for client in clients for each in locks_of(client)]
        return [*module_locks(), *of_clients, *reservation_locks(self._reservations)]

    def check_thread(self) -> None:
        """The thread's capture mode is CUDA's default, and a context of this device is current."""
        driver = _drivers.load()
        mode = driver.cuThreadExchangeStreamCaptureMode(0)[1]
        self.require(int(mode) == 0, f"the thread's capture mode is {mode}")
        self.require(int(driver.cuCtxGetDevice()[1]) == 0, "another device is current")

    def check_gone(self, name: str) -> None:
        """Nobody has the event any more, so that another session can open it as its recorder."""
        # A request that an exception ended may be on its way yet; what it opens is given back.
        until(lambda: self._opens(name), f"{name} can be opened by another session", self.wait_s)
        until(lambda: name not in self._names(name), f"{name} is gone", self.wait_s)

    def _names(self, prefix: str) -> list[str]:
        self.wake()
        return [row.name for row in self.peer.list_events(prefix)]

    def wake(self) -> None:
        """Have the sessions' threads look now."""
        for client in (self.client, self.peer):
            client._session.lease.wake()  # its thread does what a call left undone; at its next beat without this

    def _opens(self, name: str) -> bool:
        self.wake()
        try:
            self.peer.event(name, recorder=True, engine=self.engine).close()
        except ipcsync.RecorderTaken:
            return False
        return True

    def check_ended(self, session: str) -> None:
        """There is no session of the name."""
        until(
            lambda: session not in [row.name for row in self.peer.list_sessions()], f"{session} has ended", self.wait_s
        )
