"""`resume` forgets what is lost of a stream, and nothing that other threads wait for meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

import ipcsync
from ipcsync._engines import queued
from ipcsync.testing import StreamGate
from tests.kit import driver_functions
from tests.kit.peer import Peer
from tests.kit.until import until

_kept: dict[str, Any] = {}


def _hold_and_record(endpoint: str, count: int) -> list[bytes]:
    """In a peer: records behind a closed gate."""
    client = _kept["client"] = ipcsync.connect(endpoint, name="above")
    stream = _kept["stream"] = ipcsync.Stream()
    event = _kept["event"] = client.event("above", recorder=True, engine="event", depth=4)
    _kept["gate"] = StreamGate(stream)
    return [bytes(event.record(stream)) for _ in range(count)]


def _close_event() -> None:
    _kept["event"].close()


def _stand_behind_a_loss(client: ipcsync.Client, peer: Peer, data: bytes) -> tuple[ipcsync.Point, ipcsync.Stream]:
    """The peer's generation 1, which is good and pending, and a stream that stands behind its lost generation 2."""
    point, stream = client.point(data), ipcsync.Stream()
    event = client.event("f", recorder=True, engine="event")
    above = client.event("above")._engine
    queued.add(queued.list_of(stream._handle, 0), above, 2, 0)  # which is never recorded
    event.record(stream)
    peer.call(_close_event)

    def is_refused() -> bool:
        try:
            event.record(stream)
        except ipcsync.RecorderLost:
            return True
        return False

    until(is_refused, "the loss of generation 2")
    return point, stream


def _assert_the_next_record_stands_behind(client: ipcsync.Client, stream: ipcsync.Stream, peer: Peer) -> None:
    assert [wait.generation for wait in queued.of(None)] == [1]
    behind = client.event("g", recorder=True, engine="event").record(stream)
    os.kill(peer.pid, signal.SIGKILL)
    with pytest.raises(ipcsync.RecorderLost):
        behind.synchronize(10)


@pytest.mark.usefixtures("nothing_queued")
def test_resume_forgets_no_wait_that_is_queued_meanwhile(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data,) = peer.call(_hold_and_record, coordinator.endpoint, 1)
    point, stream = _stand_behind_a_loss(client, peer, data)
    passed = queued.await_passed

    def amid(*arguments: Any) -> bool:
        is_past = passed(*arguments)
        thread = threading.Thread(target=lambda: point.wait(stream, timeout=5))
        thread.start()
        thread.join()
        return is_past

    monkeypatch.setattr(queued, "await_passed", amid)
    client.resume(stream, timeout=10)
    _assert_the_next_record_stands_behind(client, stream, peer)


@pytest.mark.usefixtures("nothing_queued")
def test_resume_forgets_no_wait_that_is_listed_and_not_queued_yet(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer
) -> None:
    (data,) = peer.call(_hold_and_record, coordinator.endpoint, 1)
    point, stream = _stand_behind_a_loss(client, peer, data)

    def resume() -> None:
        thread = threading.Thread(target=lambda: client.resume(stream, timeout=10))
        thread.start()
        thread.join()

    with driver_functions.replaced(driver_functions.amid("cuStreamWaitEvent", resume)):
        point.wait(stream, timeout=5)
    _assert_the_next_record_stands_behind(client, stream, peer)
