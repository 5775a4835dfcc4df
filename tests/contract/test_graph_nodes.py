"""Memory operations and events as nodes of graphs, and batches of memory operations."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.contract import actions, graphing
from tests.contract.graphing import Graphs, Words, memory_operation
from tests.contract.sharing import share
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, ok
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL
SIZE = 64


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
    drv: ModuleType, graphs: Graphs, stream: Any, page: kit.Page, page_path: str, partner: Peer
) -> None:
    address = page.register()
    partner.call(actions.map_page, "page", page_path)

    def put() -> None:
        ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(address), 1, kit.GEQ))
        ok(drv.cuStreamWriteValue64(stream, drv.CUdeviceptr(address + 8), 1, 0))

    executable = graphs.captured(stream, put)
    for _ in range(2):
        page.words[0] = page.words[1] = 0
        ok(drv.cuGraphLaunch(executable, stream))
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
        partner.call(actions.store_word, "page", 0, 1)
        finish(stream)
        assert partner.call(actions.load_word, "page", 1) == 1
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
    ways: tuple[Callable[[], Any], ...] = (
        lambda: drv.cuStreamBatchMemOp(stream, len(batch), batch, 0),
        lambda: drv.cuGraphLaunch(graphs.executable(captured[0]), stream),
        lambda: drv.cuGraphLaunch(graphs.executable(built), stream),
    )
    for put in ways:
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
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, ipc_event: Any, words: Words
) -> None:
    other = new_stream()

    def put() -> None:
        ok(drv.cuStreamWaitValue64(stream, words.at(0), 1, kit.GEQ))
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))
        ok(drv.cuEventRecordWithFlags(ipc_event, stream, EXTERNAL))
        ok(drv.cuStreamWaitValue64(stream, words.at(2), 1, kit.GEQ))

    executable = graphs.captured(stream, put)
    complete(ipc_event)  # the capture recorded nothing
    for _ in range(3):
        for index in range(4):
            words[index] = 0
        ok(drv.cuGraphLaunch(executable, stream))
        assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
        ok(drv.cuStreamWaitEvent(other, ipc_event, 0))
        ok(drv.cuMemcpyDtoDAsync(words.at(3), words.at(1), 8, other))
        words[0] = 1
        finish(other)
        complete(ipc_event)
        assert words[3] == 1
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY, "what is behind the node is not part of the record"
        words[2] = 1
        finish(stream)


def test_an_event_wait_node_waits_at_each_launch_for_the_latest_record(
    drv: ModuleType, graphs: Graphs, stream: Any, new_stream: New, ipc_event: Any, words: Words
) -> None:
    recorder = new_stream()

    def put() -> None:
        ok(drv.cuStreamWaitEvent(stream, ipc_event, EXTERNAL))
        ok(drv.cuMemcpyDtoDAsync(words.at(1), words.at(0), 8, stream))

    executable = graphs.captured(stream, put)
    ok(drv.cuGraphLaunch(executable, stream))
    finish(stream)  # a never recorded event counts as complete
    for turn in range(1, 4):
        latch = Latch(recorder)
        ok(drv.cuStreamWriteValue64(recorder, words.at(0), turn, 0))
        ok(drv.cuEventRecord(ipc_event, recorder))
        ok(drv.cuGraphLaunch(executable, stream))
        assert code(drv.cuStreamQuery(stream)) == kit.NOT_READY
        latch.open()
        finish(stream)
        assert words[1] == turn


def test_event_nodes_of_two_processes_hand_work_to_each_other(
    drv: ModuleType, graphs: Graphs, stream: Any, new_event: New, partner: Peer, words: Words
) -> None:
    mine, theirs = new_event(), new_event()
    share(drv, mine, partner)
    handle = graphing.handle(theirs)
    assert partner.call(actions.open_event, "back", handle) == kit.SUCCESS

    def put() -> None:
        ok(drv.cuStreamWaitValue64(stream, words.at(0), 1, kit.GEQ))
        ok(drv.cuEventRecordWithFlags(mine, stream, EXTERNAL))

    sending = graphs.captured(stream, put)

    def answer() -> None:
        ok(drv.cuStreamWaitEvent(stream, theirs, EXTERNAL))
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))

    receiving = graphs.captured(stream, answer)
    partner.call(graphing.capture_wait_and_record, "e", "back")
    for _ in range(5):
        words[0] = words[1] = 0
        ok(drv.cuGraphLaunch(sending, stream))
        assert partner.call(actions.query, "e") == kit.NOT_READY
        partner.call(graphing.launch, "s")
        assert code(drv.cuEventQuery(theirs)) == kit.NOT_READY
        ok(drv.cuGraphLaunch(receiving, stream))
        assert partner.call(actions.query_stream, "s") == kit.NOT_READY
        words[0] = 1
        finish(stream)
        partner.call(actions.finish, "s")
        assert words[1] == 1
    partner.call(graphing.destroy)
