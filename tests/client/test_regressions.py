"""Faults that the soak or a review found, each made to happen for certain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import fixtures
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

_kept: list[object] = []


def _record_gated(endpoint: str, name: str) -> None:
    """In the peer: a record that will never be complete."""
    client = ipcsync.connect(endpoint)
    stream = ipcsync.Stream()
    gate = StreamGate(stream)
    gate.__enter__()
    event = client.event(name, recorder=True, engine="event")
    event.record(stream)
    _kept.extend((client, stream, gate, event))


def test_a_slot_that_a_dead_recorder_left_unfinished_can_be_released_by_its_next_recorder(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client], peer: Peer, engine: EngineName
) -> None:
    observer = new_client("observer")
    peer.call(_record_gated, coordinator.endpoint, "e")
    peer.kill()
    until(lambda: observer.stats()["pool_in_use"] == 0, "every slot is free")
    following = new_client("following")
    following.event("f", recorder=True, engine=engine)
    following.close()
    until(lambda: observer.stats()["pool_in_use"] == 0, "every slot is free")


def test_a_beat_in_the_middle_of_close_does_not_end_what_still_lingers(
    new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    observer = new_client("observer")
    closing = new_client("closing", lease_ttl=3.0)  # beats all through the second that close waits
    stream = ipcsync.Stream()
    with StreamGate(stream):
        closing.event("e", recorder=True, engine=engine).record(stream)
        closing.close()
    until(lambda: observer.stats()["pool_in_use"] == 0, "every slot is free")


def _assert_follows(event: ipcsync.SharedEvent, held: ipcsync.Point, stream: ipcsync.Stream) -> None:
    """A record on `stream` is complete only after `held`, whose own stream does not get on."""
    following = event.record(stream)
    stream.query()  # whatever was queued there for good reason is done by then
    with pytest.raises(ipcsync.WaitTimeout):
        following.synchronize(0.2)
    assert not held.query()
    assert event.completed < held.generation


def test_a_record_between_two_on_the_same_stream_is_not_overtaken_if_it_was_on_the_default_stream(
    client: ipcsync.Client, engine: EngineName
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream, default = ipcsync.Stream(), ipcsync.default_stream()
    event.record(stream).synchronize(10)
    with StreamGate(default):
        _assert_follows(event, event.record(default), stream)
    event.record(stream).synchronize(10)
    assert event.completed == event.generation


def test_a_close_that_leaves_work_in_flight_gives_back_the_rest_before_that_ends(
    new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    observer, closing = new_client("observer"), new_client("closing")
    stream = ipcsync.Stream()
    for name in ("a", "b"):
        closing.event(name, recorder=True, engine=engine).record(ipcsync.Stream()).synchronize(10)
    with StreamGate(stream):
        closing.event("held", recorder=True, engine=engine).record(stream)
        closing.close()
        # Not by the close itself if the coordinator took longer than half a second to answer: then by the next beat.
        until(lambda: observer.stats()["pool_in_use"] == 1, "all but what is held is given back")
    until(lambda: observer.stats()["pool_in_use"] == 0, "every slot is free")
    assert len(observer.list_sessions()) == 1


def test_two_that_wait_ahead_for_each_other_are_both_released_when_one_closes(
    new_client: Callable[..., ipcsync.Client],
) -> None:
    observer, first, second = new_client("observer"), new_client("first"), new_client("second")
    firsts, seconds = ipcsync.Stream(), ipcsync.Stream()
    first.event("of the second", engine="timeline").at(1).wait(firsts, ahead=True)
    second.event("of the first", engine="timeline").at(1).wait(seconds, ahead=True)
    first.event("of the first", recorder=True)
    of_second = second.event("of the second", recorder=True)
    first.close()  # its own stream goes on waiting for the second
    until(seconds.query, "the stream is released")
    assert not firsts.query()
    of_second.record(ipcsync.Stream())  # on `seconds` it would stand behind the wait that is lost
    until(firsts.query, "the stream is released")
    second.close()
    until(lambda: observer.stats()["pool_in_use"] == 0, "every slot is free")


def test_a_beat_that_ends_an_attachment_does_not_wait_for_a_coordinator_that_is_silent(
    coordinator: ipcsync.Coordinator, new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    recorder, waiter = new_client("recorder"), new_client("waiter", lease_ttl=3.0)
    event = recorder.event("e", recorder=True, engine=engine)
    point = waiter.point(bytes(event.record(ipcsync.Stream())))
    point.synchronize(10)
    event.close()
    fixtures.stop(coordinator.pid)
    try:
        del point  # the last of a finished event: the next beat ends the attachment
        with pytest.raises(ipcsync.WaitTimeout):
            waiter.event("other", timeout=4.0)  # for longer than its TTL no other request gets through
    finally:
        fixtures.resume(coordinator.pid)
    assert waiter.list_sessions()
