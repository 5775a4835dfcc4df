"""What is left here of a coordinator that was killed."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator

import pytest

import ipcsync
from ipcsync._native import pinned
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName

pytestmark = pytest.mark.driver


@pytest.fixture
def kill(
    coordinator: ipcsync.Coordinator, new_coordinator: Callable[..., ipcsync.Coordinator]
) -> Iterator[Callable[[], None]]:
    """Kills the coordinator; after the test another one starts, which takes away what it left in shared memory."""
    yield lambda: os.kill(coordinator.pid, signal.SIGKILL)
    coordinator.stop()
    new_coordinator()


def test_a_client_closes_although_its_last_record_was_not_seen_complete(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, engine: EngineName, kill: Callable[[], None]
) -> None:
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(stream):
        point = client.event("e", recorder=True, engine=engine).record(stream)
        point.wait(other)
        kill()
        coordinator.stop()
    client.close()
    with pytest.raises(ipcsync.ClientClosed):
        client.record(stream)


def test_pages_that_a_gpu_may_still_write_stay_mapped(
    coordinator: ipcsync.Coordinator, kill: Callable[[], None]
) -> None:
    client = ipcsync.connect(coordinator.endpoint)
    board = client._session.lease.board
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        client.event("e", recorder=True, engine="timeline").record(stream)
        kill()
        coordinator.stop()
        client.close()
        assert pinned.is_any(board.address, board.length)
        del client, board
        gc.collect()
        gate.open()
    stream.synchronize()  # its write goes where it was meant to go


def test_calls_that_are_made_as_it_dies_say_so_and_not_what_the_driver_says(
    client: ipcsync.Client, kill: Callable[[], None]
) -> None:
    stream = ipcsync.Stream()
    event = client.event("e", recorder=True, engine="event")
    event.record(stream)
    kill()

    def go_on() -> None:
        while True:
            event.record(stream).wait(stream)

    with pytest.raises(ipcsync.CoordinatorLost):
        go_on()


@pytest.mark.process
def test_a_coordinator_that_is_stopped_as_soon_as_it_is_ready_ends_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    # Ticks this frequent make it likely that one is due when the sockets are gone.
    assert [ipcsync.launch(lease_ttl=0.2, log_level="error").stop() for _ in range(5)] == [0] * 5
    assert capfd.readouterr().err == ""
