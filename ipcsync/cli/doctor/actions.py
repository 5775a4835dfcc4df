"""The functions that the doctor's processes run, and their state between two calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipcsync
from ipcsync._deadline import pauses
from ipcsync._drivers import DriverObject
from ipcsync._linux import child
from ipcsync.errors import EngineMismatch, IpcSyncError
from ipcsync.typing import EngineChecks, EngineName

if TYPE_CHECKING:
    from ipcsync.testing import StreamGate

SOON_S = 5.0
_clients: dict[str, ipcsync.Client] = {}
_kept: dict[str, ipcsync.SharedEvent] = {}
_streams: dict[str, ipcsync.Stream] = {}
_gates: dict[str, StreamGate] = {}


def describe() -> dict[str, Any]:
    """The driver and the devices of this process. Fails without a driver."""
    from cuda.bindings.driver import CUdevice_attribute as Attribute

    from ipcsync import _drivers
    from ipcsync._native import context

    driver = context.driver()

    def ask(attribute: DriverObject, device: DriverObject) -> int:
        return int(_drivers.unwrap(driver.cuDeviceGetAttribute(attribute, device), "cuDeviceGetAttribute"))

    devices = []
    for ordinal, device in enumerate(context.devices()):
        properties = ipcsync.get_device_properties(ordinal)
        devices.append(
            {
                "name": properties.name,
                "uuid": properties.uuid,
                "compute_mode": ask(Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device),
                "ipc_events": bool(ask(Attribute.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, device)),
            }
        )
    return {"driver": ipcsync.driver_name(), "version": ipcsync.driver_version(), "devices": devices}


def place() -> dict[str, Any]:
    """This process's pid, pid namespace and /dev/shm (None if there is none)."""
    from ipcsync._linux.process import pid_namespace

    return {"pid": os.getpid(), "namespace": pid_namespace(), "shm": _identity("/dev/shm")}  # noqa: S108 - looked at


def _identity(path: str) -> list[int] | None:
    """The identity of a directory; None if there is none, or this process may not look at it."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, PermissionError):
        return None
    return [status.st_dev, status.st_ino]


def connect(endpoint: str) -> dict[str, Any]:
    """Connect, and return the coordinator's place; its /dev/shm is None if this process may not look at it."""
    client = _client(endpoint)
    pid, _, namespace = client._session.lease.board.coordinator
    shm = _identity(f"/proc/{pid}/root/dev/shm") if namespace == place()["namespace"] else None
    return {"pid": pid, "has_keeper": client.stats()["pid"] != pid, "namespace": namespace, "shm": shm}


def _client(endpoint: str) -> ipcsync.Client:
    if endpoint not in _clients:
        _clients[endpoint] = ipcsync.connect(endpoint, name="ipcsync doctor", trace="")
    return _clients[endpoint]


def check(endpoint: str, device: int) -> EngineChecks:
    """The result of `Client.check` for a device."""
    return _client(endpoint).check(device)


def open_recorder(endpoint: str, name: str, engine: EngineName, device: int) -> None:
    """Open an event to record on, and hold a stream of the device."""
    from ipcsync.testing import StreamGate

    _kept[name] = _client(endpoint).event(name, recorder=True, engine=engine, device=device)
    _streams[name] = ipcsync.Stream(device)
    _gates[name] = StreamGate(_streams[name])


def record(name: str) -> str:
    """Record on the held stream; the point's bytes."""
    return bytes(_kept[name].record(_streams[name])).hex()


def release(name: str) -> None:
    """Let the held stream go on."""
    _gates[name].open()


def completed_here(name: str, generation: int) -> bool:
    """Whether the CPU sees within five seconds what this process's stream wrote to the board."""
    line = _kept[name]._attached.engine.line
    base = _kept[name]._attached.engine.base
    return _soon(lambda: line.completed >= base + generation)


def join(endpoint: str, name: str, device: int, generation: int, ahead: bool) -> None:
    """Open an event, and have a stream of the device wait for a generation."""
    _kept[name] = _client(endpoint).event(name)
    _streams[name] = ipcsync.Stream(device)
    _kept[name].at(generation).wait(_streams[name], timeout=SOON_S, ahead=ahead)


def is_held(name: str) -> bool:
    """Whether the waiting stream still waits."""
    return not _streams[name].query()


def goes_on(name: str, seconds: float = SOON_S) -> bool:
    """Whether the waiting stream goes on within `seconds`."""
    return _soon(_streams[name].query, seconds)


def outcome(name: str, generation: int) -> str:
    """The outcome of a wait for a generation within five seconds: "complete", an error's name, or "nothing"."""
    try:
        _kept[name].at(generation).synchronize(SOON_S)
    except ipcsync.WaitTimeout:
        return "nothing"
    except IpcSyncError as error:
        return type(error).__name__
    return "complete"


def close(name: str) -> None:
    """Close the event that this process records or waits on, and let go what it holds."""
    if name in _gates:
        _gates.pop(name).open()
    _kept.pop(name).close()
    del _streams[name]


def try_gate() -> bool:
    """Whether a plain store wakes a wait that is pending on a stream, within five seconds."""
    from ipcsync.testing import StreamGate

    stream = ipcsync.Stream()
    gate = StreamGate(stream)
    if stream.query():
        raise IpcSyncError("the stream was not held at all")
    gate.open()
    woke = _soon(stream.query)
    if woke:
        gate.open()
    return woke


def do_streams_pass() -> bool:
    """Whether a stream goes on while others wait, so that they do not all share a hardware queue."""
    from ipcsync.client._ahead import check_passing

    try:
        check_passing(0)
    except EngineMismatch:
        return False
    return True


def _soon(condition: Callable[[], bool], seconds: float = SOON_S) -> bool:
    for pause_s in pauses(seconds, 0.0002, 0.01):
        if condition():
            return True
        time.sleep(pause_s)
    return False


def _close_clients() -> None:
    for client in _clients.values():
        client.close()


child.at_end.append(_close_clients)
