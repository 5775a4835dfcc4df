"""What comes within a replay: other threads, host functions, signals, closes, a coordinator that is replaced."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest

import ipcsync
from ipcsync._board.layout import L_AWAITED
from ipcsync._engines.core import lanes_of_process
from ipcsync.client import client as client_module
from ipcsync.client import graphs
from ipcsync.client.graphs import lane_of
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults.fixtures import sleeps_in_core
from tests.graphs import actions as do
from tests.graphs import ahead_actions as ahead
from tests.graphs.layers import Layers, begin_capture, call, captured, end_empty, finish
from tests.graphs.stage import NewClient, Stage, Standing
from tests.kit import remote
from tests.kit.driver_functions import RECORD, REFUSED, Call, amid, refused_once, replaced
from tests.kit.failing import Failing
from tests.kit.peer import Peer
from tests.kit.steps import at_step
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver


def test_threads_that_replay_one_graph_are_each_refused_or_whole(two: Stage) -> None:
    replays = 40
    made: list[ipcsync.Point] = []
    wrong: list[BaseException] = []

    def run() -> None:
        left = replays
        while left:
            try:
                with two.replay(two.sender.send(7)) as replay:
                    two.layers.launch()
            except ipcsync.CaptureError:
                continue
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                wrong.append(error)
                return
            made.extend(replay[record] for record in two.layers.records)
            left -= 1

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    ipcsync.synchronize_all(made, timeout=DEADLINE_S)
    assert sorted(point.generation for point in made) == list(range(1, 2 * 3 * replays + 1))
    assert two.layers.found() == [7, 7]
    two.expect(8)


def test_one_block_is_entered_once_whichever_threads_try(one: Stage) -> None:
    replaying = one.replay(one.sender.send(1))
    entered: list[ipcsync.Replay] = []
    refused: list[ipcsync.CaptureError] = []

    def enter() -> None:
        try:
            entered.append(replaying.__enter__())
        except ipcsync.CaptureError as error:
            refused.append(error)

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(entered), len(refused)) == (1, 7)
    one.layers.launch()
    replaying.__exit__(None, None, None)
    entered[0][one.layers.records[0]].synchronize(DEADLINE_S)
    assert one.layers.found() == [1]


def test_a_host_function_of_the_stream_that_replays_there_is_refused_and_the_open_replay_is_right(one: Stage) -> None:
    errors: list[Exception] = []
    seen = threading.Event()

    def replay_within(_: Any) -> None:
        try:
            one.replay(one.sender.send(9)).__enter__()
        except ipcsync.IpcSyncError as error:
            errors.append(error)
        seen.set()

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(replay_within)
    address = ctypes.cast(function, ctypes.c_void_p).value
    with one.replay(one.sender.send(1)) as replay:
        one.layers.launch()
        call("cuLaunchHostFunc", one.layers.stream._handle, address, 0)
        assert seen.wait(DEADLINE_S)
    assert [type(error) for error in errors] == [ipcsync.CaptureError]
    replay[one.layers.records[0]].synchronize(DEADLINE_S)
    one.expect(2)


@pytest.mark.parametrize("number", range(4))
def test_a_replay_within_a_call_of_the_driver_is_refused_and_this_one_is_right(one: Stage, number: int) -> None:
    """As of a signal's handler or a finalizer that comes there."""
    errors: list[Exception] = []
    left = [number]

    def within(real: Callable[..., int], *arguments: Any) -> int:
        left[0] -= 1
        if left[0] == -1:
            try:
                with one.replay(points):
                    pass
            except ipcsync.IpcSyncError as error:
                errors.append(error)
        return real(*arguments)

    one.expect(1)
    points = one.sender.send(2)
    with replaced({"cuStreamBatchMemOp": within}), one.replay(points) as replay:
        one.layers.launch()
    replay[one.layers.records[0]].synchronize(DEADLINE_S)
    assert [type(error) for error in errors] == [ipcsync.CaptureError]
    one.expect(3)


_BATCHES_BEFORE_TURN = {"timeline": 2, "event": 3}  # where records are one batch, they have their turns before the end


class _InterruptError(Exception):
    pass


def _interrupted(function: Callable[[], object], is_waiting: Callable[[], object]) -> None:
    """Have a signal's handler raise amid a call that waits."""
    main = threading.main_thread().ident
    assert main is not None

    def raise_it(*_: object) -> None:
        raise _InterruptError

    def send() -> None:
        until(is_waiting, "the call waits")
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raise_it)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(_InterruptError):
            function()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_row_64_an_interrupt_while_a_point_is_not_recorded_queues_nothing(one: Stage) -> None:
    late = one.sender.event.at(1)
    awaited = ctypes.c_uint64.from_address(one.sender.event._engine.line.address + 8 * L_AWAITED)
    _interrupted(one.replay([late]).__enter__, lambda: awaited.value)
    finish(one.layers.stream)
    one.expect(2)


def test_row_64_an_interrupt_while_there_is_no_room_queues_nothing(one: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    is_waiting, session = threading.Event(), one.client._session

    def check() -> None:
        is_waiting.set()
        type(session).check_liveness(session)

    def fill() -> None:
        while True:
            with one.client.replay(waits, stream=one.layers.stream):
                one.layers.launch()

    monkeypatch.setattr(session, "check_liveness", check)
    with StreamGate(one.sender.stream):
        waits = {one.layers.waits[0]: one.sender.send(1)[0]}
        _interrupted(fill, is_waiting.is_set)
    one.expect(2)


def test_row_64_a_record_that_is_interrupted_leaves_the_taps_drained_and_the_next_replay_right(two: Stage) -> None:
    two.expect(1)
    points, main, batches = two.sender.send(2), threading.current_thread(), []
    has_turn, go_on = threading.Event(), threading.Event()

    def batch(real: Call, *arguments: Any) -> int:
        batches.append(arguments)
        return real(*arguments)

    def record(real: Call, *arguments: Any) -> int:
        if threading.current_thread() is not main:
            has_turn.set()
            assert go_on.wait(DEADLINE_S)
        return real(*arguments)

    replaying = two.replay(points)
    thread = threading.Thread(target=two.done.record, args=(ipcsync.Stream(),))
    with replaced({"cuStreamBatchMemOp": batch, RECORD[two.done._engine.kind]: record}):
        replay = replaying.__enter__()
        two.layers.launch()
        thread.start()
        assert has_turn.wait(DEADLINE_S)
        # Asleep, it is in no function of this test, in which what a handler raises would be lost.
        _interrupted(
            lambda: replaying.__exit__(None, None, None),
            lambda: len(batches) >= _BATCHES_BEFORE_TURN[two.done._engine.kind] and sleeps_in_core(main.native_id),
        )
        go_on.set()
        thread.join()
    with pytest.raises(ipcsync.CaptureError, match="no such record"):
        replay[two.layers.records[0]]
    two.expect(3)


def test_a_refused_record_does_not_wait_for_what_another_stream_was_to_record_before(
    one: Stage, new_client: NewClient
) -> None:
    other = ipcsync.Stream()
    theirs = new_client()
    theirs.event("theirs", recorder=True, engine="timeline")
    never = one.client.event("theirs").at(1)
    with StreamGate(other):
        one.done.record(other)
        (point,) = one.sender.send(1)
        replaying = one.replay([point])
        replaying.__enter__()
        one.layers.launch()
        never._bound().engine.wait(1, one.layers.stream, None, True)
        theirs.close()
        with pytest.raises(ipcsync.RecorderLost):
            replaying.__exit__(None, None, None)
        until(lane_of(one.layers.stream._handle, 0)[0].drainer.query, "the taps are drained")
    one.client.resume(one.layers.stream, timeout=DEADLINE_S)
    one.expect(2)


def test_an_event_that_is_closed_within_the_block_makes_no_record_and_the_other_one_does(
    two: Stage, new_client: NewClient
) -> None:
    other = two.client.event("other", recorder=True, engine="timeline")
    waits = dict(zip(two.layers.waits, two.sender.send(1), strict=True))
    records = dict(zip(two.layers.records, (two.done, other), strict=True))
    replaying = two.client.replay(waits, records, stream=two.layers.stream, timeout=20)
    replay = replaying.__enter__()
    two.layers.launch()
    two.done.close()
    with pytest.raises(ipcsync.EventClosed):
        replaying.__exit__(None, None, None)
    replay[two.layers.records[1]].synchronize(DEADLINE_S)
    with pytest.raises(ipcsync.CaptureError, match="no such record"):
        replay[two.layers.records[0]]
    assert two.layers.found() == [1, 1]


def test_a_points_event_that_is_closed_here_within_the_block_is_waited_for_all_the_same(one: Stage) -> None:
    seen = one.client.event("layers")
    with StreamGate(one.sender.stream) as gate:
        one.sender.send(3)
        with one.replay([seen.at(1)]) as replay:
            one.layers.launch()
            seen.close()
        assert not one.layers.stream.query()
        gate.open()
    replay[one.layers.records[0]].synchronize(DEADLINE_S)
    assert one.layers.found() == [3]


def test_a_client_closes_though_the_driver_refuses_the_end_of_its_open_replay(
    one: Stage, new_client: NewClient
) -> None:
    other, replaying = new_client("other"), one.replay(one.sender.send(1))
    replaying.__enter__()
    with replaced({"cuStreamBatchMemOp": lambda *_: REFUSED}):
        one.client.close()
    assert sorted(session.name for session in other.list_sessions()) == ["other", "sends"]
    one.client.close()  # which ends the replay
    until(one.layers.stream.query, "its stream goes on")


def test_row_40_a_client_closes_amid_a_capture_and_its_open_replay_ends_later(one: Stage) -> None:
    replaying = one.replay(one.sender.send(1))
    replaying.__enter__()
    one.layers.launch()
    begin_capture(one.layers.stream)
    one.client.close()
    end_empty(one.layers.stream)
    one.client.close()  # which ends the replay
    until(one.layers.stream.query, "its stream goes on")


def test_an_exception_while_a_close_ends_the_open_replays_leaves_a_session_that_ends(
    one: Stage, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_it(_: object) -> None:
        raise _InterruptError

    other = new_client("other")
    with monkeypatch.context() as patch:
        patch.setattr(client_module, "end_all", raise_it)
        with pytest.raises(_InterruptError):
            one.client.close()
    until(lambda: len(other.list_sessions()) == 2, "its session ends")


def test_a_coordinator_that_its_keeper_replaces_within_the_block_is_not_seen(
    new_coordinator: Callable[..., ipcsync.Coordinator], engine: EngineName
) -> None:
    coordinator = new_coordinator(keeper=True)
    clients = [ipcsync.connect(coordinator.endpoint) for _ in range(2)]
    try:
        made = iter(clients)
        one = Stage(lambda *_: next(made), engine)
        one.expect(1)
        with StreamGate(one.sender.stream), one.replay(one.sender.send(2)) as replay:
            starts, pid = one.client.stats()["starts"], one.client.stats()["pid"]
            os.kill(pid, signal.SIGKILL)
            until(lambda: one.client.stats(timeout=DEADLINE_S)["starts"] > starts, "another one serves")
            one.layers.launch()
        replay[one.layers.records[0]].synchronize(DEADLINE_S)
        assert one.layers.found() == [2]
        one.expect(3)
    finally:
        for client in clients:
            client.close()


def test_a_block_in_which_the_coordinator_was_lost_makes_no_record_and_its_stream_goes_on(
    new_coordinator: Callable[..., ipcsync.Coordinator], engine: EngineName
) -> None:
    coordinator = new_coordinator(keeper=False)
    clients = [ipcsync.connect(coordinator.endpoint) for _ in range(2)]
    made = iter(clients)
    one = Stage(lambda *_: next(made), engine)
    one.expect(1)
    replaying = one.replay(one.sender.send(2))
    replay = replaying.__enter__()
    one.layers.launch()
    os.kill(coordinator.pid, signal.SIGKILL)
    until(lambda: not one.client.is_connected, "its loss is seen")
    with pytest.raises(ipcsync.CoordinatorLost):
        replaying.__exit__(None, None, None)
    with pytest.raises(ipcsync.CaptureError, match="no such record"):
        replay[one.layers.records[0]]
    finish(one.layers.stream)
    for client in clients:
        client.close()
    coordinator.stop()
    new_coordinator()  # which takes away what that one left in shared memory


@pytest.mark.process
def test_a_replay_that_waits_for_one_points_record_ends_by_the_loss_of_another(
    two: Stage, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    data = peer.call(remote.record_unfinished, coordinator.endpoint, "dying")
    dying, never = two.client.point(data), two.client.event("layers").at(1)
    peer.kill()
    with pytest.raises(ipcsync.RecorderLost, match="'dying'"), two.replay([never, dying]):
        pytest.fail("it is entered")


def test_a_replay_that_waits_for_one_points_record_ends_by_the_lost_coordinator_of_another(
    new_coordinator: Callable[..., ipcsync.Coordinator], client: ipcsync.Client
) -> None:
    coordinator = new_coordinator(keeper=False)
    recorder, other = clients = [ipcsync.connect(coordinator.endpoint) for _ in range(2)]
    held, stream, gates = ipcsync.Stream(), ipcsync.Stream(), [ipcsync.GraphWait() for _ in range(2)]
    captured(stream, *[partial(gate.capture, stream) for gate in gates])
    never = client.event("never", engine="timeline")
    with StreamGate(held):
        recorder.event("e", recorder=True, engine="timeline").record(held)
        points = [never.at(1), other.event("e").at(1)]
        replaying = client.replay(dict(zip(gates, points, strict=True)), stream=stream, timeout=DEADLINE_S)
        entering = Failing(replaying.__enter__)
        until(lambda: never._engine.line.awaited, "it waits for the first one")
        os.kill(coordinator.pid, signal.SIGKILL)
        assert isinstance(entering.raised(), ipcsync.CoordinatorLost)
    finish(stream)
    for each in clients:
        each.close()
    coordinator.stop()
    new_coordinator()  # which takes away what that one left in shared memory


def test_a_replay_whose_points_event_is_closed_here_before_it_has_its_turn_queues_nothing(one: Stage) -> None:
    seen, calls = one.client.event("layers"), []

    def batch(real: Call, *arguments: Any) -> int:
        calls.append(arguments)
        return real(*arguments)

    with StreamGate(one.sender.stream):
        one.sender.send(1)
        replaying = one.replay([seen.at(1)])
        with replaced({"cuStreamBatchMemOp": batch}), at_step("lock", seen.close), pytest.raises(ipcsync.EventClosed):
            replaying.__enter__()
        assert calls == []
        assert not replaying._replay.is_used
        other, done = ipcsync.Stream(), one.client.event("other", recorder=True, engine="timeline")
        with one.client.replay({}, {one.layers.records[0]: done}, stream=other, timeout=20) as replay:
            pass
        replay[one.layers.records[0]].synchronize(DEADLINE_S)  # which has to wait for nothing of that one
    one.expect(2)


def test_a_replay_so_large_that_only_one_has_room_finds_an_open_one_at_once_and_ends_an_abandoned_one(
    client: ipcsync.Client,
) -> None:
    stream, waits = ipcsync.Stream(), [ipcsync.GraphWait() for _ in range(230)]
    captured(stream, *(partial(wait.capture, stream) for wait in waits))
    points = dict.fromkeys(waits, client.event("e", recorder=True, engine="timeline").record(stream))
    replaying = client.replay(points, stream=stream, timeout=DEADLINE_S)
    replaying.__enter__()
    with pytest.raises(ipcsync.CaptureError, match="is open"):
        client.replay(points, stream=stream, timeout=DEADLINE_S).__enter__()
    del replaying
    with client.replay(points, stream=stream, timeout=DEADLINE_S):
        pass
    finish(stream)


def test_a_replay_ends_what_was_abandoned_on_several_other_streams(client: ipcsync.Client) -> None:
    stream, waits = ipcsync.Stream(), [ipcsync.GraphWait() for _ in range(3)]
    captured(stream, *(partial(wait.capture, stream) for wait in waits))
    points = dict.fromkeys(waits, client.event("e", recorder=True, engine="timeline").record(stream))
    for wait in waits:
        client.replay({wait: points[wait]}, stream=ipcsync.Stream(), timeout=DEADLINE_S).__enter__()
    with client.replay(points, stream=stream, timeout=DEADLINE_S):
        pass
    finish(stream)


@pytest.mark.parametrize("engine", ["timeline"])
def test_a_block_on_the_current_stream_that_could_not_be_ended_keeps_that_stream(
    one: Stage, engine: EngineName
) -> None:
    one.expect(1)
    (wait,), records = one.layers.waits, dict.fromkeys(one.layers.records, one.done)

    def leave_open() -> None:
        with ipcsync.stream(ipcsync.Stream()) as stream:
            assert stream is not None
            replaying = one.client.replay({wait: one.sender.send(2)[0]}, records, timeout=DEADLINE_S)
            replaying.__enter__()
            one.layers.launch(on=stream)
            begin_capture(stream)
            with pytest.raises(ipcsync.StreamCapturing):
                replaying.__exit__(None, None, None)
            end_empty(stream)

    with StreamGate(one.sender.stream):
        leave_open()
        gc.collect()
        other = ipcsync.Stream()
        replaying = one.client.replay({wait: one.sender.send(3)[0]}, records, stream=other, timeout=DEADLINE_S)
        with replaying as replay:  # which ends that one
            one.layers.launch(on=other)
    replay[one.layers.records[0]].synchronize(DEADLINE_S)
    assert one.layers.found() == [3]


def test_a_replay_of_several_events_of_which_one_is_closed_leaves_its_stream_behind_none(
    two: Stage, coordinator: ipcsync.Coordinator, peer: Peer
) -> None:
    peer.call(ahead.open_recorders, coordinator.endpoint, "first", "second")
    first, second = two.client.event("first"), two.client.event("second")
    replaying = two.replay([first.at(1), second.at(1)], ahead=True)
    with at_step("lock", second.close, behind=1), pytest.raises(ipcsync.EventClosed):
        replaying.__enter__()
    peer.call(ahead.close_recorders)
    two.client.record(two.layers.stream).synchronize(DEADLINE_S)
    two.expect(2)


def test_a_points_event_that_is_closed_here_is_in_use_until_the_lane_is_past_it(
    one: Stage, new_client: NewClient
) -> None:
    stream, theirs = ipcsync.Stream(), new_client().event("theirs", recorder=True, engine="timeline")
    seen = one.client.event("theirs")
    core = seen._engine
    with StreamGate(one.sender.stream):
        one.run(1)
        with StreamGate(stream):
            point = theirs.record(stream)
            with one.replay([seen.at(1)]):
                one.layers.launch()
        point.synchronize(DEADLINE_S)  # it is complete, and the lane waits for the replay before
        seen.close()
        for _ in range(300):
            assert not core.try_release()
    until(core.try_release, "the lane is past it")
    one.expect(2)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_points_event_that_is_closed_here_is_released_though_the_lane_waits_for_a_later_one(
    one: Stage, new_client: NewClient, is_over: bool
) -> None:
    stream, theirs = ipcsync.Stream(), new_client().event("theirs", recorder=True, engine="timeline")
    seen = one.client.event("theirs")
    core = seen._engine
    with StreamGate(stream) as gate, StreamGate(one.sender.stream):
        theirs.record(stream)
        with one.replay([seen.at(1)]):
            one.layers.launch()
        if is_over:
            gate.open()
            finish(one.layers.stream)
        one.run(2)
        seen.close()
        assert is_over or not core.try_release()  # the marker is behind the later one's wait
        gate.open()
        until(core.try_release, "nothing of it is used any more")
    one.expect(3)


def test_a_replay_of_many_events_has_room_for_their_markers(client: ipcsync.Client, new_client: NewClient) -> None:
    count, other, stream = 60, new_client(), ipcsync.Stream()
    layers, done = Layers(count), client.event("done", recorder=True, engine="timeline")
    records = {layers.records[0]: done}
    theirs = [other.event(f"e{number}", recorder=True, engine="timeline") for number in range(count)]
    with StreamGate(stream):
        for _ in range(4):
            waits = dict(zip(layers.waits, [event.record(stream) for event in theirs], strict=True))
            with client.replay(waits, records, stream=layers.stream, timeout=20):
                layers.launch()
        with pytest.raises(ipcsync.WaitTimeout, match="4 are in flight"):
            client.replay(waits, records, stream=layers.stream, timeout=0).__enter__()
    finish(layers.stream)


def test_a_replay_of_many_records_has_room_for_their_markers(client: ipcsync.Client) -> None:
    count, other = 73, ipcsync.Stream()
    layers = Layers(count)
    events = [client.event(f"e{number}", recorder=True, engine="timeline") for number in range(count)]
    records = dict(zip(layers.records, events, strict=True))
    with StreamGate(layers.stream):
        for _ in range(3):
            with client.replay({}, records, stream=layers.stream, timeout=20):
                pass
            for event in events:
                event.record(other)  # which the next replay's records follow
        with pytest.raises(ipcsync.WaitTimeout, match="3 are in flight"):
            client.replay({}, records, stream=layers.stream, timeout=0).__enter__()
    finish(layers.stream)


def test_a_replay_whose_recorder_is_killed_while_it_is_fed_is_refused(
    one: Stage, coordinator: ipcsync.Coordinator, new_client: NewClient, peer: Peer
) -> None:
    peer.call(do.connect, coordinator.endpoint, "theirs")
    peer.call(do.open_sources, [one.layers.source[0].handle()], "theirs")
    peer.call(do.hold)
    (data,) = peer.call(do.send, 1)
    seen = new_client().point(data)

    def kill() -> None:
        peer.kill()
        with pytest.raises(ipcsync.RecorderLost):
            seen.synchronize(DEADLINE_S)

    replaying = one.client.replay({one.layers.waits[0]: one.client.point(data)}, stream=one.layers.stream)
    with replaced(amid("cuStreamBatchMemOp", kill)), pytest.raises(ipcsync.RecorderLost):
        replaying.__enter__()
    one.client.resume(one.layers.stream, timeout=DEADLINE_S)
    one.expect(2)


@pytest.mark.usefixtures("lanes_move")
def test_a_replay_whose_lane_another_stream_takes_meanwhile_has_one_of_its_own(one: Stage) -> None:
    one.expect(1)
    finish(one.layers.stream)
    lane, of = lane_of(one.layers.stream._handle, 0)
    others: list[ipcsync.Stream] = []

    def is_taken() -> bool:
        others.append(ipcsync.Stream())
        with one.client.replay({}, stream=others[-1]):
            pass
        return lane.stream_id != of

    with StreamGate(one.sender.stream):
        replaying = one.replay(one.sender.send(2))
        with at_step("load completed", lambda: until(is_taken, "it is taken")):
            replaying.__enter__()
        one.layers.launch()
        replaying.__exit__(None, None, None)
        until(others[-1].query, "the other stream has nothing of this one's")
    one.expect(3)


@pytest.mark.usefixtures("lanes_move")
@pytest.mark.parametrize("engine", ["timeline"])
def test_row_64_an_interrupt_while_a_lane_is_taken_or_made_leaves_the_lanes_of_both_streams_right(
    one: Stage, engine: EngineName
) -> None:
    first = one.layers.stream
    one.expect(1)
    for number in count():
        finish(first)
        until(lambda: all(lane.is_free for lane in lanes_of_process.values()), "their brackets are over")
        second = ipcsync.Stream()
        was_interrupted = _is_interrupted_at(number, partial(lane_of, second._handle, 0))
        for value, stream in enumerate((first, second, first), number % 100):
            one.layers.stream = stream
            one.expect(value)
        if not was_interrupted:
            assert number > 10, "it is interrupted at each line"
            break


@pytest.mark.usefixtures("lanes_move")
@pytest.mark.parametrize("engine", ["timeline"])
def test_a_record_elsewhere_is_not_behind_what_its_lane_waited_for_when_it_served_another_stream(
    one: Stage, coordinator: ipcsync.Coordinator, peer: Peer, engine: EngineName
) -> None:
    first, second, third = ipcsync.Stream(), ipcsync.Stream(), ipcsync.Stream()
    peer.call(do.connect, coordinator.endpoint, "theirs")
    peer.call(do.open_sources, [one.layers.source[0].handle()], "theirs")
    peer.call(do.hold)
    (data,) = peer.call(do.send, 1)
    one.client.point(data).wait(third)
    lost = one.done.record(third)
    with one.client.replay({}, {one.layers.records[0]: one.done}, stream=first):  # the lane waits for that record
        pass
    peer.kill()
    with pytest.raises(ipcsync.RecorderLost):
        lost.synchronize(DEADLINE_S)
    lane, served = lane_of(first._handle, 0)
    until(lambda: lane.is_free, "the lane is past it")
    event = one.client.event("another", recorder=True, engine=engine)
    refused = refused_once("cuStreamBatchMemOp", 2)  # its end
    replaying = one.client.replay({}, {one.layers.records[0]: event}, stream=second)
    with replaced(refused), pytest.raises(ipcsync.DriverError), replaying:
        pass
    assert lane.stream_id != served
    event.record(ipcsync.Stream()).synchronize(DEADLINE_S)


class _Behind:
    """A lane that a replay leaves behind a pending point, and a next replay on `stream`, which would be behind that."""

    def __init__(self, new_client: NewClient, where: str) -> None:
        self.client, self.standing, self.first = new_client("main"), Standing(new_client), ipcsync.Stream()
        self.wait, self.record = ipcsync.GraphWait(), ipcsync.GraphRecord()
        self.graph = captured(self.first, *(partial(each.capture, self.first) for each in (self.wait, self.record)))
        self.complete = self.client.event("complete", recorder=True, engine="timeline").record(ipcsync.Stream())
        self.complete.synchronize(DEADLINE_S)
        self.point = self.client.point(self.standing.data)
        self.later = self.client.event("later", recorder=True, engine="timeline")
        is_drainer = where == "its own drainer"
        self.stream = self.first if is_drainer else ipcsync.Stream()
        event = self.client.event("first", recorder=True, engine="event")
        side = ipcsync.Stream() if is_drainer else self.first
        self.point.wait(side)
        if is_drainer:
            self.point = event.record(side)  # which the lane's record waits for
        waits = {self.wait: self.complete} if where != "a lane with its record" else {}
        records = {self.record: event} if where != "a lane with its wait" else {}
        with self.client.replay(waits, records, stream=self.first, timeout=20):
            pass

    def replay(self, *, records: bool = True) -> ipcsync.client.Replaying:
        return self.client.replay(
            {self.wait: self.complete}, {self.record: self.later} if records else {}, stream=self.stream, timeout=20
        )

    def expect(self) -> None:
        with self.replay() as made:
            call("cuGraphLaunch", self.graph, self.stream._handle)
        made[self.record].synchronize(DEADLINE_S)


_WHERE = ["its own drainer", "a lane with its record", "a lane with its wait"]


@pytest.mark.parametrize(
    ("where", "records"), [*((where, True) for where in _WHERE), (_WHERE[0], False), (_WHERE[2], False)]
)
def test_row_65_a_replay_is_refused_before_anything_is_queued_while_another_stream_stands_in_its_way(
    new_client: NewClient, where: str, records: bool
) -> None:
    behind = _Behind(new_client, where)
    free = behind.client.event("free", recorder=True, engine="timeline")
    with behind.standing.gate:
        behind.standing.lose(behind.point)
        until(lambda: where != "its own drainer" or behind.stream.query(), "the graph is over")
        for _ in range(2):
            with pytest.raises(ipcsync.RecorderLost, match=r"the replay may never be done: .* captured anew"):
                behind.replay(records=records).__enter__()
            free.record(behind.stream).synchronize(DEADLINE_S)  # which has nothing of it
    behind.client.resume(behind.first, timeout=DEADLINE_S)
    behind.expect()


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("where", _WHERE)
def test_row_65_a_replay_is_behind_what_another_stream_in_its_way_waits_for_until_that_is_over(
    new_client: NewClient, where: str, is_lost: bool
) -> None:
    behind = _Behind(new_client, where)
    with behind.standing.gate:
        with behind.replay() as made:
            call("cuGraphLaunch", behind.graph, behind.stream._handle)
        point = made[behind.record]
        assert not point.query()
        if is_lost:
            behind.standing.lose(behind.point)
            with pytest.raises(ipcsync.RecorderLost):
                point.synchronize(DEADLINE_S)
            with pytest.raises(ipcsync.WaitTimeout):
                behind.client.resume(behind.stream, timeout=0)
        else:
            behind.standing.complete()
            point.synchronize(DEADLINE_S)
            behind.expect()
    behind.client.resume(behind.stream, timeout=DEADLINE_S)
    behind.client.event("next", recorder=True, engine="timeline").record(behind.stream).synchronize(DEADLINE_S)


@pytest.mark.usefixtures("lanes_move")
def test_row_65_a_lane_serves_another_stream_once_its_own_streams_have_passed_what_is_lost(
    new_client: NewClient,
) -> None:
    behind, others = _Behind(new_client, "its own drainer"), [ipcsync.Stream(), ipcsync.Stream()]
    lane = lane_of(behind.first._handle, 0)[0]
    with behind.standing.gate:
        behind.standing.lose(behind.point)
        assert lane_of(others[0]._handle, 0)[0] is not lane, "its drainer stands"
    until(lane.drainer.query, "its drainer has passed it")
    assert lane_of(others[1]._handle, 0)[0] is lane
    for stream in (others[1], behind.first, *others):
        behind.stream = stream
        behind.expect()


def test_a_replay_is_not_behind_what_another_stream_waits_for_behind_its_replays(new_client: NewClient) -> None:
    client, standing = new_client("main"), Standing(new_client)
    first, second, record = ipcsync.Stream(), ipcsync.Stream(), ipcsync.GraphRecord()
    captured(first, lambda: record.capture(first))
    events = [client.event(name, recorder=True, engine="timeline") for name in ("e", "later")]
    point = client.point(standing.data)
    with standing.gate:
        for stream, event in zip((first, second), events, strict=True):
            with client.replay({}, {record: event}, stream=stream, timeout=20) as made:
                pass
            made[record].synchronize(DEADLINE_S)
            until(lambda: lane_of(first._handle, 0)[0].is_free, "its bracket is over")
            if stream is first:
                point.wait(first)
                standing.lose(point)
    client.resume(first, DEADLINE_S)


def test_row_65_a_refused_replay_is_behind_nothing_pending_either(new_client: NewClient) -> None:
    client, streams = new_client("main"), [ipcsync.Stream() for _ in range(3)]
    standing = [Standing(new_client, name) for name in ("pending", "lost")]
    records = [ipcsync.GraphRecord() for _ in standing]
    points = [client.point(each.data) for each in standing]
    captured(streams[0], *(partial(record.capture, streams[0]) for record in records))
    with standing[0].gate, standing[1].gate:
        for number, record in enumerate(records):
            points[number].wait(streams[number])
            event = client.event(f"e{number}", recorder=True, engine="timeline")
            with client.replay({}, {record: event}, stream=streams[number], timeout=20):
                pass
        standing[1].lose(points[1])
        later = client.event("later", recorder=True, engine="timeline")
        with pytest.raises(ipcsync.RecorderLost, match="captured anew"):
            client.replay({}, dict.fromkeys(records, later), stream=streams[2], timeout=20).__enter__()
        standing[0].lose(points[0])
        later.record(streams[2]).synchronize(DEADLINE_S)
    for stream in streams:
        client.resume(stream, DEADLINE_S)


@pytest.mark.parametrize("is_lost_before", [True, False])
@pytest.mark.parametrize("who", ["main", "lost"])
def test_row_65_behind_a_lost_clients_record_that_may_stand_itself_nothing_waits_for_ever(
    new_client: NewClient, who: str, is_lost_before: bool
) -> None:
    standing, wait = Standing(new_client), ipcsync.GraphWait()
    clients, (above, stream) = {name: new_client(name) for name in ("main", "lost")}, (ipcsync.Stream() for _ in "ab")
    captured(stream, lambda: wait.capture(stream))
    complete = clients["main"].event("free", recorder=True, engine="timeline").record(ipcsync.Stream())
    seen = clients["main"].point(standing.data)
    with standing.gate:
        clients[who].point(standing.data).wait(above)
        clients["lost"].event("e", recorder=True, engine="event").record(above).wait(stream)
        if is_lost_before:
            standing.lose(seen)
        clients["lost"]._session.lease.mark.give_up()  # as the kernel does of a process that ends
        until(lambda: not clients["lost"].is_connected, "its loss")
        if not is_lost_before:
            standing.lose(seen)
        with pytest.raises(ipcsync.RecorderLost, match=r"the replay may never be done: .* captured anew"):
            clients["main"].replay({wait: complete}, stream=stream, timeout=20).__enter__()
        with pytest.raises(ipcsync.RecorderLost):
            stream.synchronize(DEADLINE_S)
    for each in (above, stream):
        clients["main"].resume(each, DEADLINE_S)


def _is_interrupted_at(number: int, function: Callable[[], object]) -> bool:
    """Whether an exception before that line of `graphs` that is run, counted from 0, ended it."""
    lines = count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != graphs.__file__:
            return None
        if event == "line" and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_replay_that_another_thread_ends_is_over_and_its_block_says_so(one: Stage) -> None:
    replaying = one.replay(one.sender.send(1))
    replaying.__enter__()
    one.layers.launch()
    thread = threading.Thread(target=replaying._end_from_outside)
    thread.start()
    thread.join()
    with pytest.raises(ipcsync.CaptureError, match="ended by another call"):
        replaying.__exit__(None, None, None)
    one.expect(2)


def test_where_nothing_is_left_to_end_the_blocks_own_error_goes_on(one: Stage) -> None:
    def leave() -> None:
        with one.replay(one.sender.send(1)):
            one.client.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    finish(one.layers.stream)


class _Elsewhere:
    """A thread that needs the GIL, and gets it only once a call of the test's thread gives it up, not between two."""

    def __init__(self) -> None:
        self.has_run = threading.Event()
        self._may_run = threading.Lock()
        self._may_run.acquire()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._interval = sys.getswitchinterval()

    def _run(self) -> None:
        self._may_run.acquire()
        self.has_run.set()

    def let_run(self) -> None:
        sys.setswitchinterval(1000)
        self._may_run.release()

    def end(self) -> None:
        sys.setswitchinterval(self._interval)
        self._thread.join()


@pytest.mark.parametrize("engine", ["timeline"])
def test_who_ends_a_replay_from_outside_lets_the_thread_go_on_that_ends_it(one: Stage) -> None:
    replaying, amidst, elsewhere = one.replay(one.sender.send(1)), threading.Event(), _Elsewhere()
    replaying.__enter__()
    one.layers.launch()

    def wait(real: Call, *args: Any) -> int:
        amidst.set()
        elsewhere.has_run.wait(DEADLINE_S)
        return int(real(*args))

    thread = threading.Thread(target=replaying.__exit__, args=(None, None, None))
    with replaced({"cuStreamBatchMemOp": wait}):
        thread.start()
        assert amidst.wait(DEADLINE_S)
        try:
            elsewhere.let_run()
            replaying._end_from_outside()
            has_run = elsewhere.has_run.is_set()
        finally:
            elsewhere.end()
            thread.join()
    assert has_run, "the GIL was kept while the lane was waited for"
    one.expect(2)
