"""Graphs: what is not seen from outside or has no promise on a GPU: leaks, deaths, freed memory, strict queues."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.kit.until import DEADLINE_S, until
from tests.softcuda.kit import IPC, NONBLOCK, Latch, code, handle_bytes, ok, open_memory, stat
from tests.softcuda.processes import MakeServers, py

RELAXED = drv.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class HostFunctions:
    """Host functions that note their numbers."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: self.ran.append(number or 0))
        self.pointer = drv.CUhostFn(ctypes.cast(self._function, ctypes.c_void_p).value)

    def node(self, graph: Any, before: list[Any], number: int) -> Any:
        """Add one to a graph."""
        parameters = drv.CUDA_HOST_NODE_PARAMS()
        parameters.fn, parameters.userData = self.pointer, number
        return ok(drv.cuGraphAddHostNode(graph, before, len(before), parameters))


@pytest.fixture
def host(ctx: Any) -> HostFunctions:
    return HostFunctions()


@pytest.fixture
def pointer(ctx: Any) -> Iterator[Any]:
    """Device memory of 64 bytes, zeros."""
    p = ok(drv.cuMemAlloc(64))
    yield p
    drv.cuMemFree(p)


def new_stream() -> Any:
    return ok(drv.cuStreamCreate(NONBLOCK))


def executable(s: Any, *puts: Callable[[], Any]) -> Any:
    """What was captured of the stream while `puts` were called."""
    ok(drv.cuStreamBeginCapture(s, RELAXED))
    for put in puts:
        ok(put())
    g = ok(drv.cuStreamEndCapture(s))
    x = ok(drv.cuGraphInstantiate(g, 0))
    ok(drv.cuGraphDestroy(g))
    return x


def read(p: Any, size: int = 64) -> bytes:
    data = bytearray(size)
    ok(drv.cuMemcpyDtoH(data, p, size))
    return bytes(data)


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize("seed", range(12))
def test_every_node_runs_once_and_after_those_that_it_depends_on(host: HostFunctions, seed: int) -> None:
    chosen = random.Random(seed)
    count, width = chosen.choice([(20, 3), (60, 8), (200, 2), (150, 200)])
    graph, s = ok(drv.cuGraphCreate(0)), new_stream()
    nodes: list[Any] = []
    before: list[list[int]] = []
    for number in range(count):
        recent = range(max(0, number - width), number)
        before.append(chosen.sample(recent, chosen.randint(0, min(3, len(recent)))))
        nodes.append(host.node(graph, [nodes[each] for each in before[number]], number))
    x = ok(drv.cuGraphInstantiate(graph, 0))
    for _ in range(3):
        host.ran.clear()
        ok(drv.cuGraphLaunch(x, s))
        ok(drv.cuStreamSynchronize(s))
        place = {number: index for index, number in enumerate(host.ran)}
        assert sorted(host.ran) == list(range(count))
        assert all(place[each] < place[number] for number in range(count) for each in before[number])
    outer = ok(drv.cuGraphCreate(0))  # the same as a child, between two nodes
    first = host.node(outer, [], count)
    child = ok(drv.cuGraphAddChildGraphNode(outer, [first], 1, graph))
    host.node(outer, [child], count + 1)
    y = ok(drv.cuGraphInstantiate(outer, 0))
    host.ran.clear()
    ok(drv.cuGraphLaunch(y, s))
    ok(drv.cuStreamSynchronize(s))
    assert (host.ran[0], host.ran[-1], sorted(host.ran)) == (count, count + 1, list(range(count + 2)))
    for each in (x, y):
        ok(drv.cuGraphExecDestroy(each))
    for each in (graph, outer):
        ok(drv.cuGraphDestroy(each))


def test_graphs_leave_nothing(host: HostFunctions) -> None:
    s, side, events = new_stream(), new_stream(), [ok(drv.cuEventCreate(2)) for _ in range(2)]
    p = ok(drv.cuMemAlloc(1 << 20))

    def round_trip() -> None:
        x = executable(
            s,
            lambda: drv.cuMemsetD8Async(p, 1, 1 << 20, s),
            lambda: drv.cuEventRecord(events[0], s),
            lambda: drv.cuStreamWaitEvent(side, events[0], 0),
            lambda: drv.cuLaunchHostFunc(side, host.pointer, 0),
            lambda: drv.cuStreamWriteValue64(s, p, 1, 0),
            lambda: drv.cuEventRecord(events[1], side),
            lambda: drv.cuStreamWaitEvent(s, events[1], 0),
        )
        ok(drv.cuGraphLaunch(x, s))
        ok(drv.cuGraphExecDestroy(x))
        assert code(drv.cuGraphExecDestroy(x)) == code(drv.cuGraphLaunch(x, s)) == 1

    streams, memory, pages = stat("streams"), stat("memory"), 0
    for number in range(400):
        round_trip()
        ok(drv.cuStreamSynchronize(s))
        if number == 100:
            pages = resident_pages()
    assert resident_pages() - pages < 256
    until(lambda: stat("streams") <= streams, "branches end")
    assert stat("memory") == memory
    ok(drv.cuMemFree(p))


def test_ten_thousand_launches_keep_memory_and_threads_bounded(host: HostFunctions, pointer: Any) -> None:
    s, side, events = new_stream(), new_stream(), [ok(drv.cuEventCreate(2)) for _ in range(2)]
    timed = ok(drv.cuEventCreate(0))
    x = executable(
        s,
        lambda: drv.cuEventRecord(events[0], s),
        lambda: drv.cuStreamWaitEvent(side, events[0], 0),
        lambda: drv.cuStreamWriteValue64(side, pointer, 1, 0),
        lambda: drv.cuEventRecordWithFlags(timed, s, 1),
        lambda: drv.cuEventRecord(events[1], side),
        lambda: drv.cuStreamWaitEvent(s, events[1], 0),
    )
    pages, threads = 0, threading.active_count() + 2
    before = len(list(Path("/proc/self/task").iterdir()))
    for number in range(10_000):
        ok(drv.cuGraphLaunch(x, s))
        if number % 100 == 0:
            ok(drv.cuStreamSynchronize(s))
        if number == 2_000:
            pages = resident_pages()
    ok(drv.cuStreamSynchronize(s))
    assert resident_pages() - pages < 256
    assert len(list(Path("/proc/self/task").iterdir())) <= before + threads
    ok(drv.cuEventSynchronize(timed))
    ok(drv.cuGraphExecDestroy(x))


def test_memory_that_was_freed_is_kept_for_graphs_and_what_was_unregistered_is_refused(pointer: Any) -> None:
    s, p = new_stream(), ok(drv.cuMemAlloc(64))
    x = executable(s, lambda: drv.cuMemsetD8Async(p, 7, 64, s), lambda: drv.cuMemcpyDtoDAsync(pointer, p, 64, s))
    ok(drv.cuMemFree(p))
    ok(drv.cuGraphLaunch(x, s))
    ok(drv.cuStreamSynchronize(s))
    assert read(pointer) == b"\7" * 64
    own = (ctypes.c_uint64 * 8)()
    address = ctypes.addressof(own)
    ok(drv.cuMemHostRegister(address, 64, 2))
    y = executable(s, lambda: drv.cuStreamWriteValue64(s, address, 1, 0))
    ok(drv.cuGraphLaunch(y, s))
    ok(drv.cuStreamSynchronize(s))
    assert own[0] == 1
    ok(drv.cuMemHostUnregister(address))
    assert code(drv.cuGraphLaunch(y, s)) == 1
    e = ok(drv.cuEventCreate(2))
    z = executable(s, lambda: drv.cuEventRecordWithFlags(e, s, 1))
    ok(drv.cuEventDestroy(e))
    assert code(drv.cuGraphLaunch(z, s)) == 400
    for each in (x, y, z):
        ok(drv.cuGraphExecDestroy(each))


def test_user_objects_live_as_long_as_graphs_and_launches_need_them(host: HostFunctions, pointer: Any) -> None:
    s, g = new_stream(), ok(drv.cuGraphCreate(0))
    first, second = (ok(drv.cuUserObjectCreate(number, host.pointer, 1, 1)) for number in (1, 2))
    ok(drv.cuGraphRetainUserObject(g, first, 1, 1))  # the caller's own reference
    ok(drv.cuGraphRetainUserObject(g, second, 1, 0))
    ok(drv.cuUserObjectRelease(second, 1))
    ok(drv.cuGraphReleaseUserObject(g, second, 1))
    until(lambda: host.ran == [2], "the one that nothing needs ends")
    assert code(drv.cuUserObjectRetain(second, 1)) == code(drv.cuGraphReleaseUserObject(g, first, 2)) == 1
    outer = ok(drv.cuGraphCreate(0))
    ok(drv.cuGraphAddChildGraphNode(outer, [], 0, g))
    x = ok(drv.cuGraphInstantiate(outer, 0))
    latch = Latch(s)
    ok(drv.cuGraphLaunch(x, s))
    for each in (g, outer):
        ok(drv.cuGraphDestroy(each))
    ok(drv.cuGraphExecDestroy(x))
    assert host.ran == [2]
    latch.open()
    until(lambda: host.ran == [2, 1], "the launch ends")


def test_memory_of_graphs_is_unmapped_with_the_last_that_needs_it(ctx: Any) -> None:
    s, side = new_stream(), new_stream()
    fork = ok(drv.cuEventCreate(2))

    p = ok(drv.cuMemAlloc(4096))

    def is_mapped() -> bool:
        return f"{int(p):x}-" in Path("/proc/self/maps").read_text()

    x = executable(s, lambda: drv.cuMemsetD8Async(p, 1, 64, s))
    ok(drv.cuStreamBeginCapture(s, RELAXED))
    ok(drv.cuMemsetD8Async(p, 1, 64, s))
    ok(drv.cuEventRecord(fork, s))
    ok(drv.cuStreamWaitEvent(side, fork, 0))
    ok(drv.cuMemsetD8Async(p, 1, 64, side))
    ok(drv.cuStreamDestroy(side))  # its work can be joined by nothing any more
    assert code(drv.cuStreamEndCapture(s)) == 904
    ok(drv.cuMemFree(p))
    for _ in range(2):
        ok(drv.cuGraphLaunch(x, s))
    ok(drv.cuStreamSynchronize(s))
    assert is_mapped()
    ok(drv.cuGraphExecDestroy(x))
    until(lambda: not is_mapped(), "the memory goes")


def test_what_is_not_there_says_so(ctx: Any) -> None:
    g = ok(drv.cuGraphCreate(0))
    assert code(drv.cuGraphAddKernelNode(g, [], 0, drv.CUDA_KERNEL_NODE_PARAMS())) == 801
    assert code(drv.cuGraphInstantiate(g, 4)) == 801  # for launches from the device
    x = ok(drv.cuGraphInstantiate(g, 0))  # an empty one
    s = new_stream()
    ok(drv.cuGraphLaunch(x, s))
    ok(drv.cuStreamSynchronize(s))
    for stale in (drv.CUgraph(5), drv.CUgraph(int(x))):
        assert code(drv.cuGraphInstantiate(stale, 0)) == code(drv.cuGraphDestroy(stale)) == 1
    ok(drv.cuStreamBeginCapture(s, RELAXED))
    assert code(drv.cuGraphUpload(x, s)) == 900
    ok(drv.cuGraphDestroy(ok(drv.cuStreamEndCapture(s))))
    ok(drv.cuGraphExecDestroy(x))
    ok(drv.cuGraphDestroy(g))


@pytest.mark.parametrize("death", ["complete", "pending"])
def test_a_graph_under_way_in_a_killed_process_stops_where_it_waits(
    servers: MakeServers, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_DEATH", death)
    a, b = servers(2)
    a("stream", 0)
    memory = ok(open_memory(a("alloc", "m", 64)))
    early, late = a("create", "early"), a("create", "late")
    for name, handle in (("early", early), ("late", late)):
        assert b("open", name, handle) == 0
    assert a("capture", 0, 2) == 0
    a("fill", "m", 1, 64, 0)
    assert a("record", "early", 0, 1) == 0
    a("hold", 0)
    a("fill", "m", 2, 64, 0)
    assert a("record", "late", 0, 1) == 0
    assert a("launch", 0) == 0
    until(lambda: b("query", "early") == 0, "what is before the gate")
    assert b("query", "late") == 600
    a.kill()
    a.p.join()
    until(lambda: stat("reap") >= 0 and stat("processes") == 2, "its end is noticed")
    assert b("query", "early") == 0
    assert b("query", "late") == (0 if death == "complete" else 600)
    assert ctypes.string_at(int(memory), 64) == b"\1" * 64
    ok(drv.cuIpcCloseMemHandle(memory))


HELD = """
    import ctypes
    start()
    words = (ctypes.c_uint64 * 64).from_address(int(ok(drv.cuMemAllocHost(512))))
    at = lambda i: drv.CUdeviceptr(ctypes.addressof(words) + 8 * i)
    mode = drv.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    def executable(s, put):
        ok(drv.cuStreamBeginCapture(s, mode))
        put()
        return ok(drv.cuGraphInstantiate(ok(drv.cuStreamEndCapture(s)), 0))
    streams = [ok(drv.cuStreamCreate(NONBLOCK)) for _ in range(6)]
    for i in range(32, 64): words[i] = 99
"""


@pytest.mark.parametrize(
    ("settings", "queues"),
    [
        ({}, 8),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "2"}, 2),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 8),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, 32),
        ({"IPCSYNC_HOST_MPS": "1"}, 2),
        ({"IPCSYNC_HOST_MPS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 8),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "2", "IPCSYNC_HOST_QUEUES": "3"}, 3),
    ],
)
@pytest.mark.parametrize("more", [0, 1])
def test_as_many_streams_pass_each_other_in_a_row_as_there_are_queues(
    settings: dict[str, str], queues: int, more: int
) -> None:
    """Each waits for a word that the next one writes. One more than queues: its copy is behind what waits for it."""
    py(
        HELD
        + f"""
    words[32] = 0
    for i in range({queues + more}):
        s = ok(drv.cuStreamCreate(NONBLOCK))
        if i < {queues + more - 1}:
            ok(drv.cuStreamWaitValue64(s, at(i + 1), 1, 0))
        else:
            ok(drv.cuMemcpyDtoDAsync(at(62), at(63), 8, s))
        ok(drv.cuStreamWriteValue64(s, at(i), 1, 0))
        streams.append(s)
    if not {more}:
        for s in streams: ok(drv.cuStreamSynchronize(s))
    words[63] = 1
    for i in range(33): words[i] = 1
    for s in streams: ok(drv.cuStreamSynchronize(s))
    assert words[62] == (1 if {more} else 99), list(words)
    """,
        True,
        **{"CUDA_DEVICE_MAX_CONNECTIONS": "", **settings},
    )


@pytest.mark.parametrize("run_async", [0, 1])
def test_an_idle_stream_takes_an_empty_queue_or_else_each_in_turn(run_async: int) -> None:
    py(
        HELD
        + """
    from tests.kit.until import until
    ok(drv.cuStreamWaitValue64(streams[0], at(0), 1, 0))
    for s in streams[1:]:
        ok(drv.cuMemsetD8Async(at(2), 0, 8, s))
        ok(drv.cuStreamSynchronize(s))
    ok(drv.cuStreamWaitValue64(streams[1], at(1), 1, 0))
    for s in streams[2:]: ok(drv.cuMemsetD8Async(at(2), 0, 8, s))
    passed = lambda: [code(drv.cuStreamQuery(s)) == 0 for s in streams[2:]]
    assert passed() == [False] * 4
    words[0] = 1
    until(lambda: sum(passed()) == 2, "half of them go on")
    assert passed() in ([True, False] * 2, [False, True] * 2)
    words[1] = 1
    for s in streams: ok(drv.cuStreamSynchronize(s))
    """,
        IPCSYNC_HOST_QUEUES=2,
        IPCSYNC_HOST_ASYNC=run_async,
    )


def test_contexts_share_no_queues() -> None:
    py(
        HELD
        + """
    ok(drv.cuStreamWaitValue64(streams[0], at(0), 1, 0))
    ok(drv.cuCtxCreate(None, 0, 0))
    s = ok(drv.cuStreamCreate(NONBLOCK))
    ok(drv.cuMemsetD8Async(at(2), 0, 8, s))
    ok(drv.cuStreamSynchronize(s))
    words[0] = 1
    ok(drv.cuStreamSynchronize(streams[0]))
    """,
        IPCSYNC_HOST_QUEUES=1,
    )


def test_what_waits_for_a_record_is_behind_it_in_their_queue() -> None:
    """One thread records, while another one has a stream of the same queue wait for whatever is recorded by then."""
    py(
        """
    import ctypes, threading
    start()
    gate, held_back = threading.Event(), ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: [gate.wait()].clear())
    event, first, waiting = ok(drv.cuEventCreate(IPC)), *(ok(drv.cuStreamCreate(NONBLOCK)) for _ in range(2))
    ok(drv.cuLaunchHostFunc(first, drv.CUhostFn(ctypes.cast(held_back, ctypes.c_void_p).value), 0))
    ok(drv.cuEventRecord(event, first))
    begun = threading.Barrier(2)
    def wait():
        for _ in range(50):
            begun.wait()
            for _ in range(15): ok(drv.cuStreamWaitEvent(waiting, event, 0))
    waiter = threading.Thread(target=wait)
    waiter.start()
    for s in [ok(drv.cuStreamCreate(NONBLOCK)) for _ in range(50)]:
        begun.wait()
        ok(drv.cuEventRecord(event, s))
    waiter.join()
    gate.set()
    end = threading.Thread(target=drv.cuStreamSynchronize, args=(waiting,), daemon=True)
    end.start()
    end.join(20)
    os._exit(end.is_alive())
    """,
        IPCSYNC_HOST_QUEUES=1,
    )


GATE_IN_A_BRANCH = """
    fork, join = ok(drv.cuEventCreate(2)), ok(drv.cuEventCreate(2))
    def put():
        ok(drv.cuEventRecord(fork, streams[0]))
        ok(drv.cuStreamWaitEvent(streams[1], fork, 0))
        ok(drv.cuStreamWaitValue64(streams[1], at(0), 1, 0))
        ok(drv.cuStreamWriteValue64(streams[1], at(1), 1, 0))
        ok(drv.cuMemcpyDtoDAsync(at(32), at(1), 8, streams[0]))
        ok(drv.cuEventRecord(join, streams[1]))
        ok(drv.cuStreamWaitEvent(streams[0], join, 0))
    gated = executable(streams[0], put)
    other = executable(streams[2], lambda: ok(drv.cuMemcpyDtoDAsync(at(33), at(1), 8, streams[2])))
    ok(drv.cuGraphLaunch(gated, streams[0]))
    ok(drv.cuGraphLaunch(other, streams[2]))
    ok(drv.cuMemcpyDtoDAsync(at(34), at(1), 8, streams[3]))
"""


@pytest.mark.parametrize("queues", [0, 1])
def test_a_gate_in_a_branch_holds_up_all_that_shares_its_queue(queues: int) -> None:
    py(
        HELD
        + GATE_IN_A_BRANCH
        + f"""
    if not {queues}:
        for i in (2, 3): ok(drv.cuStreamSynchronize(streams[i]))
        while words[32]: time.sleep(0.001)
    words[0] = 1
    for s in streams: ok(drv.cuStreamSynchronize(s))
    assert [words[32 + i] for i in range(3)] == [{queues}] * 3, list(words)
    """,
        IPCSYNC_HOST_QUEUES=queues,
        CUDA_DEVICE_MAX_CONNECTIONS=1,
    )


def test_launches_behind_a_latch_all_run_though_their_executable_is_gone(host: HostFunctions, pointer: Any) -> None:
    s = new_stream()
    x = executable(s, lambda: drv.cuLaunchHostFunc(s, host.pointer, 3))
    latch = Latch(s)
    for _ in range(500):
        ok(drv.cuGraphLaunch(x, s))
    ok(drv.cuGraphExecDestroy(x))
    assert host.ran == []
    latch.open()
    ok(drv.cuStreamSynchronize(s))
    assert host.ran == [3] * 500


def test_launches_of_one_executable_from_several_threads_run_one_by_one(ctx: Any, host: HostFunctions) -> None:
    streams = [new_stream() for _ in range(4)]
    x = executable(
        streams[0],
        lambda: drv.cuLaunchHostFunc(streams[0], host.pointer, 1),
        lambda: drv.cuLaunchHostFunc(streams[0], host.pointer, 2),
    )

    def launch(s: Any) -> None:
        ok(drv.cuCtxSetCurrent(ctx))
        for _ in range(100):
            ok(drv.cuGraphLaunch(x, s))
            ok(drv.cuGraphExecDestroy(executable(s, lambda: drv.cuLaunchHostFunc(s, host.pointer, 3))))

    threads = [threading.Thread(target=launch, args=(s,)) for s in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    for s in streams:
        ok(drv.cuStreamSynchronize(s))
    assert host.ran == [1, 2] * 400
    ok(drv.cuGraphExecDestroy(x))


def test_event_nodes_keep_time_and_belong_to_the_record(ctx: Any) -> None:
    s, first, last = new_stream(), ok(drv.cuEventCreate(0)), ok(drv.cuEventCreate(0))
    shared = ok(drv.cuEventCreate(IPC))
    assert len(handle_bytes(shared)) == 64
    x = executable(
        s,
        lambda: drv.cuEventRecordWithFlags(first, s, 1),
        lambda: drv.cuEventRecordWithFlags(shared, s, 1),
        lambda: drv.cuEventRecordWithFlags(last, s, 1),
    )
    ok(drv.cuGraphLaunch(x, s))
    ok(drv.cuEventSynchronize(last))
    assert ok(drv.cuEventElapsedTime(first, last)) >= 0
    ok(drv.cuEventSynchronize(shared))
    ok(drv.cuGraphExecDestroy(x))
