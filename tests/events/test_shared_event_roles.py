"""A shared event: who records, its objects, and what a close means."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import remote
from tests.kit.failing import Failing
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


# --- who records ------------------------------------------------------------------------------------------------------


def test_only_who_opened_it_as_recorder_may_record(new_client: NewClient, engine: EngineName) -> None:
    event = new_client("waiter").event("e", engine=engine)
    with pytest.raises(ipcsync.NotRecorder):
        event.record(ipcsync.Stream())
    recorder = new_client("recorder").event("e", recorder=True)
    with pytest.raises(ipcsync.NotRecorder):
        event.record(ipcsync.Stream())
    recorder.record(ipcsync.Stream()).synchronize(10)


def test_another_recorder_is_refused_and_told_who_has_the_role(
    coordinator: ipcsync.Coordinator, new_client: NewClient, peer: Peer
) -> None:
    with new_client("first").event("e", recorder=True):
        other = new_client("second")
        with pytest.raises(ipcsync.RecorderTaken) as caught:
            other.event("e", recorder=True)
        assert caught.value.recorder == "first"
        assert pickle.loads(pickle.dumps(caught.value)).recorder == "first"
        peer.call(remote.connect, coordinator.endpoint)
        error = peer.call(remote.error_of, remote.open_event, "e", {"recorder": True})
        assert error is not None
        assert error[0] == "RecorderTaken"
        other.event("e").close()


@pytest.mark.parametrize("first", ["recorder", "waiter"])
def test_the_recorder_may_come_first_or_last(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName, first: str
) -> None:
    peer.call(remote.connect, coordinator.endpoint)
    stream = ipcsync.Stream()
    if first == "recorder":
        peer.call(remote.open_event, "e", {"recorder": True, "engine": engine})
        peer.call(remote.record, "e")
    event = client.event("e", engine=engine)
    if first == "waiter":
        waiting = Failing(lambda: event.at(1).wait(stream, timeout=15))
        peer.call(remote.open_event, "e", {"recorder": True})
        peer.call(remote.record, "e")
        assert waiting.raised() is None
    event.at(1).synchronize(10)
    peer.call(remote.close)


def test_the_role_is_kept_for_good_even_if_its_recorder_never_records(new_client: NewClient) -> None:
    first, second = new_client(), new_client()
    waiting = second.event("e")
    first.event("e", recorder=True).close()
    until(lambda: waiting.state == "closed", "the close is told, for which it waits half a second at most")
    with pytest.raises(ipcsync.RecorderLost):
        waiting.at(1).query()
    with second.event("e", recorder=True) as anew:
        assert anew.state == "open"
        assert anew.record(ipcsync.Stream()) != waiting.at(1)


# --- two objects, and closing -----------------------------------------------------------------------------------------


def test_two_objects_share_one_attachment_that_ends_with_the_last(client: ipcsync.Client, engine: EngineName) -> None:
    first = client.event("e", engine=engine)
    second = client.event("e")
    assert client.list_events("e")[0].attached == 1
    assert first.at(1) == second.at(1)
    first.close()
    with pytest.raises(ipcsync.EventClosed):
        first.at(1)
    assert second.state == "open"
    assert not second.at(1).query()
    second.close()
    until(lambda: client.list_events("e") == [], "the close is told")


def test_each_object_records_only_if_it_was_opened_for_that(client: ipcsync.Client, engine: EngineName) -> None:
    plain = client.event("e", engine=engine)
    recording = client.event("e", recorder=True)
    recording.record(ipcsync.Stream()).synchronize(10)
    with pytest.raises(ipcsync.NotRecorder):
        plain.record(ipcsync.Stream())
    assert plain.at(1).query()


def test_closing_twice_is_nothing(client: ipcsync.Client) -> None:
    event, other = client.event("e"), client.event("e")
    event.close()
    event.close()
    with event:
        pass
    assert other.state == "open"


def test_a_closed_object_raises_and_says_closed(client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", recorder=True, engine=engine)
    point = event.record(ipcsync.Stream())
    point.synchronize(10)
    event.close()
    uses: list[Callable[[], Any]] = [
        lambda: event.record(ipcsync.Stream()),
        lambda: event.at(1),
        lambda: event.latest,
        lambda: event.generation,
        lambda: event.completed,
        point.query,
        lambda: point.synchronize(10),
        lambda: point.wait(ipcsync.Stream()),
        lambda: point.is_recorded,
    ]
    for use in uses:
        with pytest.raises(ipcsync.EventClosed):
            use()
    assert event.state == "closed"
    assert (event.name, event.engine, event.depth) == ("e", engine, ipcsync.DEFAULT_DEPTH)


def test_a_close_wakes_this_processs_own_waits_and_nobody_elses(new_client: NewClient, engine: EngineName) -> None:
    recorder, closing, staying = new_client(), new_client(), new_client()
    event = recorder.event("e", recorder=True, engine=engine)
    mine, other = closing.event("e"), staying.event("e")
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        event.record(stream)
        not_recorded = [
            Failing(lambda: mine.at(2).synchronize()),
            Failing(lambda: mine.at(2).wait(ipcsync.Stream())),
            Failing(lambda: mine.at(1).synchronize()),
        ]
        unaffected = Failing(lambda: other.at(1).synchronize(20))
        mine.close()
        for wait in not_recorded:
            assert isinstance(wait.raised(), ipcsync.EventClosed)
        assert unaffected.is_alive()
        gate.open()
        assert unaffected.raised() is None


def test_when_the_recorder_closes_what_it_recorded_stays_good_and_the_name_is_free(
    new_client: NewClient, engine: EngineName
) -> None:
    recorder, waiter = new_client(), new_client()
    event, seen = recorder.event("e", recorder=True, engine=engine), waiter.event("e")
    stream, waiting = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(stream) as gate:
        event.record(stream)
        blocked = Failing(lambda: seen.at(2).synchronize())
        event.close()
        assert isinstance(blocked.raised(), ipcsync.RecorderLost)
        assert seen.state == "closed"
        assert not seen.at(1).query()
        seen.at(1).wait(waiting)
        assert not waiting.query()
        with waiter.event("e", engine=engine, recorder=True) as anew:
            assert (anew.generation, anew.state) == (0, "open")
            assert anew.at(1) != seen.at(1)
            assert anew.record(ipcsync.Stream()).generation == 1
            assert not seen.at(1).query()
        gate.open()
        seen.at(1).synchronize(10)
    until(waiting.query, "the wait on the finished event ends")
    assert seen.at(1).query()
    with pytest.raises(ipcsync.RecorderLost) as caught:
        seen.at(2).query()
    assert caught.value.generation == 2


def test_an_event_that_its_recorder_finished_can_still_be_joined_by_a_point(
    new_client: NewClient, engine: EngineName
) -> None:
    recorder, waiter, late = new_client(), new_client(), new_client()
    event = recorder.event("e", recorder=True, engine=engine)
    held = waiter.event("e")
    data = bytes(event.record(ipcsync.Stream()))
    event.close()
    late.point(data).synchronize(10)
    assert held.at(1).query()


def test_when_the_recorder_is_killed_what_is_known_complete_stays_good_and_all_else_is_lost(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    peer.call(remote.connect, coordinator.endpoint, "recorder")
    peer.call(remote.open_event, "e", {"recorder": True, "engine": engine})
    event = client.event("e")
    peer.call(remote.record, "e")
    event.at(1).synchronize(10)
    peer.call(remote.hold)
    peer.call(remote.record, "e")
    blocked = [Failing(lambda: event.at(2).synchronize()), Failing(lambda: event.at(3).wait(ipcsync.Stream()))]
    peer.kill()
    for wait, generation in zip(blocked, (2, 3), strict=True):
        error = wait.raised()
        assert isinstance(error, ipcsync.RecorderLost)
        assert error.generation == generation
    until(lambda: event.state == "broken", "the death is told")
    assert event.at(1).query()
    event.at(1).wait(ipcsync.Stream())
    for generation in (2, 3):
        with pytest.raises(ipcsync.RecorderLost):
            event.at(generation).query()
    with client.event("e", recorder=True, engine=engine) as anew:
        anew.record(ipcsync.Stream()).synchronize(10)
    assert event.generation == 2


def test_an_abandoned_event_that_nobody_records_lives_as_long_as_somebody_has_it(new_client: NewClient) -> None:
    first, second = new_client(), new_client()
    event, other = first.event("e"), second.event("e")
    event.close()
    assert other.state == "open"
    with second.event("e", recorder=True) as recording:
        recording.record(ipcsync.Stream()).synchronize(10)


# --- quotas -----------------------------------------------------------------------------------------------------------


def test_the_pools_limit_is_told_and_a_close_makes_room(
    new_coordinator: Callable[..., ipcsync.Coordinator], engine: EngineName
) -> None:
    coordinator = new_coordinator(pool=3)
    with ipcsync.connect(coordinator.endpoint) as client:
        events = [client.event(f"e{i}", engine=engine) for i in range(3)]
        with pytest.raises(ipcsync.QuotaExceeded) as caught:
            client.event("one-more", engine=engine)
        assert caught.value.limit == 3
        client.event("e0").close()  # one that exists can be opened all the same
        events.pop().close()
        client.event("one-more", engine=engine)
        assert client.stats()["pool_in_use"] == 3
        assert client.stats()["pool_high_water"] == 3
