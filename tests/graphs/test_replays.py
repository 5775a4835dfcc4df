"""A replay waits for its own points and records its own work, whatever the host does around it."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

import ipcsync
from ipcsync._engines.core import Place, lanes_of_process
from ipcsync.testing import Memory, StreamGate
from ipcsync.typing import EngineName
from tests.graphs.layers import Layers, begin_capture, call, captured, end_empty, finish
from tests.graphs.stage import NewClient, Stage
from tests.graphs.test_deaths import CALLS
from tests.kit.driver_functions import REFUSED, Call, refused_once, replaced
from tests.kit.steps import at_step
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver


def test_a_replay_waits_for_its_point_and_its_record_for_the_graph(one: Stage) -> None:
    for value in range(1, 6):
        with StreamGate(one.sender.stream) as gate:
            (done,) = one.run(value)
            assert not done.query()
            gate.open()
            done.synchronize(DEADLINE_S)
        assert one.layers.found() == [value]
    assert one.done.generation == 5


def test_replays_in_flight_each_have_their_own_point(one: Stage) -> None:
    seen = [Memory(8) for _ in range(6)]
    with StreamGate(one.sender.stream):
        for value, memory in enumerate(seen, 1):
            (done,) = one.run(value)
            memory.copy_from(one.layers.target[0], one.layers.stream)
            done.wait(one.sender.stream)  # the source is overwritten only then
    finish(one.layers.stream)
    assert [memory.read()[0] for memory in seen] == [1, 2, 3, 4, 5, 6]


def test_a_layer_goes_on_while_the_next_one_waits_and_the_records_are_in_order_of_capture(two: Stage) -> None:
    for value in (1, 2, 3):
        (first,) = two.sender.send(value, [0])
        with StreamGate(two.sender.stream):
            (second,) = two.sender.send(value, [1])
            with two.replay([first, second]) as replay:
                two.layers.launch()
            points = [replay[record] for record in two.layers.records]
            assert [point.generation for point in points] == [2 * value - 1, 2 * value]
            points[0].synchronize(DEADLINE_S)
            assert two.layers.target[0].read()[0] == value
            assert not points[1].query()
        points[1].synchronize(DEADLINE_S)
        assert two.layers.found() == [value, value]


def test_a_replay_that_is_made_before_a_capture_records_in_the_order_of_that(two: Stage) -> None:
    replaying = two.replay(two.sender.send(1))
    graph = two.layers.capture(1, 0)
    with replaying as replay:
        two.layers.launch(graph)
    points = [replay[record] for record in two.layers.records]
    assert [point.generation for point in points] == [2, 1]
    points[0].synchronize(DEADLINE_S)
    assert two.layers.found() == [1, 1]


def test_row_64_a_block_that_raises_records_nothing_and_the_next_replay_is_right(two: Stage) -> None:
    two.expect(1)
    replaying = two.replay(two.sender.send(2))
    replay = replaying.__enter__()
    two.layers.launch()
    replaying.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(ipcsync.CaptureError, match="no such record"):
        replay[two.layers.records[0]]
    assert two.done.generation == 2
    two.expect(3)


def test_row_64_a_block_that_launches_nothing_leaves_nothing_open_for_the_next(two: Stage) -> None:
    with pytest.raises(ZeroDivisionError), two.replay(two.sender.send(1)):
        raise ZeroDivisionError
    finish(two.layers.stream)
    with two.replay(two.sender.send(2)):
        pass
    with StreamGate(two.sender.stream):
        points = two.run(3)
        assert not points[0].query()
    points[1].synchronize(DEADLINE_S)
    assert two.layers.found() == [3, 3]


def test_row_64_a_graph_that_is_launched_twice_in_a_block_passes_twice(one: Stage) -> None:
    with one.replay(one.sender.send(1)) as replay:
        one.layers.launch()
        one.layers.launch()
    replay[one.layers.records[0]].synchronize(DEADLINE_S)
    one.expect(2)


def test_a_launch_outside_of_blocks_waits_for_the_next_block(one: Stage) -> None:
    one.expect(1)
    one.layers.launch()
    assert not one.layers.stream.query()
    one.expect(2)


def test_smaller_graphs_than_were_fed_and_graphs_without_waits_or_records(two: Stage) -> None:
    first, blind = two.layers.capture(0), two.layers.capture(0, 1, waits=False)
    late = two.layers.capture(0, 1, records=False)
    for value, graph in enumerate((first, None, blind, first, late, None), 1):
        with two.replay(two.sender.send(value)) as replay:
            two.layers.launch(graph)
        replay[two.layers.records[1]].synchronize(DEADLINE_S)
    assert two.layers.found() == [6, 6]


def test_a_second_launch_stream_waits_until_the_words_are_free(one: Stage) -> None:
    other = ipcsync.Stream()
    for value in range(1, 7):
        stream = other if value % 2 else one.layers.stream
        with StreamGate(one.sender.stream):
            (point,) = one.sender.send(value)
            waits, records = {one.layers.waits[0]: point}, {one.layers.records[0]: one.done}
            with one.client.replay(waits, records, stream=stream, timeout=20) as replay:
                one.layers.launch(on=stream)
            done = replay[one.layers.records[0]]
            done.wait(one.sender.stream)
        if value % 3 == 0:
            done.synchronize(DEADLINE_S)
            assert one.layers.found() == [value]


def test_a_point_of_a_second_launch_stream_does_not_open_the_gate_for_the_first(
    one: Stage, new_client: NewClient
) -> None:
    other, free, seen = ipcsync.Stream(), ipcsync.Stream(), Memory(8)
    theirs = new_client().event("theirs", recorder=True, engine="timeline")
    wait, record = one.layers.waits[0], one.layers.records[0]
    with StreamGate(one.sender.stream):
        with one.replay(one.sender.send(1)) as first:
            one.layers.launch()
        seen.copy_from(one.layers.target[0], one.layers.stream)
        points = {wait: theirs.record(free)}
        with one.client.replay(points, {record: one.done}, stream=other, timeout=20) as second:
            one.layers.launch(on=other)
        for _ in range(300):  # if it does, then soon
            assert not first[record].query()
            assert not second[record].query()
    ipcsync.synchronize_all([first[record], second[record]], timeout=DEADLINE_S)
    finish(one.layers.stream)
    assert seen.holds(1)


def test_a_wait_in_two_branches_of_one_capture_and_a_record_behind_both(new_client: NewClient) -> None:
    client, side = new_client(), ipcsync.Stream()
    stream, events = ipcsync.Stream(), [ipcsync.Event() for _ in range(2)]
    waits, record = [ipcsync.GraphWait() for _ in range(2)], ipcsync.GraphRecord()
    source, target = Memory(8), [Memory(8) for _ in range(2)]

    def put() -> None:
        events[0].record(stream)
        side.wait_event(events[0])
        for each, on, memory in zip(waits, (stream, side), target, strict=True):
            each.capture(on)
            memory.copy_from(source, on)
        events[1].record(side)
        stream.wait_event(events[1])
        record.capture(stream)

    graph = captured(stream, put)
    sent = new_client().event("sent", recorder=True, engine="timeline")
    done = client.event("done", recorder=True, engine="timeline")
    for value in (1, 2, 3):
        with StreamGate(side):
            source.fill(value, side)
            points = [sent.record(side) for _ in waits]
            with client.replay(dict(zip(waits, points, strict=True)), {record: done}, stream=stream) as replay:
                Layers.launch(object.__new__(Layers), graph, stream)
        replay[record].synchronize(DEADLINE_S)
        assert [memory.read()[0] for memory in target] == [value, value]


def test_a_stream_for_each_launch_takes_a_bounded_number_of_streams(one: Stage) -> None:
    seen = set()
    for value in range(1, 101):
        stream = ipcsync.Stream()
        (point,) = one.sender.send(value)
        waits, records = {one.layers.waits[0]: point}, {one.layers.records[0]: one.done}
        with one.client.replay(waits, records, stream=stream, timeout=20) as replay:
            one.layers.launch(on=stream)
        replay[one.layers.records[0]].synchronize(DEADLINE_S)
        assert one.layers.found() == [value]
        finish(stream)
        seen |= {lane.feeder_id for lane in lanes_of_process.values()}
        until(lambda: [*lanes_of_process.values()][-1].is_free, "its brackets are over")
    assert len(seen) < 60


@pytest.mark.parametrize("engine", ["timeline"])
def test_the_legacy_stream_is_that_of_its_context_and_the_threads_one_stays(one: Stage, engine: EngineName) -> None:
    context, legacy = call("cuCtxGetCurrent"), ipcsync.ExternalStream(1, device=0)
    for value, within in ((1, context), (2, 0)):  # from the second one on all is there that is made with a context
        waits = dict(zip(one.layers.waits, one.sender.send(value), strict=True))
        with one.client.replay(waits, {one.layers.records[0]: one.done}, stream=legacy, timeout=20) as replay:
            one.layers.launch(on=legacy)
            call("cuCtxSetCurrent", within)
        assert int(call("cuCtxGetCurrent")) == int(within)
        call("cuCtxSetCurrent", context)
        replay[one.layers.records[0]].synchronize(DEADLINE_S)
    one.expect(3)


def test_the_legacy_stream_launches_graphs_and_the_per_thread_one_does_not(one: Stage) -> None:
    legacy, per_thread = ipcsync.ExternalStream(1, device=0), ipcsync.ExternalStream(2, device=0)
    for value in (1, 2, 3):
        waits = dict(zip(one.layers.waits, one.sender.send(value), strict=True))
        with one.client.replay(waits, {one.layers.records[0]: one.done}, stream=legacy, timeout=20) as replay:
            one.layers.launch(on=legacy)
        replay[one.layers.records[0]].synchronize(DEADLINE_S)
        assert one.layers.found() == [value]
    with pytest.raises(ipcsync.CaptureError, match="per-thread"):
        one.client.replay({}, stream=per_thread).__enter__()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_captured_nowhere_twice_or_never_is_an_error_and_spoils_no_capture(one: Stage) -> None:
    wait, record = ipcsync.GraphWait(), ipcsync.GraphRecord()
    for each in (wait, record):
        assert not each.is_capturing(one.layers.stream)
        with pytest.raises(ipcsync.CaptureError, match="not being captured"):
            each.capture(one.layers.stream)

    def put() -> None:
        for each in (wait, record):
            assert each.is_capturing(one.layers.stream)
            each.capture(one.layers.stream)
            with pytest.raises(ipcsync.CaptureError, match="in this capture already"):
                each.capture(one.layers.stream)

    with pytest.raises(ipcsync.CaptureError, match="never captured"):
        one.client.replay({wait: one.sender.send(1)[0]}, stream=one.layers.stream).__enter__()
    captured(one.layers.stream, put)
    captured(one.layers.stream, put)  # in another one, again


def test_a_wait_for_another_device_is_refused(one: Stage) -> None:
    other = Place(1, 0, is_gate=True)  # as of a GraphWait there
    other._note_capture()
    (point,) = one.sender.send(1)
    for waits in ({other: point}, {one.layers.waits[0]: point, other: point}):
        with pytest.raises(ipcsync.DeviceMismatch, match=r"GraphWait device=cuda:1.* than the stream's, 0"):
            one.client.replay(waits, stream=one.layers.stream).__enter__()  # type: ignore[arg-type]


def test_a_record_and_a_wait_on_a_capturing_stream_name_what_there_is_instead(one: Stage) -> None:
    (point,) = one.sender.send(1)

    def put() -> None:
        with pytest.raises(ipcsync.StreamCapturing, match="GraphRecord"):
            one.done.record(one.layers.stream)
        with pytest.raises(ipcsync.StreamCapturing, match="GraphWait"):
            point.wait(one.layers.stream)
        with pytest.raises(ipcsync.StreamCapturing), one.replay([point]):
            pass

    captured(one.layers.stream, put)


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
def test_row_40_a_block_whose_stream_is_captured_at_its_end_puts_nothing_there_and_the_next_ends_it(
    one: Stage, error: Exception | None
) -> None:
    one.expect(1)
    points = one.sender.send(2)

    def leave() -> None:
        with one.replay(points):
            one.layers.launch()
            begin_capture(one.layers.stream)
            if error is not None:
                raise error

    with pytest.raises(ipcsync.StreamCapturing, match="cannot end a replay") as caught:
        leave()
    assert caught.value.__context__ is error
    waits = dict(zip(one.layers.waits, points, strict=True))
    with pytest.raises(ipcsync.StreamCapturing, match="cannot end a replay"):
        one.client.replay(waits, stream=ipcsync.Stream()).__enter__()
    assert one.done.generation == 1
    end_empty(one.layers.stream)
    one.expect(3)


def test_row_40_a_stream_that_is_captured_while_a_replay_is_entered_gets_nothing(one: Stage) -> None:
    points = one.sender.send(1)
    with (
        at_step("load completed", lambda: begin_capture(one.layers.stream)),
        pytest.raises(ipcsync.StreamCapturing, match="cannot replay"),
    ):
        one.replay(points).__enter__()
    end_empty(one.layers.stream)
    one.expect(2)


@pytest.mark.parametrize("engine", ["timeline"])
def test_row_40_a_replay_on_the_legacy_stream_does_not_end_while_a_blocking_stream_is_captured(
    one: Stage, engine: EngineName
) -> None:
    legacy, blocking, context = ipcsync.ExternalStream(1, device=0), call("cuStreamCreate", 0), call("cuCtxGetCurrent")
    stream = ipcsync.ExternalStream(int(blocking), device=0)
    records = {one.layers.records[0]: one.done}

    def replay(value: int, *puts: Callable[[], object]) -> Any:
        waits = dict(zip(one.layers.waits, one.sender.send(value), strict=True))
        with one.client.replay(waits, records, stream=legacy, timeout=20) as made:
            one.layers.launch(on=legacy)
            for put in puts:
                put()
        return made

    with pytest.raises(ipcsync.StreamCapturing, match="legacy stream"):
        replay(1, lambda: begin_capture(stream), lambda: call("cuCtxSetCurrent", 0))
    call("cuCtxSetCurrent", context)
    end_empty(stream)
    replay(2)[one.layers.records[0]].synchronize(DEADLINE_S)
    assert one.layers.found() == [2]
    call("cuStreamDestroy", blocking)


def test_row_64_a_second_block_on_the_stream_or_with_these_words_is_refused_and_the_first_is_right(one: Stage) -> None:
    other = ipcsync.Stream()
    more = Layers(1)
    one.layers.capture(0)  # behind those
    with StreamGate(one.sender.stream):
        points = one.sender.send(7)
        errors: list[str] = []

        def enter(stream: ipcsync.Stream, waits: dict[ipcsync.GraphWait, ipcsync.Point]) -> None:
            try:
                one.client.replay(waits, stream=stream).__enter__()
            except ipcsync.CaptureError as error:
                errors.append(str(error))

        with one.replay(points) as replay:
            enter(one.layers.stream, {more.waits[0]: points[0]})
            thread = threading.Thread(
                target=enter, args=(other, dict.fromkeys([*more.waits, *one.layers.waits], points[0]))
            )
            thread.start()
            thread.join()
            one.layers.launch()
        assert ["one at a time" in errors[0], "is in use" in errors[1]] == [True, True]
    replay[one.layers.records[0]].synchronize(DEADLINE_S)
    assert one.layers.found() == [7]
    waits, records = dict.fromkeys(more.waits, points[0]), dict.fromkeys(more.records, one.done)
    with one.client.replay(waits, records, stream=more.stream, timeout=20) as replay:
        more.launch()
    replay[more.records[0]].synchronize(DEADLINE_S)  # what was refused has taken no other words


def test_a_block_that_nobody_ended_is_ended_by_the_next(one: Stage) -> None:
    one.replay(one.sender.send(1)).__enter__()
    one.layers.launch()
    gc.collect()
    one.expect(2)


def test_a_block_that_nobody_ended_is_ended_by_one_on_another_stream(one: Stage) -> None:
    other = ipcsync.Stream()
    one.replay(one.sender.send(1)).__enter__()
    one.layers.launch()
    gc.collect()
    (point,) = one.sender.send(2)
    records = {one.layers.records[0]: one.done}
    with one.client.replay({one.layers.waits[0]: point}, records, stream=other, timeout=20) as replay:
        one.layers.launch(on=other)
    replay[one.layers.records[0]].synchronize(DEADLINE_S)
    assert one.layers.found() == [2]


def test_a_replay_that_its_event_refers_to_is_collected_with_it(one: Stage) -> None:
    event = one.client.event("kept", recorder=True, engine="timeline")
    (point,), (record,) = one.sender.send(1), one.layers.records
    with one.client.replay({one.layers.waits[0]: point}, {record: event}, stream=one.layers.stream) as replay:
        one.layers.launch()
    replay[record].synchronize(DEADLINE_S)
    vars(event)["latest"] = replay
    seen = weakref.ref(event)
    del event, replay
    gc.collect()
    assert seen() is None


def test_a_replay_keeps_what_it_was_given(two: Stage) -> None:
    event = two.client.event("given", recorder=True, engine="timeline")
    first, second = (two.client.point(bytes(point)) for point in two.sender.send(1))
    second = pickle.loads(pickle.dumps(second))
    seen = [weakref.ref(each) for each in (event, first, second)]
    waits = dict(zip(two.layers.waits, (first, second), strict=True))
    replaying = two.client.replay(waits, dict.fromkeys(two.layers.records, event), stream=two.layers.stream, timeout=20)
    del event, first, second, waits
    gc.collect()
    assert None not in [each() for each in seen]
    with replaying as replay:
        two.layers.launch()
    replay[two.layers.records[1]].synchronize(DEADLINE_S)
    assert two.layers.found() == [1, 1]


def test_the_points_are_there_behind_the_block(one: Stage) -> None:
    with one.replay(one.sender.send(1)) as replay:
        with pytest.raises(ipcsync.CaptureError, match="after its block"):
            replay[one.layers.records[0]]
        one.layers.launch()
    with pytest.raises(KeyError):
        replay[ipcsync.GraphRecord()]
    assert replay[one.layers.records[0]].generation == 1


def test_a_pending_point_of_another_session_on_the_event_engine_is_refused(one: Stage, new_client: NewClient) -> None:
    theirs = new_client().event("theirs", recorder=True, engine="event")
    mine = one.client.event("mine", recorder=True, engine="event")
    with StreamGate(one.sender.stream) as gate:
        point, own = theirs.record(one.sender.stream), mine.record(one.sender.stream)
        seen = one.client.point(bytes(point))
        with pytest.raises(ipcsync.EngineMismatch, match="depends on another process"):
            one.replay([seen]).__enter__()
        with one.replay([own]) as replay:
            one.layers.launch()
        gate.open()
    replay[one.layers.records[0]].synchronize(DEADLINE_S)
    with one.replay([seen]):  # complete by now
        one.layers.launch()


def test_a_point_of_another_session_on_the_event_engine_may_be_complete_once_it_is_recorded(
    one: Stage, new_client: NewClient
) -> None:
    theirs = new_client().event("theirs", recorder=True, engine="event")
    seen, stream = one.client.event("theirs").at(1), ipcsync.Stream()
    replaying = one.replay([seen])
    with at_step("sleep", lambda: theirs.record(stream).synchronize(DEADLINE_S)):
        replaying.__enter__()
    one.layers.launch()
    replaying.__exit__(None, None, None)
    finish(one.layers.stream)


def test_more_records_of_an_event_than_its_depth_are_refused_and_as_many_wait_for_room(new_client: NewClient) -> None:
    client = new_client()
    layers = Layers(2)
    shallow = client.event("shallow", recorder=True, engine="event", depth=1)
    fit = client.event("fit", recorder=True, engine="event", depth=2)
    with pytest.raises(ipcsync.EngineMismatch, match="depth=1"):
        client.replay({}, dict.fromkeys(layers.records, shallow), stream=layers.stream).__enter__()
    graph = layers.capture(0, 1, waits=False)
    for _ in range(4):
        with client.replay({}, dict.fromkeys(layers.records, fit), stream=layers.stream, timeout=20):
            layers.launch(graph)
    with StreamGate(layers.stream):
        with client.replay({}, dict.fromkeys(layers.records, fit), stream=layers.stream, timeout=20):
            layers.launch(graph)
        with pytest.raises(ipcsync.WaitTimeout):
            client.replay({}, dict.fromkeys(layers.records, fit), stream=layers.stream, timeout=0).__enter__()
    fit.at(10).synchronize(DEADLINE_S)


def test_only_so_many_replays_are_in_flight(one: Stage) -> None:
    with StreamGate(one.sender.stream):
        points = one.sender.send(1)

        def replay_all() -> None:
            for _ in range(100):
                with one.client.replay({one.layers.waits[0]: points[0]}, stream=one.layers.stream, timeout=0):
                    one.layers.launch()

        with pytest.raises(ipcsync.WaitTimeout, match="in flight"):
            replay_all()
    one.expect(2)


def test_a_point_that_this_very_replay_is_to_record_is_refused(one: Stage) -> None:
    with pytest.raises(ValueError, match="is for this replay to record"):
        one.client.replay(
            {one.layers.waits[0]: one.done.at(1)}, {one.layers.records[0]: one.done}, stream=one.layers.stream
        ).__enter__()


def test_arguments_of_other_types_are_refused(two: Stage) -> None:
    (first, second), (record, _), (point, _) = two.layers.waits, two.layers.records, two.sender.send(1)
    others: list[dict[Any, Any]] = [{first: two.done}, {first: point, second: two.done}, {first: point, record: point}]
    for waits in others:
        with pytest.raises(TypeError, match="GraphWait to Point"):
            two.client.replay(waits)
    with pytest.raises(TypeError, match="GraphRecord to SharedEvent"):
        two.client.replay({}, {record: two.done, first: two.done})  # type: ignore[dict-item]
    for wrong in ([first], point, None):
        with pytest.raises(TypeError, match=f"GraphWait to Point, .*, but got {type(wrong).__name__}$"):
            two.client.replay(wrong, {})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"one from GraphRecord .*, but got {type(wrong).__name__}$"):
            two.client.next({}, wrong)  # type: ignore[arg-type]
    for timeout in (-1, -0.5, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            two.client.replay({}, timeout=timeout)
    for text in ("1", True):
        with pytest.raises(TypeError, match="timeout"):
            two.client.replay({}, timeout=text)  # type: ignore[arg-type]
    for good in (0, 0.0, 1e300, 10**30, float("inf"), None):  # at once, or for ever
        with two.client.replay({}, stream=two.layers.stream, timeout=good):
            pass


# --- refusals at every step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize(("engine", "number"), CALLS)
def test_row_64_a_call_that_the_driver_refuses_leaves_the_next_replay_right(
    two: Stage, number: int, is_made: bool
) -> None:
    two.expect(1)
    refused = refused_once("cuStreamBatchMemOp", number, is_made=is_made)
    with replaced(refused), pytest.raises(ipcsync.DriverError, match="cuStreamBatchMemOp"):
        two.run(2)
    with StreamGate(two.sender.stream):
        points = two.run(3)
        assert not any(point.query() for point in points)
    points[1].synchronize(DEADLINE_S)
    assert two.layers.found() == [3, 3]
    two.expect(4)


@pytest.mark.parametrize("engine", ["timeline"])
def test_a_replays_record_that_is_repeated_on_another_stream_proves_nothing_of_what_that_waits_for(
    two: Stage, new_client: NewClient, engine: EngineName
) -> None:
    """The drain that was refused may have made it, and that is not behind the other stream's waits."""
    two.expect(1)
    theirs, other = ipcsync.Stream(), ipcsync.Stream()
    points = two.sender.send(2)
    with StreamGate(theirs):
        new_client().record(theirs).wait(other)
        refused = refused_once("cuStreamBatchMemOp", 3, is_made=True)
        with replaced(refused), pytest.raises(ipcsync.DriverError, match="cuStreamBatchMemOp"):
            _whole(two, points)
        assert two.done.record(other).generation == 5
        (entry,) = [each for each in two.done._engine.chain.entries.values() if each.wait.is_queued]
        assert entry.proof == 5


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("number", [2, 3])  # of the batches: the end, and the drain
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("engine", ["timeline"])
def test_row_64_a_record_elsewhere_is_behind_a_replay_whose_end_the_driver_refused(
    two: Stage, engine: EngineName, times: int, number: int, is_made: bool
) -> None:
    two.expect(1)
    other, made = ipcsync.Stream(), count()

    def record() -> ipcsync.Point | None:
        with suppress(ipcsync.IpcSyncError):  # amid the other call, or while its place is not known
            return two.done.record(other)
        return None

    def batch(real: Call, *arguments: Any) -> int:
        here = next(made)
        is_refused = number <= here < number + times
        if here > number:  # as another thread's, which may come as soon as the event's turn is given
            record()
        if not is_refused or is_made:
            real(*arguments)
        return REFUSED if is_refused else 0

    with StreamGate(two.sender.stream):
        points = two.sender.send(2)
        with replaced({"cuStreamBatchMemOp": batch}), pytest.raises(ipcsync.DriverError, match="cuStreamBatchMemOp"):
            _whole(two, points)
        record()
        for _ in range(300):
            assert not any(two.done.at(number).query() for number in range(3, 7))
    until(record, "a further record is made").synchronize(DEADLINE_S)
    assert two.layers.found() == [2, 2]
    two.expect(3)


@pytest.mark.parametrize("engine", ["timeline"])
def test_row_64_a_record_elsewhere_is_behind_what_the_launch_stream_waits_for_once_a_replays_marker_was_refused(
    one: Stage, new_client: NewClient, engine: EngineName
) -> None:
    """The marker is late: a further replay stands behind the wait, and the marker behind that."""
    one.expect(1)
    points = one.sender.send(2)
    with replaced(refused_once("cuEventRecord")), pytest.raises(ipcsync.DriverError, match="cuEventRecord"):
        _whole(one, points)
    root = new_client().event("root", recorder=True, engine="timeline")
    seen = one.client.event("root")
    seen._engine.wait(1, one.layers.stream, None, True)  # as one that waited ahead
    another = one.client.event("another", recorder=True, engine=engine)
    with one.client.replay({}, {one.layers.records[0]: another}, stream=one.layers.stream, timeout=20):
        pass
    point = one.done.record(ipcsync.Stream())
    root.close()
    with pytest.raises(ipcsync.RecorderLost):
        point.synchronize(DEADLINE_S)
    one.client.resume(one.layers.stream, DEADLINE_S)


_MARKS: list[tuple[EngineName, int, bool]] = [
    ("timeline", 0, False),
    ("timeline", 0, True),
    ("event", 0, True),
    ("event", 1, True),
]
"""The records of CUDA events that a replay of two layers has: a marker on F, if there is none yet, on D, or two of the
ring."""


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize(("engine", "number", "has_markers"), _MARKS)
def test_row_64_a_record_or_a_marker_that_the_driver_refuses_leaves_the_next_replays_right(
    two: Stage, number: int, has_markers: bool, is_made: bool
) -> None:
    two.expect(1)
    if has_markers:
        with StreamGate(two.sender.stream):
            two.run(1)
    with StreamGate(two.sender.stream):
        points = two.sender.send(2)
        refused = refused_once("cuEventRecord", number, is_made=is_made)
        with replaced(refused), pytest.raises(ipcsync.DriverError, match="cuEventRecord"):
            _whole(two, points)
    for value in (3, 4, 5):
        with StreamGate(two.sender.stream):
            (first, _) = two.run(value)
            assert not first.query()
        two.expect(value)


def _whole(stage: Stage, points: list[ipcsync.Point]) -> None:
    with stage.replay(points):
        stage.layers.launch()
