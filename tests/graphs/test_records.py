"""A replay's records among the other records of their event: order, numbers, who is woken, what is closed."""

from __future__ import annotations

import threading
from ctypes import c_uint64

import pytest

import ipcsync
from ipcsync._board.layout import L_STATE, OPEN
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.graphs import actions as do
from tests.graphs import ahead_actions as ahead
from tests.graphs.layers import finish
from tests.graphs.stage import NewClient, Stage
from tests.kit.driver_functions import RECORD, Call, held_up, refused_once, replaced
from tests.kit.peer import Peer
from tests.kit.steps import at_step
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver

_WAIT_64, _FIELDS = 4, 6  # CUstreamBatchMemOpType, CUstreamBatchMemOpParams


def _noting(operations: list[tuple[int, int, int]]) -> dict[str, Call]:
    """For `replaced`: the kind, the address and the value of each operation are added."""

    def batch(real: Call, stream: int, count: int, address: int, flags: int) -> int:
        fields = list((c_uint64 * (_FIELDS * count)).from_address(address))
        operations.extend(zip(fields[::_FIELDS], fields[1::_FIELDS], fields[2::_FIELDS], strict=True))
        return int(real(stream, count, address, flags))

    return {"cuStreamBatchMemOp": batch}


def test_a_replays_record_comes_behind_that_of_another_stream(one: Stage) -> None:
    other, core = ipcsync.Stream(), one.done._engine
    operations: list[tuple[int, int, int]] = []
    with StreamGate(other):
        before = one.done.record(other)
        with replaced(_noting(operations)):
            (point,) = one.run(1)
        finish(one.layers.stream)
        assert core.kind == "event" or (_WAIT_64, core._address, core.base + 1) in operations
        assert not before.query()
        assert not point.query()
    point.synchronize(DEADLINE_S)


def test_a_record_of_another_stream_comes_behind_a_replays(one: Stage) -> None:
    other = ipcsync.Stream()
    one.done.record(other)
    with StreamGate(one.sender.stream):
        (point,) = one.run(1)
        behind = one.done.record(other)
        for _ in range(300):
            assert not point.query()
            assert not behind.query()
    behind.synchronize(DEADLINE_S)
    assert one.layers.found() == [1]


def test_a_record_that_the_driver_refused_and_a_replays_have_numbers_of_their_own(one: Stage) -> None:
    refused = refused_once(RECORD[one.done._engine.kind])
    with replaced(refused), pytest.raises(ipcsync.DriverError):
        one.done.record(ipcsync.Stream())
    (point,) = one.run(1)
    assert point.generation == 2
    point.synchronize(DEADLINE_S)


def test_a_replays_record_wakes_who_waits_for_it(one: Stage) -> None:
    with pytest.raises(ipcsync.WaitTimeout):  # from now on each record of it wakes
        one.done.at(1).synchronize(0.001)
    woken: list[bool] = []
    with at_step("wake", lambda: woken.append(True)):
        one.run(1)
    assert woken


@pytest.mark.parametrize("engine", ["timeline"])
def test_of_an_event_that_was_closed_no_word_is_written(one: Stage, engine: EngineName) -> None:
    address, operations = one.done._engine._address, list[tuple[int, int, int]]()

    def close_within() -> None:
        with one.replay(one.sender.send(1)):
            one.layers.launch()
            one.done.close()

    with replaced(_noting(operations)), pytest.raises(ipcsync.EventClosed):
        close_within()
    assert address not in [word for _, word, _ in operations]


def test_behind_a_lost_point_of_the_launch_stream_a_replay_with_records_queues_nothing(
    one: Stage, new_client: NewClient
) -> None:
    theirs, operations = new_client(), list[tuple[int, int, int]]()
    theirs.event("theirs", recorder=True, engine="timeline")
    one.client.event("theirs")._engine.wait(1, one.layers.stream, None, True)
    points = one.sender.send(1)
    theirs.close()
    with replaced(_noting(operations)), pytest.raises(ipcsync.RecorderLost):
        one.replay(points).__enter__()
    assert operations == []
    one.client.resume(one.layers.stream, timeout=DEADLINE_S)
    one.expect(2)


def test_a_replay_that_is_refused_before_its_feed_leaves_its_stream_behind_nothing(
    one: Stage, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    peer.call(ahead.open_recorders, coordinator.endpoint, "theirs")
    replaying = one.replay([one.client.event("theirs").at(1)], ahead=True)
    with replaced(refused_once("cuEventRecord")), pytest.raises(ipcsync.DriverError):
        replaying.__enter__()
    peer.call(ahead.close_recorders)
    one.client.record(one.layers.stream).synchronize(DEADLINE_S)
    one.expect(2)


@pytest.mark.parametrize("engine", ["event"])
def test_of_an_event_no_record_follows_one_that_was_refused(two: Stage, engine: EngineName) -> None:
    points = two.sender.send(1)
    ipcsync.synchronize_all(points, timeout=DEADLINE_S)
    replaying = two.replay(points)
    replay = replaying.__enter__()
    two.layers.launch()
    with replaced(refused_once("cuEventRecord")), pytest.raises(ipcsync.DriverError):
        replaying.__exit__(None, None, None)
    for record in two.layers.records:
        with pytest.raises(ipcsync.CaptureError, match="no such record"):
            replay[record]
    two.expect(2)


def test_what_is_recorded_behind_a_replay_that_follows_a_lost_record_is_lost(
    one: Stage, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    """An event's record of another stream is behind a point; a replay's follows it, and the next one's is another's."""
    peer.call(do.connect, coordinator.endpoint, "theirs")
    peer.call(do.open_sources, [one.layers.source[0].handle()], "theirs")
    peer.call(do.hold)
    other, more = ipcsync.Stream(), one.client.event("more", recorder=True, engine=one.done._engine.kind)
    one.client.point(*peer.call(do.send, 1)).wait(other)
    one.done.record(other)
    graph, (record,) = one.layers.capture(0, waits=False), one.layers.records
    for event in (one.done, more):
        with one.client.replay({}, {record: event}, stream=one.layers.stream) as replay:
            one.layers.launch(graph)
    peer.kill()
    with pytest.raises(ipcsync.RecorderLost) as lost:
        replay[record].synchronize(DEADLINE_S)
    assert lost.value.cause == "behind"


@pytest.mark.parametrize("engine", ["timeline"])
def test_while_a_replay_waits_for_the_turn_of_one_event_the_others_can_be_recorded(two: Stage) -> None:
    other = two.client.event("other", recorder=True, engine="timeline")
    holds = threading.Thread(target=other.record, args=(ipcsync.Stream(),))
    records = threading.Thread(target=two.done.record, args=(ipcsync.Stream(),))
    were_stuck: list[bool] = []
    records_of = dict(zip(two.layers.records, (two.done, other), strict=True))
    replaying = two.client.replay({}, records_of, stream=two.layers.stream, timeout=20)

    def record() -> None:
        records.start()
        records.join(DEADLINE_S / 2)
        were_stuck.append(records.is_alive())
        held.go_on.set()

    with held_up(RECORD["timeline"]) as held:
        holds.start()
        assert held.inside.acquire(timeout=DEADLINE_S)
        replay = replaying.__enter__()
        with at_step("lock", record, behind=2):  # of one event, of the other one, of that one again
            replaying.__exit__(None, None, None)
        holds.join()
        records.join()
    assert were_stuck == [False]
    assert [replay[each].generation for each in two.layers.records] == [2, 2]


def test_a_replay_whose_event_another_threads_record_holds_ends_without_records_at_its_timeout(one: Stage) -> None:
    holds = threading.Thread(target=one.done.record, args=(ipcsync.Stream(),))
    (record,) = one.layers.records
    replaying = one.client.replay({}, {record: one.done}, stream=one.layers.stream, timeout=0.1)
    replay = replaying.__enter__()
    with held_up(RECORD[one.done._engine.kind]) as held:
        holds.start()
        held.wait()
        with pytest.raises(ipcsync.WaitTimeout, match="another thread's"):
            replaying.__exit__(None, None, None)
    holds.join()
    with pytest.raises(ipcsync.CaptureError, match="no such record"):
        replay[record]
    one.expect(1)


@pytest.mark.parametrize("engine", ["timeline"])
def test_a_record_of_an_event_that_is_closed_while_it_is_made_does_not_count(one: Stage) -> None:
    replaying = one.replay(one.sender.send(1))
    replay = replaying.__enter__()
    one.layers.launch()
    close = threading.Thread(target=one.done.close)
    state = c_uint64.from_address(one.done._engine.line.address + 8 * L_STATE)

    def close_within() -> None:
        close.start()
        until(lambda: state.value != OPEN, "it is closed")

    with at_step("cuStreamBatchMemOp", close_within, behind=1), pytest.raises(ipcsync.EventClosed):
        replaying.__exit__(None, None, None)
    close.join()
    with pytest.raises(ipcsync.CaptureError, match="no such record"):
        replay[one.layers.records[0]]


def test_of_an_event_with_a_lost_record_a_replay_queues_nothing_though_earlier_ones_are_open(
    one: Stage, new_client: NewClient
) -> None:
    operations, other, theirs = list[tuple[int, int, int]](), ipcsync.Stream(), new_client()
    theirs.event("theirs", recorder=True, engine="timeline")
    with StreamGate(one.sender.stream):
        one.sender.send(1)[0].wait(other)
        one.done.record(other)
        one.client.event("theirs")._engine.wait(1, other, None, True)
        lost = one.done.record(other)
        theirs.close()
        with pytest.raises(ipcsync.RecorderLost):
            lost.synchronize(DEADLINE_S)
        with replaced(_noting(operations)), pytest.raises(ipcsync.RecorderLost):
            one.client.replay({}, {one.layers.records[0]: one.done}, stream=one.layers.stream).__enter__()
    assert operations == []
