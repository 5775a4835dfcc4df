"""Replays for asyncio: the loop goes on while one is entered or left, and a cancelled one leaves nothing open."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults.fixtures import sleeps_in_core
from tests.graphs.layers import Layers, Sender, finish
from tests.graphs.stage import Standing
from tests.kit.driver_functions import Call, replaced
from tests.kit.machine import FEW_WAKE_UPS, Machine
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


def _with_client(coordinator: ipcsync.Coordinator, run: Callable[[ipcsync.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ipcsync.aconnect(coordinator.endpoint, name="loop") as client:
            await run(client)

    asyncio.run(main())


def test_a_replay_waits_for_the_record_of_its_point_while_the_loop_goes_on(
    coordinator: ipcsync.Coordinator, new_client: NewClient
) -> None:
    layers = Layers(1)
    sender = Sender(new_client(), layers)

    async def run(client: ipcsync.AsyncClient) -> None:
        done = await client.event("done", recorder=True, engine="timeline")
        seen = await client.event("layers")
        for value in (1, 2, 3):
            is_entered = asyncio.Event()

            async def replay(value: int = value, is_entered: asyncio.Event = is_entered) -> ipcsync.AsyncPoint:
                waits = {layers.waits[0]: seen.at(value)}
                records = {layers.records[0]: done}
                async with client.replay(waits, records, stream=layers.stream, timeout=20) as made:
                    is_entered.set()
                    layers.launch()
                return made[layers.records[0]]

            task = asyncio.ensure_future(replay())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not is_entered.is_set()
            sender.send(value)
            await (await task).synchronize(DEADLINE_S)
            assert layers.found() == [value]

    _with_client(coordinator, run)


def test_a_replay_has_one_timeout_for_its_points_and_for_room(
    coordinator: ipcsync.Coordinator, new_client: NewClient, machine: Machine
) -> None:
    layers, busy = Layers(1), ipcsync.Stream()
    sender = Sender(new_client(), layers)

    async def run(client: ipcsync.AsyncClient) -> None:
        seen = await client.event("layers")
        done = await client.event("done", recorder=True, engine="event", depth=1)
        with StreamGate(busy):
            await done.record(busy)
            asyncio.get_running_loop().call_later(1.5, sender.send, 1)
            replaying = client.replay(
                {layers.waits[0]: seen.at(1)}, {layers.records[0]: done}, stream=layers.stream, timeout=2
            )
            began = time.monotonic()
            with pytest.raises(ipcsync.WaitTimeout):
                await replaying.__aenter__()
            took = time.monotonic() - began
            assert took < machine.limit(3, began, FEW_WAKE_UPS), "not one and a half seconds, and then two"

    _with_client(coordinator, run)


def test_a_cancelled_replay_leaves_nothing_open(coordinator: ipcsync.Coordinator, new_client: NewClient) -> None:
    layers = Layers(1)
    sender = Sender(new_client(), layers)

    async def run(client: ipcsync.AsyncClient) -> None:
        done = await client.event("done", recorder=True, engine="timeline")
        seen = await client.event("layers")
        records = {layers.records[0]: done}

        async def never(is_entered: asyncio.Event) -> None:
            async with client.replay({layers.waits[0]: seen.at(1)}, records, stream=layers.stream, timeout=20):
                layers.launch()
                is_entered.set()
                await asyncio.sleep(DEADLINE_S)

        for is_sent in (False, True):
            if is_sent:
                sender.send(1)
            is_entered = asyncio.Event()
            task = asyncio.ensure_future(never(is_entered))
            await (is_entered.wait() if is_sent else asyncio.sleep(0))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with StreamGate(sender.stream):
            (point,) = sender.send(2)
            mine = await client.point(bytes(point))
            async with client.replay({layers.waits[0]: mine}, records, stream=layers.stream, timeout=20) as made:
                layers.launch()
            assert not await made[layers.records[0]].query()
        await made[layers.records[0]].synchronize(DEADLINE_S)
        assert layers.found() == [2]

    _with_client(coordinator, run)


def _entering() -> list[int]:
    """The threads on which replays are entered or left."""
    return [thread.native_id for thread in threading.enumerate() if thread.name == "ipcsync-alone" and thread.native_id]


def test_an_entry_that_is_cancelled_while_it_waits_for_room_enters_nothing_later(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    """For room on its stream, or in the ring of its event."""
    layers, busy, most = Layers(1), ipcsync.Stream(), {"timeline": 32, "event": 1}[engine]
    batches: list[object] = []

    def batch(real: Call, *arguments: Any) -> int:
        batches.append(arguments)
        return real(*arguments)

    async def run(client: ipcsync.AsyncClient) -> None:
        held = await client.event("held", recorder=True, engine="timeline")
        done = await client.event("done", recorder=True, engine=engine, depth=1)

        async def replay() -> ipcsync.AsyncPoint:
            waits, records = {layers.waits[0]: point}, {layers.records[0]: done}
            async with client.replay(waits, records, stream=layers.stream) as made:
                layers.launch()
            return made[layers.records[0]]

        with StreamGate(busy) as gate:
            point = await held.record(busy)
            for _ in range(most):
                await replay()
            until(lambda: not _entering(), "their threads end")
            waiting = asyncio.ensure_future(replay())
            await asyncio.sleep(0)
            until(lambda: [each for each in _entering() if sleeps_in_core(each)], "it waits")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            until(lambda: engine == "event" or not _entering(), "its thread ends")
            with replaced({"cuStreamBatchMemOp": batch}):
                gate.open()
                until(lambda: not _entering(), "its thread ends")
        assert batches == []
        await (await replay()).synchronize(DEADLINE_S)
        assert done.generation == most + 1

    _with_client(coordinator, run)


def test_a_block_that_raises_records_nothing(coordinator: ipcsync.Coordinator) -> None:
    layers = Layers(1)

    async def run(client: ipcsync.AsyncClient) -> None:
        done = await client.event("done", recorder=True)
        replaying = client.replay({}, {layers.records[0]: done}, stream=layers.stream)

        async def fail() -> None:
            async with replaying:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert done.generation == 0
        finish(layers.stream)

    _with_client(coordinator, run)


def test_a_cancelled_task_whose_client_is_closed_is_cancelled(coordinator: ipcsync.Coordinator) -> None:
    layers = Layers(1)

    async def run(client: ipcsync.AsyncClient) -> None:
        records = {layers.records[0]: await client.event("done", recorder=True)}
        is_entered = asyncio.Event()

        async def stay() -> None:
            async with client.replay({}, records, stream=layers.stream):
                is_entered.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(stay())
        await is_entered.wait()
        await client.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        finish(layers.stream)

    _with_client(coordinator, run)


def test_an_event_that_is_not_an_asynchronous_clients_is_refused(
    coordinator: ipcsync.Coordinator, new_client: NewClient
) -> None:
    other, record = new_client(), ipcsync.GraphRecord()
    event = other.event("theirs", recorder=True)

    async def run(client: ipcsync.AsyncClient) -> None:
        done = await client.event("done", recorder=True)
        with other.reserve() as reservation:
            for wrong in (event, reservation, None):
                records: dict[Any, Any] = {ipcsync.GraphRecord(): done, record: wrong}
                for make in (client.replay, client.next):
                    with pytest.raises(TypeError, match=f"to AsyncSharedEvent, but got {type(wrong).__name__}$"):
                        make({}, records)

    _with_client(coordinator, run)


def test_a_point_that_this_very_replay_is_to_record_is_refused_at_once(coordinator: ipcsync.Coordinator) -> None:
    layers = Layers(1)

    async def run(client: ipcsync.AsyncClient) -> None:
        done = await client.event("done", recorder=True)
        replaying = client.replay({layers.waits[0]: done.at(1)}, {layers.records[0]: done}, stream=layers.stream)
        with pytest.raises(ValueError, match="is for this replay to record"):
            await asyncio.wait_for(replaying.__aenter__(), DEADLINE_S)

    _with_client(coordinator, run)


def test_what_is_no_mapping_is_refused(coordinator: ipcsync.Coordinator) -> None:
    wrong: Any = [ipcsync.GraphWait()]

    async def run(client: ipcsync.AsyncClient) -> None:
        for make in (client.replay, client.next):
            with pytest.raises(TypeError, match=r"GraphWait to AsyncPoint, .*, but got list and mappingproxy"):
                make(wrong)
            with pytest.raises(TypeError, match=r"GraphRecord to AsyncSharedEvent, but got dict and list"):
                make({}, wrong)

    _with_client(coordinator, run)


def test_row_65_a_replay_is_refused_while_another_stream_stands_in_its_way_and_right_once_that_has_passed(
    coordinator: ipcsync.Coordinator, new_client: NewClient
) -> None:
    layers, held = Layers(1), ipcsync.Stream()
    standing, sender = Standing(new_client), Sender(new_client(), layers)
    sent = [bytes(point) for value in (1, 2) for point in sender.send(value)]

    async def run(client: ipcsync.AsyncClient) -> None:
        own, later = [await client.event(name, recorder=True, engine="timeline") for name in ("own", "later")]
        lost, *points = [await client.point(data) for data in (standing.data, *sent)]

        def replay(number: int, event: ipcsync.AsyncSharedEvent, stream: ipcsync.Stream) -> Any:
            waits, records = {layers.waits[0]: points[number]}, {layers.records[0]: event}
            return client.replay(waits, records, stream=stream, timeout=20)

        await lost.wait(held)
        async with replay(0, own, held):
            layers.launch(on=held)
        standing.lose(lost._point)
        with pytest.raises(ipcsync.RecorderLost, match="captured anew"):
            async with replay(1, later, layers.stream):
                pass
        standing.gate.open()
        await client.resume(held, DEADLINE_S)
        async with replay(1, later, layers.stream) as made:
            layers.launch()
        await made[layers.records[0]].synchronize(DEADLINE_S)

    with standing.gate:
        _with_client(coordinator, run)
    assert layers.found() == [2]
