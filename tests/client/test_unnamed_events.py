"""A client's unnamed events: one for each stream, made at its first record."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import ipcsync
from ipcsync.client import unnamed
from ipcsync.client.unnamed import StreamKey
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.client.loops import turns_until
from tests.kit import driver_functions
from tests.kit.peer import Peer
from tests.kit.steps import at_step
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


_held: list[object] = []


def _held_record(endpoint: str) -> bytes:
    """The point of a record that is not complete while this process lives."""
    client, stream = ipcsync.connect(endpoint), ipcsync.Stream()
    _held.extend([client, stream, StreamGate(stream)])
    return bytes(client.record(stream))


def test_each_stream_has_an_unnamed_event_leased_once(new_client: NewClient, engine: EngineName) -> None:
    client, waiter = new_client(), new_client()
    streams = [ipcsync.Stream() for _ in range(3)]
    points = [client.record(stream, engine=engine) for stream in streams]
    assert [point.generation for point in points] == [1, 1, 1]
    assert len(set(points)) == 3
    before = client.messages_sent
    again = [client.record(stream, engine=engine) for stream in streams]
    assert [point.generation for point in again] == [2, 2, 2]
    assert client.messages_sent == before
    for point in [*points, *again]:
        waiter.point(bytes(point)).synchronize(10)
    assert len(client.list_events()) == 3
    assert {row.name for row in client.list_events()} == {""}


def test_streams_of_one_client_do_not_wait_for_each_other(client: ipcsync.Client, engine: EngineName) -> None:
    held, free = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(held):
        pending = client.record(held, engine=engine)
        client.record(free, engine=engine).synchronize(10)
        assert not pending.query()


def test_recording_with_no_stream_takes_the_current_one(client: ipcsync.Client, engine: EngineName) -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream), ipcsync.stream(stream):
        point = client.record(engine=engine)
        assert not point.query()
        assert client.record(stream, engine=engine).generation == 2
    point.synchronize(10)
    client.record(None, engine=engine).synchronize(10)
    client.record(0, engine=engine).synchronize(10)


def test_two_clients_record_on_one_stream_apart(new_client: NewClient) -> None:
    stream = ipcsync.Stream()
    first, second = new_client().record(stream), new_client().record(stream)
    assert first != second
    first.synchronize(10)
    second.synchronize(10)


def test_threads_that_record_on_one_stream_share_its_event(client: ipcsync.Client, engine: EngineName) -> None:
    stream = ipcsync.Stream()
    made: list[ipcsync.Point] = []
    start = threading.Barrier(4)

    def record() -> None:
        start.wait(10)
        for _ in range(10):
            made.append(client.record(stream, engine=engine))  # noqa: PERF401 - each is there at once

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(point.generation for point in made) == list(range(1, 41))
    assert len(client.list_events()) == 1


def test_events_of_streams_that_are_lost_and_gone_are_closed_and_cause_no_more(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]
) -> None:
    with ipcsync.connect(coordinator.endpoint) as client:
        for _ in range(3):
            peer = new_peer()
            point = client.point(peer.call(_held_record, coordinator.endpoint))
            for _ in range(20):
                stream = ipcsync.Stream()
                point.wait(stream)
                client.record(stream)
            peer.kill()
            with pytest.raises(ipcsync.RecorderLost):
                point.synchronize(10)
            for _ in range(60):
                client.record(ipcsync.Stream()).synchronize(10)
        events = client._unnamed.events.values()
        assert sum(event.is_lost for event in events) <= 20, "those of the last loss at most"
        assert sum(not event.is_lost for event in events) <= 32


def test_events_of_another_engine_do_not_keep_new_streams_from_those_that_are_idle(client: ipcsync.Client) -> None:
    for stream in [ipcsync.Stream() for _ in range(33)]:
        client.record(stream, engine="timeline").synchronize(10)
    for _ in range(400):
        client.record(ipcsync.Stream(), engine="event").synchronize(10)
    assert len(client._unnamed.events) < 80, "about twice those of the other engine"


@pytest.fixture
def takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of one event makes no more while that is idle."""
    monkeypatch.setattr(unnamed, "_MANY", 1)


@pytest.mark.usefixtures("takes_over")
def test_no_stream_takes_over_an_event_that_another_one_has_begun_to_record_on(
    client: ipcsync.Client, engine: EngineName
) -> None:
    held, free = ipcsync.Stream(), ipcsync.Stream()
    client.record(free, engine=engine).synchronize(10)
    with StreamGate(held), at_step("cuStreamGetId", lambda: client.record(held, engine=engine)):
        client.record(free, engine=engine).synchronize(10)


@pytest.mark.usefixtures("takes_over")
def test_no_stream_takes_over_an_event_that_another_one_records_on_since_it_was_found_idle(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch, engine: EngineName
) -> None:
    held, free, is_idle = ipcsync.Stream(), ipcsync.Stream(), unnamed._is_idle
    client.record(held, engine=engine).synchronize(10)

    def look(event: ipcsync.SharedEvent) -> bool:
        found = is_idle(event)
        with suppress(ipcsync.Reentered):  # on another thread it would wait until that is taken over
            client.record(held, engine=engine)
        return found

    monkeypatch.setattr(unnamed, "_is_idle", look)
    with StreamGate(held):
        client.record(free, engine=engine).synchronize(10)


@pytest.mark.usefixtures("takes_over")
def test_no_stream_takes_over_an_event_while_another_ones_record_on_it_ends(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch, engine: EngineName
) -> None:
    held, free, generation = ipcsync.Stream(), ipcsync.Stream(), ipcsync.SharedEvent.generation.__get__
    client.record(held, engine=engine).synchronize(10)
    with (
        StreamGate(held),
        ThreadPoolExecutor(1) as threads,
        driver_functions.held_up(driver_functions.RECORD[engine]) as record,
    ):
        made = threads.submit(client.record, held, engine=engine)
        record.wait()

        def read(event: ipcsync.SharedEvent) -> int:
            value: int = generation(event)
            record.go_on.set()
            made.result(10)
            return value

        monkeypatch.setattr(ipcsync.SharedEvent, "generation", property(read))
        client.record(free, engine=engine).synchronize(10)


@pytest.mark.usefixtures("takes_over")
@pytest.mark.parametrize("is_made", [False, True])
def test_no_stream_takes_over_an_event_whose_last_record_the_driver_refused(
    client: ipcsync.Client, engine: EngineName, is_made: bool
) -> None:
    """It is to be made again first, and may be behind whatever its stream waits for."""
    held, free = ipcsync.Stream(), ipcsync.Stream()
    refused = driver_functions.refused_once(driver_functions.RECORD[engine], is_made=is_made)
    with StreamGate(held):
        with driver_functions.replaced(refused), pytest.raises(ipcsync.DriverError):
            client.record(held, engine=engine)
        client.record(free, engine=engine).synchronize(10)


@pytest.mark.usefixtures("takes_over")
def test_no_two_tasks_records_on_new_streams_are_on_one_event_or_take_it_from_each_other(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch, engine: EngineName
) -> None:
    taken, take = list[StreamKey](), unnamed.UnnamedEvents.take

    def noted(self: unnamed.UnnamedEvents, key: StreamKey, *args: Any, **options: Any) -> ipcsync.SharedEvent:
        taken.append(key)
        return take(self, key, *args, **options)

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            await (await client.record(ipcsync.Stream(), engine=engine)).synchronize(10)
            streams = [ipcsync.Stream() for _ in range(16)]
            with ExitStack() as gates:
                for stream in streams:  # else one that is complete may be another's by then
                    gates.enter_context(StreamGate(stream))
                points = await asyncio.gather(*(client.record(stream, engine=engine) for stream in streams))
            assert len({point._point._key.slot for point in points}) == len(streams)
            assert len(taken) <= 2 * len(streams)

    monkeypatch.setattr(unnamed.UnnamedEvents, "take", noted)
    asyncio.run(scenario())


def test_an_event_that_was_taken_for_a_record_that_is_cancelled_is_let_go_of(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            loop, take = asyncio.get_running_loop(), unnamed.UnnamedEvents.take
            record = asyncio.create_task(client.record(ipcsync.Stream()))

            def taken(*args: Any, **options: Any) -> ipcsync.SharedEvent:
                event = take(*args, **options)
                loop.call_soon_threadsafe(record.cancel)
                return event

            monkeypatch.setattr(unnamed.UnnamedEvents, "take", taken)
            with pytest.raises(asyncio.CancelledError):
                await record
            (event,) = client._client._unnamed.events.values()
            await turns_until(lambda: unnamed._is_idle(event), "another stream can take it over")

    asyncio.run(scenario())


def test_a_program_that_makes_a_stream_for_each_record_does_not_use_up_the_pool(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    with ipcsync.connect(new_coordinator(pool=8).endpoint) as client:
        kept = [ipcsync.Stream() for _ in range(4)]
        for stream in kept:
            client.record(stream).synchronize(10)
        assert client.stats()["pool_in_use"] == 4


def test_no_stream_takes_over_an_event_whose_record_waits_for_another_one(
    new_client: NewClient, engine: EngineName
) -> None:
    client, other, stream = new_client(), new_client(), ipcsync.Stream()
    client.record(stream, engine=engine).synchronize(10)
    first = other.event("first", recorder=True, engine=engine)
    point = client.event("first").at(1)
    with ThreadPoolExecutor(1) as threads, ExitStack() as gates:
        record = threads.submit(client.record, stream, engine=engine, after=[point])
        until(lambda: point._bound().engine.line.awaited, "it waits")
        for _ in range(40):
            gates.enter_context(StreamGate(held := ipcsync.Stream()))
            client.record(held, engine=engine)
        first.record()
        made = record.result(10)
        gates.close()  # its stream may share a hardware queue with one of them
        made.synchronize(10)
