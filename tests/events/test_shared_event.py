"""A shared event: what it says of itself, its generations, and its ring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit.failing import Failing
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


# --- what it says of itself -------------------------------------------------------------------------------------------


def test_a_new_event_says_what_it_is(client: ipcsync.Client, engine: EngineName) -> None:
    with client.event("a/b", engine=engine, depth=3) as event:
        assert (event.name, event.engine, event.depth, event.state) == ("a/b", engine, 3, "open")
        assert event.device == ipcsync.Device(ipcsync.current_device())
        assert (event.generation, event.completed, event.latest) == (0, 0, None)
        assert repr(event) == f"<ipcsync.SharedEvent 'a/b' {engine} open generation=0>"
    assert event.state == "closed"
    assert "closed" in repr(event)


def test_handles_are_the_rings_and_a_timeline_has_none(new_client: NewClient) -> None:
    first, second = new_client(), new_client()
    event, same = first.event("e", engine="event", depth=3), second.event("e")
    assert len(event.handles) == 3
    assert all(isinstance(handle, bytes) and len(handle) == 64 for handle in event.handles)
    assert len(set(event.handles)) == 3
    with pytest.raises(ipcsync.EngineMismatch, match=r"a ring of 3 CUDA events.*open it with depth=1.*bytes\(point\)"):
        event.handle  # noqa: B018 - torch would wait for another record with it
    single = first.event("single", engine="event", depth=1)
    assert (single.handle,) == single.handles
    assert same.handles == event.handles
    timeline = first.event("t", engine="timeline")
    for attribute in ("handle", "handles"):
        with pytest.raises(ipcsync.EngineMismatch, match=r"no CUDA event.*engine='event'.*bytes\(point\)"):
            getattr(timeline, attribute)


def test_the_depth_is_the_creators(new_client: NewClient) -> None:
    first, second = new_client(), new_client()
    with first.event("e", depth=2), second.event("e", depth=9) as event:
        assert event.depth == 2


@pytest.mark.parametrize("depth", [0, -1, 1025])
def test_a_depth_outside_its_range_is_refused(client: ipcsync.Client, depth: int) -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        client.event("e", depth=depth)


@pytest.mark.parametrize("depth", ["4", 4.0, True])
def test_a_depth_that_is_no_int_is_refused(client: ipcsync.Client, depth: Any) -> None:
    with pytest.raises(TypeError):
        client.event("e", depth=depth)


def test_the_greatest_depth_works(client: ipcsync.Client) -> None:
    with client.event("e", engine="event", depth=1024, recorder=True) as event:
        assert len(event.handles) == 1024
        event.record(ipcsync.Stream()).synchronize(10)


# --- generations ------------------------------------------------------------------------------------------------------


def test_each_record_makes_the_next_generation_for_everybody(new_client: NewClient, engine: EngineName) -> None:
    event = new_client().event("e", recorder=True, engine=engine)
    seen = new_client().event("e")
    stream = ipcsync.Stream()
    for generation in (1, 2, 3):
        point = event.record(stream)
        assert point.generation == event.generation == seen.generation == generation
        assert event.latest == seen.latest == point
        assert seen.at(generation) == point
        point.synchronize(10)
        assert event.completed == generation
    assert seen.at(3).query()
    assert seen.completed == 3


def test_completed_is_behind_what_is_recorded_while_work_is_pending(new_client: NewClient, engine: EngineName) -> None:
    event = new_client().event("e", recorder=True, engine=engine)
    seen = new_client().event("e")
    stream = ipcsync.Stream()
    event.record(stream).synchronize(10)
    with StreamGate(stream) as gate:
        event.record(stream)
        last = event.record(stream)
        assert (event.generation, event.completed) == (3, 1)
        assert seen.generation == 3
        assert seen.completed <= 1
        gate.open()
        last.synchronize(10)
    assert event.completed == 3
    seen.at(3).synchronize(10)
    assert seen.completed == 3


def test_each_record_is_complete_as_soon_as_its_own_work_is(new_client: NewClient, engine: EngineName) -> None:
    event = new_client().event("e", recorder=True, engine=engine)
    stream = ipcsync.Stream()
    for before in range(1, 3):
        event.record(stream)
        stream.synchronize()
        with StreamGate(stream):
            for _ in range(2):
                event.record(stream)
            assert event.completed == 3 * before - 2
        stream.synchronize()
        assert event.completed == 3 * before


def test_what_an_idle_recorder_finished_is_told_by_its_heartbeat(new_client: NewClient, engine: EngineName) -> None:
    event = new_client(lease_ttl=2).event("e", recorder=True, engine=engine)
    other = new_client()
    event.record(ipcsync.Stream())
    until(lambda: other.list_events("e")[0].completed == 1, "the board says that it is complete")


@pytest.mark.parametrize("generation", [0, -1, 1 << 62])
def test_generations_are_counted_from_one(client: ipcsync.Client, generation: int) -> None:
    text = rf"counted from 1 to 2\*\*62 - 1, but got {generation}$"
    with client.event("e") as event, pytest.raises(ValueError, match=text):
        event.at(generation)


@pytest.mark.parametrize("generation", ["1", 1.0, None, True])
def test_a_generation_that_is_no_int_is_refused(client: ipcsync.Client, generation: Any) -> None:
    with client.event("e") as event, pytest.raises(TypeError):
        event.at(generation)


def test_threads_that_record_one_event_make_every_generation_once_and_in_order(
    new_client: NewClient, engine: EngineName
) -> None:
    event = new_client().event("e", recorder=True, engine=engine, depth=4)
    waiter = new_client()
    threads, each = 4, 25
    made: list[list[ipcsync.Point]] = [[] for _ in range(threads)]
    start = threading.Barrier(threads)

    def record(mine: list[ipcsync.Point]) -> None:
        stream = ipcsync.Stream()
        start.wait(10)
        mine.extend(event.record(stream, timeout=20) for _ in range(each))

    runs = [Failing(lambda mine=mine: record(mine)) for mine in made]  # type: ignore[misc] # the default binds it now
    assert [run.raised() for run in runs] == [None] * threads
    generations = [[point.generation for point in mine] for mine in made]
    assert all(mine == sorted(mine) for mine in generations)
    assert sorted(number for mine in generations for number in mine) == list(range(1, threads * each + 1))
    waiter.event("e").at(threads * each).synchronize(10)
    assert all(point.query() for mine in made for point in mine)


def test_a_record_on_another_stream_is_not_complete_before_the_one_before_it(
    new_client: NewClient, engine: EngineName
) -> None:
    event = new_client().event("e", recorder=True, engine=engine)
    seen = new_client().event("e")
    first, second, third, waiting = (ipcsync.Stream() for _ in range(4))
    with StreamGate(first) as gate:
        event.record(first)
        later = event.record(second)
        last = event.record(third)
        seen.at(3).wait(waiting)
        for point in (later, last, seen.at(2), seen.at(3)):
            assert not point.query()
        assert not waiting.query()
        gate.open()
        last.synchronize(10)
        assert later.query()
    until(waiting.query, "the waiter goes on")


def test_a_record_goes_back_to_its_first_stream_in_order_too(client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", recorder=True, engine=engine)
    first, second = ipcsync.Stream(), ipcsync.Stream()
    event.record(first)
    with StreamGate(second):
        event.record(second)
        assert not event.record(first).query()
    event.at(3).synchronize(10)


def test_recording_with_no_stream_takes_the_current_one(client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream = ipcsync.Stream()
    with StreamGate(stream), ipcsync.stream(stream):
        held = event.record()
        assert not held.query()
    held.synchronize(10)
    event.record(None).synchronize(10)


def test_a_default_stream_may_record_and_wait(client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", recorder=True, engine=engine)
    default = ipcsync.default_stream()
    point = event.record(default)
    point.wait(default)
    point.synchronize(10)
    event.record(0).synchronize(10)


def test_what_is_no_stream_is_refused_and_records_nothing(client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", recorder=True, engine=engine)
    for wrong in ("main", object(), 1.5):
        with pytest.raises(TypeError):
            event.record(wrong)  # type: ignore[arg-type]
    assert event.generation == 0


# --- the ring ---------------------------------------------------------------------------------------------------------


def test_a_full_ring_blocks_until_the_oldest_is_complete_and_is_counted(client: ipcsync.Client) -> None:
    event = client.event("e", recorder=True, engine="event", depth=2)
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        event.record(stream)
        event.record(stream)
        before = client.stats()["client"]["full_ring_waits"]
        with pytest.raises(ipcsync.WaitTimeout) as caught:
            event.record(stream, timeout=0.05)
        assert (caught.value.event, caught.value.generation, caught.value.timeout) == ("e", 1, 0.05)
        assert "generation 1 of 'e'" in str(caught.value)
        assert event.generation == 2
        assert client.stats()["client"]["full_ring_waits"] == before + 1
        blocked = Failing(lambda: event.record(stream, timeout=15))
        until(lambda: client.stats()["client"]["full_ring_waits"] == before + 2, "the record waits for room")
        gate.open()
        assert blocked.raised() is None
    assert event.generation == 3


def test_a_timeline_has_room_for_any_number(client: ipcsync.Client) -> None:
    event = client.event("e", recorder=True, engine="timeline", depth=1)
    stream = ipcsync.Stream()
    with StreamGate(stream):
        for _ in range(64):
            event.record(stream, timeout=0)
    event.at(64).synchronize(10)
    assert client.stats()["client"]["full_ring_waits"] == 0


def test_a_point_is_waited_for_exactly_when_the_ring_goes_round(new_client: NewClient) -> None:
    event = new_client().event("e", recorder=True, engine="event", depth=2)
    seen = new_client().event("e")
    first, second = ipcsync.Stream(), ipcsync.Stream()
    for _ in range(5):
        event.record(first).synchronize(10)
    with StreamGate(second):
        event.record(second)
        assert seen.at(5).query()
        seen.at(4).synchronize(10)
        seen.at(5).wait(first)
        until(first.query, "a complete point holds nobody, whatever is recorded after it")
        assert not seen.at(6).query()


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan")])
def test_an_invalid_timeout_is_refused_before_anything_happens(
    client: ipcsync.Client, engine: EngineName, timeout: float
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream = ipcsync.Stream()
    with pytest.raises(ValueError, match="timeout"):
        event.record(stream, timeout=timeout)
    assert event.generation == 0
    point = event.record(stream)
    point.synchronize(10)
    with pytest.raises(ValueError, match="timeout"):
        point.synchronize(timeout)
    with pytest.raises(ValueError, match="timeout"):
        point.wait(stream, timeout=timeout)
