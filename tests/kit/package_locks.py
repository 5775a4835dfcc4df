"""The locks of ipcsync's that another thread may have while a process forks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import ipcsync
from ipcsync import _drivers
from ipcsync._board import board
from ipcsync._native import event as native_event
from ipcsync._native import pinned
from ipcsync._threads import CallLock
from ipcsync._trace import file as trace_file
from ipcsync.client import _connecting


def module_locks() -> Iterator[tuple[str, CallLock]]:
    """Those that a process has one of."""
    parts: list[Any] = [_connecting, _drivers, native_event, board, pinned, trace_file]
    parts += board._held.values()
    for part in parts:
        yield from _locks_in(part)


def locks_of(client: ipcsync.Client) -> Iterator[tuple[str, CallLock]]:
    """Those of a client; the compiled core's are taken by calls only, and its session has none."""
    for part in (client, client._unnamed):
        yield from _locks_in(part)


def reservation_locks(reservations: Iterable[ipcsync.Reservation]) -> Iterator[tuple[str, CallLock]]:
    """Those of reservations, which no session lists."""
    for reservation in reservations:
        yield from _locks_in(reservation)


def _locks_in(part: Any) -> Iterator[tuple[str, CallLock]]:
    for name, value in list(vars(part).items()):
        if isinstance(value, CallLock):
            yield f"{getattr(part, '__name__', type(part).__name__)}.{name}", value
