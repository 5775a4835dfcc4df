"""`record(after=[points])`: what is declared counts as what is queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import ipcsync
from ipcsync.typing import EngineName
from tests.events.stage import Stage
from tests.kit import remote
from tests.kit.failing import Failing
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver

Record = Callable[[ipcsync.Stream, Iterable[ipcsync.Point]], ipcsync.Point]


@pytest.fixture(params=["event", "client", "reservation"])
def record(request: pytest.FixtureRequest, client: ipcsync.Client, engine: EngineName) -> Iterator[Record]:
    """Each way to record."""
    if request.param == "client":
        yield lambda stream, after: client.record(stream, engine=engine, after=after)
    elif request.param == "event":
        with client.event("after", recorder=True, engine=engine) as event:
            yield lambda stream, after: event.record(stream, after=after)
    else:
        with client.reserve(engine=engine) as reservation:
            yield lambda stream, after: reservation.record(stream, after=after)


@pytest.mark.parametrize("is_generator", [False, True], ids=["a list", "a generator"])
@pytest.mark.parametrize("stream", [ipcsync.Stream, ipcsync.default_stream], ids=["a stream", "the default stream"])
def test_a_record_is_complete_only_after_the_points_that_it_is_after(
    stage: Stage, record: Record, stream: Callable[[], ipcsync.Stream], is_generator: bool
) -> None:
    point, gate = stage.pending()
    on = stream()
    made = record(on, (each for each in [point]) if is_generator else [point])
    assert not made.query()
    assert not on.query()
    gate.open()
    made.synchronize(DEADLINE_S)
    assert point.query()


def test_it_may_be_after_a_complete_point(stage: Stage, record: Record) -> None:
    point, gate = stage.pending()
    gate.open()
    point.synchronize(DEADLINE_S)
    stream = ipcsync.Stream()
    record(stream, [point]).synchronize(DEADLINE_S)


def test_it_waits_on_the_host_until_they_are_recorded(stage: Stage) -> None:
    made, seen = stage.open()
    recording, _ = stage.open()
    stream = ipcsync.Stream()
    with pytest.raises(ipcsync.WaitTimeout, match=r"^generation 1 of 'e1' was not recorded within 0.02 s$"):
        recording.record(stream, timeout=0.02, after=[seen.at(1)])
    assert recording.generation == 0
    thread = threading.Thread(target=made.record, args=(ipcsync.Stream(),))
    thread.start()
    recording.record(stream, timeout=DEADLINE_S, after=[seen.at(1)]).synchronize(DEADLINE_S)
    thread.join()


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_lost_point_ends_it_though_another_one_is_never_recorded(
    coordinator: ipcsync.Coordinator, stage: Stage, peer: Peer, dies: str, is_last: bool
) -> None:
    made, seen = stage.open()
    other, never = stage.open()
    peer.call(remote.connect, coordinator.endpoint)
    peer.call(remote.open_event, "dying", {"recorder": True, "engine": stage.engine})
    with stage.waiting.event("dying") as dying:
        after = [never.at(1), dying.at(1)] if is_last else [dying.at(1), never.at(1)]
        if dies == "before":
            peer.kill()
        recording = Failing(lambda: made.record(ipcsync.Stream(), timeout=DEADLINE_S, after=after))
        if dies == "meanwhile":
            until(lambda: (other if is_last else dying)._engine.line.awaited, "it waits for the first one")
            peer.kill()
        error = recording.raised()
    assert isinstance(error, ipcsync.RecorderLost)
    assert (error.event, error.generation, error.cause) == (seen.name, 1, "behind")
    assert made.generation == 0


def test_a_lost_record_of_its_own_ends_it_too(coordinator: ipcsync.Coordinator, stage: Stage, peer: Peer) -> None:
    made, _ = stage.open()
    other, never = stage.open()
    stream = ipcsync.Stream()
    stage.waiting.point(peer.call(remote.record_unfinished, coordinator.endpoint, "dying")).wait(stream)
    after = [never.at(1), made.record(stream)]
    recording = Failing(lambda: made.record(ipcsync.Stream(), timeout=DEADLINE_S, after=after))
    until(lambda: other._engine.line.awaited, "it waits for the first one")
    peer.kill()
    error = recording.raised()
    assert isinstance(error, ipcsync.RecorderLost)
    assert (error.generation, error.cause) == (2, "behind")


def test_one_point_in_place_of_several_is_refused(client: ipcsync.Client, record: Record) -> None:
    one: Any = client.record()
    with pytest.raises(TypeError, match="after takes points, in a list or another iterable, but got Point"):
        record(ipcsync.Stream(), one)


def test_what_gives_the_points_may_call_anything(client: ipcsync.Client) -> None:
    """No lock is taken before."""
    with client.reserve() as reservation:

        def points() -> Iterator[ipcsync.Point]:
            yield reservation.record(ipcsync.Stream())

        with pytest.raises(ipcsync.EventClosed, match="is recorded, and for one record"):
            reservation.record(ipcsync.Stream(), after=points())
        reservation.point.synchronize(DEADLINE_S)


def test_a_point_of_the_event_itself_has_to_be_recorded(stage: Stage) -> None:
    made, seen = stage.open()
    stream = ipcsync.Stream()
    with pytest.raises(ValueError, match="generation 1 of 'e1' cannot depend on its generation 1"):
        made.record(stream, after=[seen.at(1)])
    first = made.record(stream)
    made.record(ipcsync.Stream(), after=[first]).synchronize(DEADLINE_S)
