"""A stream's wait whose point is recorded, and lost, while its process is stopped raises when the process goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync._board.layout import L_AWAITED
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import fixtures
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

_kept: dict[str, Any] = {}


def _hold(endpoint: str, name: str, engine: EngineName, above: bytes | None) -> bytes:
    """In a peer: record behind a closed gate, then have the stream wait for `above`."""
    client = _kept["client"] = ipcsync.connect(endpoint, name=name)
    stream = _kept["stream"] = ipcsync.Stream()
    event = _kept["event"] = client.event(name, recorder=True, engine=engine, depth=4)
    _kept["gate"] = StreamGate(stream)
    data = bytes(event.record(stream))
    if above is not None:
        client.point(above).wait(stream, timeout=10)
    return data


def _record() -> None:
    _kept["event"].record(_kept["stream"])


def _open_gate() -> None:
    _kept["gate"].open()


def _attach(endpoint: str, name: str, engine: EngineName) -> None:
    client = _kept["client"] = ipcsync.connect(endpoint)
    _kept["event"] = client.event(name, engine=engine)
    _kept["stream"] = ipcsync.Stream()
    _kept["event"].at(1).wait(_kept["stream"], timeout=10)


def _wait_for_the_second() -> str:
    try:
        _kept["event"].at(2).wait(_kept["stream"])
    except ipcsync.RecorderLost as error:
        return str(error.cause)
    return "no error"


def test_a_wait_for_what_was_lost_while_its_process_was_stopped_raises(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[..., Peer], engine: EngineName
) -> None:
    above, recorder, waiter = (new_peer() for _ in range(3))
    data = above.call(_hold, coordinator.endpoint, "above", engine, None)
    recorder.call(_hold, coordinator.endpoint, "below", engine, data)
    waiter.call(_attach, coordinator.endpoint, "below", engine)
    event = client.event("below", engine=engine)
    line = event._engine.line
    waiter.begin(_wait_for_the_second)
    until(lambda: line.all_words[L_AWAITED], "the waiter asleep")
    fixtures.stop(waiter.pid)
    recorder.call(_record)
    os.kill(above.pid, signal.SIGKILL)

    def is_lost() -> bool:
        event._engine.is_clear(2)  # else its recorder is woken to look
        return event._engine.is_lost(2)

    until(is_lost, "the loss, on the board")
    assert event.state == "open", "generation 1 is pending, and not lost"
    fixtures.resume(waiter.pid)
    assert waiter.result() == "behind"
    recorder.call(_open_gate)
