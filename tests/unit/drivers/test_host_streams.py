"""Streams of the host driver: order, threads, destroying what is pending, default streams, the end of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.until import until
from tests.unit.drivers.host_process import HostProcess, own_segment

pytestmark = pytest.mark.process

WAIT = "d.wait_event(event, time.monotonic_ns() + 10_000_000_000)"


@pytest.fixture(params=["0", "1"], ids=["within-the-call", "asynchronous"])
def process(request: pytest.FixtureRequest) -> Iterator[HostProcess]:
    with own_segment() as segment, HostProcess(segment, IPCSYNC_HOST_ASYNC=request.param) as child:
        child.run("stream = d.cuStreamCreate(1)[1]; event = d.cuEventCreate(2)[1]")
        yield child


def test_operations_happen_in_the_order_of_their_calls(process: HostProcess) -> None:
    seen = process.run(
        "memory = d.cuMemAlloc(4096)[1]; gate = hold(stream); copies = [bytearray(8) for _ in range(50)]\n"
        "pinned = d.cuMemAllocHost(8 * 50)[1]\n"
        "for n in range(50):\n"
        "    d.cuStreamWriteValue64(stream, memory, n, 0)\n"
        "    d.cuMemcpyAsync(pinned + 8 * n, memory, 8, stream)\n"
        "pending = code(d.cuStreamQuery(stream)); gate.value = 1; d.cuStreamSynchronize(stream)\n"
        "pending, list((ctypes.c_uint64 * 50).from_address(pinned))"
    )
    assert seen == (600, list(range(50)))


def test_a_stream_takes_work_again_after_its_thread_has_ended(process: HostProcess) -> None:
    process.run(
        "from ipcsync._drivers.host import stream as streams\nstreams._IDLE_S = 0.01\n"
        "gate = hold(stream); gate.value = 1; d.cuStreamSynchronize(stream)\n"
        "running = streams.find_stream(stream)._running\nrunning.acquire(timeout=10) and running.release()"
    )
    assert process.run("running.locked()") is False
    process.run("gate = hold(stream); d.cuEventRecord(event, stream)")
    assert process.run("code(d.cuEventQuery(event))") == 600
    process.run("gate.value = 1")
    assert process.run(WAIT) is True


def test_a_destroyed_streams_work_is_still_done_and_its_slot_then_free(process: HostProcess) -> None:
    process.run("from ipcsync._drivers.host.stream import find_stream\ninner = find_stream(stream)")
    assert process.run("gate = hold(stream); d.cuEventRecord(event, stream); code(d.cuStreamDestroy(stream))") == 0
    assert process.run("code(d.cuStreamQuery(stream)), code(d.cuEventQuery(event))") == (400, 600)
    assert process.run("process.segment._map[layout.STREAM_MAP + inner.slot]") == 1
    process.run("gate.value = 1")
    until(lambda: process.run("code(d.cuEventQuery(event))") == 0, "its work is done")
    until(lambda: process.run("process.segment._map[layout.STREAM_MAP + inner.slot]") == 0, "its slot is free")


def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(process: HostProcess) -> None:
    process.run("blocking = d.cuStreamCreate(0)[1]; gate = hold(blocking); d.cuEventRecord(event, 0)")
    assert process.run("code(d.cuEventQuery(event)), code(d.cuStreamQuery(0))") == (600, 600)
    process.run("free = d.cuEventCreate(2)[1]; d.cuEventRecord(free, stream)")  # a non-blocking one does not
    assert process.run("d.wait_event(free, time.monotonic_ns() + 10_000_000_000)") is True
    process.run("gate.value = 1")
    assert process.run(WAIT) is True
    process.run("gate = hold(1); d.cuEventRecord(event, blocking)")
    assert process.run("code(d.cuEventQuery(event))") == 600
    process.run("gate.value = 1")
    assert process.run(WAIT) is True


def test_each_thread_has_a_per_thread_stream_of_its_own(process: HostProcess) -> None:
    ids = process.run(
        "context = d.cuCtxGetCurrent()[1]; ids = [d.cuStreamGetId(2)[1], d.cuStreamGetId(2)[1]]\n"
        "def other():\n    d.cuCtxSetCurrent(context); ids.append(d.cuStreamGetId(2)[1])\n"
        "thread = threading.Thread(target=other); thread.start(); thread.join(); ids"
    )
    assert ids[0] == ids[1] != ids[2]


def test_a_host_function_that_blocks_holds_up_only_its_own_stream(process: HostProcess) -> None:
    process.run(
        "open_it = threading.Event(); function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: open_it.wait())\n"
        "d.cuLaunchHostFunc(stream, ctypes.cast(function, ctypes.c_void_p).value, 0)\n"
        "other = d.cuStreamCreate(1)[1]; d.cuEventRecord(event, other)"
    )
    assert process.run(WAIT) is True
    assert process.run("code(d.cuStreamQuery(stream))") == 600
    process.run("open_it.set()")
    assert process.run("code(d.cuStreamSynchronize(stream))") == 0


@pytest.mark.parametrize(
    "work",
    [
        "gate = hold(stream)",
        "d.cuLaunchHostFunc(stream, ctypes.cast(function, ctypes.c_void_p).value, 0)",
        "gate = hold(stream); other = d.cuStreamCreate(1)[1]; d.cuEventRecord(event, stream);"
        " d.cuStreamWaitEvent(other, event, 0)",
    ],
    ids=["wait-value", "host-function", "event"],
)
def test_a_process_with_pending_work_can_exit(process: HostProcess, work: str) -> None:
    process.run("function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: threading.Event().wait())")
    process.run(work)
    assert process.finish() == 0


def test_many_threads_on_one_stream_lose_no_position(process: HostProcess) -> None:
    done, tail = process.run(
        "from ipcsync._drivers.host.stream import find_stream\ninner = find_stream(stream); before = inner.tail\n"
        "def work(mine):\n    for _ in range(500): d.cuEventRecord(mine, stream)\n"
        "threads = [threading.Thread(target=work, args=(d.cuEventCreate(2)[1],)) for _ in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "d.cuStreamSynchronize(stream); process.words[inner.done_at] - before, inner.tail - before"
    )
    assert done == tail == 2000


def test_a_released_context_takes_its_streams_with_it(process: HostProcess) -> None:
    assert process.run("code(d.cuDevicePrimaryCtxRelease(0))") == 0
    assert process.run("code(d.cuStreamQuery(stream)), code(d.cuStreamCreate(1)), code(d.cuCtxGetDevice())") == (
        400,
        709,
        709,
    )
    process.run("start(); stream = d.cuStreamCreate(1)[1]; event = d.cuEventCreate(2)[1]")
    assert process.run("code(d.cuEventRecord(event, stream))") == 0
    assert process.run(WAIT) is True
