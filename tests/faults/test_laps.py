"""A stream's wait is for its own record, also if the ring goes round while its process is held up right before it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import ipcsync
from ipcsync._engines import event as event_engine
from ipcsync.testing import StreamGate
from tests.faults import actions
from tests.faults.fixtures import Blocked, resume, state_of, until_lost
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

_LONG_NS = 10**15


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder waits for ever for one that is about to queue a wait: no test hangs on how fast it is."""
    monkeypatch.setattr(event_engine, "_PATIENCE_NS", _LONG_NS)


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
def event(coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer) -> Iterator[ipcsync.SharedEvent]:
    """A ring of two that is about to go round, and a wait that is about to be queued on it."""
    event = client.event("e", recorder=True, engine="event", depth=2)
    _hold_up(coordinator, peer, event, ipcsync.Stream())
    yield event
    if state_of(peer.pid) == "T":
        resume(peer.pid)


@pytest.mark.usefixtures("patience")
def test_a_ring_goes_round_once_the_wait_is_queued(event: ipcsync.SharedEvent, peer: Peer) -> None:
    held = ipcsync.Stream()
    with StreamGate(held):
        for timeout in (0, 0.01):
            with pytest.raises(ipcsync.WaitTimeout, match=r"generation 1 .* another process has been about to queue"):
                event.record(held, timeout=timeout)
        record = Blocked(lambda: event.record(held), "_await_leave")
        resume(peer.pid)
        assert isinstance(record.outcome(), ipcsync.Point)
        assert event.record(held).generation == 4, "on the CUDA event of the second"
        peer.result()
        until(lambda: peer.call(actions.stream_is_done), "the stream past its wait")
        assert not event.at(3).query()


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


def test_one_who_is_stopped_there_is_not_waited_for_long(
    event: ipcsync.SharedEvent, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ipcsync.Stream()
    monkeypatch.setattr(event_engine, "_PATIENCE_NS", 10_000_000)
    for generation in range(3, 12):
        assert event.record(stream, timeout=60).generation == generation
        stream.synchronize()
    monkeypatch.setattr(event_engine, "_PATIENCE_NS", _LONG_NS)
    errors = [_error_of(event, stream) for _ in range(3)]
    assert "WaitTimeout" in errors, "it is given up on after that time, and not for good"
    resume(peer.pid)
    assert event.record(stream).generation >= 12
    peer.result()
    until(lambda: peer.call(actions.stream_is_done), "the stream past its wait")


def _error_of(event: ipcsync.SharedEvent, stream: ipcsync.Stream) -> str:
    return actions.error_of(lambda: event.record(stream, timeout=0.01))


def test_what_is_not_watched_is_no_patience(
    event: ipcsync.SharedEvent, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_engine, "_PATIENCE_NS", 300_000_000)
    stream = ipcsync.Stream()
    for _ in range(2):
        with pytest.raises(ipcsync.WaitTimeout):
            event.record(stream, timeout=0)
        time.sleep(0.35)
    resume(peer.pid)
    assert event.record(stream).generation == 3


@pytest.mark.usefixtures("patience")
def test_a_record_that_waits_for_a_visit_ends_with_its_event(event: ipcsync.SharedEvent) -> None:
    stream = ipcsync.Stream()
    record = Blocked(lambda: event.record(stream), "_await_leave")
    event.close()
    assert isinstance(record.outcome(), ipcsync.EventClosed)


@pytest.mark.usefixtures("patience")
def test_one_who_is_killed_there_is_not_waited_for(
    event: ipcsync.SharedEvent, client: ipcsync.Client, peer: Peer
) -> None:
    stream = ipcsync.Stream()
    line = event._engine.line
    assert line.visits()
    os.kill(peer.pid, signal.SIGKILL)
    for generation in range(3, 12):
        assert event.record(stream).generation == generation
        stream.synchronize()
    until_lost(client, "pidfd")
    until(lambda: not line.visits(), "the coordinator has ended the visit")


# --- calls within a wait, and exceptions ------------------------------------------------------------------------------


class _Within:
    """A waiter's engine, and a call that is made inside of its wait: at the driver's call, or at the marker."""

    def __init__(self, coordinator: ipcsync.Coordinator, recorder: ipcsync.Client) -> None:
        self.client = ipcsync.connect(coordinator.endpoint, name="waiter")
        self.event = recorder.event("e", recorder=True, engine="event", depth=2)
        self.stream, self.held = ipcsync.Stream(), ipcsync.Stream()
        self.seen = self.client.event("e")
        self.visits: list[dict[int, int]] = []

    def wait(self, point: ipcsync.Point, monkeypatch: pytest.MonkeyPatch, at: str, call: Callable[[], object]) -> None:
        engine: Any = self.seen._engine
        owner = engine._markers if at == "add" else engine
        method = getattr(owner, at)
        calls: list[str] = []

        def interrupted(*args: Any) -> Any:
            if not calls:
                calls.append(at)
                self.visits.append(self.event._engine.line.visits())
                call()
                self.visits.append(self.event._engine.line.visits())
            return method(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, at, interrupted)
            self.client.point(bytes(point))._bound().engine.wait(point.generation, self.stream, 1, False)
        assert calls


@pytest.fixture
def within(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> Iterator[_Within]:
    within = _Within(coordinator, client)
    with within.client, StreamGate(within.held):
        yield within


def test_a_wait_within_a_wait_neither_ends_nor_hides_its_visit(
    within: _Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ipcsync.Stream()
    point = within.event.record(within.held)
    engine = within.seen._engine
    within.wait(point, monkeypatch, "_driver_stream_wait", lambda: engine.wait(1, other, 1, False))
    first, second = within.visits
    assert len(first) == 1
    assert first == second
    within.wait(point, monkeypatch, "add", lambda: engine.wait(1, other, 1, False))
    assert within.visits[2:] == [{}, {}]
    assert within.event._engine.line.visits() == {}


def test_a_wait_that_an_exception_ends_leaves_no_visit(within: _Within, monkeypatch: pytest.MonkeyPatch) -> None:
    point = within.event.record(within.held)
    engine: Any = within.seen._engine
    line = type(engine.line)
    leave = line.leave

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(line, "leave", leave)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_driver_stream_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.wait(point.generation, within.stream, 1, False)
    assert engine.line.visits() == {}
    monkeypatch.setattr(line, "leave", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.wait(point.generation, within.stream, 1, False)
    assert engine.line.visits() == {}


def test_a_record_within_a_wait_of_its_own_session_does_not_go_round(
    within: _Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, engine = within.event, cast("Any", within.event._engine)
    gate = StreamGate(within.stream)
    event.record(within.stream)
    point = event.record(within.stream)
    queue = engine._driver_stream_wait
    errors: list[str] = []

    def interrupted(*args: Any) -> None:
        if not errors:
            gate.open()
            within.stream.synchronize()
            errors.append("")
            try:
                event.record(within.stream)
            except ipcsync.Reentered as error:
                errors.append(str(error))
        queue(*args)

    monkeypatch.setattr(engine, "_driver_stream_wait", interrupted)
    engine.wait(point.generation, ipcsync.Stream(), 1, False)
    assert errors == ["", "a wait for 'e' is under way on this thread, and this record interrupts it"]
    assert event.record(within.stream).generation == 3
