"""Threads of one client that would be in each other's way: rows 47, 51 and 52."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync import _drivers
from ipcsync._deadline import deadline_of
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import actions, fixtures
from tests.kit import driver_functions, remote
from tests.kit.failing import Failing
from tests.kit.peer import Peer
from tests.kit.steps import at_step
from tests.kit.until import until

pytestmark = pytest.mark.keeper

_TTL_S = 3.0
NewClient = Callable[..., ipcsync.Client]


# --- row 47 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "what"), fixtures.each_once("record", "wait"))
def test_row_47_a_drivers_call_that_blocks_for_longer_than_the_ttl_costs_no_session(
    new_client: NewClient, engine: EngineName, what: str
) -> None:
    client, peer = new_client("slow", lease_ttl=_TTL_S), new_client("peer")
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    event, source = client.event("e", recorder=True, engine=engine), peer.event("s", recorder=True, engine=engine)
    event.record(stream).synchronize(10)
    blocked: list[str] = []

    def block() -> None:
        blocked.append(what)
        time.sleep(1.2 * client.lease_ttl)  # as behind a full queue: the GIL is released, other threads run

    with StreamGate(other) as gate:
        point = client.point(bytes(source.record(other)))
        name = (driver_functions.RECORD if what == "record" else driver_functions.WAIT)[engine]
        with driver_functions.replaced(driver_functions.amid(name, block)):
            if what == "record":
                event.record(stream)
            else:
                point.wait(stream)
        assert blocked
        gate.open()
    event.record(stream).synchronize(10)
    assert client.is_connected
    assert "slow" in [row.name for row in peer.list_sessions()]


@contextlib.contextmanager
def _amid_a_drivers_call(call: Callable[[], object], *names: str) -> Iterator[None]:
    """While another thread's call blocks in the driver."""
    with driver_functions.held_up(*names) as held:
        thread = threading.Thread(target=call)
        thread.start()
        held.wait()
        yield
        assert thread.is_alive(), "else the call that blocked was waited for"
    thread.join()


@contextlib.contextmanager
def _amid_a_record(event: ipcsync.SharedEvent, stream: ipcsync.Stream) -> Iterator[None]:
    with _amid_a_drivers_call(lambda: event.record(stream), *driver_functions.RECORD.values()):
        yield


@contextlib.contextmanager
def _amid_an_opening(point: ipcsync.Point) -> Iterator[None]:
    """While another thread's opening of the point's import blocks in the driver."""
    is_inside, is_over = threading.Event(), threading.Event()
    driver, thread = _drivers.load(), threading.Thread(target=point.query)
    opens = driver.cuIpcOpenEventHandle

    def block(*args: Any) -> Any:
        if threading.current_thread() is thread:
            is_inside.set()
            is_over.wait(30)
        return opens(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "cuIpcOpenEventHandle", block)
        thread.start()
        assert is_inside.wait(10)
        try:
            yield
            assert thread.is_alive(), "else the opening was waited for"
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize("call", ["a record", "a wait", "an opening"])
@pytest.mark.parametrize("role", ["recorder", "waiter"])
def test_row_47_a_drivers_call_that_blocks_keeps_no_wait_on_the_host_past_its_timeout(
    new_client: NewClient, engine: EngineName, role: str, call: str
) -> None:
    recorder = new_client("recorder")
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    event = recorder.event("e", recorder=True, engine=engine)
    opened = recorder.event("o", recorder=True, engine="event")
    used = event if role == "recorder" else new_client("waiter").event("e")
    theirs = new_client("opener").event("o")
    with StreamGate(stream) as gate:
        for _ in range(2):  # the first one's import is opened with the event, a waiter's second one by what asks for it
            event.record(stream)
            opened.record(stream)
        amid: Callable[[], contextlib.AbstractContextManager[None]] = {
            "a record": lambda: _amid_a_record(event, stream),
            "a wait": lambda: _amid_a_drivers_call(lambda: used.at(1).wait(other), *driver_functions.WAIT.values()),
            "an opening": lambda: _amid_an_opening(theirs.at(2)),
        }[call]
        with amid():
            assert not used.at(2).query()
            with pytest.raises(ipcsync.WaitTimeout):
                used.at(2).synchronize(0.1)
        gate.open()
        used.at(2).synchronize(10)
        event.record(stream).synchronize(10)


@pytest.mark.parametrize(
    "ends",
    [
        "it is complete",
        "its recorder dies",
        pytest.param("its recorder expires", marks=pytest.mark.thorough),
        "it is closed here",
    ],
)
def test_row_47_a_streams_wait_that_another_threads_call_holds_up_ends_with_what_it_waits_for(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer, engine: EngineName, ends: str
) -> None:
    lease_ttl = 1.0 if ends == "its recorder expires" else None
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine, lease_ttl)
    peer.call(remote.hold)
    event, stream = client.event("e"), ipcsync.Stream()
    point = client.point(peer.call(actions.record, "e"))
    with _amid_a_drivers_call(lambda: actions.error_of(point.wait, stream), *driver_functions.WAIT.values()):
        waiting = fixtures.Blocked(lambda: point.wait(ipcsync.Stream()))
        if ends == "it is complete":
            peer.call(remote.let_go)
            point.synchronize(10)
        elif ends == "its recorder dies":
            peer.call(actions.be_marked_as_dead)
        elif ends == "its recorder expires":
            fixtures.stop(peer.pid)
        else:
            event._engine.close()
        outcome = waiting.outcome()
    fixtures.resume(peer.pid)
    if ends != "it is complete":
        peer.call(remote.let_go)
    names = {"it is complete": "NoneType", "it is closed here": "EventClosed"}
    assert type(outcome).__name__ == names.get(ends, "RecorderLost")


def test_row_47_a_record_that_another_threads_call_holds_up_ends_with_its_event(
    client: ipcsync.Client, engine: EngineName
) -> None:
    stream, event = ipcsync.Stream(), client.event("e", recorder=True, engine=engine)
    event.record(stream)
    with _amid_a_drivers_call(lambda: actions.error_of(event.record, stream), driver_functions.RECORD[engine]):
        recording = fixtures.Blocked(lambda: event.record(stream))
        with pytest.raises(ipcsync.WaitTimeout):
            event.record(stream, timeout=0)
        event._engine.close()
        assert isinstance(recording.outcome(), ipcsync.EventClosed)


def test_row_47_a_record_that_another_threads_call_holds_up_ends_once_its_event_is_lost(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer, engine: EngineName
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "above", "timeline")
    peer.call(remote.hold)
    stream, event = ipcsync.Stream(), client.event("e", recorder=True, engine=engine)
    client.point(peer.call(actions.record, "above")).wait(stream)
    point = event.record(stream)
    with _amid_a_drivers_call(lambda: actions.error_of(event.record, stream), driver_functions.RECORD[engine]):
        recording = fixtures.Blocked(lambda: event.record(ipcsync.Stream()))
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(ipcsync.RecorderLost):
            point.synchronize(10)
        assert isinstance(recording.outcome(), ipcsync.RecorderLost)
    client.resume(stream, 10)


def test_row_47_nor_a_streams_wait_that_another_threads_call_holds_up(
    client: ipcsync.Client, engine: EngineName
) -> None:
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine)
    with StreamGate(stream) as gate:
        point = event.record(stream)
        waiting = _amid_a_drivers_call(lambda: point.wait(stream), *driver_functions.WAIT.values())
        for blocked in (_amid_a_record(event, stream), waiting):
            with blocked, pytest.raises(ipcsync.WaitTimeout, match="another thread's wait or record blocks"):
                point.wait(other, timeout=0.1)
        gate.open()
    point.wait(other)
    event.record(other).synchronize(10)


def test_row_47_nor_a_streams_first_record_that_another_threads_call_holds_up(client: ipcsync.Client) -> None:
    """That call comes between the look for the stream's marker and the turn in which one is made."""
    stream = ipcsync.Stream()
    event = client.event("e", recorder=True, engine="timeline")
    event.record(stream)
    blocked = _amid_a_record(event, stream)
    with contextlib.ExitStack() as stack:
        stack.enter_context(at_step("lock", lambda: stack.enter_context(blocked), behind=1))
        with pytest.raises(ipcsync.WaitTimeout, match="another thread's record or wait"):
            event.record(ipcsync.Stream(), timeout=0.1)
    assert event.record(stream).generation == 3


def test_row_47_what_is_complete_is_seen_amid_a_drivers_call_that_blocks(
    client: ipcsync.Client, engine: EngineName
) -> None:
    stream = ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine)
    point = event.record(stream)
    with _amid_a_record(event, stream):
        point.synchronize(10)
        assert point.query()
    assert event.record(stream).generation == 3
    until(lambda: event.completed == 3, "complete")


def test_row_47_a_drivers_call_that_blocks_keeps_no_other_event_from_its_callbacks(
    client: ipcsync.Client, engine: EngineName
) -> None:
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    blocked = client.event("blocked", recorder=True, engine=engine)
    free = client.event("free", recorder=True, engine=engine)
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    with StreamGate(stream) as gate, StreamGate(other) as other_gate:
        points = blocked.record(stream), free.record(other)
        with _amid_a_record(blocked, stream):
            for point in points:
                point.add_done_callback(lambda point: called.put(point.event_name))
            other_gate.open()
            assert called.get(timeout=10) == "free"
        gate.open()
        assert called.get(timeout=10) == "blocked"


# --- row 51 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_row_51_a_done_callback_that_would_end_its_thread_keeps_no_other_from_being_called(
    client: ipcsync.Client, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def give_up(_: ipcsync.Point) -> None:
        raise error

    stream, called = ipcsync.Stream(), threading.Event()
    client.record(stream).add_done_callback(give_up)
    said = "a done callback of generation 1 of an unnamed event (slot "
    until(lambda: said in caplog.text, "what it raised is logged, with the event")
    client.record(stream).add_done_callback(lambda _: called.set())
    assert called.wait(10)


def test_row_51_a_done_callback_that_does_not_return_keeps_no_other_from_being_called(client: ipcsync.Client) -> None:
    stream, go_on, called = ipcsync.Stream(), threading.Event(), threading.Event()
    client.record(stream).add_done_callback(lambda _: go_on.wait(60))
    client.record(stream).add_done_callback(lambda _: called.set())
    try:
        assert called.wait(20)
    finally:
        go_on.set()


@pytest.mark.parametrize("returns", [True, False])
def test_row_51_asynchronous_waits_end_beside_a_bad_callback(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, returns: bool
) -> None:
    go_on = threading.Event()

    def bad(_: ipcsync.AsyncPoint) -> None:
        raise SystemExit

    async def wait() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as own:
            stream = ipcsync.Stream()
            first = own._client.point(bytes(client.record(stream)))
            first.add_done_callback(bad if returns else lambda _: go_on.wait(60))  # type: ignore[arg-type]
            event = await own.event("e")
            with pytest.raises(ipcsync.WaitTimeout):
                await asyncio.wait_for(event.at(1).synchronize(timeout=0.2), 20)
            recorder = client.event("e", recorder=True)
            recorder.record(stream)
            await asyncio.wait_for(event.at(1).synchronize(timeout=20), 30)
            go_on.set()

    asyncio.run(wait())


# --- row 52 -----------------------------------------------------------------------------------------------------------


def test_row_52_threads_that_open_and_close_one_name_do_not_end_each_others_event(
    client: ipcsync.Client, engine: EngineName
) -> None:
    errors: list[BaseException] = []
    rounds = [0, 0, 0]
    end = time.monotonic() + 1.5

    def work(number: int) -> None:
        stream = ipcsync.Stream()
        try:
            while time.monotonic() < end or not rounds[number]:
                with client.event("shared", recorder=True, engine=engine) as event:
                    for _ in range(3):
                        event.record(stream, timeout=20)
                rounds[number] += 1
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[:3]
    assert min(rounds) > 0


def test_row_52_the_last_close_amid_an_opening_of_its_name_ends_nothing_of_the_new_one(
    client: ipcsync.Client, new_client: Callable[..., ipcsync.Client], engine: EngineName, monkeypatch: Any
) -> None:
    """The close comes between the request and its reply: the owner does one behind the other."""
    waiting = new_client("waiting").event("shared", engine=engine)
    first, stream, table = client.event("shared", recorder=True, engine=engine), ipcsync.Stream(), _table(client)
    add = table.add

    def close_first(*args: Any) -> Any:
        client._session.abandon([first._attached])
        return add(*args)

    first.record(stream)
    monkeypatch.setattr(table, "add", close_first)
    second = client.event("shared", recorder=True, engine=engine)
    monkeypatch.undo()
    assert second.record(stream).generation == 2
    waiting.at(2).synchronize(10)
    second.close()
    with pytest.raises(ipcsync.RecorderLost):
        waiting.at(3).synchronize(10)
    assert client.event("shared", recorder=True, engine=engine).generation == 0, "the name is free"


@pytest.mark.parametrize("is_released", [False, True])
def test_row_52_a_point_attached_amid_the_close_of_its_event_does_not_keep_it_open(
    client: ipcsync.Client,
    new_client: Callable[..., ipcsync.Client],
    engine: EngineName,
    monkeypatch: Any,
    is_released: bool,
) -> None:
    """The close has begun, and is not told yet."""
    event, stream = client.event("shared", recorder=True, engine=engine), ipcsync.Stream()
    waiting, points = new_client("waiting").event("shared"), list[ipcsync.Point]()
    progress, is_begun = client._session.driving.progress, list[bool]()

    def attach_first(used: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not is_begun:  # and not the driver's
            is_begun.append(True)
            points.append(client.point(data))
        return progress(used)

    with StreamGate(stream) as gate:
        data = bytes(event.record(stream))
        if is_released:
            gate.open()
            waiting.at(1).synchronize(10)
        monkeypatch.setattr(client._session.driving, "progress", attach_first)
        event.close()
        with pytest.raises(ipcsync.RecorderLost) as lost:
            waiting.at(2).synchronize(10)
        assert lost.value.cause == "closed"
        assert client.event("shared", recorder=True, engine=engine).generation == 0, "the name is free"
        gate.open()
    points[0].synchronize(10)
    waiting.at(1).synchronize(10)


def test_row_52_a_use_that_ends_amid_a_record_of_an_earlier_one_does_not_say_that_the_record_is_complete(
    client: ipcsync.Client, new_client: NewClient
) -> None:
    """To the coordinator both are one, and what it is told to be complete it counts."""
    event, stream, table = client.event("e", recorder=True, engine="timeline"), ipcsync.Stream(), _table(client)
    seen, session = new_client("waiting").event("e"), client._session
    data = bytes(event.record(stream))
    seen.at(1).synchronize(10)

    def is_alone() -> bool:
        session.driving.look()
        session._call(table.beat, deadline_of(5.0), 5.0)
        return not table.uses and len(table.ending) == 1

    with StreamGate(stream) as gate:
        with driver_functions.held_up("cuStreamWriteValue64") as held:
            recording = Failing(lambda: event.record(stream))
            held.wait()
            event.close()
            assert client.point(data).query()
        assert isinstance(recording.raised(), ipcsync.EventClosed)
        until(is_alone, "the point's use is over")
        assert not seen.at(2).query()
        gate.open()
        seen.at(2).synchronize(10)


def _use(event: ipcsync.SharedEvent) -> tuple[int, int]:
    return event._engine.slot, event._engine.incarnation


def _table(client: ipcsync.Client) -> Any:
    return client._session.attachments
