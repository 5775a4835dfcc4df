"""What a peer does for a test. Clients, streams, gates, events and points stay in the peer, under names."""

from __future__ import annotations

import ctypes
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ipcsync
from ipcsync.testing import StreamGate
from tests.kit.until import DEADLINE_S

_clients: dict[str, ipcsync.Client] = {}
_events: dict[str, ipcsync.SharedEvent] = {}
_reservations: dict[str, ipcsync.Reservation] = {}
_streams: dict[str, ipcsync.Stream] = {}
_gates: dict[str, StreamGate] = {}
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


def connect(endpoint: str, name: str = "peer", options: dict[str, Any] | None = None) -> int:
    """Connect this process's client; which line of the board its session has."""
    _clients["main"] = ipcsync.connect(endpoint, name=name, **(options or {}))
    return session_line()


def client() -> ipcsync.Client:
    """This process's client."""
    return _clients["main"]


def session_line() -> int:
    """Which line of the board this process's session has."""
    return client()._session.lease.welcome.line


def open_event(name: str, options: dict[str, Any] | None = None) -> tuple[str, int, str]:
    """Open an event and keep it: its engine, and its device's ordinal here and UUID."""
    event = _events[name] = client().event(name, **(options or {}))
    return event.engine, event.device.index, ipcsync.get_device_properties(event.device).uuid


def event(name: str) -> ipcsync.SharedEvent:
    """An event that was opened here."""
    return _events[name]


def stream(name: str = "main", device: Any = None) -> ipcsync.Stream:
    """The stream of that name, made when it is first asked for."""
    if name not in _streams:
        _streams[name] = ipcsync.Stream(device)
    return _streams[name]


def hold(name: str = "main", device: Any = None) -> None:
    """Hold the later work of a stream."""
    _gates[name] = StreamGate(stream(name, device))


def let_go(name: str = "main") -> None:
    """Let a held stream go on."""
    _gates[name].open()


def record(name: str, on: str = "main", times: int = 1) -> list[bytes]:
    """Record on a stream; the points' bytes."""
    return [bytes(_events[name].record(stream(on))) for _ in range(times)]


def record_unfinished(endpoint: str, name: str) -> bytes:
    """Connect, and record on a new event what does not end; the point's bytes."""
    connect(endpoint)
    open_event(name, {"recorder": True})
    hold()
    return record(name)[0]


def reserve(name: str, options: dict[str, Any] | None = None) -> bytes:
    """Reserve a point and keep the reservation; the point's bytes."""
    reservation = _reservations[name] = client().reserve(**(options or {}))
    return bytes(reservation.point)


def record_reserved(name: str, on: str = "main") -> bytes:
    """Make the record that was reserved."""
    return bytes(_reservations[name].record(stream(on)))


def record_all(
    streams: list[str] | None = None, options: dict[str, Any] | None = None, after: list[bytes] | None = None
) -> bytes:
    """Record everything, or the streams of those names; the point's bytes."""
    named = None if streams is None else [stream(name) for name in streams]
    points = [client().point(data) for data in after or ()]
    return bytes(client().record_all(streams=named, after=points, **(options or {})))


def resume(on: str = "main") -> None:
    """Forget what a stream waited for and lost."""
    client().resume(stream(on), timeout=DEADLINE_S / 2)


def close_reserved(name: str) -> None:
    """Close a reservation."""
    _reservations.pop(name).close()


def drop_reserved(name: str) -> int:
    """Drop a reservation without a word; how many warnings there were."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del _reservations[name]
        gc.collect()
    return len([each for each in seen if issubclass(each.category, ResourceWarning)])


def wait(data: bytes, on: str = "main", options: dict[str, Any] | None = None, device: Any = None) -> None:
    """Have a stream wait for a point."""
    client().point(data).wait(stream(on, device), **(options or {}))


def stream_is_idle(name: str = "main") -> bool:
    """Whether a stream has nothing left to do."""
    return stream(name).query()


def synchronize(data: bytes, timeout: float = DEADLINE_S / 2) -> None:
    """Block until a point is complete."""
    client().point(data).synchronize(timeout)


def close_event(name: str) -> None:
    """Close an event."""
    _events[name].close()


def close_client() -> None:
    """Close the client, whatever is held."""
    client().close()


def close() -> None:
    """Open every gate and close the client."""
    for gate in _gates.values():
        gate.open()
    _gates.clear()
    _clients.pop("main").close()


def error_of(fn: Callable[..., object], *args: Any) -> tuple[str, str] | None:
    """The class name and text of the ipcsync error that `fn(*args)` raises; None if it returns."""
    try:
        fn(*args)
    except ipcsync.IpcSyncError as error:
        return type(error).__name__, str(error)
    return None


def see_another_shm() -> None:
    """Give this process a /dev/shm of its own, as a container has. Only root may, before anything lies mapped in it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: Any, *args: Any) -> None:
        if function(*args) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    call(libc.unshare, _CLONE_NEWNS)
    call(libc.mount, None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    call(libc.mount, b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), None)


@contextmanager
def held(on: ipcsync.Stream) -> Iterator[StreamGate]:
    """A stream of the test's own process, held until the end of the block."""
    with StreamGate(on) as gate:
        yield gate
