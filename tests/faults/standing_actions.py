"""What a peer does whose stream waits for another process's record, and which then waits for that stream."""

from __future__ import annotations

import logging
from collections.abc import Callable

import ipcsync
from ipcsync._board import INT64_MAX
from ipcsync._engines import queued
from tests.faults import actions
from tests.kit import remote

_before: list[ipcsync.Event] = []
_behind: list[ipcsync.Event] = []

CALLS: dict[str, Callable[[], Callable[..., None]]] = {
    "Stream.synchronize": lambda: remote.stream().synchronize,
    "Event.synchronize": lambda: _behind[0].synchronize,
    "synchronize": lambda: ipcsync.synchronize,
}


ANOTHER = "Stream.synchronize of another"


def wait_for(endpoint: str, data: bytes) -> None:
    """Connect, and queue a wait for the point between two records of events of this process."""
    actions.connect(endpoint, "waiter")
    actions.take(data, "p")
    _before.append(remote.stream().record_event())
    actions.wait_on_stream("p")
    _behind.append(remote.stream().record_event())


def record_behind(name: str) -> bytes:
    """The point of a record on the stream that waits."""
    actions.open_event(name, "event")
    return actions.record(name)


def record_on_another_stream(name: str) -> None:
    """The event's next record, which follows the one before."""
    remote.event(name).record(remote.stream("another"))


def outcome(call: str, timeout: float | None = None) -> tuple[str, str, int, str]:
    """How a call ends here: class, cause, pid and text of its error; empty if it returns."""
    try:
        (remote.stream("another").synchronize if call == ANOTHER else CALLS[call]())(timeout=timeout)
    except ipcsync.RecorderLost as error:
        return "RecorderLost", str(error.cause), error.pid, str(error)
    except ipcsync.WaitTimeout as error:
        return "WaitTimeout", str(error.timeout), 0, str(error)
    return "", "", 0, ""


def others_end() -> bool:
    """What does not stand behind the wait ends: the event before it, another stream, and an event there."""
    _before[0].synchronize()
    other = ipcsync.Stream()
    other.record_event().synchronize()
    other.synchronize()
    return other.query()


def said_at_exit() -> list[str]:
    """What this process would log at its exit."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    queued.log.addHandler(handler)
    queued.log_at_exit()
    return said


def is_released(point: str) -> bool:
    """Whether the point's word is the one that ends every wait."""
    return bool(actions.engine_of(point).line.completed == INT64_MAX)


def beat_often() -> None:
    """Run the driver's thread's work, which finds a lost coordinator, a few times."""
    for _ in range(5):
        remote.client()._session.driving.look()
