"""What holds with a GPU's figures (IPCSYNC_HOST_PROFILE): nothing is seen too early, and work stays in order.

How well the figures are met is measured by `python -m tests.gpu.profile_check`, and tested nowhere. These tests know
only least times, which a busy machine makes longer and never shorter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.kit.until import until
from tests.softcuda.kit import IPC, NONBLOCK, code, handle_bytes, ok, open_event, open_memory, raw, start, stat
from tests.softcuda.processes import Child, py

# Of profiles/h100.h, in nanoseconds: from the call until others see it.
_RECORD_NS, _WRITE_NS, _TURN_NS, _LATE_NS = 5_000, 3_800, 134_000, 77_000
_THERE_AND_BACK_NS, _CROSS_NS = 2_400 + 2 * (1_000 + 1_350), 2_290  # by words of device memory, of two streams
_LAUNCH_NS, _NODE_NS, _NODES = 2_000, 1_300, 40  # of graphs
_GEQ, _BLOCKING, _TIMING = 0, 3, 0


@pytest.fixture(autouse=True)
def profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children of these tests have the profile; this process chose when it began."""
    monkeypatch.setenv("IPCSYNC_HOST_PROFILE", "h100")


def _ran(function: Any, *args: Any) -> None:
    child = Child(function, *args)
    assert child.get() == "done"
    child.end()


def _streams(count: int) -> Iterator[Any]:
    return (ok(drv.cuStreamCreate(NONBLOCK)) for _ in range(count))


def _page() -> tuple[int, Any]:
    address = int(ok(drv.cuMemAllocHost(mmap.PAGESIZE)))
    ctypes.memset(address, 0, mmap.PAGESIZE)
    return address, ctypes.c_uint64.from_address(address)


def _is_seen_late(connection: Any) -> None:
    start()
    (stream,) = _streams(1)
    event, (address, word) = ok(drv.cuEventCreate(IPC)), _page()
    for number in range(1, 101):
        began = time.monotonic_ns()
        ok(drv.cuEventRecord(event, stream))
        while code(drv.cuEventQuery(event)):
            pass
        assert time.monotonic_ns() - began >= _RECORD_NS
        began = time.monotonic_ns()
        ok(drv.cuStreamWriteValue64(stream, drv.CUdeviceptr(address), number, 0))
        while word.value != number:
            pass
        assert time.monotonic_ns() - began >= _WRITE_NS
    connection.send("done")


def test_work_is_seen_to_be_over_when_its_latency_has_passed(ctx: Any) -> None:
    _ran(_is_seen_late)


def _in_order(connection: Any) -> None:
    start()
    first, second = _streams(2)
    before, behind, (address, word) = ok(drv.cuEventCreate(IPC)), ok(drv.cuEventCreate(2)), _page()
    other = ctypes.c_uint64.from_address(address + 64)
    for number in range(1, 201):
        ok(drv.cuStreamWriteValue64(first, drv.CUdeviceptr(address), number, 0))
        ok(drv.cuEventRecord(before, first))
        ok(drv.cuStreamWaitEvent(second, before, 0))
        ok(drv.cuEventRecord(behind, second))
        ok(drv.cuStreamWriteValue64(second, drv.CUdeviceptr(address + 64), number, 0))
        if number % 2:
            while code(drv.cuEventQuery(behind)):
                pass
        else:
            while other.value != number:
                pass
            assert not code(drv.cuEventQuery(behind))
        assert word.value == number
        assert not code(drv.cuEventQuery(before))
    ok(drv.cuStreamSynchronize(second))
    assert other.value == 200
    assert not code(drv.cuStreamQuery(second))
    connection.send("done")


def test_work_is_over_in_order_within_a_stream_and_across_streams(ctx: Any) -> None:
    _ran(_in_order)


def _record_for(connection: Any) -> None:
    start()
    (stream,) = _streams(1)
    event, memory = ok(drv.cuEventCreate(IPC)), ok(drv.cuMemAlloc(mmap.PAGESIZE))
    ok(drv.cuMemsetD8(memory, 0, mmap.PAGESIZE))
    ok(drv.cuCtxSynchronize())
    connection.send((handle_bytes(event), raw(ok(drv.cuIpcGetMemHandle(memory)))))
    for number in iter(connection.recv, 0):
        ok(drv.cuStreamWriteValue64(stream, memory, number, 0))
        ok(drv.cuEventRecord(event, stream))
        connection.send("recorded")
    ok(drv.cuStreamSynchronize(stream))


def _wait_for(connection: Any) -> None:
    start()
    event_handle, memory_handle = connection.recv()
    event, memory = ok(open_event(event_handle)), ok(open_memory(memory_handle))
    (stream,), (address, word), buffer = _streams(1), _page(), ctypes.c_uint64()
    for number in iter(connection.recv, 0):
        ok(drv.cuStreamWaitEvent(stream, event, 0))
        ok(drv.cuMemcpyAsync(drv.CUdeviceptr(address), memory, 8, stream))
        if number % 2:
            ok(drv.cuStreamSynchronize(stream))
            assert word.value == number
            assert not code(drv.cuEventQuery(event))
        else:
            ok(drv.cuEventSynchronize(event))
            ok(drv.cuMemcpyDtoH(ctypes.addressof(buffer), memory, 8))
            assert buffer.value == number
        connection.send("seen")


def test_another_process_sees_a_record_complete_behind_the_work_before_it(ctx: Any) -> None:
    recorder, waiter = Child(_record_for), Child(_wait_for)
    waiter.send(recorder.get())
    for number in range(1, 51):
        recorder.send(number)
        assert recorder.get() == "recorded"
        waiter.send(number)
        assert waiter.get() == "seen"
    for child in (waiter, recorder):
        child.send(0)
        child.end()


def _take_turns(connection: Any, handle: bytes) -> None:
    """With the event of that handle, or one of its own."""
    start()
    (stream,), event = _streams(1), ok(open_event(handle) if handle else drv.cuEventCreate(IPC))
    for _ in iter(connection.recv, "end"):
        began = time.monotonic_ns()
        ok(drv.cuEventRecord(event, stream))
        while code(drv.cuEventQuery(event)):
            pass
        connection.send(time.monotonic_ns() - began)


@pytest.mark.parametrize("mps", [False, True], ids=["alone", "MPS"])
def test_processes_that_record_interprocess_events_in_turn_pay_for_each_turn(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, mps: bool
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_MPS", str(int(mps)))
    imported = handle_bytes(ok(drv.cuEventCreate(IPC)))
    children = [Child(_take_turns, handle) for handle in (imported, b"")]

    def record(child: Child) -> int:
        child.send("record")
        took: int = child.get()
        return took

    record(children[0])
    before = stat("turns")
    for _ in range(3):
        took = [record(children[1]), record(children[0])]
        assert mps or min(took) >= _TURN_NS
    turns = stat("turns")
    record(children[0])
    assert stat("turns") == turns, "nobody else recorded in between"
    assert turns - before == (0 if mps else 6)
    for child in children:
        child.send("end")
        child.end()


def _launch_nodes(connection: Any) -> None:
    start()
    (stream,), (address, word) = _streams(1), _page()
    word.value, made = 1, []
    for count in (0, _NODES):
        graph = ok(drv.cuGraphCreate(0))
        last: list[Any] = []
        params = drv.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        operation = drv.CUstreamBatchMemOpParams()
        operation.operation = drv.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        operation.waitValue.address, operation.waitValue.value = drv.CUdeviceptr(address), drv.cuuint32_t(1)
        params.ctx, params.count, params.paramArray = ok(drv.cuCtxGetCurrent()), 1, [operation]
        for _ in range(count):
            last = [ok(drv.cuGraphAddBatchMemOpNode(graph, last, len(last), params))]
        made.append(ok(drv.cuGraphInstantiate(graph, 0)))
    for executable, least in zip(made, (_LAUNCH_NS, _LAUNCH_NS + _NODES * _NODE_NS), strict=True):
        began = time.monotonic_ns()
        ok(drv.cuGraphLaunch(executable, stream))
        assert time.monotonic_ns() - began >= least
        ok(drv.cuStreamSynchronize(stream))
    connection.send("done")


def test_a_launch_takes_longer_by_each_node_that_waits(ctx: Any) -> None:
    _ran(_launch_nodes)


def _ask(connection: Any) -> None:
    start()
    memory, event, (stream,) = ok(drv.cuMemAlloc(mmap.PAGESIZE)), ok(drv.cuEventCreate(2)), _streams(1)
    ok(drv.cuMemsetD8(memory, 0, mmap.PAGESIZE))
    ok(drv.cuCtxSynchronize())
    connection.send(raw(ok(drv.cuIpcGetMemHandle(memory))))
    for number in range(1, 21):
        connection.recv()
        began = time.monotonic_ns()
        ok(drv.cuStreamWriteValue64(stream, memory, number, 0))
        ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(int(memory) + 64), number, _GEQ))
        ok(drv.cuEventRecord(event, stream))
        while code(drv.cuEventQuery(event)):
            pass
        connection.send(time.monotonic_ns() - began)


def _answer(connection: Any) -> None:
    start()
    memory, (stream,) = int(ok(open_memory(connection.recv()))), _streams(1)
    for number in range(1, 21):
        ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(memory), number, _GEQ))
        ok(drv.cuStreamWriteValue64(stream, drv.CUdeviceptr(memory + 64), number, 0))
        connection.send("queued")
        connection.recv()
    ok(drv.cuStreamSynchronize(stream))


@pytest.mark.parametrize("mps", [False, True], ids=["alone", "MPS"])
def test_a_wait_for_another_process_s_word_costs_more(ctx: Any, monkeypatch: pytest.MonkeyPatch, mps: bool) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_MPS", str(int(mps)))
    asker, answerer = Child(_ask), Child(_answer)
    answerer.send(asker.get())
    for _ in range(20):
        assert answerer.get() == "queued"
        asker.send("ask")
        assert asker.get() >= _THERE_AND_BACK_NS + (0 if mps else 2 * _CROSS_NS)
        answerer.send("answered")
    for child in (asker, answerer):
        child.end()


def _is_woken_late(connection: Any) -> None:
    start()
    (stream,), event, (address, word) = _streams(1), ok(drv.cuEventCreate(_BLOCKING)), _page()
    ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(address), 1, _GEQ))
    ok(drv.cuEventRecord(event, stream))
    stored: list[int] = []

    def store() -> None:
        calls = Path(f"/proc/self/task/{os.getpid()}/syscall")
        until(lambda: calls.read_text().split()[0] in ("202", "98"), "the main thread sleeps in the driver")
        time.sleep(0.001)  # longer than a driver looks before it sleeps
        stored.append(time.monotonic_ns())
        word.value = 1

    threading.Thread(target=store).start()
    ok(drv.cuEventSynchronize(event))
    assert time.monotonic_ns() - stored[0] >= _LATE_NS
    connection.send("done")


def test_a_host_that_waited_long_is_woken_late(ctx: Any) -> None:
    _ran(_is_woken_late)


def _burns_a_core(connection: Any) -> None:
    start()
    (stream,), event, (address, word) = _streams(1), ok(drv.cuEventCreate(IPC | _BLOCKING)), _page()
    ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(address), 1, _GEQ))
    ok(drv.cuEventRecord(event, stream))
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def store() -> None:
        used = time.clock_gettime(clock)
        until(lambda: time.clock_gettime(clock) > used + 0.05, "the main thread uses its core")
        word.value = 1

    threading.Thread(target=store).start()
    ok(drv.cuEventSynchronize(event))
    connection.send("done")


def test_a_host_that_waits_for_an_interprocess_event_burns_a_core(ctx: Any) -> None:
    _ran(_burns_a_core)


def _runs_ahead(connection: Any) -> None:
    start()
    (stream,), event = _streams(1), ok(drv.cuEventCreate(IPC))
    began = time.monotonic_ns()
    for _ in range(6000):
        ok(drv.cuEventRecord(event, stream))
    assert time.monotonic_ns() - began >= 6000 * 1200 - 1_100_000  # 1.2 us each on the GPU; so much it takes in
    ok(drv.cuStreamSynchronize(stream))
    assert time.monotonic_ns() - began >= 6000 * 1200
    connection.send("done")


def test_a_caller_is_held_up_by_work_that_is_not_over_by_the_clock(ctx: Any) -> None:
    _ran(_runs_ahead)


def _elapsed(connection: Any) -> None:
    start()
    (stream,) = _streams(1)
    first, last = ok(drv.cuEventCreate(_TIMING)), ok(drv.cuEventCreate(_TIMING))
    ok(drv.cuEventRecord(first, stream))
    for _ in range(99):
        ok(drv.cuEventRecord(last, stream))
    ok(drv.cuEventSynchronize(last))
    assert ok(drv.cuEventElapsedTime(first, last)) >= 99 * 1.2e-3  # 1.2 us each, by the stream's clock
    connection.send("done")


def test_elapsed_times_are_those_of_the_stream_s_clock(ctx: Any) -> None:
    _ran(_elapsed)


def test_a_profile_that_there_is_not_is_refused() -> None:
    assert "IPCSYNC_HOST_PROFILE must be" in py("assert code(drv.cuInit(0)) == 1", IPCSYNC_HOST_PROFILE="b300").stderr
