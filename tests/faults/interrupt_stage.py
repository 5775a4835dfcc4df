"""What is interrupted, and what must hold afterwards, each time."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from _thread import LockType
from collections.abc import Callable, Iterator
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._engines import imports, queued
from ipcsync._locks import Unwinding
from ipcsync._native import event as native_event
from ipcsync._native import living, pinned
from ipcsync._session.session import Session
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
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
        self._open()
        self._modules = [*module_locks()]

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
        self.require(not any(engine._doubtful for engine in engines), "queued work without a marker")

    def check_locks(self) -> None:
        """No lock of ours is held; those of threads at work are let go of in a moment."""
        for name, lock in self._locks():
            if isinstance(lock, Unwinding):
                self.require(not lock.is_mine(), f"{name} is kept")
            elif lock.locked():
                until(lambda lock=lock: not lock.locked(), f"{name} is let go of", self.wait_s)  # type: ignore[misc]

    def unwind(self) -> None:
        """Release what this thread keeps of ours, as a mistake that was planted leaves it."""
        for _, lock in self._locks():
            if isinstance(lock, Unwinding):
                lock.unwind()

    def _locks(self) -> list[tuple[str, Any]]:
        return [*self._modules, *locks_of(self.client), *locks_of(self.peer), *_streams_locks()]

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
        self._wake()
        return [row.name for row in self.peer.list_events(prefix)]

    def _wake(self) -> None:
        for client in (self.client, self.peer):
            client._session.lease.wake()  # its thread does what a call left undone; at its next beat without this

    def _opens(self, name: str) -> bool:
        self._wake()
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


def module_locks() -> Iterator[tuple[str, Any]]:
    modules: list[Any] = [_drivers, native_event, pinned, imports._imports, living._living, queued]
    if _drivers.name() == "host":
        from ipcsync._drivers.host import capture_calls, context, init, memory
        from ipcsync._drivers.host.process import process

        modules += [capture_calls, context, init, memory, memory.ranges, process.segment]
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, Unwinding | LockType):
                yield f"{getattr(module, '__name__', type(module).__name__)}.{name}", value


def locks_of(client: ipcsync.Client) -> Iterator[tuple[str, Any]]:
    session: Session = client._session
    parts = [client, client._unnamed, session, session.connection, session.attachments, session.lease]
    parts.append(session.attachments.closes)
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, Unwinding):
                yield f"{type(part).__name__}.{name}", value
    for engine in (*session.attachments._engines.values(), *session.attachments.draining.engines):
        yield f"the lock of {engine.label}", engine._lock  # by name: the compiled core keeps them out of `vars`
        yield f"the record lock of {engine.label}", engine._record_lock


def _streams_locks() -> Iterator[tuple[str, Any]]:
    if _drivers.name() == "host":
        from ipcsync._drivers.host.stream import streams

        yield from ((f"the lock of stream {number:#x}", stream._lock) for number, stream in list(streams.items()))
