"""The client for asyncio: the loop goes on whatever is waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar, cast

import pytest

import ipcsync
from ipcsync._wire import messages
from ipcsync.client.aio.event import AsyncPoint
from ipcsync.client.point import _unpickle
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.client.loops import LONG_S, stopped, turns, turns_until, two_clients
from tests.kit import driver_functions, remote
from tests.kit.peer import Peer
from tests.kit.until import until

T = TypeVar("T")

_MANY = 1000  # the loop's own socket holds some 280 wake-ups


def test_waits_for_gpu_work_do_not_block_the_loop(coordinator: ipcsync.Coordinator, engine: EngineName) -> None:
    # Whatever blocked would wait for what only this very loop does next, and run into its timeout.
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (recorder, waiter):
            stream, other = ipcsync.Stream(), ipcsync.Stream()
            event = await recorder.event("e", recorder=True, engine=engine, depth=1)
            seen = await waiter.event("e")
            with StreamGate(stream) as gate:
                first = await event.record(stream)
                waits = [
                    asyncio.create_task(wait)
                    for wait in (
                        first.synchronize(LONG_S),
                        seen.at(1).synchronize(LONG_S),
                        seen.at(2).synchronize(LONG_S),
                        seen.at(3).wait(other, timeout=LONG_S),
                    )
                ]
                record = asyncio.create_task(event.record(stream, timeout=LONG_S))
                await turns()
                assert not any(task.done() for task in waits)
                if engine == "timeline":
                    await record  # which has no ring to be full
                assert record.done() == (engine == "timeline")
                gate.open()
                await record
            await event.record(stream)
            await asyncio.gather(*waits)
            other.synchronize()

    asyncio.run(scenario())


def _at_once(call: Coroutine[Any, Any, T]) -> T:
    """What a call returns that never gives the loop a turn."""
    with pytest.raises(StopIteration) as ended:
        call.send(None)
    return cast("T", ended.value.value)


def test_what_needs_no_request_is_done_without_another_thread(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            stream, other = ipcsync.Stream(), ipcsync.Stream()
            event = await one.event("e", recorder=True, engine=engine)
            await one.record(stream)
            await two.point(bytes(await event.record(stream)))
            for record in (event.record, one.record):
                point = _at_once(record(stream))
                stream.synchronize()
                assert _at_once(point.query()) if engine == "timeline" else await point.query()
            seen = _at_once(two.point(bytes(await event.record(stream))))
            _at_once(seen.wait(other))
            assert _at_once(two.wait_all([seen, seen], other)) == []

    asyncio.run(scenario())


def test_who_asks_until_a_point_is_complete_leaves_the_loop_to_others(coordinator: ipcsync.Coordinator) -> None:
    async def ask(point: AsyncPoint) -> None:
        while not await point.query():
            assert await point.exception() is None

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            stream = ipcsync.Stream()
            with StreamGate(stream) as gate:
                asking = asyncio.create_task(ask(await client.record(stream)))
                await turns()
                gate.open()
            await asking

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "request_of",
    [
        pytest.param(lambda client, _: client.event("new"), id="event"),
        pytest.param(lambda client, _: client.record(ipcsync.Stream()), id="record"),
        pytest.param(lambda client, data: client.point(data), id="point"),
        pytest.param(lambda client, _: client.stream("s"), id="stream"),
        pytest.param(lambda client, _: client.list_events(), id="list_events"),
        pytest.param(lambda client, _: client.list_sessions(), id="list_sessions"),
        pytest.param(lambda client, _: client.stats(), id="stats"),
        pytest.param(lambda client, _: client.check(), id="check"),
        pytest.param(lambda client, _: anext(client.watch()), id="watch"),
        pytest.param(lambda client, _: ipcsync.aconnect(client.endpoint), id="aconnect"),
        pytest.param(lambda client, _: client.close(), id="close"),
    ],
)
def test_requests_do_not_block_the_loop(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, request_of: Callable[..., Awaitable[Any]]
) -> None:
    # Whatever blocked would wait for an answer of the coordinator that this very loop sets going again.
    data = bytes(client.record())

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as mine:
            with stopped(coordinator) as go_on:
                task = asyncio.ensure_future(request_of(mine, data))
                await turns()
                assert not task.done()
                go_on()
                answer = await task
            if isinstance(answer, ipcsync.AsyncClient):
                await answer.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("nothing_queued", "client")  # the process's first client, which such points belong to
def test_points_that_were_unpickled_are_attached_to_without_blocking_the_loop(coordinator: ipcsync.Coordinator) -> None:
    async def scenario(stream: ipcsync.Stream, events: list[ipcsync.SharedEvent]) -> None:
        points = [AsyncPoint(_unpickle(bytes(event.record(stream)))) for event in events]
        async with ipcsync.aconnect(coordinator.endpoint) as mine:
            calls: list[Callable[..., Coroutine[Any, Any, AsyncPoint]]] = [
                partial(mine.record, stream),
                mine.record_all,
            ]
            for call, point in zip(calls, points, strict=True):
                await call()  # what it asks for at first
                with stopped(coordinator) as go_on:
                    task = asyncio.create_task(call(after=[point]))
                    await turns()
                    assert not task.done()
                    go_on()
                    await task
                with pytest.raises(TypeError, match="AsyncPoints, but got Point"):
                    await call(after=[events[0].latest])

    with ipcsync.connect(coordinator.endpoint) as recorder:
        events = recorder.events(["e0", "e1"], recorder=True)
        asyncio.run(scenario(ipcsync.Stream(), events))


def test_a_record_after_what_is_not_recorded_does_not_block_the_loop(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (recorder, waiter), await waiter.reserve() as reservation:
            stream, other = ipcsync.Stream(), ipcsync.Stream()
            event = await recorder.event("e", recorder=True)
            seen = await waiter.event("e")
            for number, record in enumerate((waiter.record, reservation.record), 1):
                task = asyncio.create_task(record(stream, after=[seen.at(number)]))
                await turns()
                assert not task.done()
                await event.record(other)
                await (await task).synchronize(20)

    asyncio.run(scenario())


def test_no_stream_takes_over_an_event_whose_record_waits_for_another_one(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (recorder, waiter):
            stream = ipcsync.Stream()
            await (await waiter.record(stream, engine=engine)).synchronize(20)
            first = await recorder.event("first", recorder=True, engine=engine)
            seen = await waiter.event("first")
            task = asyncio.create_task(waiter.record(stream, engine=engine, after=[seen.at(1)]))
            await turns()
            with ExitStack() as gates:
                for _ in range(40):
                    gates.enter_context(StreamGate(held := ipcsync.Stream()))
                    await waiter.record(held, engine=engine)
                await first.record(ipcsync.Stream())
                made = await task
            await made.synchronize(20)  # only now: its stream may share a hardware queue with a held one

    asyncio.run(scenario())


def test_hundreds_of_waits_take_no_threads_and_keep_none_from_others(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (recorder, waiter):
            stream, other = ipcsync.Stream(), ipcsync.Stream()
            events = [await recorder.event(f"e{i}", recorder=True, engine="event", depth=1) for i in range(10)]
            seen = [await waiter.event(f"e{i}") for i in range(10)]
            before = threading.active_count()
            with StreamGate(stream) as gate:
                await asyncio.gather(*(event.record(stream) for event in events))
                full = [asyncio.create_task(event.record(stream, timeout=LONG_S)) for event in events]
                waits = [
                    asyncio.create_task(wait)
                    for event in seen
                    for generation in range(1, 11)
                    for wait in (
                        event.at(generation).synchronize(LONG_S),
                        event.at(generation).wait(other, timeout=LONG_S),
                    )
                ]
                await turns()
                assert len(waits) == 200
                assert threading.active_count() <= before + 16
                assert await (await recorder.record(ipcsync.Stream())).exception() is None  # others go on
                gate.open()
                await asyncio.gather(*full)
                for event in events:
                    for _ in range(8):
                        await event.record(stream, timeout=LONG_S)
                await asyncio.gather(*waits)
            other.synchronize()

    asyncio.run(scenario())


def test_a_signal_beside_a_thousand_waits_that_end_is_seen(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, ended.set)
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            stream, called = ipcsync.Stream(), list[AsyncPoint]()
            with StreamGate(stream) as gate:
                point = await client.record(stream)
                waits = [asyncio.create_task(point.synchronize(LONG_S)) for _ in range(_MANY)]
                for _ in range(_MANY):
                    point.add_done_callback(called.append)
                await turns()
                gate.open()
                session = client._client._session
                until(lambda: not len(session.waits._waiting), "all have ended")  # the loop is busy meanwhile
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.wait_for(ended.wait(), LONG_S)
                await asyncio.gather(*waits)
                await turns_until(lambda: len(called) == _MANY, "all callbacks were called")

    asyncio.run(scenario())


def test_a_signal_beside_a_thousand_requests_that_end_is_seen(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, ended.set)
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            before = client.messages_sent
            requests = [asyncio.create_task(client.list_sessions(timeout=LONG_S)) for _ in range(_MANY)]
            await turns()
            until(lambda: client.messages_sent >= before + _MANY, "all are sent")  # the loop is busy meanwhile
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(ended.wait(), LONG_S)
            await asyncio.gather(*requests)

    asyncio.run(scenario())


def _held(coordinator: ipcsync.Coordinator, peer: Peer) -> bytes:
    """A point of a CUDA event whose work is held."""
    peer.call(remote.connect, coordinator.endpoint)
    peer.call(remote.hold)
    peer.call(remote.open_event, "e", {"recorder": True, "engine": "event"})
    (data,) = peer.call(remote.record, "e")
    return bytes(data)


@pytest.mark.parametrize("call", ["query", "exception"])
def test_a_question_that_the_driver_keeps_does_not_hold_up_the_loop(
    coordinator: ipcsync.Coordinator, peer: Peer, call: str
) -> None:
    data = _held(coordinator, peer)

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            point = await client.point(data)
            assert not await point.query()  # opens its import
            with driver_functions.held_up("cuEventQuery") as driver:
                asked = asyncio.create_task(getattr(point, call)())
                await asyncio.to_thread(driver.wait)
                await turns()
                assert not asked.done()
            assert not await asked
            peer.call(remote.let_go)
            await point.synchronize(LONG_S)

    asyncio.run(scenario())


def test_a_point_that_the_driver_says_nothing_of_does_not_hold_up_who_waits_for_another(
    coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    data = _held(coordinator, peer)

    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            late = await one.event("late", recorder=True, engine="timeline")
            seen, stuck = await two.event("late"), await two.point(data)
            assert not await stuck.query()  # opens its import
            with driver_functions.held_up("cuEventQuery", threads=_MANY) as driver:
                waiting = asyncio.create_task(two.wait_all([stuck, seen.at(2)], timeout=LONG_S))
                await turns_until(lambda: two._session.waits._waiting, "it waits")
                await late.record(ipcsync.Stream())
                await asyncio.wait_for(seen.at(1).synchronize(), LONG_S)
                assert not driver.go_on.is_set()
                assert not waiting.done()
                await late.record(ipcsync.Stream())
                assert await waiting == []
            peer.call(remote.let_go)

    asyncio.run(scenario())


def _break(name: str) -> None:
    """Have an event broken by its recorder, which lives on and knows of no loss, as one that has expired."""
    _, *use = remote.event(name)._engine.origin
    remote.client()._session.request(messages.Break(*use), messages.Done)


def test_of_a_broken_ring_nobody_waits_for_an_answer_that_the_driver_keeps(
    coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    data = _held(coordinator, peer)

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as one:
            mine, late = await one.event("mine", recorder=True), await one.event("late")
            stuck = await one.point(data)
            assert not await stuck.query()  # opens its import
            points = [stuck, late.at(1)]
            with driver_functions.held_up("cuEventQuery", threads=_MANY):
                asked = {
                    "wait_all": asyncio.create_task(one.wait_all(points)),
                    "record": asyncio.create_task(mine.record(ipcsync.Stream(), after=points)),
                }
                await turns_until(lambda: len(one._session.waits._waiting) == 2, "both wait")
                peer.call(_break, "e")
                await turns_until(lambda: stuck._bound().engine.state == "broken", "it is broken")
                asked["query"] = asyncio.create_task(stuck.query())
                asked["Point.query"] = asyncio.create_task(asyncio.to_thread(stuck._point.query))
                await asyncio.wait(asked.values(), timeout=LONG_S)
                assert [name for name, task in asked.items() if not task.done()] == []
            for task in asked.values():
                assert isinstance(task.exception(), ipcsync.RecorderLost)
            peer.call(remote.let_go)

    asyncio.run(scenario())


@pytest.mark.parametrize("beside", [0, 1])
def test_a_wait_ends_by_its_timeout_and_by_a_loss_though_the_driver_keeps_its_answer(
    coordinator: ipcsync.Coordinator, peer: Peer, beside: int
) -> None:
    data = _held(coordinator, peer)

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            point, other = await client.point(data), await client.event("other")
            assert not await point.query()  # opens its import
            with driver_functions.held_up("cuEventQuery", threads=_MANY) as driver:
                for _ in range(beside):  # a lone one is watched from the next beat on
                    other.at(1).add_done_callback(lambda _: None)
                late = asyncio.create_task(point.synchronize(0.2))
                await asyncio.to_thread(driver.wait)
                with pytest.raises(ipcsync.WaitTimeout):
                    await asyncio.wait_for(late, LONG_S)
                called: list[AsyncPoint] = []
                point.add_done_callback(called.append)
                lost = asyncio.create_task(point.synchronize())
                await turns_until(lambda: len(client._session.waits._waiting) == 2 + beside, "both wait")
                peer.call(_break, "e")
                with pytest.raises(ipcsync.RecorderLost):
                    await asyncio.wait_for(lost, LONG_S)
                await turns_until(lambda: called, "called")
                assert not driver.go_on.is_set()
            peer.call(remote.let_go)

    asyncio.run(scenario())


def test_waits_end_by_their_timeouts_though_the_driver_keeps_the_answers_of_more_than_threads_ask(
    coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    peer.call(remote.connect, coordinator.endpoint)
    peer.call(remote.hold)
    recorded = []
    for number in range(10):
        peer.call(remote.open_event, f"e{number}", {"recorder": True, "engine": "event"})
        recorded += peer.call(remote.record, f"e{number}")

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            points = [await client.point(bytes(each)) for each in recorded]
            for point in points:
                assert not await point.query()  # opens its import
            with driver_functions.held_up("cuEventQuery", threads=_MANY) as driver:
                waits = [asyncio.create_task(point.synchronize(0.5)) for point in points]
                await asyncio.wait(waits, timeout=LONG_S)
                assert not driver.go_on.is_set()
                assert all(isinstance(wait.exception(), ipcsync.WaitTimeout) for wait in waits)
            peer.call(remote.let_go)
            await asyncio.gather(*(point.synchronize(LONG_S) for point in points))

    asyncio.run(scenario())
