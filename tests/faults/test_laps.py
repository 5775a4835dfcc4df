"""A stream's wait is for its own record, also if the ring goes round while its process is held up right before it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import ipcsync
from ipcsync._engines import core
from ipcsync.testing import StreamGate
from tests.faults import actions
from tests.faults.fixtures import Blocked, resume, state_of, until_lost
from tests.kit import driver_functions, remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

_LONG_NS = 10**15


@pytest.fixture
def patience() -> Iterator[None]:
    """A recorder waits for ever for one that is about to queue a wait: no test hangs on how fast it is."""
    core.set_times(patience_ns=_LONG_NS)
    yield
    core.set_times()


def _hold_up(coordinator: ipcsync.Coordinator, peer: Peer, event: ipcsync.SharedEvent, stream: ipcsync.Stream) -> None:
    """Record two generations, which are complete; the peer is stopped just before its wait for the second is queued."""
    first = event.record(stream)
    peer.call(actions.connect, coordinator.endpoint, "waiter")
    with StreamGate(stream) as gate:
        point = event.record(stream)
        for name, data in (("first", first), ("second", point)):
            peer.call(actions.take, bytes(data), name)
        peer.call(actions.wait_on_stream, "first")
        peer.begin(actions.stop_before_queued, "second")
        until(lambda: state_of(peer.pid) == "T", "the peer stopped")
        gate.open()
        point.synchronize(20)


@pytest.fixture
def full_ring(coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer) -> Iterator[ipcsync.SharedEvent]:
    """A ring of two that is about to go round, and a wait that is about to be queued on it."""
    event = client.event("e", recorder=True, engine="event", depth=2)
    _hold_up(coordinator, peer, event, ipcsync.Stream())
    yield event
    if state_of(peer.pid) == "T":
        resume(peer.pid)


@pytest.mark.usefixtures("patience")
def test_a_ring_goes_round_once_the_wait_is_queued(full_ring: ipcsync.SharedEvent, peer: Peer) -> None:
    held = ipcsync.Stream()
    with StreamGate(held):
        for timeout in (0, 0.01):
            with pytest.raises(ipcsync.WaitTimeout, match=r"generation 1 .* another process has been about to queue"):
                full_ring.record(held, timeout=timeout)
        record = Blocked(lambda: full_ring.record(held))
        resume(peer.pid)
        assert isinstance(record.outcome(), ipcsync.Point)
        assert full_ring.record(held).generation == 4, "on the CUDA event of the second"
        peer.result()
        until(lambda: peer.call(remote.stream_is_idle), "the stream past its wait")
        assert not full_ring.at(3).query()


@pytest.mark.usefixtures("patience")
def test_a_record_of_an_asyncio_task_goes_on_once_the_wait_is_queued(
    coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            event = await client.event("e", recorder=True, engine="event", depth=2)
            stream = ipcsync.Stream()
            _hold_up(coordinator, peer, event._event, stream)
            with pytest.raises(ipcsync.WaitTimeout):
                await event.record(stream, timeout=0.01)
            record = asyncio.create_task(event.record(stream))
            turns = 0
            while turns < 50:
                await asyncio.sleep(0)
                turns += 1
            assert not record.done()
            resume(peer.pid)
            assert (await record).generation == 3
            peer.result()

    asyncio.run(scenario())


@pytest.mark.usefixtures("patience")
def test_one_who_is_stopped_there_is_not_waited_for_long(full_ring: ipcsync.SharedEvent, peer: Peer) -> None:
    stream = ipcsync.Stream()
    core.set_times(patience_ns=10_000_000)
    for generation in range(3, 12):
        assert full_ring.record(stream, timeout=60).generation == generation
        stream.synchronize()
    core.set_times(patience_ns=_LONG_NS)
    errors = [_error_of(full_ring, stream) for _ in range(3)]
    assert "WaitTimeout" in errors, "it is given up on after that time, and not for good"
    resume(peer.pid)
    assert full_ring.record(stream).generation >= 12
    peer.result()
    until(lambda: peer.call(remote.stream_is_idle), "the stream past its wait")


def _error_of(event: ipcsync.SharedEvent, stream: ipcsync.Stream) -> str:
    return actions.error_of(lambda: event.record(stream, timeout=0.01))


@pytest.mark.usefixtures("patience")
def test_what_is_not_watched_is_no_patience(full_ring: ipcsync.SharedEvent, peer: Peer) -> None:
    core.set_times(patience_ns=300_000_000)
    stream = ipcsync.Stream()
    for _ in range(2):
        with pytest.raises(ipcsync.WaitTimeout):
            full_ring.record(stream, timeout=0)
        time.sleep(0.35)
    resume(peer.pid)
    assert full_ring.record(stream).generation == 3


@pytest.mark.usefixtures("patience")
def test_what_many_threads_watch_at_once_is_no_more_patience(full_ring: ipcsync.SharedEvent, peer: Peer) -> None:
    core.set_times(patience_ns=10_000_000_000)
    count, stream = 64, ipcsync.Stream()
    start = threading.Barrier(count)

    def record() -> str:
        start.wait()
        return actions.error_of(lambda: full_ring.record(stream, timeout=0.4))

    with ThreadPoolExecutor(count) as threads:
        assert {call.result() for call in [threads.submit(record) for _ in range(count)]} == {"WaitTimeout"}
    resume(peer.pid)
    assert full_ring.record(stream).generation == 3


@pytest.mark.usefixtures("patience")
def test_a_record_that_waits_for_a_visit_ends_with_its_event(full_ring: ipcsync.SharedEvent) -> None:
    stream = ipcsync.Stream()
    record = Blocked(lambda: full_ring.record(stream))
    full_ring.close()
    assert isinstance(record.outcome(), ipcsync.EventClosed)


@pytest.mark.usefixtures("patience")
def test_one_who_is_killed_there_is_not_waited_for(
    full_ring: ipcsync.SharedEvent, client: ipcsync.Client, peer: Peer
) -> None:
    stream = ipcsync.Stream()
    line = full_ring._engine.line
    assert line.hazards()
    os.kill(peer.pid, signal.SIGKILL)
    for generation in range(3, 12):
        assert full_ring.record(stream).generation == generation
        stream.synchronize()
    until_lost(client, "pidfd")
    until(lambda: not line.hazards(), "the coordinator has retracted the hazard")


def _hold_up_for_long(
    coordinator: ipcsync.Coordinator, recorder: Peer, waiter: Peer, complete: int, pending: int, step: str
) -> None:
    """The waiter's wait for generation 1 was stopped at that step while the ring of two went round."""
    recorder.call(actions.connect, coordinator.endpoint, "recorder")
    recorder.call(actions.open_event, "e", "event", depth=2)
    recorder.call(_be_impatient)
    recorder.call(remote.hold)
    first = recorder.call(actions.record, "e")
    waiter.call(actions.connect, coordinator.endpoint, "waiter")
    waiter.call(actions.take, first, "first")
    waiter.begin(actions.stop_before_queued, "first", step)
    until(lambda: state_of(waiter.pid) == "T", "the waiter stopped")
    recorder.call(remote.let_go)
    recorder.call(remote.record, "e", "main", complete)
    recorder.call(_until_complete)
    recorder.call(remote.hold, "held")
    recorder.call(remote.record, "e", "held", pending)
    resume(waiter.pid)
    waiter.result()
    waiter.call(actions.open_event, "behind", "event")


@pytest.mark.parametrize(("records", "is_lost"), [(1, False), (2, True)])
def test_one_who_is_stopped_there_for_long_is_behind_the_record_that_its_stream_waits_for(
    coordinator: ipcsync.Coordinator,
    client: ipcsync.Client,
    new_peer: Callable[..., Peer],
    records: int,
    is_lost: bool,
) -> None:
    recorder, waiter = new_peer(), new_peer(IPCSYNC_HOST_DEATH="pending")  # whose stream never ends
    _hold_up_for_long(coordinator, recorder, waiter, 0, records, "cuStreamWaitEvent")
    point = client.point(waiter.call(actions.record, "behind"))
    os.kill(recorder.pid, signal.SIGKILL)
    outcomes = actions.error_of(point.synchronize, 20), waiter.call(_outcome_of_resume)
    assert outcomes == (("RecorderLost", "WaitTimeout") if is_lost else ("", ""))


@pytest.mark.parametrize(
    ("step", "complete", "pending"),
    [
        pytest.param("cuStreamWaitEvent", 2, 1, id="the last record is on another CUDA event"),
        pytest.param("mark", 0, 2, id="it waits already"),
    ],
)
def test_one_who_is_stopped_there_for_long_is_not_behind_a_record_that_its_stream_does_not_wait_for(
    coordinator: ipcsync.Coordinator,
    client: ipcsync.Client,
    new_peer: Callable[..., Peer],
    step: str,
    complete: int,
    pending: int,
) -> None:
    recorder, waiter = new_peer(), new_peer()
    _hold_up_for_long(coordinator, recorder, waiter, complete, pending, step)
    os.kill(recorder.pid, signal.SIGKILL)
    until_lost(client, "pidfd")
    client.point(waiter.call(actions.record, "behind")).synchronize(20)


def _be_impatient() -> None:
    core.set_times(patience_ns=10_000_000)


def _until_complete() -> None:
    until(lambda: remote.event("e").completed == remote.event("e").generation, "all so far, as the board says")


def _outcome_of_resume() -> str:
    return actions.error_of(remote.client().resume, remote.stream(), 0.1)


# --- calls within a wait, and one that is refused ---------------------------------------------------------------------


class _Within:
    """A waiter of this process, and what is seen of its hazards."""

    def __init__(self, coordinator: ipcsync.Coordinator, recorder: ipcsync.Client) -> None:
        self.client = ipcsync.connect(coordinator.endpoint, name="waiter")
        self.event = recorder.event("e", recorder=True, engine="event", depth=2)
        self.stream, self.held = ipcsync.Stream(), ipcsync.Stream()
        self.seen: list[dict[int, int]] = []

    def look(self) -> None:
        assert self.event._engine is not None
        self.seen.append(self.event._engine.line.hazards())


@pytest.fixture
def within(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> Iterator[_Within]:
    within = _Within(coordinator, client)
    with within.client, StreamGate(within.held):
        yield within


def test_a_call_within_a_wait_is_refused_and_neither_ends_nor_hides_its_visit(within: _Within) -> None:
    """As a function of the user's that the driver calls; a signal's handler comes between calls of the driver."""
    point = within.client.point(bytes(within.event.record(within.held)))
    point.wait(ipcsync.Stream())  # what is opened once
    refused: list[str] = []

    def call() -> None:
        within.look()
        with pytest.raises(ipcsync.Reentered) as caught:
            point.wait(ipcsync.Stream(), timeout=1)
        refused.append(str(caught.value))
        within.look()

    with driver_functions.replaced(driver_functions.amid("cuStreamWaitEvent", call)):
        point.wait(within.stream, timeout=1)
    within.look()
    assert len(within.seen[0]) == 1
    assert within.seen == [within.seen[0], within.seen[0], {}]
    assert refused == ["a call for 'e' is under way on this thread, which this one interrupts"]


def test_a_wait_that_the_driver_refuses_leaves_no_visit(within: _Within) -> None:
    point = within.client.point(bytes(within.event.record(within.held)))
    with driver_functions.replaced(driver_functions.refused_once("cuStreamWaitEvent")):
        with pytest.raises(ipcsync.DriverError, match="cuStreamWaitEvent failed"):
            point.wait(within.stream)
        within.look()
        point.wait(within.stream)
    within.look()
    assert within.seen == [{}, {}]


def test_a_record_within_a_wait_of_its_own_session_does_not_go_round(within: _Within) -> None:
    event, gate = within.event, StreamGate(within.stream)
    event.record(within.stream)
    point = event.record(within.stream)
    errors: list[str] = []

    def call() -> None:
        gate.open()
        within.stream.synchronize()
        with pytest.raises(ipcsync.Reentered) as caught:
            event.record(within.stream)
        errors.append(str(caught.value))

    with driver_functions.replaced(driver_functions.amid("cuStreamWaitEvent", call)):
        point.wait(ipcsync.Stream(), timeout=1)
    assert errors == ["a call for 'e' is under way on this thread, which this one interrupts"]
    assert event.record(within.stream).generation == 3
