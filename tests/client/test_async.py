"""The client for asyncio: as the other one."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.client.loops import LONG_S, cancel, threads_named, turns, turns_until, two_clients
from tests.kit.peer import Peer

pytestmark = pytest.mark.driver

# --- what it does -----------------------------------------------------------------------------------------------------


def test_a_point_is_complete_only_once_the_recorders_work_is(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (recorder, waiter):
            stream, other = ipcsync.Stream(), ipcsync.Stream()
            with StreamGate(stream) as gate:
                async with await recorder.event("e", recorder=True, engine=engine) as event:
                    recorded = await event.record(stream)
                    point = await waiter.point(bytes(recorded))
                    assert point == recorded
                    assert point.is_recorded
                    assert not await point.query()
                    with pytest.raises(ipcsync.WaitTimeout):
                        await point.synchronize(0.05)
                    await point.wait(other)
                    assert not other.query()
                    gate.open()
                    await point.synchronize(10)
                    other.synchronize()
                    assert await point.query()
                    assert await point.exception() is None
                    assert (event.generation, event.completed, event.state) == (1, 1, "open")

    asyncio.run(scenario())


@pytest.mark.usefixtures("nothing_queued")  # the legacy stream waits for every blocking one
def test_a_task_resumes_any_stream_but_its_threads_own_default_one(coordinator: ipcsync.Coordinator) -> None:
    """On the thread that makes a task's call that is another stream."""

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            with pytest.raises(ipcsync.IpcSyncError, match=r"per-thread default stream .*: use Client\.resume$"):
                await client.resume(2, LONG_S)
            for stream in (1, None, ipcsync.Stream()):
                await client.resume(stream, LONG_S)

    asyncio.run(scenario())


def test_every_name_of_the_client_is_there(coordinator: ipcsync.Coordinator) -> None:
    for kind, twin in [
        (ipcsync.Client, ipcsync.AsyncClient),
        (ipcsync.SharedEvent, ipcsync.AsyncSharedEvent),
        (ipcsync.Point, ipcsync.AsyncPoint),
        (ipcsync.Reservation, ipcsync.AsyncReservation),
    ]:
        wanted = {name for name in vars(kind) if not name.startswith("_") and hasattr(kind, name)}  # not its hints
        assert not wanted - set(dir(twin)), twin

    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            point = await one.record()
            assert await (await two.point(bytes(point))).exception() is None
            assert (await one.stream("s")).device_index == 0
            assert [session.name for session in await one.list_sessions()] == ["one", "two"]
            async with await one.event("n") as event:
                assert [info.name for info in await two.list_events("n")] == ["n"]
                assert event.latest is None
                assert event.at(3).generation == 3
            assert (await one.stats())["sessions"] == 2
            assert (await one.check())["event"]["ok"]
            assert (one.name, one.endpoint, one.epoch) == ("one", coordinator.endpoint, two.epoch)
            assert one.is_connected

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("plain", "twin"),
    [
        (ipcsync.connect, ipcsync.aconnect),
        *(
            (getattr(ipcsync.Client, name), getattr(ipcsync.AsyncClient, name))
            for name, value in vars(ipcsync.Client).items()
            if inspect.isfunction(value) and not name.startswith("_")
        ),
    ],
    ids=lambda function: function.__qualname__,
)
def test_a_twin_has_the_parameters_of_the_plain_function(plain: Any, twin: Any) -> None:
    told = [
        [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
        for function in (plain, twin)
    ]
    assert told[0] == told[1]
    assert twin.__doc__


def test_clients_events_and_points_tell_what_the_plain_ones_do(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            plain = one._client
            assert (one.session_id, one.lease_ttl) == (plain.session_id, plain.lease_ttl)
            one.timeout = 7.5
            assert one.timeout == plain.timeout == 7.5
            event = await one.event("e", recorder=True, engine=engine, depth=1)
            point = await event.record(ipcsync.Stream())
            sync = event._event
            handles = ("handle", "handles") if engine == "event" else ()
            for name in ("engine", "depth", "node", "is_lost", "generation", "state", *handles):
                assert getattr(event, name) == getattr(sync, name), name
            assert (event.engine, event.node, point.node, event.is_lost) == (engine, "", "", False)
            assert [repr(one), repr(event), repr(point)] == [
                repr(plain).replace("Client", "AsyncClient"),
                repr(sync).replace("SharedEvent", "AsyncSharedEvent"),
                repr(point._point).replace("Point", "AsyncPoint"),
            ]
            seen = await two.event("e")
            told = await two.list_attachments("e")
            assert {(row.event, row.session, row.role) for row in told} == {
                ("e", "one", "records"),
                ("e", "two", "waits"),
            }
            await seen.close()
            with pytest.raises(ipcsync.NoBridge):
                await one.bridge()
            with pytest.raises(ipcsync.NoBridge):
                await one.nodes()
            with pytest.raises(TypeError, match="callable"):
                point.add_done_callback(None)  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_a_stream_refuses_an_asynchronous_point_whose_wait_nobody_would_await(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            point = await client.record(ipcsync.Stream())
            with pytest.raises(TypeError, match=r"await its own wait\(stream\)"):
                ipcsync.Stream().wait_event(point)

    asyncio.run(scenario())


def test_a_reserved_point_is_waited_for_before_its_record(coordinator: ipcsync.Coordinator, engine: EngineName) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            async with await one.reserve(engine=engine) as reservation:
                theirs = await two.point(bytes(reservation.point))
                waiting = asyncio.create_task(theirs.synchronize(10))
                done, _ = await asyncio.wait([waiting], timeout=0.05)
                assert not done
                assert await reservation.record(ipcsync.Stream()) == reservation.point
                await waiting
                with pytest.raises(ipcsync.EventClosed):
                    await reservation.record()
            async with await one.reserve(engine=engine) as reservation:
                theirs = await two.point(bytes(reservation.point))
            with pytest.raises(ipcsync.RecorderLost):
                await theirs.synchronize(10)

    asyncio.run(scenario())


def test_a_record_that_would_depend_on_itself_is_refused_at_once(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            stream, reservation = ipcsync.Stream(), await one.reserve(engine=engine)
            event = await one.event("e", recorder=True, engine=engine)
            theirs = (await two.event("e")).at(2)
            for record, later in ((event.record, theirs), (reservation.record, reservation.point)):
                with pytest.raises(ValueError, match=r"generation 1 of .* cannot depend on its generation"):
                    await asyncio.wait_for(record(stream, after=[later]), LONG_S)

    asyncio.run(scenario())


def test_who_may_not_record_is_told_at_once_whatever_the_record_would_depend_on(
    coordinator: ipcsync.Coordinator,
) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            seen, other = await two.event("seen"), await one.event("other", recorder=True)
            with pytest.raises(ipcsync.NotRecorder):
                await asyncio.wait_for(seen.record(ipcsync.Stream(), after=[other.at(1)]), LONG_S)

    asyncio.run(scenario())


def _messages(sync: Callable[[], object]) -> tuple[type, str, dict[str, object]]:
    with pytest.raises(ipcsync.IpcSyncError) as caught:
        sync()
    return caught.type, str(caught.value), vars(caught.value)


async def _amessages(coroutine: Awaitable[object]) -> tuple[type, str, dict[str, object]]:
    with pytest.raises(ipcsync.IpcSyncError) as caught:
        await coroutine
    return caught.type, str(caught.value), vars(caught.value)


def test_errors_are_the_same_as_without_asyncio(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            stream = ipcsync.Stream()
            event = await client.event("e", recorder=True, engine="event", depth=1)
            sync = event._event
            with StreamGate(stream):
                point = await event.record(stream)
                later = event.at(2)
                for ours, theirs in [
                    (point.synchronize(0.01), lambda: point._point.synchronize(0.01)),
                    (later.synchronize(0.01), lambda: later._point.synchronize(0.01)),
                    (later.wait(stream, timeout=0.01), lambda: later._point.wait(stream, timeout=0.01)),
                    (later.wait(stream, ahead=True), lambda: later._point.wait(stream, ahead=True)),
                    (event.record(stream, timeout=0.01), lambda: sync.record(stream, timeout=0.01)),
                ]:
                    assert await _amessages(ours) == _messages(theirs)
            await point.synchronize(10)
            with pytest.raises(ValueError, match="timeout"):
                await point.synchronize(-1)
            with pytest.raises(TypeError):
                await point.wait("no stream")  # type: ignore[arg-type]
            await event.close()
            assert await _amessages(event.record(stream)) == _messages(lambda: sync.record(stream))

    asyncio.run(scenario())


def test_work_goes_to_the_stream_that_is_current_where_it_is_awaited(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (recorder, waiter):
            stream, other = ipcsync.Stream(), ipcsync.Stream()
            event = await recorder.event("e", recorder=True)
            with StreamGate(stream) as gate:
                with ipcsync.stream(stream):
                    named, unnamed = await event.record(), await recorder.record()
                assert not await named.query()
                assert not await unnamed.query()
                with ipcsync.stream(other):
                    await (await waiter.point(bytes(named))).wait()
                assert not other.query()
                gate.open()
                await asyncio.gather(named.synchronize(10), unnamed.synchronize(10))
            other.synchronize()

    asyncio.run(scenario())


def _devices_of_events() -> list[str]:
    """In a peer with two devices: the device of an event that is made while device 1, then 0, is current."""

    async def scenario() -> list[str]:
        with ipcsync.launch() as coordinator:
            async with await ipcsync.aconnect(coordinator.endpoint) as client:
                found: list[str] = []
                for ordinal in (1, 0, 1):
                    with ipcsync.device(ordinal):
                        event = await client.event(f"on-{len(found)}")
                        found.append(f"{event.device.index} {(await client.stream(f's-{len(found)}')).device_index}")
                return found

    return asyncio.run(scenario())


def test_the_device_is_the_one_that_is_current_where_it_is_awaited(new_peer: Callable[..., Peer]) -> None:
    segment = f"async-{os.getpid()}"
    peer = new_peer(IPCSYNC_HOST_DEVICES="2", IPCSYNC_HOST_SEGMENT=segment)
    if peer.call(ipcsync.device_count) < 2:
        pytest.skip("this machine has one GPU: the test needs two")
    assert peer.call(_devices_of_events) == ["1 1", "0 0", "1 1"]


# --- watch, callbacks, the end ----------------------------------------------------------------------------------------


def test_watch_tells_a_snapshot_and_then_every_change(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            first = await one.event("n/1")
            notices = two.watch("n/", timeout=LONG_S)
            kinds = [await anext(notices) for _ in range(3)]
            assert [(notice.kind, notice.name) for notice in kinds] == [
                ("session_opened", "one"),
                ("session_opened", "two"),
                ("opened", "n/1"),
            ]
            second = await one.event("n/2")
            await one.event("other")
            await first.close()
            await second.close()
            told = [await anext(notices) for _ in range(3)]
            assert [(n.kind, n.name) for n in told] == [("opened", "n/2"), ("closed", "n/1"), ("closed", "n/2")]
            await notices.aclose()
            assert [notice.kind async for notice in two.watch("none", timeout=0)] == ["session_opened"] * 2

    asyncio.run(scenario())


def test_a_watch_that_is_cancelled_or_left_ends_its_thread(coordinator: ipcsync.Coordinator) -> None:
    async def read(client: ipcsync.AsyncClient, started: asyncio.Event) -> None:
        async for _ in client.watch():
            started.set()

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            started, before = asyncio.Event(), threads_named("ipcsync-watch")
            task = asyncio.create_task(read(client, started))
            await started.wait()
            (thread,) = threads_named("ipcsync-watch") - before
            await cancel(task)
            thread.join(LONG_S)
            notices, before = client.watch(), threads_named("ipcsync-watch")
            async for _ in notices:
                (thread,) = threads_named("ipcsync-watch") - before
                break
            await notices.aclose()
            thread.join(LONG_S)
            assert not thread.is_alive()

    asyncio.run(scenario())


def test_a_watch_is_left_though_no_thread_can_be_started(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            notices, before = client.watch(), threads_named("ipcsync-watch")
            await anext(notices)
            (thread,) = threads_named("ipcsync-watch") - before
            thread.join(LONG_S)  # it is idle, and ends
            with monkeypatch.context() as limit:
                limit.setattr("_thread.start_new_thread", refuse)
                limit.setattr(threading.Thread, "start", refuse)
                await notices.aclose()

    asyncio.run(scenario())


def test_a_done_callback_is_called_by_the_loop(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            stream = ipcsync.Stream()
            loop = asyncio.get_running_loop()
            called: asyncio.Future[tuple[ipcsync.AsyncPoint, int]] = loop.create_future()
            with StreamGate(stream) as gate:
                point = await client.record(stream)
                point.add_done_callback(lambda done: called.set_result((done, threading.get_ident())))
                await turns()
                assert not called.done()
                gate.open()
                assert await asyncio.wait_for(called, LONG_S) == (point, threading.get_ident())

    asyncio.run(scenario())


def test_an_unpickled_point_finds_its_client(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            event = await client.event("e", recorder=True)
            point = await event.record()
            again = pickle.loads(pickle.dumps(point))
            assert (again, hash(again), bytes(again)) == (point, hash(point), bytes(point))
            with pytest.raises(ipcsync.ConnectError):
                again.event_name  # noqa: B018 - looking is the test
            await again.synchronize(10)
            assert (again.event_name, again.device, again.is_recorded) == ("e", event.device, True)
        with pytest.raises(ipcsync.ConnectError):
            await pickle.loads(pickle.dumps(point)).query()
        with ipcsync.connect(coordinator.endpoint):  # any client of the coordinator does
            assert await pickle.loads(pickle.dumps(point)).query()

    asyncio.run(scenario())


def test_close_ends_what_waits_and_later_calls_say_so(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        client = await ipcsync.aconnect(coordinator.endpoint)
        event = await client.event("e", recorder=True)
        point = event.at(1)
        waiting = asyncio.create_task(point.synchronize())
        await turns()
        await client.close()
        await client.close()
        with pytest.raises(ipcsync.EventClosed):
            await waiting
        for call in (client.event("f"), client.list_events(), client.record(), anext(client.watch())):
            with pytest.raises(ipcsync.ClientClosed):
                await call
        for use in (point.query(), point.synchronize(), point.wait(), event.record()):
            with pytest.raises(ipcsync.EventClosed):
                await use
        assert not client.is_connected

    asyncio.run(scenario())


def test_a_dead_coordinator_ends_what_waits(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            event = await client.event("e")
            reader = asyncio.ensure_future(_read_all(client))
            waiting = asyncio.create_task(event.at(1).synchronize())
            await turns()
            os.kill(coordinator.pid, signal.SIGKILL)
            for task in (waiting, reader):
                with pytest.raises(ipcsync.CoordinatorLost):
                    await asyncio.wait_for(task, LONG_S)

    asyncio.run(scenario())


async def _read_all(client: ipcsync.AsyncClient) -> None:
    async for _ in client.watch():
        continue


def _use_in_forked_child(endpoint: str) -> int:
    """In a peer: how many uses raise ForkedProcessError in a forked child."""

    async def connect_and_record() -> tuple[ipcsync.AsyncClient, ipcsync.AsyncSharedEvent, ipcsync.AsyncPoint]:
        client = await ipcsync.aconnect(endpoint)
        event = await client.event("e", recorder=True)
        return client, event, await event.record()

    client, event, point = asyncio.run(connect_and_record())
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: point.synchronize(5),
            point.query,
            lambda: point.wait(timeout=5),
            lambda: event.record(timeout=5),
            client.list_events,
            lambda: client.event("f"),
            lambda: anext(client.watch()),
            lambda: ipcsync.aconnect(endpoint),
        ):
            with suppress(ipcsync.ForkedProcessError):
                asyncio.new_event_loop().run_until_complete(use())
                os._exit(100)
            refused += 1
        os._exit(refused)
    refused = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    asyncio.run(client.close())
    return refused


def test_a_forked_child_is_refused(coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]) -> None:
    peer = new_peer(PYTHONWARNINGS="default")  # Python warns of a fork with threads, which is the point here
    assert peer.call(_use_in_forked_child, coordinator.endpoint) == 8


# --- default streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["event", "client", "record_all", "reservation", "replay", "wait_all"])
def test_a_close_ends_a_call_that_waits_for_another_clients_point_to_be_recorded(
    coordinator: ipcsync.Coordinator, engine: EngineName, call: str
) -> None:
    async def main() -> None:
        async with two_clients(coordinator.endpoint) as (one, two):
            event, point = await one.event("e", recorder=True, engine=engine), (await two.event("other")).at(1)
            reservation = await one.reserve()

            async def replay() -> None:
                async with one.replay({wait: point}, stream=stream):
                    pass

            stream, wait = ipcsync.Stream(), ipcsync.GraphWait()
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "event": lambda: event.record(after=[point]),
                "client": lambda: one.record(after=[point]),
                "record_all": lambda: one.record_all(after=[point]),
                "reservation": lambda: reservation.record(after=[point]),
                "replay": replay,
                "wait_all": lambda: one.wait_all([point], stream),
            }
            waiting = asyncio.ensure_future(calls[call]())
            await turns_until(lambda: point._bound().engine.line.awaited, "it waits")
            await one.close()
            with pytest.raises((ipcsync.EventClosed, ipcsync.ClientClosed)):
                await asyncio.wait_for(waiting, LONG_S)

    asyncio.run(main())
