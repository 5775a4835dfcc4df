"""Which calls go straight to the core, that they are counted, and what comes of one that the driver refuses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import ipcsync
from ipcsync._engines import queued
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import driver_functions, remote
from tests.kit.boards import bits_of
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.core, pytest.mark.driver, pytest.mark.usefixtures("nothing_queued")]


class Foreign:
    """Another library's stream."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


class Plain:
    """A stream of another library that does not share the protocol."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self.cuda_stream = stream.cuda_stream


class OtherPlain(Plain):
    """The same of a second one."""


@pytest.fixture
def refuse() -> Iterator[Callable[..., None]]:
    """Has the driver say of the core's next call of a function that it was refused, which it made or did not."""

    def refuse(name: str, *, is_made: bool) -> None:
        driver_functions.replace(driver_functions.refused_once(name, is_made=is_made))

    yield refuse
    driver_functions.restore()


def taken(client: ipcsync.Client, call: Callable[[], object], times: int = 1) -> tuple[int, int]:
    """How many calls went straight to the core, and of how many Python looked at the arguments first."""
    before: Any = client.stats()["client"]
    for _ in range(times):
        call()
    after: Any = client.stats()["client"]
    return after["shortcuts"] - before["shortcuts"], after["slow_calls"] - before["slow_calls"]


def test_a_second_record_on_a_stream_is_a_shortcut(client: ipcsync.Client, engine: EngineName) -> None:
    stream = ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine)
    for _ in range(event.depth):  # each opens an event of the ring
        event.record(stream).synchronize(10)
    shortcuts = 0
    for _ in range(8):
        shortcuts += taken(client, lambda: event.record(stream))[0]
        event.at(event.generation).synchronize(10)
    assert shortcuts >= 7  # one may have found a lock held
    assert event.generation == event.depth + 8


def test_foreign_streams_and_addresses_are_shortcuts_too(client: ipcsync.Client, engine: EngineName) -> None:
    stream = ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine, depth=1)
    for how in (Plain(stream), Foreign(stream), OtherPlain(stream), stream.cuda_stream):
        event.record(stream).synchronize(10)
        shortcuts = 0
        for _ in range(4):
            shortcuts += taken(client, lambda how=how: event.record(how))[0]  # type: ignore[misc]
            event.at(event.generation).synchronize(10)
        assert shortcuts >= 3  # one may have found the ring full


def test_a_recorder_that_alternates_between_streams_takes_shortcuts_in_order(
    client: ipcsync.Client, engine: EngineName
) -> None:
    streams = [ipcsync.Stream(), ipcsync.Stream()]
    event = client.event("e", recorder=True, engine=engine, depth=8)
    for number in range(16):
        event.record(streams[number % 2]).synchronize(10)
    with StreamGate(streams[0]) as gate:
        shortcuts, _ = taken(client, lambda: [event.record(stream) for stream in streams])
        assert shortcuts == 2
        assert not event.at(17).query()
        assert not event.at(18).query()  # though nothing else holds the second stream
        gate.open()
    event.at(18).synchronize(10)


def test_waits_and_queries_are_shortcuts(client: ipcsync.Client, engine: EngineName) -> None:
    other = ipcsync.connect(client._session.endpoint)
    stream, waiting = ipcsync.Stream(), ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine)
    with other:
        with StreamGate(stream) as gate:
            point = other.point(bytes(event.record(stream)))
            point.wait(waiting)  # makes the marker
            assert taken(other, lambda: point.wait(waiting))[0] == 1
            assert not point.query()
            assert not waiting.query()
            gate.open()
        point.synchronize(10)
        waiting.synchronize()
        assert taken(other, point.query, 3)[0] == 3
        assert taken(other, lambda: point.wait(waiting), 3)[0] == 3
        assert taken(other, lambda: point.synchronize(10), 3)[0] == 3


def test_what_one_event_has_seen_of_a_stream_is_known_to_all_of_the_process(
    client: ipcsync.Client, engine: EngineName
) -> None:
    recorded, waiting = ipcsync.Stream(), ipcsync.Stream()
    first, second = (client.event(name, recorder=True, engine=engine) for name in ("one", "two"))
    with ipcsync.connect(client._session.endpoint) as other:
        with StreamGate(recorded):
            other.point(bytes(first.record(recorded))).wait(waiting)
            assert taken(client, lambda: second.record(recorded)) == (1, 0)
            assert taken(client, lambda: first.record(waiting)) == (1, 0)
            point = other.point(bytes(second.at(1)))
            assert not point.query()
            assert taken(other, lambda: point.wait(waiting)) == (1, 0)
        ipcsync.synchronize_all([point, first.at(2)], timeout=10)
        waiting.synchronize()


def test_a_record_behind_another_sessions_work_is_a_shortcut(client: ipcsync.Client, engine: EngineName) -> None:
    other = ipcsync.connect(client._session.endpoint)
    stream, waiting = ipcsync.Stream(), ipcsync.Stream()
    event = client.event("e", recorder=True, engine=engine, depth=8)
    with other, other.event("above", recorder=True, engine=engine, depth=8) as above:
        for _ in range(8):
            event.record(waiting).synchronize(10)
            client.point(bytes(above.record(stream))).synchronize(10)
        with StreamGate(stream) as gate:
            points = [client.point(bytes(above.record(stream))) for _ in range(4)]

            def follow(point: ipcsync.Point) -> ipcsync.Point:
                point.wait(waiting)
                return event.record(waiting)

            follow(points[0])  # makes the marker, and the first entry of the chain
            behind: list[ipcsync.Point] = []
            for point in points[1:]:
                assert taken(client, lambda point=point: behind.append(follow(point)))[0] == 2  # type: ignore[misc]
            entries = event._engine.chain.entries
            assert [(entry.first, entry.last) for entry in entries.values()] == [(9, 9), (10, 10), (11, 11), (12, 12)]
            assert [wait.generation for wait in entries] == [9, 10, 11, 12]
            assert bits_of(event._engine.line) == 1 << other._session.lease.welcome.line
            assert not behind[-1].query()
            gate.open()
        behind[-1].synchronize(10)
        until(lambda: event.completed == 12, "all of them judged")
        assert (event._engine.chain.entries, bits_of(event._engine.line)) == ({}, 0)


def test_two_streams_in_turn_that_wait_and_record_take_shortcuts_only(
    client: ipcsync.Client, engine: EngineName
) -> None:
    other = ipcsync.connect(client._session.endpoint)
    held, streams = ipcsync.Stream(), [ipcsync.Stream(), ipcsync.Stream()]
    event = client.event("e", recorder=True, engine=engine, depth=16)
    with other, other.event("above", recorder=True, engine=engine, depth=16) as above:

        def follow(number: int, point: ipcsync.Point) -> ipcsync.Point:
            point.wait(streams[number % 2])
            return event.record(streams[number % 2])

        def keep(behind: list[ipcsync.Point], number: int, point: ipcsync.Point) -> None:
            behind.append(follow(number, point))

        for number in range(16):  # opens both rings
            follow(number, client.point(bytes(above.record(held)))).synchronize(10)
        with StreamGate(held) as gate:
            points = [client.point(bytes(above.record(held))) for _ in range(8)]
            for number in range(2):  # makes the markers, and the chain's first entries
                follow(number, points[number])
            behind: list[ipcsync.Point] = []
            for number in range(2, 8):
                assert taken(client, partial(keep, behind, number, points[number])) == (2, 0)
            later = client.event("later", recorder=True, engine=engine).record(streams[0])
            own = [wait.generation for wait in queued.of(None) if wait.view is event._engine]
            assert sorted(own) == [*range(17, 24)], "each stream follows what was recorded on the other one"
            assert not any(point.query() for point in (*behind, later))
            gate.open()
        later.synchronize(10)
        behind[-1].synchronize(10)
        until(lambda: event.completed == 24, "all of them judged")
        assert (event._engine.chain.entries, bits_of(event._engine.line)) == ({}, 0)


def test_of_what_is_rare_python_looks_at_the_arguments_first(client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", recorder=True, engine=engine)
    assert taken(client, event.record) == (0, 1)  # the default stream
    with pytest.raises(TypeError, match="a stream is"):
        event.record("none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout is"):
        event.at(1).wait(ipcsync.Stream(), timeout=-1)
    with pytest.raises(ValueError, match="timeout is"):
        event.at(1).synchronize(float("nan"))
    with pytest.raises(ipcsync.WaitTimeout):
        event.at(99).synchronize(0.01)


# A million in all; fewer where a stream's thread has to do each, for which the recorders wait.
_MANY = 6_250 if os.environ.get("IPCSYNC_HOST_ASYNC", "0") != "0" else 62_500


@pytest.mark.parametrize(
    ("count", "each"),
    [(8, 200), pytest.param(16, _MANY, marks=[pytest.mark.thorough, pytest.mark.timeout(900)])],
    ids=["some", "many"],
)
def test_threads_that_record_together_leave_no_gap(
    client: ipcsync.Client, engine: EngineName, count: int, each: int
) -> None:
    event = client.event("e", recorder=True, engine=engine, depth=8)
    made: list[list[int]] = []
    fallen: list[tuple[int, int]] = []
    is_over = threading.Event()

    def record() -> None:
        stream = ipcsync.Stream()
        made.append([event.record(stream).generation for _ in range(each)])

    def look() -> None:
        last = 0
        while not is_over.is_set():
            now = event.completed
            if now < last:
                fallen.append((last, now))
            last = now

    threads = [threading.Thread(target=record) for _ in range(count)]
    looker = threading.Thread(target=look)
    for thread in [*threads, looker]:
        thread.start()
    for thread in threads:
        thread.join()
    last = count * each
    event.at(last).synchronize(60)
    is_over.set()
    looker.join()
    assert all(numbers == sorted(numbers) for numbers in made)
    assert sorted(number for numbers in made for number in numbers) == list(range(1, last + 1))
    assert fallen == []
    until(lambda: event.completed == last, "all of them complete")


class Refused:
    """Two sessions, streams on which shortcuts are taken, and a call of the driver that is refused once."""

    def __init__(self, client: ipcsync.Client, engine: EngineName, name: str) -> None:
        self.client, self.other = client, ipcsync.connect(client._session.endpoint)
        self.stream, self.busy, self.third = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Stream()
        self.event = client.event(name, recorder=True, engine=engine, depth=8)
        self.above = self.other.event(f"{name}/above", recorder=True, engine=engine, depth=4)
        for stream in (self.third, self.stream) * 4:
            self.event.record(stream).synchronize(10)
            client.point(bytes(self.above.record(self.busy))).synchronize(10)

    def is_said(self, call: Callable[[], object], function: str) -> bool:
        """Whether the driver's error was raised; False: a beat had the lock, so that the call was no shortcut."""
        errors: list[ipcsync.DriverError] = []

        def attempt() -> None:
            try:
                call()
            except ipcsync.DriverError as error:
                errors.append(error)

        was_left = taken(self.client, attempt)[1] > 0
        assert bool(errors) != was_left
        for error in errors:
            assert str(error) == f"{function} failed: CUDA_ERROR_UNKNOWN (999)"
        return bool(errors)

    def close(self) -> None:
        self.event.close()
        self.other.close()


_WRITES = {"event": ["cuEventRecord"], "timeline": ["cuStreamWriteValue64", "cuEventRecord"]}


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("goes_on", [False, True], ids=["on another stream", "on the same stream"])
def test_a_record_that_the_driver_refuses_once_is_an_error_and_takes_one_number(
    client: ipcsync.Client, engine: EngineName, refuse: Callable[..., None], goes_on: bool, is_behind: bool
) -> None:
    said: set[str] = set()
    for number in range(4 * len(_WRITES[engine])):
        function = _WRITES[engine][number % len(_WRITES[engine])]
        made = Refused(client, engine, f"e{number}")
        event, stream = made.event, made.stream
        with StreamGate(made.busy) as gate:
            if is_behind:
                client.point(bytes(made.above.record(made.busy))).wait(stream)
            last = event.record(stream)  # makes the first entry of the chain
            with StreamGate(stream) as held:
                refuse(function, is_made=True)
                is_said = made.is_said(lambda event=event, stream=stream: event.record(stream), function)  # type: ignore[misc]
                driver_functions.restore()
                assert event.generation == (9 if is_said else 10)
                point = event.record(stream if goes_on else made.third)  # behind one more of the number in doubt
                assert point.generation == 11
                gate.open()
                last.synchronize(10)
                if not goes_on:
                    ahead = ipcsync.Event()
                    ahead.record(made.third)
                    assert not ahead.query(), "it waits for the stream that may have the refused record"
                assert not point.query()
                held.open()
        point.synchronize(10)
        stream.synchronize()
        assert event.completed == 11
        assert event._engine.line.completed - event._engine.base == 11, "no later write sets the word back"
        made.close()
        if is_said:
            said.add(function)
        if said == {*_WRITES[engine]}:
            return
    pytest.fail(f"of {_WRITES[engine]} only {said} was refused")


def test_a_wait_whose_marker_the_driver_refuses_once_is_an_error_and_has_its_marker(
    client: ipcsync.Client, engine: EngineName, refuse: Callable[..., None]
) -> None:
    for number in range(4):
        made = Refused(client, engine, f"e{number}")
        waiting = made.client.event(f"e{number}/above")
        with StreamGate(made.busy) as first:
            seen = [waiting.at(made.above.record(made.busy).generation)]
            gate = StreamGate(made.busy)
            seen.append(waiting.at(made.above.record(made.busy).generation))
            seen[0].wait(made.third)  # makes the marker
            between = ipcsync.Event()
            between.record(made.third)
            refuse("cuEventRecord", is_made=False)
            is_said = made.is_said(lambda seen=seen, made=made: seen[1].wait(made.third), "cuEventRecord")  # type: ignore[misc]
            driver_functions.restore()
            first.open()
            between.synchronize()  # so is the marker of the first wait
            assert not waiting._engine.has_passed(queued.list_of(made.third._handle, 0))
            gate.open()
        made.third.synchronize()
        until(lambda: waiting._engine.has_passed(queued.list_of(made.third._handle, 0)), "it is past its waits")  # noqa: B023
        waiting.close()
        made.close()
        if is_said:
            return
    pytest.fail("no wait was a shortcut")


@pytest.mark.parametrize("function", _WRITES["timeline"])
def test_a_record_that_is_made_again_stands_behind_what_was_waited_for_since(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer, function: str
) -> None:
    """The stream may have the refused one too, before the wait: its end proves nothing of that."""
    peer.call(remote.connect, coordinator.endpoint, "recorder")
    peer.call(remote.open_event, "theirs", {"recorder": True, "engine": "timeline"})
    theirs, event = client.event("theirs"), client.event("e", recorder=True, engine="timeline")
    stream = ipcsync.Stream()
    event.record(stream).synchronize(10)
    peer.call(remote.hold)
    peer.call(remote.record, "theirs", "main", 1)
    refused = driver_functions.refused_once(function, is_made=True)
    with driver_functions.replaced(refused), pytest.raises(ipcsync.DriverError):
        event.record(stream)
    theirs.at(1).wait(stream)
    point = event.record(stream)
    until(lambda: event._engine.line.completed - event._engine.base >= 2, "the refused one is complete")
    event._engine.publish_completed()
    assert not point.query()
    peer.kill()
    with pytest.raises(ipcsync.RecorderLost):
        point.synchronize(DEADLINE_S)
    with pytest.raises(ipcsync.RecorderLost):
        event.record(stream)
