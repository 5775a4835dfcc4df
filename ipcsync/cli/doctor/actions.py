"""The functions that the doctor's processes run, and their state between two calls."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import ipcsync
from ipcsync._deadline import pauses
from ipcsync._linux import child
from ipcsync.errors import EngineMismatch, IpcSyncError
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineChecks, EngineName

SOON_S = 5.0


@dataclass
class _Side:
    """What this process takes part in a check with. The stream records on the event, or waits for it."""

    event: ipcsync.SharedEvent
    stream: ipcsync.Stream
    gate: StreamGate | None = None


_sides: list[_Side] = []  # the last one is of the present check; the others, of checks that failed


def describe() -> dict[str, Any]:
    """The driver and the devices of this process. Fails without a driver."""
    from cuda.bindings.driver import CUdevice_attribute

    from ipcsync import _drivers
    from ipcsync._native import context

    ask, mode = context.driver().cuDeviceGetAttribute, CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    devices = []
    for ordinal, device in enumerate(context.devices()):
        properties = ipcsync.get_device_properties(ordinal)
        compute_mode = int(_drivers.unwrap(ask(mode, device), "cuDeviceGetAttribute"))
        devices.append({"name": properties.name, "uuid": properties.uuid, "compute_mode": compute_mode})
    return {"driver": ipcsync.driver_name(), "version": ipcsync.driver_version(), "devices": devices}


def connect(endpoint: str) -> dict[str, Any]:
    """Connect, and return the coordinator's pid, and whether it has a keeper and is in this pid namespace."""
    from ipcsync._linux.process import pid_namespace

    client = _client(endpoint)
    pid, _, namespace = client._session.lease.board.coordinator
    return {"pid": pid, "has_keeper": client.stats()["pid"] != pid, "shares_pids": namespace == pid_namespace()}


@cache
def _client(endpoint: str) -> ipcsync.Client:
    client = ipcsync.connect(endpoint, name="ipcsync doctor", trace="")
    child.at_end.append(client.close)
    return client


def check(endpoint: str, device: int) -> EngineChecks:
    """The result of `Client.check` for a device."""
    return _client(endpoint).check(device)


def open_recorder(endpoint: str, engine: EngineName, device: int, records: bool) -> str:
    """Open an event to record on, hold a stream of the device, and perhaps have that record: the event's name."""
    name = f"ipcsync-doctor/{os.urandom(6).hex()}"
    event = _client(endpoint).event(name, recorder=True, engine=engine, device=device)
    stream = ipcsync.Stream(device)
    _sides.append(_Side(event, stream, StreamGate(stream)))
    if records:
        event.record(stream)
    return name


def join(endpoint: str, name: str, device: int, ahead: bool) -> bool:
    """Open an event, and have a stream of the device wait for its first record: whether it is held by that."""
    event, stream = _client(endpoint).event(name), ipcsync.Stream(device)
    _sides.append(_Side(event, stream))
    event.at(1).wait(stream, timeout=SOON_S, ahead=ahead)
    return not stream.query()


def finish(seconds: float) -> tuple[str, bool]:
    """The outcome of a wait for the record, and whether the waiting stream then goes on within `seconds`: if so, close.

    The outcome is "complete", an error's name, or, after five seconds, "nothing".
    """
    side, outcome = _sides[-1], "complete"
    try:
        side.event.at(1).synchronize(SOON_S)
    except ipcsync.WaitTimeout:
        outcome = "nothing"
    except IpcSyncError as error:
        outcome = type(error).__name__
    for pause_s in pauses(seconds, 0.0002, 0.01):
        if side.stream.query():
            close()
            return outcome, True
        time.sleep(pause_s)
    return outcome, False


def close() -> None:
    """Release the stream that this process holds, and close the event that it records or waits on."""
    side = _sides.pop()
    if side.gate is not None:
        side.gate.open()
    side.event.close()


def do_streams_pass() -> bool:
    """Whether a stream goes on while others wait, so that they do not all share a hardware queue."""
    from ipcsync.client.point import check_passing

    try:
        check_passing(0)
    except EngineMismatch:
        return False
    return True
