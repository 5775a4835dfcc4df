"""Launches of graphs: what they do, in which order, and what they wait for; in data, not in time."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.contract import graphing
from tests.contract.graphing import Graphs, HostFunctions, Words, fork, read
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, ok
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.process]

New = Callable[..., Any]
EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL
SIZE = 64
again = pytest.mark.skipif(graphing.IS_CUDA_12, reason="cuda-bindings 12 frees a host function behind its first run")


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


@again
def test_each_of_a_hundred_launches_adds_to_what_the_ones_before_left(
    drv: ModuleType, graphs: Graphs, new_stream: New, memory: Any, host: HostFunctions
) -> None:
    stream = new_stream()
    cells = 128
    row, other = ok(drv.cuMemAlloc(8 * cells)), ok(drv.cuMemAlloc(8 * cells))
    ok(drv.cuMemsetD8(row, 0, 8 * cells))
    ok(drv.cuMemsetD8(row, 7, 8))
    ok(drv.cuStreamSynchronize(drv.CUstream(kit.LEGACY)))

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
    drv: ModuleType, graphs: Graphs, stream: Any, ipc_event: Any, new_stream: New, words: Words
) -> None:
    def put() -> None:
        ok(drv.cuStreamWaitValue64(stream, words.at(0), 1, kit.GEQ))
        ok(drv.cuStreamWriteValue64(stream, words.at(1), 1, 0))

    executable, other = graphs.captured(stream, put), new_stream()
    before = Latch(stream)
    ok(drv.cuStreamWriteValue64(stream, words.at(2), 1, 0))
    ok(drv.cuGraphLaunch(executable, stream))
    ok(drv.cuMemcpyDtoDAsync(words.at(3), words.at(1), 8, stream))
    ok(drv.cuEventRecord(ipc_event, stream))
    ok(drv.cuStreamWaitEvent(other, ipc_event, 0))
    ok(drv.cuMemcpyDtoDAsync(words.at(4), words.at(1), 8, other))
    words[0] = 1
    assert [code(drv.cuStreamQuery(each)) for each in (stream, other)] == [kit.NOT_READY] * 2
    assert words[1] == 0
    words[0] = 0
    before.open()
    until(lambda: words[2], "what is before the launch")
    assert [code(drv.cuStreamQuery(each)) for each in (stream, other)] == [kit.NOT_READY] * 2
    assert code(drv.cuEventQuery(ipc_event)) == kit.NOT_READY
    words[0] = 1
    finish(other)
    complete(ipc_event)
    assert [words[index] for index in (1, 3, 4)] == [1, 1, 1]


@again
def test_launches_of_one_executable_follow_each_other_in_whatever_streams(
    drv: ModuleType, graphs: Graphs, new_stream: New, words: Words, host: HostFunctions
) -> None:
    streams = [new_stream() for _ in range(3)]

    def put() -> None:
        ok(drv.cuLaunchHostFunc(streams[0], host("begin"), 0))
        ok(drv.cuStreamWaitValue64(streams[0], words.at(0), 1, kit.GEQ))
        ok(drv.cuLaunchHostFunc(streams[0], host("end"), 0))
        ok(drv.cuStreamWriteValue64(streams[0], words.at(0), 0, 0))

    executable, uploader = graphs.captured(streams[0], put), new_stream()
    for stream in streams:
        ok(drv.cuGraphLaunch(executable, stream))
    ok(drv.cuGraphUpload(executable, uploader))
    for turn, stream in enumerate(streams):
        until(lambda: len(host.ran) == 2 * turn + 1, "the next launch begins")  # noqa: B023
        assert host.ran == ["begin", "end"] * turn + ["begin"]
        assert [code(drv.cuStreamQuery(each)) for each in (stream, uploader)] == [kit.NOT_READY] * 2
        words[0] = 1
        finish(stream)
    finish(uploader)


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
    side, events = new_stream(), [new_event(kit.DISABLE_TIMING) for _ in range(2)]

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


@again
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


# ---- hardware queues


def test_with_many_hardware_queues_streams_pass_one_that_waits(drv: ModuleType, graphs: Graphs, new_peer: New) -> None:
    for connections in ("8", "32"):
        other = new_peer(CUDA_DEVICE_MAX_CONNECTIONS=connections)
        assert other.call(graphing.copies_that_pass_a_held_stream, 32, wait_for_them=True) == 32


def test_with_one_hardware_queue_no_stream_passes_one_that_waits(
    drv: ModuleType, graphs: Graphs, new_peer: New
) -> None:
    other = new_peer(CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert other.call(graphing.copies_that_pass_a_held_stream, 32, wait_for_them=False) == 0
