"""The asynchronous client's one wait for many points: as the synchronous one, and for the price of one call."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

import ipcsync
from ipcsync._wire import codec as wire
from ipcsync.client.aio.event import AsyncPoint
from ipcsync.client.point import _unpickle
from ipcsync.testing import StreamGate
from tests.client.loops import LONG_S, cancel, stopped, turns, turns_until, two_clients
from tests.faults import actions
from tests.kit import remote
from tests.kit.peer import Peer

COUNT = 24

Wait = Callable[..., Awaitable[list[ipcsync.AsyncPoint]]]


def _of(client: ipcsync.AsyncClient, name: str) -> Wait:
    wait: Wait = getattr(client, name)
    return wait


def test_all_are_waited_for_on_the_host_and_by_a_stream(coordinator: ipcsync.Coordinator) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            stream, waiting = ipcsync.Stream(), ipcsync.Stream()
            recorder, event = await one.event("kv", recorder=True, engine="timeline"), await two.event("kv")
            points = [event.at(number) for number in range(1, COUNT + 1)]
            complete = asyncio.ensure_future(two.synchronize_all(points, timeout=LONG_S))
            queued = asyncio.ensure_future(two.wait_all(points, waiting, timeout=LONG_S))
            with StreamGate(stream) as gate:
                for number in range(COUNT):
                    await turns()
                    assert not queued.done(), f"{number} of {COUNT} are recorded"
                    await recorder.record(stream)
                assert await queued == []
                assert not waiting.query(), "the stream waits"
                assert not complete.done(), "recorded, and not complete"
                gate.open()
            assert await complete == []
            waiting.synchronize()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["synchronize_all", "wait_all"])
def test_the_first_that_is_late_is_named(coordinator: ipcsync.Coordinator, name: str) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            opened = await one.events(["a", "b", "c"], recorder=True)
            await opened[0].record(ipcsync.Stream())
            points = [(await two.event(each)).at(1) for each in ("a", "b", "c")]
            with pytest.raises(ipcsync.WaitTimeout) as late:
                await _of(two, name)(points, timeout=0.05)
            assert (late.value.event, late.value.timeout) == ("b", 0.05)

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("is_unpickled", [False, True])
def test_a_recorded_point_that_is_lost_ends_the_wait_for_another_ones_record(
    coordinator: ipcsync.Coordinator, peer: Peer, is_unpickled: bool
) -> None:
    data = peer.call(remote.record_unfinished, coordinator.endpoint, "dying")

    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            await one.event("mine", recorder=True)
            points = [(await two.event("mine")).at(1)]
            points.append(AsyncPoint(_unpickle(data)) if is_unpickled else await two.point(data))
            waiting = asyncio.ensure_future(two.wait_all(points, timeout=LONG_S))
            await turns()
            assert not waiting.done()
            peer.kill()
            with pytest.raises(ipcsync.RecorderLost, match="'dying'"):
                await waiting

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("what", ["it", "what it stands behind"])
def test_a_recorded_point_of_a_ring_that_is_lost_ends_it_too_though_the_coordinator_may_be_silent(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], what: str
) -> None:
    first, peer = new_peer(), new_peer()
    before = first.call(remote.record_unfinished, coordinator.endpoint, "before")
    peer.call(remote.connect, coordinator.endpoint)
    peer.call(remote.open_event, "dying", {"recorder": True, "engine": "event"})
    peer.call(remote.wait, before)
    (data,) = peer.call(remote.record, "dying")

    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            await one.event("mine", recorder=True)
            points = [(await two.event("mine")).at(1), await two.point(data)]
            waiting = asyncio.ensure_future(two.wait_all(points, timeout=LONG_S))
            await turns_until(lambda: two._session.waits._waiting, "it waits")
            with stopped(coordinator) if what == "it" else nullcontext():
                (peer if what == "it" else first).kill()
                with pytest.raises(ipcsync.RecorderLost, match="generation 1 of 'dying'") as lost:
                    await waiting
            assert lost.value.cause == ("died" if what == "it" else "behind")

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_record_after_a_point_that_is_lost_waits_for_no_other(
    coordinator: ipcsync.Coordinator, peer: Peer, generation: int, is_last: bool
) -> None:
    """By either client, though it was recorded, or never will be, and wherever it stands."""
    data = peer.call(remote.record_unfinished, coordinator.endpoint, "dying")

    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            mine, never = [await one.event(name, recorder=True) for name in ("mine", "never")]
            point, dying = await two.point(data), (await two.event("dying")).at(generation)
            peer.kill()
            with pytest.raises(ipcsync.RecorderLost):
                await point.synchronize(LONG_S)
            after = [never.at(1), dying] if is_last else [dying, never.at(1)]
            waits: list[Awaitable[object]] = [mine.record(ipcsync.Stream(), after=after, timeout=LONG_S)]
            record = partial(mine._event.record, ipcsync.Stream(), timeout=LONG_S)
            waits.append(asyncio.to_thread(record, after=[each._point for each in after]))
            for wait in waits:
                with pytest.raises(ipcsync.RecorderLost, match="generation 1 of 'mine'") as lost:
                    await wait
                assert (lost.value.cause, lost.value.event) == ("behind", "mine")

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("is_silent", [False, True])
def test_what_is_recorded_after_a_point_that_is_lost_meanwhile_stands_behind_it(
    coordinator: ipcsync.Coordinator, peer: Peer, is_silent: bool
) -> None:
    """Whatever else it is recorded after, and though the coordinator says nothing of it."""
    peer.call(actions.open_recorder, coordinator.endpoint, "dying", "timeline")

    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, _):
            mine, never = [await one.event(name, recorder=True) for name in ("mine", "never")]
            after = [(await one.event("dying")).at(1), never.at(1)]
            record = asyncio.ensure_future(mine.record(ipcsync.Stream(), after=after, timeout=LONG_S))
            await turns()
            assert not record.done()
            with stopped(coordinator) if is_silent else nullcontext():
                peer.kill()
                with pytest.raises(ipcsync.RecorderLost, match="generation 1 of 'mine'") as lost:
                    await record
            assert (lost.value.cause, lost.value.event) == ("behind", "mine")

    asyncio.run(main())


def test_a_reservation_that_is_recorded_waits_for_nothing_more(coordinator: ipcsync.Coordinator) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            await one.event("never", recorder=True)
            never, stream = (await two.event("never")).at(1), ipcsync.Stream()
            async with await two.reserve() as reserved:
                await reserved.record(stream)
                with pytest.raises(ipcsync.EventClosed, match="is recorded, and for one record"):
                    await reserved.record(stream, after=[never], timeout=LONG_S)

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("name", ["synchronize_all", "wait_all"])
@pytest.mark.parametrize("lost", ["raise", "skip"])
def test_a_recorder_that_dies_ends_the_wait_or_is_left_out(
    coordinator: ipcsync.Coordinator, peer: Peer, name: str, lost: str
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "dying", "timeline")

    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            mine = await one.event("mine", recorder=True)
            points = [(await two.event("mine")).at(1), (await two.event("dying")).at(1)]
            waiting = asyncio.ensure_future(_of(two, name)(points, lost=lost, timeout=LONG_S))
            await turns()
            assert not waiting.done()
            peer.kill()
            if lost == "raise":
                with pytest.raises(ipcsync.RecorderLost) as raised:
                    await waiting
                assert raised.value.event == "dying"
            else:
                await (await mine.record(ipcsync.Stream())).synchronize(LONG_S)
                assert await waiting == [points[1]]

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("name", ["synchronize_all", "wait_all"])
@pytest.mark.parametrize("end", ["the event is closed", "the client is closed", "the coordinator is lost"])
def test_what_cannot_be_waited_for_any_more_ends_the_wait_for_all(
    coordinator: ipcsync.Coordinator,
    new_coordinator: Callable[..., ipcsync.Coordinator],
    caplog: pytest.LogCaptureFixture,
    name: str,
    end: str,
) -> None:
    """No timeout would end that for the others, and an error that may be skipped is another one."""
    other = new_coordinator()

    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two), ipcsync.aconnect(other.endpoint) as third:
            await one.event("never", recorder=True)
            event = await third.event("ending")
            points = [(await two.event("never")).at(1), event.at(1), event.at(2)]
            waiting = [asyncio.ensure_future(_of(two, name)(points, lost=lost)) for lost in ("raise", "skip")]
            await turns_until(lambda: len(two._session.waits._waiting) == 2, "both wait")
            if end == "the coordinator is lost":
                os.kill(other.pid, signal.SIGKILL)
            else:
                await (event if "event" in end else third).close()
            for wait in waiting:
                with pytest.raises(ipcsync.CoordinatorLost if "lost" in end else ipcsync.EventClosed):
                    await asyncio.wait_for(wait, LONG_S)
            assert not two._session.waits._waiting

    asyncio.run(main())
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"], "each error was retrieved"


def test_cancelling_it_leaves_no_wait_behind(coordinator: ipcsync.Coordinator) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            await one.event("kv", recorder=True)
            points = [(await two.event("kv")).at(number) for number in range(1, 4)]
            for name in ("synchronize_all", "wait_all"):
                waiting = asyncio.ensure_future(_of(two, name)(points))
                waits = two._client._session.waits
                await turns_until(lambda: len(waits._waiting) == 3, "all wait")  # noqa: B023 - within this turn
                await cancel(waiting)
                assert len(waits._waiting) == 0

    asyncio.run(main())


def test_what_is_no_point_or_no_way_to_lose_one_is_refused(coordinator: ipcsync.Coordinator) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, _):
            point: Any = await one.record()
            for call in (one.record, one.record_all):
                with pytest.raises(TypeError, match="after takes AsyncPoints, in a list or another iterable, but got"):
                    await call(after=point)
            for name in ("synchronize_all", "wait_all"):
                with pytest.raises(TypeError, match="are AsyncPoints, but got str"):
                    await _of(one, name)(["point"])
                with pytest.raises(TypeError, match="points takes AsyncPoints, in a list or another iterable, but got"):
                    await _of(one, name)(point)
                with pytest.raises(ValueError, match="lost is 'raise' or 'skip', but got 'ignore'"):
                    await _of(one, name)([], lost="ignore")
                assert await _of(one, name)([]) == []
            with pytest.raises(TypeError, match="did you mean timeout=5"):
                await _of(one, "wait_all")([], 5)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["synchronize_all", "wait_all"])
def test_one_that_is_cancelled_before_its_waits_begin_leaves_none_that_was_never_awaited(
    coordinator: ipcsync.Coordinator, name: str
) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (_, two):
            event = await two.event("kv")
            task = asyncio.ensure_future(_of(two, name)([event.at(1), event.at(2)]))
            asyncio.get_running_loop().call_soon(task.cancel)  # behind the task's first turn, before its waits' first
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()  # which warns of what was never awaited
            assert len(two._session.waits._waiting) == 0

    asyncio.run(main())


@pytest.mark.parametrize("name", ["synchronize_all", "wait_all"])
def test_an_unpickled_point_that_is_gone_is_left_out(coordinator: ipcsync.Coordinator, name: str) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            event = await one.event("e", recorder=True)
            there = await event.record(ipcsync.Stream())
            gone = AsyncPoint(_unpickle(wire.pack(there._point._key._replace(incarnation=1 << 20))))
            assert await _of(two, name)([gone, there], lost="skip", timeout=LONG_S) == [gone]
            with pytest.raises(ipcsync.RecorderLost):
                await _of(two, name)([there, gone], timeout=LONG_S)

    asyncio.run(main())
