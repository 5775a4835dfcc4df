"""Every lock of ipcsync's: where it is made, and which of them a call of the stage may leave held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._board import over
from ipcsync._engines import imports, queued, traced
from ipcsync._locks import Unwinding
from ipcsync._native import event as native_event
from ipcsync._native import living, pinned
from ipcsync._trace import writer
from ipcsync.client import default

THREADS_OWN = "only the thread that works takes it, which no exception of a call reaches"
LATCHS = "it is held until the latch is set, and a waiter that keeps it does no harm"
NOBODYS = "no other thread ever has it: to take it is a fence"

LOCKS: dict[tuple[str, str], str] = {
    ("_board/fence.py", "1 without a name"): NOBODYS,
    ("_board/over.py", "_lock"): "ipcsync._board.over._lock",
    ("_drivers/__init__.py", "_lock"): "ipcsync._drivers._lock",
    ("_engines/base.py", "_record_lock"): "the record lock of",
    ("_engines/imports.py", "_lock"): "Imports._lock",
    ("_engines/queued.py", "lists_lock"): "ipcsync._engines.queued.lists_lock",
    ("_engines/slot_use.py", "_lock"): "the use lock of",
    ("_engines/traced.py", "_learning"): "the learning lock of",
    ("_engines/traced.py", "_lock"): "Releases._lock",
    ("_linux/last_lock.py", "_lock"): "LastLock._lock",
    ("_native/event.py", "_creating"): "ipcsync._native.event._creating",
    ("_native/living.py", "_lock"): "_Living._lock",
    ("_native/pinned.py", "_lock"): "ipcsync._native.pinned._lock",
    ("_room.py", "1 without a name"): THREADS_OWN,
    ("_session/attachments.py", "_lock"): "AttachmentTable._lock",
    ("_session/closes.py", "changing"): "PendingCloses.changing",
    ("_session/connection.py", "_lock"): "Connection._lock",
    ("_session/lease.py", "lock"): THREADS_OWN,
    ("_session/lease.py", "_waking"): "SessionLease._waking",
    ("_trace/writer.py", "_opening"): "ipcsync._trace.writer._opening",
    ("_worker.py", "_lock"): LATCHS,
    ("_worker.py", "_running"): THREADS_OWN,
    ("client/_unnamed.py", "_lock"): "UnnamedEvents._lock",
    ("client/default.py", "_lock"): "ipcsync.client.default._lock",
    ("client/reservation.py", "_lock"): "Reservation._lock",
}
"""Each lock that the package makes, by file and attribute: how its name begins below, or why it is not listed there."""


def module_locks() -> Iterator[tuple[str, Unwinding]]:
    """Those that a process has one of."""
    parts: list[Any] = [_drivers, default, native_event, over, pinned, queued, writer]
    parts += [imports._imports, living._living, traced._releases, *over._held.values()]
    for part in parts:
        yield from _locks_in(part)


def locks_of(client: ipcsync.Client) -> Iterator[tuple[str, Unwinding]]:
    """Those of a client, its session and its attachments."""
    session = client._session
    parts: list[Any] = [client, client._unnamed, session, session.connection, session.attachments, session.lease]
    for part in (*parts, session.attachments.closes):
        yield from _locks_in(part)
    for engine in (*session.attachments._engines.values(), *session.attachments.draining.engines):
        yield f"the use lock of {engine.label}", engine._lock  # by name: the compiled core keeps them out of `vars`
        yield f"the record lock of {engine.label}", engine._record_lock
        if isinstance(engine, traced.Traced):
            yield f"the learning lock of {engine.label}", engine._learning


def reservation_locks(reservations: Iterable[ipcsync.Reservation]) -> Iterator[tuple[str, Unwinding]]:
    """Those of reservations, which no session lists."""
    for reservation in reservations:
        yield from _locks_in(reservation)


def _locks_in(part: Any) -> Iterator[tuple[str, Unwinding]]:
    for name, value in list(vars(part).items()):
        if isinstance(value, Unwinding):
            yield f"{getattr(part, '__name__', type(part).__name__)}.{name}", value
