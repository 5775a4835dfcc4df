"""What a capture makes a graph of: its edges, its joins, the graphs within it; and graphs that are built by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.contract import graphing
from tests.contract.graphing import Graphs, HostFunctions, Words, fork
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, finish, ok
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL
SIZE = 64


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
    assert code(graphing.update_dependencies(drv, other, [], graphing.SET)) == kit.ILLEGAL_STATE
    with graphs.capture(stream) as captured:
        ok(drv.cuStreamWaitValue64(stream, words.at(0), 1, kit.GEQ))
        first = graphing.nodes(drv, ok(drv.cuStreamGetCaptureInfo(stream))[2])[0]
        ok(graphing.update_dependencies(drv, stream, [], graphing.SET))
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))
        ok(graphing.update_dependencies(drv, stream, [first], graphing.ADD))
        assert graphing.dependencies(drv, stream) == [graphing.MEM_OPS] * 2
        ok(drv.cuStreamWriteValue64(stream, words.at(2), 1, 0))
    ok(drv.cuGraphLaunch(graphs.executable(captured[0]), stream))
    until(lambda: words[1], "the second root goes on")
    assert words[2] == 0
    words[0] = 1
    finish(stream)
    assert words[2] == 1


def test_a_graph_can_be_built_and_captured_into(
    drv: ModuleType, graphs: Graphs, stream: Any, words: Words, ipc_event: Any
) -> None:
    built = graphs.own(ok(drv.cuGraphCreate(0)))
    first = ok(drv.cuGraphAddEmptyNode(built, [], 0))
    record = ok(drv.cuGraphAddEventRecordNode(built, [first], 1, ipc_event))
    ok(drv.cuGraphAddEventWaitNode(built, [record], 1, ipc_event))
    graphing.capture_into(drv, stream, built, first)
    ok(drv.cuStreamWriteValue64(stream, words.at(0), 7, 0))
    assert int(ok(drv.cuStreamEndCapture(stream))) == int(built)
    expected = [graphing.EMPTY, graphing.WAIT_EVENT, graphing.EVENT_RECORD, graphing.MEM_OPS]
    assert graphing.types(drv, built) == expected
    executable = graphs.executable(built)
    ok(drv.cuGraphUpload(executable, stream))
    ok(drv.cuGraphLaunch(executable, stream))
    finish(stream)
    assert words[0] == 7


def test_instantiating_a_graph_that_is_captured_into_is_refused_and_invalidates_the_capture(
    drv: ModuleType, graphs: Graphs, stream: Any, words: Words
) -> None:
    built = graphs.own(ok(drv.cuGraphCreate(0)))
    graphing.capture_into(drv, stream, built, ok(drv.cuGraphAddEmptyNode(built, [], 0)))
    assert code(drv.cuGraphInstantiate(built, 0)) != kit.SUCCESS
    assert code(drv.cuStreamWriteValue64(stream, words.at(0), 7, 0)) == kit.CAPTURE_INVALIDATED
    assert code(drv.cuGraphDestroy(built)) == kit.ILLEGAL_STATE, "while it is captured into"
    assert kit.end_capture(drv, stream) == kit.CAPTURE_INVALIDATED


def test_an_executable_is_updated_from_a_graph_of_the_same_shape_for_its_later_launches(
    drv: ModuleType, graphs: Graphs, stream: Any, words: Words, host: HostFunctions
) -> None:
    def write(value: int) -> Any:
        with graphs.capture(stream) as captured:
            ok(drv.cuStreamWaitValue64(stream, words.at(0), value, kit.GEQ))
            ok(drv.cuStreamWriteValue64(stream, words.at(value), value, 0))
        return captured[0]

    executable = graphs.executable(write(1))
    ok(drv.cuGraphLaunch(executable, stream))
    ok(drv.cuGraphExecUpdate(executable, write(2)))
    ok(drv.cuGraphLaunch(executable, stream))
    words[0] = 2
    finish(stream)
    assert (words[1], words[2]) == (1, 2)
    with graphs.capture(stream) as shorter:
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))
    with graphs.capture(stream) as other:
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))
        ok(drv.cuLaunchHostFunc(stream, host("other"), 0))
    for graph in (shorter[0], other[0]):
        assert code(drv.cuGraphExecUpdate(executable, graph)) == graphing.UPDATE_FAILURE
