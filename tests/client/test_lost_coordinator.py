"""What is left here of a coordinator that was killed."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync._wire import codec as wire
from ipcsync._wire.codec import PointKey
from ipcsync.client.aio.event import AsyncPoint
from ipcsync.client.point import _unpickle
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import chain_actions as do
from tests.kit import boards
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.own_coordinator]


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


def test_a_client_that_was_lost_and_not_closed_hides_no_later_one_from_points_of_other_nodes(
    client: ipcsync.Client, kill: Callable[[], None], new_coordinator: Callable[..., ipcsync.Coordinator]
) -> None:
    kill()
    until(lambda: not client.is_connected, "its loss is seen")
    data = wire.pack(PointKey(os.urandom(16), 1, 1, 1))  # of another node
    endpoint = new_coordinator().endpoint

    async def query() -> None:
        async with ipcsync.aconnect(endpoint):
            await pickle.loads(pickle.dumps(AsyncPoint(_unpickle(data)))).query()

    with ipcsync.connect(endpoint), pytest.raises(ipcsync.StalePoint):
        _unpickle(data).query()
    with pytest.raises(ipcsync.StalePoint):
        asyncio.run(query())


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
        assert boards.is_pinned(board)
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


def test_an_event_that_stands_behind_what_it_owned_says_so_once_the_client_is_closed_too(
    coordinator: ipcsync.Coordinator,
    client: ipcsync.Client,
    new_client: Callable[..., ipcsync.Client],
    kill: Callable[[], None],
) -> None:
    held, stream, behind = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Event()
    recorder = new_client().event("e", recorder=True, engine="event")
    with StreamGate(held):
        point = client.point(bytes(recorder.record(held)))
        point.wait(stream)
        behind.record(stream)
        kill()
        coordinator.stop()
        use: Any = point._attached
        client.close()
        until(lambda: use.engine.is_released, "its use is released")
        with pytest.raises(ipcsync.RecorderLost, match=r"the record of .* stands behind generation 1 of 'e'"):
            behind.synchronize(30)
    until(behind.query, "the stream goes on")


_kept: list[Any] = []


def _record_behind_another_ones(endpoint: str, data: bytes, second: str, engine: EngineName) -> bytes:
    """Have a stream wait for an event of one coordinator, and record on it with another one's."""
    stream, client, other = ipcsync.Stream(), ipcsync.connect(endpoint), ipcsync.connect(second, name="b")
    client.point(data).wait(stream)
    event = other.event("b/out", recorder=True, engine=engine)
    _kept.extend([client, other, event, stream])
    return bytes(event.record(stream))


def _record_again() -> None:
    *_, event, stream = _kept
    event.record(stream)


@pytest.mark.parametrize("ends", ["its coordinator", "its recorder"])
def test_a_record_with_another_one_is_lost_with_the_wait_before_it(
    coordinator: ipcsync.Coordinator,
    kill: Callable[[], None],
    new_coordinator: Callable[..., ipcsync.Coordinator],
    new_peer: Callable[..., Peer],
    engine: EngineName,
    ends: str,
) -> None:
    """The stream never ends, so it is a peer's: no later test of this process stands behind it."""
    recorder, behind, waiter, second = new_peer(), new_peer(), new_peer(), new_coordinator()
    recorder.call(do.connect, coordinator.endpoint, "a")
    recorder.call(do.open_event, "a/out", engine)
    recorder.call(do.hold)
    made = recorder.call(do.record, "a/out")
    point = behind.call(_record_behind_another_ones, coordinator.endpoint, made, second.endpoint, engine)
    waiter.call(do.connect, second.endpoint, "c")
    kill() if ends == "its coordinator" else recorder.kill()
    loss = waiter.call(do.await_end, point)
    assert loss is not None
    assert (loss["cause"], loss["session"], loss["pid"]) == ("behind", "", 0)  # nobody of its own coordinator
    seen = behind.call(do.loss_of, _record_again)
    assert seen is not None
    assert seen["session"] == "a"
    assert "a/out" in seen["text"]


@pytest.mark.process
def test_a_coordinator_that_is_stopped_as_soon_as_it_is_ready_ends_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    # Ticks this frequent make it likely that one is due when the sockets are gone.
    assert [ipcsync.launch(lease_ttl=0.2, log_level="error").stop() for _ in range(5)] == [0] * 5
    assert capfd.readouterr().err == ""
