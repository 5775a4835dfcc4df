"""What the processes of a chain do: one session each, which records on one event and waits for others'."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ipcsync
from ipcsync._deadline import deadline_of
from ipcsync._drivers import load, unwrap
from ipcsync._session.attachments import Life
from ipcsync.testing import Memory, StreamGate
from ipcsync.typing import EngineName
from tests.faults.actions import signal_at_step
from tests.kit import driver_functions
from tests.kit.boards import bits_of
from tests.kit.until import until

_clients: list[ipcsync.Client] = []
_events: dict[str, ipcsync.SharedEvent] = {}
_streams: dict[str, ipcsync.Stream] = {}
_gates: list[StreamGate] = []
_points: dict[str, ipcsync.Point] = {}
_reservations: list[ipcsync.Reservation] = []

LOST_WITHIN_S = 20.0
_PORTABLE_MAPPED = 1 | 2


def client() -> ipcsync.Client:
    return _clients[0]


def stream(name: str = "main") -> ipcsync.Stream:
    if name not in _streams:
        _streams[name] = ipcsync.Stream()
    return _streams[name]


def connect(endpoint: str, name: str, options: dict[str, Any] | None = None) -> int:
    """Connect; which line of the board the session has."""
    _clients.append(ipcsync.connect(endpoint, name=name, **(options or {})))
    return client()._session.lease.welcome.line


def resume_by_another_client(on: str) -> None:
    """Resume by a client that did not record there."""
    with ipcsync.connect(client().endpoint) as other:
        other.resume(stream(on), LOST_WITHIN_S)


def open_event(name: str, engine: EngineName, depth: int = 4) -> None:
    _events[name] = client().event(name, recorder=True, engine=engine, depth=depth)


def open_in_slot(name: str, engine: EngineName, slot: int) -> None:
    """Open events and close them until one is in that slot, which rests before it is used again."""
    for _ in range(2000):
        event = client().event(name, recorder=True, engine=engine, depth=4)
        if event._engine.slot == slot:
            _events[name] = event
            return
        event.close()
    raise AssertionError(f"slot {slot} is never used again")


def hold(on: str = "main") -> None:
    """Hold all later work of a stream."""
    _gates.append(StreamGate(stream(on)).__enter__())


def open_gate() -> None:
    _gates.pop().open()


def record(name: str, on: str = "main", after: tuple[bytes, ...] = ()) -> bytes:
    return bytes(_events[name].record(stream(on), after=[client().point(data) for data in after]))


def finish(on: str) -> None:
    """Wait for the work of a stream."""
    stream(on).synchronize()


def is_complete(data: bytes) -> bool:
    return client().point(data).query()


def wait_ahead(name: str) -> bytes:
    """Open an event without its role, and queue a wait for its first record on a stream of its own."""
    _events[f"{name}, seen"] = event = client().event(name, engine="timeline")
    event.at(1).wait(stream("ahead"), ahead=True)
    return bytes(event.at(1))


def fill_queue(count: int, on: str = "main") -> None:
    """Queue so many operations on a stream."""
    memory = Memory(8)
    for value in range(count):
        memory.fill(value, stream(on))
    _kept.append(memory)


def record_unnamed(on: str = "main") -> bytes:
    return bytes(client().record(stream(on)))


def wait(data: bytes, on: str = "main", ahead: bool = False) -> None:
    """Queue a wait for a point of another process on a stream of this one."""
    client().point(data).wait(stream(on), timeout=20, ahead=ahead)


def point_of(name: str, generation: int) -> bytes:
    return bytes(_events[name].at(generation))


def is_settled(name: str) -> bool:
    """Whether all that was recorded is known to count, by the board."""
    event = _events[name]
    return event.completed == event.generation and not event._engine.chain.entries


def words(name: str) -> dict[str, int]:
    """What the board says of the event's chain."""
    line, base = _events[name]._engine.line, _events[name]._engine.base
    return {
        "recorded": line.recorded - base,
        "completed": line.completed - base,
        "behind": max(line.first_dependent - base, 0),
        "lost": max(line.lost - base, 0),
        "bits": bits_of(line),
    }


def close_event(name: str) -> None:
    _events.pop(name).close()


def close_client() -> None:
    client().close()


def keep(data: bytes) -> None:
    """Stay attached to a point's event."""
    _points[str(data)] = client().point(data)


def forget_point(data: bytes) -> None:
    """Open and close the event of a point, so that its attachment ends."""
    name = client().point(data).event_name
    client().event(name).close()


def draining(name: str = "") -> int:
    """How many uses are closed and not released, of all events or of one."""
    ending = client()._session.attachments.ending
    return sum(use.life < Life.RELEASED and name in ("", use.engine.name) for use in ending)


def messages_sent() -> int:
    return client().messages_sent


def quarantined() -> int:
    return int(client().stats()["quarantined"])


def resume(on: str, timeout: float) -> None:
    client().resume(stream(on), timeout)


def loss_of(fn: Any, *args: Any) -> dict[str, Any] | None:
    """What the RecorderLost says that a call raises, None if it raises none; how long that took."""
    began = time.monotonic()
    try:
        fn(*args)
    except ipcsync.RecorderLost as error:
        return {
            **{key: getattr(error, key) for key in ("cause", "session", "pid", "generation", "event")},
            "text": str(error),
            "took_s": time.monotonic() - began,
        }
    return None


def error_of(fn: Any, *args: Any) -> str:
    """The name of the ipcsync error that a call here raises, empty if it raises none."""
    try:
        fn(*args)
    except ipcsync.IpcSyncError as error:
        return type(error).__name__
    return ""


# --- how a waiter waits -----------------------------------------------------------------------------------------------


def _query(point: ipcsync.Point) -> None:
    until(point.query, "the point is complete", LOST_WITHIN_S)


def _stream_wait(point: ipcsync.Point) -> None:
    """Queue waits, one after another: each that cannot see that all is well asks for a judgement."""

    def look() -> bool:
        point.wait(ipcsync.Stream(), timeout=0)
        return point.query()

    until(look, "the point is complete", LOST_WITHIN_S)


def _callback(point: ipcsync.Point) -> None:
    is_over = threading.Event()
    point.add_done_callback(lambda _: is_over.set())
    assert is_over.wait(LOST_WITHIN_S)
    error = point.exception()
    if error is not None:
        raise error


def _asyncio(point: ipcsync.Point) -> None:
    async def synchronize() -> None:
        async with ipcsync.aconnect(client().endpoint) as connected:
            await (await connected.point(bytes(point))).synchronize(LOST_WITHIN_S)

    asyncio.run(synchronize())


def _synchronize(point: ipcsync.Point) -> None:
    point.synchronize(LOST_WITHIN_S)


WAYS = {
    "query": _query,
    "synchronize": _synchronize,
    "stream_wait": _stream_wait,
    "callback": _callback,
    "asyncio": _asyncio,
}


def await_point(data: bytes, way: str = "synchronize") -> None:
    """Wait until a point is complete; raises RecorderLost if it is lost."""
    WAYS[way](client().point(data))


def await_end(data: bytes, way: str = "synchronize") -> dict[str, Any] | None:
    """What the RecorderLost says with which the wait for a point ends, None if it is complete."""
    return loss_of(await_point, data, way)


# --- what the driver refuses, and what comes right before its call ---------------------------------------------------


def refused_wait(data: bytes, on: str = "main") -> None:
    """A wait that the driver does not get."""
    point = client().point(data)
    _refused(driver_functions.WAIT[point._bound().engine.kind], lambda: point.wait(stream(on)))


def refused_record(name: str, step: str = "record", is_made: bool = False) -> None:
    """A record of which the driver refuses that step: `record`, or `follow` the record on another stream."""
    functions = {"record": driver_functions.RECORD, "follow": driver_functions.WAIT}[step]
    _refused(functions[_events[name].engine], lambda: record(name), is_made)


def refused_place(name: str, on: str) -> None:
    """A record on a timeline of which the driver refuses the marker."""
    _refused("cuEventRecord", lambda: record(name, on))


def _refused(function: str, call: Callable[[], object], is_made: bool = False) -> None:
    with driver_functions.replaced(driver_functions.refused_once(function, is_made=is_made)):
        try:
            call()
        except ipcsync.DriverError as error:
            if error.call == function:
                return
    raise AssertionError("not refused")


def reserve_again_after_a_refusal(data: bytes, engine: EngineName) -> bytes:
    """A reservation whose first record the driver refuses, and whose second one stands behind a point too."""
    reservation = client().reserve(engine=engine)
    _reservations.append(reservation)
    _refused(driver_functions.RECORD[engine], lambda: reservation.record(stream()))
    return bytes(reservation.record(stream(), after=[client().point(data)]))


def die_before_the_record(name: str) -> None:
    """SIGKILL right before the driver's call."""
    signal_at_step([*driver_functions.RECORD.values()], [signal.SIGKILL])
    record(name)


def slot_of(name: str) -> int:
    return _events[name]._engine.slot


def synchronize_briefly(data: bytes) -> None:
    client().point(data).synchronize(0.3)


def session_line() -> int:
    return client()._session.lease.welcome.line


def end_beats() -> None:
    """From now on only calls find out what is lost."""
    client()._session.driving.stop()
    client()._session._driver_thread.join()


def beat() -> None:
    """What the session's threads do at each beat."""
    session = client()._session
    session.driving.look()
    session._call(session.attachments.beat, deadline_of(5.0), 5.0)


def state_of(data: bytes) -> str:
    return client().point(data)._bound().engine.state


def use_blocking_stream(name: str) -> None:
    """Have `name` be a stream that waits for the default stream."""
    ipcsync.Stream()  # a context
    handle = unwrap(load().cuStreamCreate(0), "cuStreamCreate")
    _streams[name] = ipcsync.ExternalStream(int(handle))


def use_default_stream(name: str) -> None:
    _streams[name] = ipcsync.default_stream()


# --- work whose doing can be told -------------------------------------------------------------------------------------

_cells: list[int] = []  # the address of a page of words, as this process's driver has it
_kept: list[Any] = []


def map_cells(path: str) -> None:
    """Map a page of words, and have the driver write it."""
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    ipcsync.Stream()  # makes a context current
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    unwrap(load().cuMemHostRegister(address, mmap.PAGESIZE, _PORTABLE_MAPPED), "cuMemHostRegister")
    _cells.append(int(unwrap(load().cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer")))
    _kept.append(page)


def write_cell(cell: int, value: int, on: str) -> None:
    """Have a stream write a word."""
    unwrap(load().cuStreamWriteValue64(stream(on).cuda_stream, _cells[0] + 8 * cell, value, 0), "cuStreamWriteValue64")


def copy_cell(source: int, to: int, on: str) -> None:
    """Have a stream copy a word."""
    first = _cells[0]
    unwrap(load().cuMemcpyAsync(first + 8 * to, first + 8 * source, 8, stream(on).cuda_stream), "cuMemcpyAsync")


def open_event_anew(name: str, engine: EngineName) -> None:
    """Close what was open, and open that to record on."""
    for each in list(_events):
        close_event(each)
    open_event(name, engine)


def record_last(on: str) -> bytes:
    """Record on the event opened last."""
    return record(next(reversed(_events)), on)


def keep_only(data: bytes) -> None:
    """Stay attached to one point's event."""
    _points.clear()
    keep(data)
