"""To and fro within a replay: it waits for what a peer makes of its own records."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

import ipcsync
from ipcsync.client import graphs as captures
from ipcsync.testing import Memory, StreamGate
from ipcsync.typing import EngineName
from tests.graphs import ahead_actions as do
from tests.graphs.layers import call, captured, finish
from tests.kit.driver_functions import held_up
from tests.kit.failing import Failing
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver


def test_a_replay_waits_in_its_second_layer_for_what_a_peer_makes_of_the_first(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    stream, there, back = ipcsync.Stream(), Memory(8), Memory(8)
    first, second = ipcsync.GraphWait(), ipcsync.GraphWait()
    half, whole = ipcsync.GraphRecord(), ipcsync.GraphRecord()
    value, target = Memory(8, pinned=True), Memory(8)

    def put() -> None:
        first.capture(stream)
        there.copy_from(value, stream)
        half.capture(stream)
        second.capture(stream)
        target.copy_from(back, stream)
        whole.capture(stream)

    graph = captured(stream, put)
    peer.call(do.connect, coordinator.endpoint, there.handle(), back.handle())
    sent = client.event("sent", recorder=True, engine="timeline")
    done = client.event("done", recorder=True, engine="timeline")
    made = client.event("made", engine="timeline")
    for number in range(1, 6):
        value.write(bytes([number]) * 8)
        point = sent.record(ipcsync.Stream())
        waits = {first: point, second: made.at(number)}
        with client.replay(waits, {half: done, whole: done}, stream=stream, timeout=20, ahead=True) as replay:
            call("cuGraphLaunch", graph, stream._handle)
        assert not replay[whole].query()
        peer.call(do.answer, bytes(replay[half]))
        ipcsync.synchronize_all([replay[half], replay[whole]], timeout=DEADLINE_S)
        finish(stream)
        assert target.holds(number + 100)


def test_what_is_never_recorded_holds_the_stream_until_its_recorder_closes(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    stream, wait, record = ipcsync.Stream(), ipcsync.GraphWait(), ipcsync.GraphRecord()
    graph = captured(stream, lambda: wait.capture(stream), lambda: record.capture(stream))
    peer.call(do.open_recorders, coordinator.endpoint, "theirs")
    done = client.event("done", recorder=True, engine="timeline")
    point = client.event("theirs").at(1)
    with client.replay({wait: point}, {record: done}, stream=stream, ahead=True) as replay:
        call("cuGraphLaunch", graph, stream._handle)
    assert not stream.query()
    peer.call(do.close_recorders)
    finish(stream)
    with pytest.raises(ipcsync.RecorderLost) as lost:
        replay[record].synchronize(DEADLINE_S)
    assert lost.value.cause == "behind"


@pytest.mark.usefixtures("lanes_move")
def test_the_lane_of_a_lost_replay_serves_another_stream_and_its_own_one_is_refused_until_its_resume(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    first, second, wait, record = ipcsync.Stream(), ipcsync.Stream(), ipcsync.GraphWait(), ipcsync.GraphRecord()
    graph = captured(first, lambda: wait.capture(first), lambda: record.capture(first))
    peer.call(do.open_recorders, coordinator.endpoint, "theirs")
    lost = client.event("lost", recorder=True, engine="timeline")
    own = client.event("own", recorder=True, engine="event")  # whose records the lane's drainer makes one by one
    never, complete = client.event("theirs").at(1), own.record(ipcsync.Stream())
    complete.synchronize(DEADLINE_S)

    def replay(point: ipcsync.Point, event: ipcsync.SharedEvent, stream: ipcsync.Stream) -> ipcsync.Point:
        with client.replay({wait: point}, {record: event}, stream=stream, ahead=point is never) as made:
            call("cuGraphLaunch", graph, stream._handle)
        made_point: ipcsync.Point = made[record]
        return made_point

    replay(never, lost, first)
    lane, _ = captures.lane_of(first._handle, 0)
    peer.call(do.close_recorders)
    finish(first)
    finish(lane.drainer)
    replay(complete, own, second).synchronize(DEADLINE_S)
    assert captures.lane_of(second._handle, 0)[0] is lane
    with pytest.raises(ipcsync.RecorderLost):
        own.record(first)
    with pytest.raises(ipcsync.RecorderLost):
        replay(complete, own, first)
    client.resume(first, DEADLINE_S)
    for stream in (first, second):
        replay(complete, own, stream).synchronize(DEADLINE_S)


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_record_behind_an_event_that_was_lost_and_closed_within_the_block_is_lost(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer, waits_first: bool
) -> None:
    stream, wait, record = ipcsync.Stream(), ipcsync.GraphWait(), ipcsync.GraphRecord()
    order = [lambda: wait.capture(stream), lambda: record.capture(stream)]
    graph = captured(stream, *(order if waits_first else reversed(order)))
    peer.call(do.open_recorders, coordinator.endpoint, "theirs")
    done, theirs = client.event("done", recorder=True, engine="timeline"), client.event("theirs")
    engine = theirs._engine

    def run() -> None:
        with client.replay({wait: theirs.at(1)}, {record: done}, stream=stream, ahead=True) as replay:
            call("cuGraphLaunch", graph, stream._handle)
            peer.call(do.close_recorders)
            finish(stream)
            theirs.close()
            until(engine.try_release, "nothing of this process touches it")
        replay[record].synchronize(DEADLINE_S)

    with pytest.raises(ipcsync.RecorderLost):
        run()


def test_a_record_waits_for_the_release_of_an_event_that_was_closed_within_the_block(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer, engine: EngineName
) -> None:
    stream, wait, record = ipcsync.Stream(), ipcsync.GraphWait(), ipcsync.GraphRecord()
    graph = captured(stream, lambda: wait.capture(stream), lambda: record.capture(stream))
    peer.call(do.open_recorders, coordinator.endpoint, "theirs")
    done, theirs = client.event("done", recorder=True, engine=engine), client.event("theirs")
    with held_up("cuStreamWaitValue64") as held:
        with client.replay({wait: theirs.at(1)}, {record: done}, stream=stream, ahead=True) as replay:
            call("cuGraphLaunch", graph, stream._handle)
            holds = Failing(lambda: theirs._engine.wait(1, ipcsync.Stream(), None, True))
            held.wait()  # as a release that is under way, it has the event's turn
            theirs._engine.close()
            threading.Timer(0.2, held.go_on.set).start()
        assert isinstance(holds.raised(), ipcsync.EventClosed)
    peer.call(do.close_recorders)
    with pytest.raises(ipcsync.RecorderLost):
        replay[record].synchronize(DEADLINE_S)
    finish(stream)


def test_a_record_depends_on_a_point_that_another_graph_may_have_waited_for_before(
    client: ipcsync.Client, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    stream, wait, record = ipcsync.Stream(), ipcsync.GraphWait(), ipcsync.GraphRecord()
    pieces = [
        captured(stream, lambda: wait.capture(stream)),
        captured(stream, lambda: record.capture(stream), lambda: wait.capture(stream)),
    ]
    peer.call(do.open_recorders, coordinator.endpoint, "theirs")
    done, point = client.event("done", recorder=True, engine="timeline"), client.event("theirs").at(1)
    with client.replay({wait: point}, {record: done}, stream=stream, ahead=True) as replay:
        for graph in pieces:
            call("cuGraphLaunch", graph, stream._handle)
    peer.call(do.close_recorders)
    finish(stream)
    with pytest.raises(ipcsync.RecorderLost):
        replay[record].synchronize(DEADLINE_S)


def test_a_replay_ahead_of_this_processs_own_record_is_refused_whichever_client_records(
    client: ipcsync.Client, new_client: Callable[..., ipcsync.Client]
) -> None:
    stream, wait, record = ipcsync.Stream(), ipcsync.GraphWait(), ipcsync.GraphRecord()
    captured(stream, lambda: wait.capture(stream), lambda: record.capture(stream))
    event = client.event("e", recorder=True, engine="timeline")
    seen = new_client().event("e")
    for point in (event.at(1), seen.at(1)):
        for records in ({}, {record: event}):
            with pytest.raises(ipcsync.EngineMismatch, match=r"is recorded in this process.*record first"):
                client.replay({wait: point}, records, stream=stream, ahead=True).__enter__()
    assert stream.query(), "nothing was queued"
    with StreamGate(other := ipcsync.Stream()) as gate:
        event.record(other)
        with client.replay({wait: seen.at(1)}, stream=stream, ahead=True):
            gate.open()
    finish(stream)


def test_a_replay_ahead_is_refused_to_a_client_whose_records_depend_on_all_waits(
    new_client: Callable[..., ipcsync.Client],
) -> None:
    stream, wait, client = ipcsync.Stream(), ipcsync.GraphWait(), new_client(chains="session")
    captured(stream, lambda: wait.capture(stream))
    point = client.event("theirs", engine="timeline").at(1)
    with pytest.raises(ipcsync.EngineMismatch, match="not for chains='session'"):
        client.replay({wait: point}, stream=stream, ahead=True).__enter__()
    finish(stream)


def test_a_replay_ahead_keeps_the_waits_and_records_whose_order_it_asks_for(
    client: ipcsync.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "_captures", {})
    stream, wait, record = ipcsync.Stream(), ipcsync.GraphWait(), ipcsync.GraphRecord()
    captured(stream, partial(wait.capture, stream), partial(record.capture, stream))
    event = client.event("e", recorder=True, engine="timeline")
    replaying = client.replay({wait: event.record(stream)}, {record: event}, stream=stream, ahead=True)
    seen = weakref.ref(wait), weakref.ref(record)
    del wait, record
    captures._captures.clear()
    gc.collect()
    assert None not in [each() for each in seen]
    del replaying
    gc.collect()
    assert [each() for each in seen] == [None, None]


def test_it_needs_the_timeline_engine(client: ipcsync.Client) -> None:
    stream, wait = ipcsync.Stream(), ipcsync.GraphWait()
    captured(stream, lambda: wait.capture(stream))
    event = client.event("e", recorder=True, engine="event")
    with pytest.raises(ipcsync.EngineMismatch, match="ahead of records only"):
        client.replay({wait: event.at(1)}, stream=stream, ahead=True).__enter__()


@pytest.mark.parametrize(("queues", "passes"), [("0", True), ("8", True), ("1", False)])
def test_it_needs_streams_that_pass_each_other(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, new_peer: Callable[..., Peer], queues: str, passes: bool
) -> None:
    client.event("theirs", recorder=True, engine="timeline")
    peer = new_peer(IPCSYNC_HOST_QUEUES=queues, CUDA_DEVICE_MAX_CONNECTIONS=queues if queues != "0" else "8")
    if not passes:
        peer.call(do.interrupt_ahead, coordinator.endpoint)
    assert ("share a hardware queue" in peer.call(do.try_ahead, coordinator.endpoint)) != passes
