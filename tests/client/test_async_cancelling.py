"""The client for asyncio: a call that is cancelled, or whose loop is abandoned, leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import pytest

import ipcsync
from ipcsync._threads import start
from ipcsync.client import unnamed
from ipcsync.client.aio import _runner
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.client.loops import LONG_S, cancel, stopped, threads_named, turns, turns_until, two_clients
from tests.kit import driver_functions
from tests.kit.scripts import run
from tests.kit.until import until


def test_a_cancelled_wait_leaves_nothing_behind(coordinator: ipcsync.Coordinator, engine: EngineName) -> None:
    async def scenario() -> None:
        async with two_clients(coordinator.endpoint) as (recorder, waiter):
            stream, other = ipcsync.Stream(), ipcsync.Stream()
            event = await recorder.event("e", recorder=True, engine=engine)
            seen = await waiter.event("e")
            with StreamGate(stream) as gate:
                await event.record(stream)
                tasks = [
                    asyncio.create_task(seen.at(1).synchronize()),
                    asyncio.create_task(seen.at(2).synchronize()),
                    asyncio.create_task(seen.at(2).wait(other)),
                ]
                await turns_until(lambda: len(waiter._client._session.waits._waiting) == 3, "all of them wait")
                for task in tasks:
                    await cancel(task)
                assert len(waiter._client._session.waits._waiting) == 0
                gate.open()
                assert other.query()  # nothing was queued on it
                await seen.at(1).synchronize(10)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(seen.at(2).synchronize(), 0.01)
            assert len(waiter._client._session.waits._waiting) == 0

    asyncio.run(scenario())


PENDING_AT_EXIT = """
    import asyncio
    import ipcsync
    from ipcsync.testing import StreamGate

    async def main():
        client = await ipcsync.aconnect(ENDPOINT)
        reservation, stream = await client.reserve(engine="timeline"), ipcsync.Stream()
        gate = StreamGate(stream).__enter__()
        ours = await client.point(bytes(reservation.point))
        ours._point._bound().engine.wait(1, stream, None, True)
        await reservation.close()  # what the stream is to wait for is lost, and it does not get there

        async def watch():
            async for notice in client.watch():
                pass

        tasks = [asyncio.create_task(watch()), asyncio.create_task(client.resume(stream))]
        done, pending = await asyncio.wait(tasks, timeout=0.2)
        assert len(pending) == 2, done
        return client, gate, tasks

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(main())  # not asyncio.run, which would cancel the tasks
"""


def test_an_interpreter_ends_with_calls_pending_that_last_as_long_as_the_session(
    coordinator: ipcsync.Coordinator,
) -> None:
    run(PENDING_AT_EXIT.replace("ENDPOINT", repr(coordinator.endpoint)))


@contextmanager
def _recorded_by_another_thread(event: ipcsync.AsyncSharedEvent, stream: ipcsync.Stream) -> Iterator[None]:
    """In the block, its record's call of the driver is under way."""
    holding = threading.Thread(target=lambda: event._event.record(stream))
    with driver_functions.held_up(*driver_functions.RECORD.values()) as held:
        holding.start()
        held.wait()
        yield
    holding.join()


def test_a_task_records_once_another_threads_record_is_made_whatever_is_complete(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            stream = ipcsync.Stream()
            with StreamGate(stream):
                async with await client.event("e", recorder=True, engine=engine) as event:
                    with _recorded_by_another_thread(event, stream):
                        recording = asyncio.create_task(event.record(stream))
                        with pytest.raises(ipcsync.WaitTimeout, match=r"another thread's record .* within 0\.01 s"):
                            await event.record(stream, timeout=0.01)
                    point = await asyncio.wait_for(recording, LONG_S)
                    assert point.generation == 2
                    assert not await point.query()

    asyncio.run(scenario())


def test_a_task_waits_for_a_point_once_another_threads_record_is_made(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            stream = ipcsync.Stream()
            with StreamGate(stream):
                async with await client.event("e", recorder=True, engine=engine) as event:
                    point = await event.record(stream)
                    with _recorded_by_another_thread(event, stream):
                        waiting = asyncio.create_task(point.wait(ipcsync.Stream()))
                        with pytest.raises(ipcsync.WaitTimeout, match=r"another thread's wait .* within 0\.01 s"):
                            await point.wait(ipcsync.Stream(), timeout=0.01)
                    await asyncio.wait_for(waiting, LONG_S)

    asyncio.run(scenario())


def test_a_task_waits_for_many_points_once_another_threads_record_is_made(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            stream, waiting = ipcsync.Stream(), ipcsync.Stream()
            with StreamGate(stream):
                events = await client.events(["a", "b"], recorder=True, engine=engine)
                points = [await event.record(stream) for event in events]
                with _recorded_by_another_thread(events[1], stream):
                    task = asyncio.create_task(client.wait_all(points, waiting))
                    with pytest.raises(ipcsync.WaitTimeout, match=r"another thread's wait .* within 0\.01 s") as late:
                        await client.wait_all(points, waiting, timeout=0.01)
                    assert late.value.event == "b"
                assert await asyncio.wait_for(task, LONG_S) == []
                assert not waiting.query()

    asyncio.run(scenario())


def test_a_reserved_record_is_made_once_another_threads_record_of_what_it_follows_is(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client, await client.reserve(engine=engine) as reservation:
            stream, other = ipcsync.Stream(), ipcsync.Stream()
            event = await client.event("e", recorder=True, engine=engine)
            with StreamGate(stream):
                followed = [await event.record(stream)]
                with _recorded_by_another_thread(event, stream):
                    recording = asyncio.create_task(reservation.record(other, after=followed))
                    await turns()
                    assert not recording.done()
                    with pytest.raises(ipcsync.WaitTimeout, match=r"another thread's record .* within 0\.01 s"):
                        await reservation.record(other, timeout=0.01, after=followed)
                point = await asyncio.wait_for(recording, LONG_S)
                assert point == reservation.point
                assert not await point.query()

    asyncio.run(scenario())


def test_while_another_thread_records_a_task_does_not_wait_again_and_again_for_what_its_record_follows(
    coordinator: ipcsync.Coordinator, engine: EngineName
) -> None:
    is_inside, goes_on, waits = threading.Event(), threading.Event(), list[str]()
    record, wait = driver_functions.RECORD[engine], driver_functions.WAIT[engine]

    def stand() -> None:
        is_inside.set()
        goes_on.wait(2 * LONG_S)

    def count(real: driver_functions.Call, *arguments: Any) -> int:
        waits.append(wait)
        return int(real(*arguments))

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            event, source = await client.events(["e", "source"], recorder=True, engine=engine)
            stream, other = ipcsync.Stream(), ipcsync.Stream()

            def hold() -> None:
                with driver_functions.replaced({**driver_functions.amid(record, stand), wait: count}):
                    event._event.record(stream)

            with StreamGate(held := ipcsync.Stream()):
                followed = await source.record(held)
                holding = threading.Thread(target=hold)
                holding.start()
                try:
                    assert await asyncio.to_thread(is_inside.wait, LONG_S)
                    with pytest.raises(ipcsync.WaitTimeout):
                        await event.record(other, timeout=0.5, after=[followed])
                finally:
                    goes_on.set()
                    holding.join()
                assert 1 <= len(waits) <= 2, "at first, and at the end of its time"

    asyncio.run(scenario())


def test_a_record_that_is_cancelled_while_the_ring_is_full_is_not_made(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            stream = ipcsync.Stream()
            event = await client.event("e", recorder=True, engine="event", depth=1)
            with StreamGate(stream) as gate:
                await event.record(stream)
                task = asyncio.create_task(event.record(stream))
                await turns_until(lambda: len(client._client._session.waits._waiting), "the record waits for room")
                await cancel(task)
                gate.open()
                await event.at(1).synchronize(10)
            assert event.generation == 1
            assert (await event.record(stream)).generation == 2

    asyncio.run(scenario())


def _await_notice(notices: Iterator[ipcsync.Notice], kind: str, name: str) -> None:
    for notice in notices:
        if (notice.kind, notice.name) == (kind, name):
            return
    raise AssertionError(f"{name} was not {kind} within the watch's time")


def test_a_cancelled_event_is_closed_again(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    notices = client.watch(timeout=LONG_S)
    _await_notice(notices, "session_opened", "main")

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint, name="other") as other:
            with stopped(coordinator) as go_on:
                before = other.messages_sent
                task = asyncio.create_task(other.event("e", recorder=True, timeout=LONG_S))
                await turns_until(lambda: other.messages_sent > before, "the request is sent")
                await cancel(task)
                go_on()
            await asyncio.to_thread(_await_notice, notices, "opened", "e")
            await asyncio.to_thread(_await_notice, notices, "closed", "e")
            assert client.list_events("e") == []

    asyncio.run(scenario())


def test_a_cancelled_point_leaves_no_attachment(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(client.event("e", recorder=True).record(ipcsync.Stream()))
    is_attached = threading.Event()

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint, name="other") as other:
            session = other._client._session
            attach = session.attach

            def attach_and_tell(*arguments: Any, **options: Any) -> object:
                try:
                    return attach(*arguments, **options)
                finally:
                    is_attached.set()

            monkeypatch.setattr(session, "attach", attach_and_tell)
            with stopped(coordinator) as go_on:
                before = other.messages_sent
                task = asyncio.create_task(other.point(data, timeout=LONG_S))
                await turns_until(lambda: other.messages_sent > before, "the request is sent")
                await cancel(task)
                go_on()
            assert await asyncio.to_thread(is_attached.wait, LONG_S)

            def is_released() -> bool:
                return [row.session for row in client.list_attachments()] == [client.name]

            await asyncio.to_thread(until, is_released, "it is released", LONG_S)

    asyncio.run(scenario())


def test_an_event_that_is_there_when_the_cancellation_comes_is_closed_again(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    notices = client.watch(timeout=LONG_S)
    _await_notice(notices, "session_opened", "main")

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as other:
            task = asyncio.create_task(other.event("e"))
            await asyncio.sleep(0)
            _await_notice(notices, "opened", "e")  # blocks the loop, which does not learn of the answer meanwhile
            await cancel(task)
            await asyncio.to_thread(_await_notice, notices, "closed", "e")

    asyncio.run(scenario())


def test_a_close_goes_on_though_it_is_cancelled_before_it_began(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    async def scenario() -> None:
        other = await ipcsync.aconnect(coordinator.endpoint)
        event, reservation = await other.event("e", recorder=True), await other.reserve()
        for closing, left in ((event.close, (1, 2)), (reservation.close, (0, 2)), (other.close, (0, 1))):
            task = asyncio.create_task(closing())
            await asyncio.sleep(0)
            await cancel(task)

            def is_closed(left: tuple[int, int] = left) -> bool:
                return (len(client.list_events()), len(client.list_sessions())) == left

            await asyncio.to_thread(until, is_closed, "it is closed", LONG_S)

    asyncio.run(scenario())


class _Foreign:
    """Another library's stream, which is destroyed with this object."""

    def __init__(self) -> None:
        self._stream = ipcsync.Stream()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


def test_the_stream_of_a_cancelled_call_lives_until_that_has_ended(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        begun.set()
        go_on.wait(LONG_S)
        ended.set()
        raise RuntimeError("nobody awaits this")

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            stream = _Foreign()
            lives = weakref.ref(stream)
            monkeypatch.setattr(client._client, "_resume", slow)
            task = asyncio.create_task(client.resume(stream))
            del stream
            await turns_until(begun.is_set, "it is under way")
            await cancel(task)
            del task
            gc.collect()
            assert lives() is not None
            go_on.set()
            await turns_until(_collects(lambda: lives() is None), "it is let go")
            assert ended.is_set()

    asyncio.run(scenario())


def test_a_cancelled_resume_leaves_no_thread(coordinator: ipcsync.Coordinator) -> None:
    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            reservation, stream = await client.reserve(engine="timeline"), ipcsync.Stream()
            with StreamGate(stream):
                engine = (await client.point(bytes(reservation.point)))._point._bound().engine
                engine.wait(1, stream, None, True)
                await reservation.close()  # what the stream is to wait for is lost, and it does not get there
                await turns_until(lambda: engine.state != "open", "the close is told, which may wait for half a second")
                before = threads_named("ipcsync-alone")
                task = asyncio.create_task(client.resume(stream))
                await turns_until(lambda: threads_named("ipcsync-alone") - before, "it is under way")
                await cancel(task)
                await turns_until(lambda: not threads_named("ipcsync-alone") - before, "it has ended")

    asyncio.run(scenario())


@pytest.mark.usefixtures("nothing_queued")
def test_a_cancelled_record_of_everything_goes_on(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed.UnnamedEvents, "_kept", {})

    async def scenario() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            task = asyncio.create_task(client.record_all())
            await asyncio.sleep(0)
            await cancel(task)
            events = client._client._unnamed.events
            await turns_until(lambda: [event.generation for event in events.values()] == [1], "it is recorded")
            await turns_until(lambda: any(client._client._unnamed._kept.values()), "its stream is given back")

    asyncio.run(scenario())


def _abandon(call: Callable[[], Awaitable[object]], is_under_way: Callable[[], object]) -> None:
    """Begin a call in a loop that is then closed."""

    async def begin() -> None:
        task = asyncio.ensure_future(call())
        assert isinstance(task, asyncio.Task)
        task._log_destroy_pending = False  # type: ignore[attr-defined] # which is what this is about
        await turns_until(is_under_way, "it is under way")

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()


def _collects(condition: Callable[[], object]) -> Callable[[], object]:
    """The condition, asked after a collection: the thread that makes a call keeps its task until it has ended."""

    def ask() -> object:
        gc.collect()
        return condition()

    return ask


@pytest.mark.parametrize("opens", ["event", "events"])
def test_what_an_abandoned_loop_opens_is_closed_again(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, opens: str
) -> None:
    notices = client.watch(timeout=LONG_S)
    _await_notice(notices, "session_opened", "main")
    loop = asyncio.new_event_loop()
    other = loop.run_until_complete(ipcsync.aconnect(coordinator.endpoint, timeout=LONG_S))
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "event": lambda: other.event("e", recorder=True, timeout=LONG_S),
        "events": lambda: other.events(["e"], timeout=LONG_S),
    }
    try:
        with stopped(coordinator):
            before = other.messages_sent
            _abandon(calls[opens], lambda: other.messages_sent > before)
        _await_notice(notices, "opened", "e")
        until(_collects(lambda: not client.list_events()), "it is closed", LONG_S)
    finally:
        loop.run_until_complete(other.close())
        loop.close()


def test_a_connect_of_an_abandoned_loop_closes_its_session(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    notices = client.watch(timeout=LONG_S)
    _await_notice(notices, "session_opened", "main")
    with stopped(coordinator):
        before = threads_named("ipcsync-alone")
        _abandon(
            lambda: ipcsync.aconnect(coordinator.endpoint, name="late", timeout=LONG_S),
            lambda: threads_named("ipcsync-alone") - before,
        )
    _await_notice(notices, "session_opened", "late")
    until(_collects(lambda: len(client.list_sessions()) == 1), "it is closed", LONG_S)


def test_a_call_is_made_once_though_no_further_thread_can_be_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has it by then: one of its threads may make it, too."""

    def none_left(_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        pool, goes_on, calls = _runner.new_pool("ipcsync-tested", 2), threading.Event(), list[int]()
        busy = asyncio.create_task(_runner.run(goes_on.wait, pool=pool))
        await turns()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            await _runner.run(lambda: calls.append(1), pool=pool)
        goes_on.set()
        await busy
        await _runner.run(lambda: None, pool=pool)  # behind what the pool had
        assert calls == [1]

    asyncio.run(scenario())


def test_a_call_that_comes_as_the_only_thread_gives_up_waiting_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(SimpleQueue[Callable[[], object]]):
        def get(self, block: bool = True, timeout: float | None = None) -> Callable[[], object]:
            try:
                return super().get(block, timeout)
            except Empty:
                if calls:
                    pool(calls.pop())
                raise

    monkeypatch.setattr(_runner, "_IDLE_S", 0.01)
    monkeypatch.setattr(_runner, "SimpleQueue", Late)
    pool, made = _runner.new_pool("ipcsync-tested"), threading.Event()
    calls = [made.set]
    pool(lambda: None)
    assert made.wait(LONG_S)
    until(lambda: not threads_named("ipcsync-tested"), "its thread ends")


def test_a_call_that_comes_as_the_only_thread_has_made_one_leaves_nobody_to_count_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Crowded(SimpleQueue[Callable[[], object]]):
        def empty(self) -> bool:
            was_empty = super().empty()
            if calls:
                pool(calls.pop())
            return was_empty

    monkeypatch.setattr(_runner, "_IDLE_S", 0.01)
    monkeypatch.setattr(_runner, "SimpleQueue", Crowded)
    pool, made = _runner.new_pool("ipcsync-tested"), threading.Event()
    calls = [lambda: None]
    pool(lambda: None)
    until(lambda: not calls and not threads_named("ipcsync-tested"), "its thread ends")
    pool(made.set)
    assert made.wait(LONG_S)


def test_requests_are_made_though_more_threads_than_there_may_be_could_not_be_started(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise ipcsync.QuotaExceeded("there is no room for the thread")

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            with monkeypatch.context() as patch:
                patch.setattr(_runner, "start", none_left)
                for _ in range(20):
                    with pytest.raises(ipcsync.QuotaExceeded):
                        await client.list_sessions()
            await asyncio.wait_for(client.list_sessions(), LONG_S)

    asyncio.run(scenario())


def test_what_a_cancelled_call_made_is_undone_though_no_further_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(target: Callable[[], object], name: str, *args: Any) -> object:
        if name == "ipcsync-undo":
            raise ipcsync.QuotaExceeded(f"there is no room for the thread {name}")
        return start(target, name, *args)

    async def scenario() -> None:
        pool, undone = _runner.new_pool("ipcsync-tested"), list[bool]()
        begun, goes_on, is_over = threading.Event(), threading.Event(), threading.Event()

        def make() -> bool:
            begun.set()
            return goes_on.wait(LONG_S)

        task = asyncio.create_task(_runner.run(make, undone.append, pool=pool))
        await turns_until(begun.is_set, "it is under way")
        await cancel(task)
        goes_on.set()
        await turns_until(lambda: undone == [True], "the pool's thread undoes it")
        task = asyncio.create_task(_runner.run(make, undone.append, pool=pool))
        await asyncio.sleep(0)
        pool(is_over.set)
        assert is_over.wait(LONG_S)  # blocks the loop, which does not learn of the result meanwhile
        await cancel(task)
        assert undone == [True, True]
        assert await asyncio.wait_for(_runner.run(make, pool=pool), LONG_S)

    monkeypatch.setattr(_runner, "start", none_left)
    asyncio.run(scenario())


def test_an_exception_in_the_middle_of_a_submit_leaves_no_session(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interruption(BaseException):
        pass

    def start_and_be_interrupted(*args: Any) -> None:
        start(*args)
        raise Interruption

    async def connect() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(_runner, "start", start_and_be_interrupted)
            await ipcsync.aconnect(coordinator.endpoint, name="late", lease_ttl=600.0)

    with pytest.raises(Interruption):
        asyncio.run(connect())
    until(lambda: not threads_named("ipcsync-alone"), "the call is over")
    until(lambda: "late" not in [row.name for row in client.list_sessions()], "no session is left")


def test_a_cancelled_connect_closes_its_session(coordinator: ipcsync.Coordinator, client: ipcsync.Client) -> None:
    notices = client.watch(timeout=LONG_S)
    _await_notice(notices, "session_opened", "main")

    async def scenario() -> None:
        with stopped(coordinator) as go_on:
            before = threads_named("ipcsync-owner")
            task = asyncio.create_task(ipcsync.aconnect(coordinator.endpoint, name="late", timeout=LONG_S))
            await turns_until(lambda: threads_named("ipcsync-owner") - before, "it is under way")
            await cancel(task)
            go_on()
        await asyncio.to_thread(_await_notice, notices, "session_opened", "late")
        await asyncio.to_thread(_await_notice, notices, "session_closed", "late")

    asyncio.run(scenario())
    assert [session.name for session in client.list_sessions()] == ["main"]


@pytest.mark.parametrize("end", ["event", "client", "session"])
def test_what_ends_an_event_ends_a_record_that_another_threads_is_in_the_way_of(
    coordinator: ipcsync.Coordinator, engine: EngineName, end: str
) -> None:
    async def scenario() -> None:
        client = await ipcsync.aconnect(coordinator.endpoint)
        event, stream = await client.event("e", recorder=True, engine=engine), ipcsync.Stream()
        await event.record(stream)

        def record() -> None:
            with suppress(ipcsync.EventClosed, ipcsync.SessionExpired):
                event._event.record(stream)

        holding = threading.Thread(target=record)
        with driver_functions.held_up(*driver_functions.RECORD.values()) as held:
            holding.start()
            held.wait()
            recording = asyncio.create_task(event.record(stream))
            await turns()
            if end == "session":
                client._session.lease.lose(ipcsync.SessionExpired("silent"))
            else:
                await (event if end == "event" else client).close()
            with pytest.raises((ipcsync.EventClosed, ipcsync.SessionExpired)):
                await asyncio.wait_for(recording, LONG_S / 3)
        holding.join()
        await client.close()

    asyncio.run(scenario())
