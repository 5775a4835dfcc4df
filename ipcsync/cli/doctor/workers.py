"""The doctor's processes, what each does, and what two of them do together over a coordinator.

Each answers in time or is killed: a driver that hangs must not hang the doctor.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import ipcsync
from ipcsync._deadline import pauses
from ipcsync._linux import child
from ipcsync._linux.child import WorkerError
from ipcsync.errors import EngineMismatch, IpcSyncError
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineChecks, EngineName

SOON_S = 5.0
START_S = 60.0
"""For a process's first answer: it imports modules and creates a GPU's context."""
ANSWER_S = 20.0
_RELEASE_S = 2.0  # the coordinator, and drivers that release, take less than a tenth of this


# --- in such a process: functions, and its state between two calls ----------------------------------------------------


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

    from ipcsync._native import context

    mode, devices = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, []
    for ordinal, device in enumerate(context.devices()):
        properties = ipcsync.get_device_properties(ordinal)
        compute_mode = int(context.call("cuDeviceGetAttribute", mode, device))
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
    return _client(endpoint).check(device, timeout=ANSWER_S - 1)


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


# --- in the doctor ----------------------------------------------------------------------------------------------------


class Worker(child.Worker):
    """One process, which runs functions of this module. WorkerError says why it did not."""

    def __init__(self, name: str) -> None:
        self._seconds = START_S
        super().__init__(name, output=subprocess.DEVNULL)  # against output of libraries

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The function's result. A process that does not answer in time is killed."""
        self.begin(function, *arguments, **keywords)
        if not self.has_spoken(self._seconds):
            self.kill()
            raise WorkerError(f"the {self.name} process did not finish {function.__name__!r} in time, and was killed")
        self._seconds = ANSWER_S
        return self.result(0.0)


class Workers(ExitStack):
    """The recorder and the waiter, started at the first use, and again after one was killed. None outlives the block.

    `endpoint` is that of the coordinator over which they work. WorkerError says why a trial could not be completed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.endpoint = ""
        self._by_name: dict[str, Worker] = {}

    def __getitem__(self, name: str) -> Worker:
        worker = self._by_name.get(name)
        if worker is None or worker.status is not None:
            try:
                worker = self._by_name[name] = self.enter_context(Worker(name))
            except OSError as error:
                raise WorkerError(f"cannot start the {name} process: {error.strerror}") from None
        return worker

    def hand_over(self, engine: EngineName, device: int) -> None:
        """A record in one process that a stream of another waits for, and goes on behind. WorkerError if it fails."""
        self._wait_behind(engine, device)
        self["recorder"].call(close)  # its stream goes on, and what it recorded can be waited for
        outcome, goes_on = self._finish(SOON_S)
        if not goes_on:
            raise WorkerError("the waiting stream did not go on when the other process's work was done")
        if outcome != "complete":
            raise WorkerError(f"the waiter got {outcome!r} for work that is complete")

    def release(self) -> bool:
        """Whether a stream that waits ahead goes on when the coordinator releases it: by a plain store."""
        recorder = self["recorder"]
        name = recorder.call(open_recorder, self.endpoint, "timeline", 0, records=False)
        self["waiter"].call(join, self.endpoint, name, 0, ahead=True)
        recorder.call(close)
        return self._finish(SOON_S)[1]

    def death(self, engine: EngineName) -> tuple[str, bool]:
        """Kill a recorder by SIGKILL amid its work, for which a stream of another process waits.

        The waiter's outcome, and whether its stream went on.
        """
        self._wait_behind(engine, 0)
        self["recorder"].kill()
        return self._finish(_RELEASE_S)

    def _wait_behind(self, engine: EngineName, device: int) -> None:
        """A record behind a held stream of one process, for which a stream of the other waits. WorkerError if not."""
        name = self["recorder"].call(open_recorder, self.endpoint, engine, device, records=True)
        if not self["waiter"].call(join, self.endpoint, name, device, ahead=False):
            raise WorkerError("the waiting stream did not wait for the other process's unfinished work")

    def _finish(self, seconds: float) -> tuple[str, bool]:
        """The waiter's outcome, and whether its stream goes on by itself; it is killed if its stream never will."""
        outcome, goes_on = self["waiter"].call(finish, seconds)
        if not goes_on:
            self["waiter"].kill()
        return outcome, goes_on
