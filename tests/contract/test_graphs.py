"""Graphs captured from streams: what a launch does, in which order, and what it waits for; in data, not in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.contract import actions, graphing
from tests.contract.graphing import Graphs, HostFunctions, Words, memory_operation
from tests.contract.sharing import share
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, ok
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL
SIZE = 64


@pytest.fixture
def graphs(drv: ModuleType, ctx: Any) -> Iterator[Graphs]:
    """Makes captures and executables, which end with the test."""
    if not hasattr(drv, "cuGraphLaunch"):
        pytest.skip("this driver has no graphs")
    made = Graphs(drv)
    yield made
    kit.open_all_latches()
    made.end()


@pytest.fixture
def words(graphs: Graphs) -> Iterator[Words]:
    """Words of pinned memory."""
    made = Words()
    yield made
    for index in range(16):
        made[index] = 2**62  # what still waits for one goes on
    kit.open_all_latches()
    ok(graphs.drv.cuCtxSynchronize())
    made.free()


@pytest.fixture
def host(graphs: Graphs) -> HostFunctions:
    """Host functions that note that they ran."""
    return HostFunctions()


@pytest.fixture
def memory(drv: ModuleType, words: Words) -> Iterator[Any]:
    """The address of device memory, all zeros."""
    pointer = ok(drv.cuMemAlloc(8 * SIZE))
    ok(drv.cuMemsetD8(pointer, 0, 8 * SIZE))
    ok(drv.cuCtxSynchronize())
    yield pointer
    ok(drv.cuCtxSynchronize())
    ok(drv.cuMemFree(pointer))


def read(drv: ModuleType, pointer: Any, size: int = SIZE) -> bytes:
    """What device memory holds."""
    data = bytearray(size)
    ok(drv.cuMemcpyDtoH(data, pointer, size))
    return bytes(data)


def fork(drv: ModuleType, event: Any, before: Any, after: Any) -> None:
    """Record the event on one stream and make the other wait for it."""
    ok(drv.cuEventRecord(event, before))
    ok(drv.cuStreamWaitEvent(after, event, 0))


# ---- one launch after the other


def test_a_launch_runs_what_was_captured_in_order_and_the_capture_ran_nothing(
    drv: ModuleType, graphs: Graphs, stream: Any, memory: Any, host: HostFunctions
) -> None:
    second = drv.CUdeviceptr(int(memory) + SIZE)

    def put() -> None:
        ok(drv.cuMemsetD8Async(memory, 1, SIZE, stream))
        ok(drv.cuMemcpyDtoDAsync(second, memory, SIZE, stream))
        ok(drv.cuMemsetD8Async(memory, 2, SIZE, stream))
        ok(drv.cuLaunchHostFunc(stream, host("ran"), 0))
        ok(drv.cuStreamWriteValue64(stream, memory, 3, 0))

    with graphs.capture(stream) as captured:
        put()
    executable = graphs.executable(captured[0])
    assert graphing.types(drv, captured[0]) == [
        graphing.MEMCPY,
        graphing.MEMSET,
        graphing.MEMSET,
        graphing.HOST,
        graphing.MEM_OPS,
    ]
    finish(stream)
    assert (read(drv, memory), read(drv, second), host.ran) == (bytes(SIZE), bytes(SIZE), [])
    ok(drv.cuGraphLaunch(executable, stream))
    finish(stream)
    assert (read(drv, memory)[:9], read(drv, second)) == (b"\3" + bytes(7) + b"\2", b"\1" * SIZE)
    assert host.ran == ["ran"]


def test_each_of_a_hundred_launches_adds_to_what_the_ones_before_left(
    drv: ModuleType, graphs: Graphs, new_stream: New, memory: Any, host: HostFunctions
) -> None:
    stream = new_stream()
    cells = 128
    row, other = ok(drv.cuMemAlloc(8 * cells)), ok(drv.cuMemAlloc(8 * cells))
    ok(drv.cuMemsetD8(row, 0, 8 * cells))
    ok(drv.cuMemsetD8(row, 7, 8))
    ok(drv.cuCtxSynchronize())

    def put() -> None:  # shift the row by one cell
        ok(drv.cuMemcpyDtoDAsync(other, row, 8 * cells, stream))
        ok(drv.cuMemcpyDtoDAsync(drv.CUdeviceptr(int(row) + 8), other, 8 * (cells - 1), stream))
        ok(drv.cuMemsetD8Async(row, 0, 8, stream))
        ok(drv.cuLaunchHostFunc(stream, host("shift"), 0))

    executable = graphs.captured(stream, put)
    for _ in range(100):
        ok(drv.cuGraphLaunch(executable, stream))
    finish(stream)
    assert read(drv, row, 8 * cells).index(b"\7") == 800
    assert len(host.ran) == 100
    for pointer in (row, other):
        ok(drv.cuMemFree(pointer))


def test_a_launch_stands_in_its_stream_as_one_operation(
    drv: ModuleType, graphs: Graphs, stream: Any, event: Any, new_stream: New, words: Words
) -> None:
    def put() -> None:
        ok(drv.cuStreamWaitValue64(stream, words.at(0), 1, kit.GEQ))
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))

    executable, other = graphs.captured(stream, put), new_stream()
    before = Latch(stream)
    ok(drv.cuStreamWriteValue64(stream, words.at(2), 1, 0))
    ok(drv.cuGraphLaunch(executable, stream))
    ok(drv.cuMemcpyDtoDAsync(words.at(3), words.at(1), 8, stream))
    ok(drv.cuEventRecord(event, stream))
    ok(drv.cuStreamWaitEvent(other, event, 0))
    ok(drv.cuMemcpyDtoDAsync(words.at(4), words.at(1), 8, other))
    words[0] = 1
    assert [code(drv.cuStreamQuery(each)) for each in (stream, other)] == [kit.NOT_READY] * 2
    assert words[1] == 0
    words[0] = 0
    before.open()
    until(lambda: words[2], "what is before the launch")
    assert [code(drv.cuStreamQuery(each)) for each in (stream, other)] == [kit.NOT_READY] * 2
    assert code(drv.cuEventQuery(event)) == kit.NOT_READY
    words[0] = 1
    finish(other)
    complete(event)
    assert [words[index] for index in (1, 3, 4)] == [1, 1, 1]


def test_launches_of_one_executable_follow_each_other_in_whatever_streams(
    drv: ModuleType, graphs: Graphs, new_stream: New, words: Words, host: HostFunctions
) -> None:
    streams = [new_stream() for _ in range(3)]

    def put() -> None:
        ok(drv.cuLaunchHostFunc(streams[0], host("begin"), 0))
        ok(drv.cuStreamWaitValue64(streams[0], words.at(0), 1, kit.GEQ))
        ok(drv.cuLaunchHostFunc(streams[0], host("end"), 0))
        ok(drv.cuStreamWriteValue64(streams[0], words.at(0), 0, 0))

    executable = graphs.captured(streams[0], put)
    for stream in streams:
        ok(drv.cuGraphLaunch(executable, stream))
    for turn, stream in enumerate(streams):
        until(lambda: len(host.ran) == 2 * turn + 1, "the next launch begins")  # noqa: B023
        assert host.ran == ["begin", "end"] * turn + ["begin"]
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
        words[0] = 1
        finish(stream)


def test_another_executable_passes_one_that_waits(
    drv: ModuleType, graphs: Graphs, new_stream: New, words: Words
) -> None:
    held, free = new_stream(), new_stream()
    waiting = graphs.captured(held, lambda: ok(drv.cuStreamWaitValue64(held, words.at(0), 1, kit.GEQ)))
    writing = graphs.captured(free, lambda: ok(drv.cuStreamWriteValue64(free, words.at(1), 1, 0)))
    ok(drv.cuGraphLaunch(waiting, held))
    ok(drv.cuGraphLaunch(writing, free))
    finish(free)
    assert words[1] == 1
    assert code(drv.cuStreamQuery(held)) == kit.NOT_READY
    words[0] = 1
    finish(held)


def test_an_executable_destroyed_while_it_runs_goes_on_to_its_end(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, new_event: New, words: Words
) -> None:
    side, events = new_stream(), [new_event() for _ in range(2)]

    def put() -> None:
        fork(drv, events[0], stream, side)
        for index, each in enumerate((stream, side)):
            ok(drv.cuStreamWaitValue64(each, words.at(index), 1, kit.GEQ))
            ok(drv.cuStreamWriteValue64(each, words.at(2 + index), 1, 0))
        fork(drv, events[1], side, stream)

    executable = graphs.captured(stream, put)
    ok(drv.cuGraphLaunch(executable, stream))
    graphs.end()
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    words[0] = words[1] = 1
    finish(stream)
    assert (words[2], words[3]) == (1, 1)


@pytest.mark.alone
def test_launches_and_the_legacy_stream_wait_for_each_other(drv: ModuleType, graphs: Graphs, words: Words) -> None:
    legacy, blocking = drv.CUstream(kit.LEGACY), ok(drv.cuStreamCreate(0))

    def put() -> None:
        ok(drv.cuMemcpyDtoDAsync(words.at(1), words.at(0), 8, blocking))
        ok(drv.cuStreamWaitValue64(blocking, words.at(2), 1, kit.GEQ))
        ok(drv.cuStreamWriteValue64(blocking, words.at(3), 1, 0))

    executable = graphs.captured(blocking, put)
    latch = Latch(legacy)
    ok(drv.cuStreamWriteValue64(legacy, words.at(0), 5, 0))
    ok(drv.cuGraphLaunch(executable, blocking))
    ok(drv.cuMemcpyDtoDAsync(words.at(4), words.at(3), 8, legacy))
    assert code(drv.cuStreamQuery(blocking)) == kit.NOT_READY
    latch.open()
    until(lambda: words[1], "the launch gets to its first operation")
    assert code(drv.cuStreamQuery(legacy)) == kit.NOT_READY
    words[2] = 1
    finish(legacy)
    assert (words[1], words[4]) == (5, 1)
    ok(drv.cuStreamDestroy(blocking))


# ---- branches


def test_a_branch_goes_on_while_another_waits_and_their_join_waits_for_both(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, new_event: New, words: Words
) -> None:
    side, events = new_stream(), [new_event(kit.DISABLE_TIMING) for _ in range(2)]

    def put() -> None:
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))
        fork(drv, events[0], stream, side)
        ok(drv.cuStreamWaitValue64(side, words.at(0), 1, kit.GEQ))
        ok(drv.cuMemcpyDtoDAsync(words.at(2), words.at(1), 8, side))
        ok(drv.cuStreamWriteValue64(stream, words.at(3), 1, 0))
        fork(drv, events[1], side, stream)
        ok(drv.cuMemcpyDtoDAsync(words.at(4), words.at(2), 8, stream))

    executable = graphs.captured(stream, put)
    for _ in range(3):
        for index in range(5):
            words[index] = 0
        ok(drv.cuGraphLaunch(executable, stream))
        until(lambda: words[3], "the other branch goes on")
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
        assert (words[2], words[4]) == (0, 0)
        words[0] = 1
        finish(stream)
        assert (words[2], words[4]) == (1, 1)


def test_branches_wait_for_what_is_before_the_launch(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, new_event: New, words: Words
) -> None:
    sides, events = [new_stream() for _ in range(3)], [new_event(kit.DISABLE_TIMING) for _ in range(4)]

    def put() -> None:
        ok(drv.cuEventRecord(events[0], stream))  # the branches have no node before their own
        for index, side in enumerate(sides):
            ok(drv.cuStreamWaitEvent(side, events[0], 0))
            ok(drv.cuMemcpyDtoDAsync(words.at(1 + index), words.at(0), 8, side))
            fork(drv, events[1 + index], side, stream)

    executable = graphs.captured(stream, put)
    latch = Latch(stream)
    ok(drv.cuStreamWriteValue64(stream, words.at(0), 1, 0))
    ok(drv.cuGraphLaunch(executable, stream))
    latch.open()
    finish(stream)
    assert [words[1 + index] for index in range(3)] == [1, 1, 1]


def test_the_next_launch_waits_for_every_branch_of_the_one_before(
    drv: ModuleType, graphs: Graphs, new_stream: New, new_event: New, words: Words, host: HostFunctions
) -> None:
    first, second, side = (new_stream() for _ in range(3))
    events = [new_event(kit.DISABLE_TIMING) for _ in range(2)]

    def put() -> None:
        ok(drv.cuLaunchHostFunc(first, host("begin"), 0))
        fork(drv, events[0], first, side)
        ok(drv.cuStreamWaitValue64(side, words.at(0), 1, kit.GEQ))
        ok(drv.cuLaunchHostFunc(side, host("side"), 0))
        fork(drv, events[1], side, first)

    executable = graphs.captured(first, put)
    for stream in (first, second, first):
        ok(drv.cuGraphLaunch(executable, stream))
    until(lambda: host.ran, "the first launch begins")
    words[0] = 1
    for stream in (first, second):
        finish(stream)
    assert host.ran == ["begin", "side"] * 3


def test_edges_are_those_of_streams_and_events(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, new_event: New, words: Words, memory: Any
) -> None:
    side, events = new_stream(), [new_event(kit.DISABLE_TIMING) for _ in range(2)]
    with graphs.capture(stream) as captured:
        assert graphing.dependencies(drv, stream) == []
        ok(drv.cuMemsetD8Async(memory, 1, SIZE, stream))
        assert graphing.dependencies(drv, stream) == [graphing.MEMSET]
        fork(drv, events[0], stream, side)
        assert graphing.dependencies(drv, side) == [graphing.MEMSET]
        ok(drv.cuStreamWriteValue64(side, words.at(0), 1, 0))
        ok(drv.cuMemcpyDtoDAsync(words.at(1), memory, 8, stream))
        fork(drv, events[1], side, stream)
        assert graphing.dependencies(drv, stream) == [graphing.MEMCPY, graphing.MEM_OPS]
        assert graphing.dependencies(drv, side) == [graphing.MEM_OPS]
        ok(drv.cuEventRecordWithFlags(events[0], stream, EXTERNAL))
        assert graphing.dependencies(drv, stream) == [graphing.EVENT_RECORD]
    assert graphing.edges(drv, captured[0]) == {
        (graphing.MEMSET, graphing.MEM_OPS),
        (graphing.MEMSET, graphing.MEMCPY),
        (graphing.MEM_OPS, graphing.EVENT_RECORD),
        (graphing.MEMCPY, graphing.EVENT_RECORD),
    }
    root = graphing.nodes(drv, captured[0])[0]
    assert int(ok(drv.cuGraphGetRootNodes(captured[0], 1))[0][0]) == int(root)
    assert len(ok(drv.cuGraphNodeGetDependentNodes(root, 2))[0]) == 2
    last = graphing.nodes(drv, captured[0])[-1]
    assert len(ok(drv.cuGraphNodeGetDependencies(last, 2))[0]) == 2


def test_a_branch_that_is_not_joined_fails_the_capture(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, new_event: New, words: Words
) -> None:
    side, event = new_stream(), new_event(kit.DISABLE_TIMING)
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(kit.GLOBAL)))
    fork(drv, event, stream, side)
    ok(drv.cuStreamWriteValue64(side, words.at(0), 1, 0))
    assert kit.end_capture(drv, stream) == graphing.UNJOINED
    assert [kit.capture_status(drv, each) for each in (stream, side)] == [kit.NONE] * 2
    for each in (stream, side):
        finish(each)
    assert words[0] == 0


def test_dependencies_of_a_capture_can_be_replaced_and_what_they_leave_out_need_not_be_joined(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, words: Words
) -> None:
    other = new_stream()
    assert code(drv.cuStreamUpdateCaptureDependencies(other, [], [], 0, graphing.SET)) == kit.ILLEGAL_STATE
    with graphs.capture(stream) as captured:
        ok(drv.cuStreamWaitValue64(stream, words.at(0), 1, kit.GEQ))
        first = graphing.nodes(drv, ok(drv.cuStreamGetCaptureInfo(stream))[2])[0]
        ok(drv.cuStreamUpdateCaptureDependencies(stream, [], [], 0, graphing.SET))
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))
        ok(drv.cuStreamUpdateCaptureDependencies(stream, [first], [drv.CUgraphEdgeData()], 1, graphing.ADD))
        assert graphing.dependencies(drv, stream) == [graphing.MEM_OPS] * 2
        ok(drv.cuStreamWriteValue64(stream, words.at(2), 1, 0))
    ok(drv.cuGraphLaunch(graphs.executable(captured[0]), stream))
    until(lambda: words[1], "the second root goes on")
    assert words[2] == 0
    words[0] = 1
    finish(stream)
    assert words[2] == 1


# ---- memory operations


def test_a_gate_in_device_memory_is_opened_by_a_stream(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, memory: Any, words: Words
) -> None:
    other = new_stream()

    def put() -> None:
        ok(drv.cuStreamWaitValue32(stream, memory, 1, kit.GEQ))
        ok(drv.cuStreamWriteValue32(stream, words.at(0), 1, 0))

    ok(drv.cuGraphLaunch(graphs.captured(stream, put), stream))
    assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
    ok(drv.cuStreamWriteValue32(other, memory, 1, 0))
    finish(stream)
    assert words[0] == 1


@pytest.mark.alone
def test_a_gate_in_a_registered_page_is_opened_by_a_plain_store_of_another_process(
    drv: ModuleType, graphs: Graphs, stream: Any, page: kit.Page, page_path: str, peer: Peer
) -> None:
    address = page.register()
    peer.call(actions.map_page, "page", page_path)

    def put() -> None:
        ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(address), 1, kit.GEQ))
        ok(drv.cuStreamWriteValue64(stream, drv.CUdeviceptr(address + 8), 1, 0))

    executable = graphs.captured(stream, put)
    for _ in range(2):
        page.words[0] = page.words[1] = 0
        ok(drv.cuGraphLaunch(executable, stream))
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
        peer.call(actions.store_word, "page", 0, 1)
        finish(stream)
        assert peer.call(actions.load_word, "page", 1) == 1
    graphs.destroy(executable)
    assert page.unregister() == kit.SUCCESS


def test_a_batch_is_done_in_order_in_a_stream_and_as_one_node_of_a_graph(
    drv: ModuleType, graphs: Graphs, stream: Any, words: Words
) -> None:
    batch = [
        memory_operation(graphing.WRITE_64, words.at(1), 1),
        memory_operation(graphing.WAIT_64, words.at(0), 1, kit.GEQ),
        memory_operation(graphing.WRITE_32, words.at(2), 1),
        memory_operation(graphing.WAIT_32, words.at(2), 1, kit.EQ),
        memory_operation(graphing.WRITE_64, words.at(3), 2**40),
    ]
    with graphs.capture(stream) as captured:
        ok(drv.cuStreamBatchMemOp(stream, len(batch), batch, 0))
    assert graphing.types(drv, captured[0]) == [graphing.MEM_OPS]
    built = graphs.own(ok(drv.cuGraphCreate(0)))
    parameters = drv.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    parameters.ctx = ok(drv.cuCtxGetCurrent())
    parameters.count, parameters.paramArray, parameters.flags = len(batch), batch, 0
    node = ok(drv.cuGraphAddBatchMemOpNode(built, [], 0, parameters))
    assert int(ok(drv.cuGraphNodeGetType(node))) == graphing.MEM_OPS
    for put in (
        lambda: drv.cuStreamBatchMemOp(stream, len(batch), batch, 0),
        lambda: drv.cuGraphLaunch(graphs.executable(captured[0]), stream),
        lambda: drv.cuGraphLaunch(graphs.executable(built), stream),
    ):
        for index in range(4):
            words[index] = 0
        ok(put())
        until(lambda: words[1], "the first write")
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
        assert (words[2], words[3]) == (0, 0)
        words[0] = 1
        finish(stream)
        assert (words[2], words[3]) == (1, 2**40)


def test_a_batch_has_at_most_255_operations_and_is_refused_as_a_whole(
    drv: ModuleType, graphs: Graphs, stream: Any, words: Words
) -> None:
    write = memory_operation(graphing.WRITE_64, words.at(0), 1)
    assert code(drv.cuStreamBatchMemOp(stream, 256, [write] * 256, 0)) == kit.INVALID_VALUE
    assert code(drv.cuStreamBatchMemOp(stream, 1, [write], 1)) == kit.INVALID_VALUE
    misaligned = memory_operation(graphing.WRITE_64, drv.CUdeviceptr(int(words.at(1)) + 4), 1)
    assert code(drv.cuStreamBatchMemOp(stream, 2, [write, misaligned], 0)) == kit.INVALID_VALUE
    finish(stream)
    assert words[0] == 0
    ok(drv.cuStreamBatchMemOp(stream, 255, [write] * 255, 0))
    finish(stream)
    assert words[0] == 1


# ---- events


def test_an_event_record_node_records_at_each_launch_what_is_before_it(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, event: Any, words: Words
) -> None:
    other = new_stream()

    def put() -> None:
        ok(drv.cuStreamWaitValue64(stream, words.at(0), 1, kit.GEQ))
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))
        ok(drv.cuEventRecordWithFlags(event, stream, EXTERNAL))
        ok(drv.cuStreamWaitValue64(stream, words.at(2), 1, kit.GEQ))

    executable = graphs.captured(stream, put)
    complete(event)  # the capture recorded nothing
    for _ in range(3):
        for index in range(4):
            words[index] = 0
        ok(drv.cuGraphLaunch(executable, stream))
        assert code(drv.cuEventQuery(event)) == kit.NOT_READY
        ok(drv.cuStreamWaitEvent(other, event, 0))
        ok(drv.cuMemcpyDtoDAsync(words.at(3), words.at(1), 8, other))
        words[0] = 1
        finish(other)
        complete(event)
        assert words[3] == 1
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY, "what is behind the node is not part of the record"
        words[2] = 1
        finish(stream)


def test_an_event_wait_node_waits_at_each_launch_for_the_latest_record(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, event: Any, words: Words
) -> None:
    recorder = new_stream()

    def put() -> None:
        ok(drv.cuStreamWaitEvent(stream, event, EXTERNAL))
        ok(drv.cuMemcpyDtoDAsync(words.at(1), words.at(0), 8, stream))

    executable = graphs.captured(stream, put)
    ok(drv.cuGraphLaunch(executable, stream))
    finish(stream)  # a never recorded event counts as complete
    for turn in range(1, 4):
        latch = Latch(recorder)
        ok(drv.cuStreamWriteValue64(recorder, words.at(0), turn, 0))
        ok(drv.cuEventRecord(event, recorder))
        ok(drv.cuGraphLaunch(executable, stream))
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
        latch.open()
        finish(stream)
        assert words[1] == turn


def test_event_nodes_of_two_processes_hand_work_to_each_other(
    drv: ModuleType, graphs: Graphs, stream: Any, new_event: New, peer: Peer, words: Words
) -> None:
    mine, theirs = new_event(), new_event()
    share(drv, mine, peer)
    handle = graphing.handle(theirs)
    assert peer.call(actions.open_event, "back", handle) == kit.SUCCESS

    def put() -> None:
        ok(drv.cuStreamWaitValue64(stream, words.at(0), 1, kit.GEQ))
        ok(drv.cuEventRecordWithFlags(mine, stream, EXTERNAL))

    sending = graphs.captured(stream, put)

    def answer() -> None:
        ok(drv.cuStreamWaitEvent(stream, theirs, EXTERNAL))
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))

    receiving = graphs.captured(stream, answer)
    peer.call(graphing.capture_wait_and_record, "e", "back")
    for _ in range(5):
        words[0] = words[1] = 0
        ok(drv.cuGraphLaunch(sending, stream))
        assert peer.call(actions.query, "e") == kit.NOT_READY
        peer.call(graphing.launch, "s")
        assert code(drv.cuEventQuery(theirs)) == kit.NOT_READY
        ok(drv.cuGraphLaunch(receiving, stream))
        assert peer.call(actions.query_stream, "s") == kit.NOT_READY
        words[0] = 1
        finish(stream)
        peer.call(actions.finish, "s")
        assert words[1] == 1
    peer.call(graphing.destroy)


# ---- graphs in graphs


def test_a_launch_on_a_capturing_stream_becomes_a_child_graph(
    drv: ModuleType, graphs: Graphs, stream: Any, words: Words
) -> None:
    inner = graphs.captured(stream, lambda: ok(drv.cuMemcpyDtoDAsync(words.at(1), words.at(0), 8, stream)))
    with graphs.capture(stream) as captured:
        ok(drv.cuStreamWriteValue64(stream, words.at(0), 1, 0))
        ok(drv.cuGraphLaunch(inner, stream))
        ok(drv.cuMemcpyDtoDAsync(words.at(2), words.at(1), 8, stream))
    assert graphing.types(drv, captured[0]) == [graphing.MEMCPY, graphing.GRAPH, graphing.MEM_OPS]
    outer = graphs.executable(captured[0])
    graphs.destroy(inner)
    finish(stream)
    assert words[0] == 0
    ok(drv.cuGraphLaunch(outer, stream))
    finish(stream)
    assert (words[1], words[2]) == (1, 1)


def test_a_graph_can_be_built_captured_into_and_updated(
    drv: ModuleType, graphs: Graphs, stream: Any, words: Words, event: Any
) -> None:
    built = graphs.own(ok(drv.cuGraphCreate(0)))
    first = ok(drv.cuGraphAddEmptyNode(built, [], 0))
    record = ok(drv.cuGraphAddEventRecordNode(built, [first], 1, event))
    ok(drv.cuGraphAddEventWaitNode(built, [record], 1, event))
    mode = drv.CUstreamCaptureMode(kit.GLOBAL)
    ok(drv.cuStreamBeginCaptureToGraph(stream, built, [first], [drv.CUgraphEdgeData()], 1, mode))
    assert code(drv.cuGraphInstantiate(built, 0)) != kit.SUCCESS, "not while a stream captures into it"
    ok(drv.cuStreamWriteValue64(stream, words.at(0), 7, 0))
    assert int(ok(drv.cuStreamEndCapture(stream))) == int(built)
    expected = [graphing.EMPTY, graphing.WAIT_EVENT, graphing.EVENT_RECORD, graphing.MEM_OPS]
    assert graphing.types(drv, built) == expected
    executable = graphs.executable(built)
    ok(drv.cuGraphUpload(executable, stream))
    ok(drv.cuGraphLaunch(executable, stream))
    finish(stream)
    assert words[0] == 7

    with graphs.capture(stream) as captured:
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))
    changed = graphs.executable(captured[0])
    with graphs.capture(stream) as captured:
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 2, 0))
    ok(drv.cuGraphExecUpdate(changed, captured[0]))
    ok(drv.cuGraphLaunch(changed, stream))
    finish(stream)
    assert words[1] == 2
    assert code(drv.cuGraphExecUpdate(changed, built)) == graphing.UPDATE_FAILURE


# ---- hardware queues


def test_with_many_hardware_queues_streams_pass_one_that_waits(drv: ModuleType, graphs: Graphs, new_peer: New) -> None:
    for connections in ("8", "32"):
        other = new_peer({"CUDA_DEVICE_MAX_CONNECTIONS": connections})
        assert other.call(graphing.copies_that_pass_a_held_stream, 32, wait_for_them=True) == 32


def test_with_one_hardware_queue_no_stream_passes_one_that_waits(
    drv: ModuleType, graphs: Graphs, new_peer: New
) -> None:
    other = new_peer({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert other.call(graphing.copies_that_pass_a_held_stream, 32, wait_for_them=False) == 0
