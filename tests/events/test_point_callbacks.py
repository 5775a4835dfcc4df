"""Done callbacks of points: when they are called, in which order, on which thread, and with which end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync._session import waits
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import driver_functions, remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


class Calls:
    """A done callback that keeps the points it was called with."""

    def __init__(self) -> None:
        self.points: list[ipcsync.Point] = []
        self.threads: list[str] = []

    def __call__(self, point: ipcsync.Point) -> None:
        self.points.append(point)
        self.threads.append(threading.current_thread().name)


def test_a_done_callback_is_called_once_on_a_thread_of_the_client(event: ipcsync.SharedEvent) -> None:
    stream, calls = ipcsync.Stream(), Calls()
    with StreamGate(stream) as gate:
        point = event.record(stream)
        point.add_done_callback(calls)
        assert calls.points == []
        gate.open()
        until(lambda: bool(calls.points), "the callback is called")
    assert calls.points == [point]
    assert calls.points[0].exception() is None
    assert calls.threads != [threading.current_thread().name]


def test_a_done_callback_may_be_added_before_the_record_and_after_the_end(event: ipcsync.SharedEvent) -> None:
    calls, late = Calls(), Calls()
    event.at(1).add_done_callback(calls)
    event.record(ipcsync.Stream())
    until(lambda: bool(calls.points), "the callback is called")
    event.at(1).add_done_callback(late)
    until(lambda: bool(late.points), "the late callback is called too")


def test_callbacks_are_called_in_the_order_of_their_points_and_in_which_they_were_added(
    event: ipcsync.SharedEvent,
) -> None:
    stream, order = ipcsync.Stream(), []
    with StreamGate(stream):
        points = [event.record(stream) for _ in range(4)]
        for number, point in enumerate([*points, *points]):
            point.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc] # bound now
    points[-1].synchronize(10)
    until(lambda: len(order) == 8, "all are called")
    assert sorted(order) == list(range(8))
    for first in range(4):
        assert order.index(first) < order.index(first + 4), "of one point, in the order in which they were added"
    for added in (range(4), range(4, 8)):
        assert [number for number in order if number in added] == list(added), "older generations first"


def test_one_that_is_added_while_the_others_are_listed_stops_nobody(
    event: ipcsync.SharedEvent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, late, stream = Calls(), [event.at(2)], ipcsync.Stream()

    class Blocked(set[object]):
        def __contains__(self, _: object) -> bool:
            while late:  # as on another thread
                late.pop().add_done_callback(calls)
            return False

    monkeypatch.setattr(waits.Waits, "_asked_by_others", lambda _: Blocked())
    event.at(1).add_done_callback(calls)
    until(lambda: not late, "the second one is added")
    points = [event.record(stream) for _ in range(2)]
    until(lambda: len(calls.points) == 2, "both are called")
    assert calls.points == points
    assert not [each for each in caplog.records if each.threadName in ("ipcsync-waits", "ipcsync-watch")]


@pytest.mark.parametrize("error", [ipcsync.DriverError("not this time"), MemoryError()], ids=["driver", "memory"])
def test_a_look_that_fails_now_and_then_does_not_end_it(
    event: ipcsync.SharedEvent, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stream, calls, looks, ask = ipcsync.Stream(), Calls(), [0], event._engine.query

    def query(generation: int, may_block: bool) -> bool:
        looks[0] += 1
        if looks[0] % 2:
            raise error
        return ask(generation, may_block)

    monkeypatch.setattr(event._engine, "query", query)
    with StreamGate(stream) as gate:
        event.record(stream).add_done_callback(calls)
        until(lambda: looks[0] > 8, "it is looked at again")
        assert calls.points == []
        gate.open()
        until(lambda: bool(calls.points), "the callback is called")


def test_a_look_that_fails_again_and_again_ends_it(event: ipcsync.SharedEvent, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()

    def query(*_: float) -> bool:
        raise ipcsync.DriverError("for ever")

    monkeypatch.setattr(waits, "_FAILING_S", 0.05)
    monkeypatch.setattr(event._engine, "query", query)
    event.at(1).add_done_callback(calls)
    until(lambda: bool(calls.points), "the callback is called")


def test_a_callback_that_raises_stops_no_other(event: ipcsync.SharedEvent, caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls()

    def wrong(_: ipcsync.Point) -> None:
        raise ZeroDivisionError("in the callback")

    point = event.at(1)
    point.add_done_callback(wrong)
    point.add_done_callback(calls)
    event.record(ipcsync.Stream())
    until(lambda: bool(calls.points), "the other callback is called")
    until(lambda: "in the callback" in caplog.text, "the error is logged")


def test_a_callback_may_use_the_client_and_add_callbacks(client: ipcsync.Client, event: ipcsync.SharedEvent) -> None:
    calls, stream = Calls(), ipcsync.Stream()

    def more(_: ipcsync.Point) -> None:
        assert client.list_events("e")
        event.record(stream).add_done_callback(calls)

    event.record(stream).add_done_callback(more)
    until(lambda: bool(calls.points), "the second callback is called")
    assert [point.generation for point in calls.points] == [2]


def test_what_is_not_callable_is_refused(event: ipcsync.SharedEvent) -> None:
    with pytest.raises(TypeError):
        event.at(1).add_done_callback("print")  # type: ignore[arg-type] # on purpose


def test_a_callback_is_told_of_a_point_that_its_recorder_never_made(new_client: NewClient, engine: EngineName) -> None:
    recorder, waiter = new_client(), new_client()
    event = recorder.event("e", recorder=True, engine=engine)
    point, calls = waiter.event("e").at(1), Calls()
    point.add_done_callback(calls)
    event.close()
    until(lambda: bool(calls.points), "the callback is called")
    error = point.exception()
    assert isinstance(error, ipcsync.RecorderLost)
    assert error.generation == 1


def test_a_callback_is_told_of_a_recorders_death(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    peer.call(remote.connect, coordinator.endpoint)
    peer.call(remote.open_event, "e", {"recorder": True, "engine": engine})
    peer.call(remote.hold)
    (data,) = peer.call(remote.record, "e")
    point, calls = client.point(data), Calls()
    point.add_done_callback(calls)
    peer.kill()
    until(lambda: bool(calls.points), "the callback is called")
    assert isinstance(point.exception(), ipcsync.RecorderLost)


def test_a_callback_is_told_of_the_clients_own_close(new_client: NewClient, engine: EngineName) -> None:
    client = new_client()
    point, calls = client.event("e", engine=engine).at(1), Calls()
    point.add_done_callback(calls)
    client.close()
    assert calls.points == [point]
    assert isinstance(point.exception(), ipcsync.EventClosed)


@pytest.mark.parametrize("count", [1, waits._LOOKERS - 1], ids=["one", "as many as may be"])
def test_an_answer_that_the_driver_keeps_holds_up_no_other_events_callback(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, count: int
) -> None:
    peer.call(remote.connect, coordinator.endpoint)
    peer.call(remote.hold)
    points = []
    for number in range(count + 1):
        peer.call(remote.open_event, f"e{number}", {"recorder": True, "engine": "event"})
        points += [client.point(data) for data in peer.call(remote.record, f"e{number}")]
        points[-1].query()  # opens its import
    calls, other = Calls(), Calls()
    with driver_functions.held_up("cuEventQuery", threads=count) as driver:
        for point in points[:-1]:
            point.add_done_callback(calls)
            driver.wait()  # a thread that looks is inside, for this event
        points[-1].add_done_callback(other)
        peer.call(remote.let_go)
        until(lambda: bool(other.points), "the other's callback is called")
        assert calls.points == []
    until(lambda: len(calls.points) == count, "all are called")
