"""Words that streams wait for: who stores one wakes them, and waiting costs nothing."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.kit.until import DEADLINE_S, until
from tests.softcuda.kit import IPC, NONBLOCK, Latch, code, ok, open_memory, raw, start
from tests.softcuda.processes import Child, py

GEQ = 0
_FUTEX_CALLS = ("449", "202", "98")  # futex_waitv, and futex of x86_64 and aarch64
_WITHOUT_LOOKS = """
import ctypes
from tests.softcuda.test_words import registered, synchronized, wait_and_store
start()
"""


def registered() -> int:
    """The address of a page that streams reach: private memory of this process."""
    return int(ok(drv.cuMemAllocHost(mmap.PAGESIZE)))


def synchronized(stream: Any) -> bool:
    """Whether the stream gets to its end before the deadline."""
    done = threading.Event()
    context = ok(drv.cuCtxGetCurrent())

    def wait() -> None:
        ok(drv.cuCtxSetCurrent(context))
        ok(drv.cuStreamSynchronize(stream))
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    return done.wait(DEADLINE_S)


def wait_and_store(store: Callable[[int, Any], None]) -> None:
    """A stream that waits for the word at an address, asleep; then `store(address, another stream)` ends the wait."""
    address = registered()
    ctypes.memset(address, 0, mmap.PAGESIZE)
    waiting, other = ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuStreamCreate(NONBLOCK))
    ok(drv.cuStreamWaitValue64(waiting, drv.CUdeviceptr(address + 64), 5, GEQ))
    sleeps()
    assert code(drv.cuStreamQuery(waiting)) == 600
    store(address + 64, other)
    assert synchronized(waiting)


def sleeps() -> None:
    """Wait until a thread of this process beside the main one, the stream's, sleeps at its word."""

    def asleep() -> bool:
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                if int(task.name) != os.getpid() and (task / "syscall").read_text().split()[0] in _FUTEX_CALLS:
                    return True
        return False

    until(asleep, "a stream's thread sleeps at its word")


@pytest.mark.parametrize(
    "store",
    [
        "ok(drv.cuStreamWriteValue64(other, drv.CUdeviceptr(address), 5, 0))",
        "ok(drv.cuMemsetD32Async(drv.CUdeviceptr(address - 8), 7, 8, other))",
        "ok(drv.cuMemcpyHtoD(drv.CUdeviceptr(address), (ctypes.c_uint64 * 1)(9), 8))",
        "ctypes.c_uint64.from_address(address).value = 5; Futex(address).wake()",
    ],
    ids=["write value", "memset", "copy", "a store of the CPU and a futex wake"],
)
def test_a_store_wakes_the_stream_that_waits_for_the_word(store: str) -> None:
    py(
        f"{_WITHOUT_LOOKS}\nfrom ipcsync._linux.futex import Futex\n"
        f"def store(address, other):\n    {store}\nwait_and_store(store)",
        IPCSYNC_HOST_POLL=0,
    )


def _wait_for_device_word(connection: Any, handle: bytes) -> None:
    start()
    word = ok(open_memory(handle))
    stream = ok(drv.cuStreamCreate(NONBLOCK))
    ok(drv.cuStreamWaitValue32(stream, drv.CUdeviceptr(int(word) + 4), 3, GEQ))
    sleeps()
    connection.send("waits")
    ok(drv.cuStreamSynchronize(stream))
    connection.send("went on")


def test_a_stream_s_write_wakes_a_stream_of_another_process(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_POLL", "0")
    memory = ok(drv.cuMemAlloc(mmap.PAGESIZE))
    child = Child(_wait_for_device_word, raw(ok(drv.cuIpcGetMemHandle(memory))))
    assert child.get() == "waits"
    ok(drv.cuStreamWriteValue32(ok(drv.cuStreamCreate(NONBLOCK)), drv.CUdeviceptr(int(memory) + 4), 3, 0))
    assert child.get() == "went on"
    child.end()


def test_a_plain_store_ends_a_wait_too(ctx: Any) -> None:
    def store(address: int, _other: Any) -> None:
        ctypes.c_uint64.from_address(address).value = 5

    wait_and_store(store)


def _fill(connection: Any, of_graph: bool) -> None:
    """Put 9 operations on a held stream that takes in 8, its gate included; host functions go on meanwhile.

    They are records; or the nodes of three launches, of which two fit.
    """
    start()
    stream, other = ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuStreamCreate(NONBLOCK))
    event, called = ok(drv.cuEventCreate(2)), threading.Event()

    def host(_data: object) -> None:
        ok(drv.cuEventRecord(event, other))
        called.set()

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(host)
    graph = ok(drv.cuGraphCreate(0))
    last: list[Any] = []
    for _ in range(3):
        last = [ok(drv.cuGraphAddEmptyNode(graph, last, len(last)))]
    executable = ok(drv.cuGraphInstantiate(graph, 0))

    def put() -> None:
        ok(drv.cuGraphLaunch(executable, stream) if of_graph else drv.cuEventRecord(event, stream))

    latch = Latch(stream)
    for _ in range(2 if of_graph else 7):
        put()
    made = threading.Event()

    def ninth() -> None:
        put()
        made.set()

    thread = threading.Thread(target=ninth)
    thread.start()
    connection.send(thread.native_id)
    connection.recv()
    assert not made.is_set()
    ok(drv.cuLaunchHostFunc(other, drv.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0))
    assert called.wait(DEADLINE_S), "a host function that calls the driver goes on beside a caller that is held up"
    assert code(drv.cuStreamQuery(stream)) == 600
    assert not made.is_set()
    latch.open()
    assert made.wait(DEADLINE_S)
    ok(drv.cuStreamSynchronize(stream))
    connection.send("done")


@pytest.mark.parametrize("of_graph", [False, True])
def test_a_stream_takes_in_so_many_operations_and_then_holds_up_the_caller(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, of_graph: bool
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_CAPACITY", "8")
    child = Child(_fill, of_graph)
    thread = child.get()
    calls = Path(f"/proc/{child.p.pid}/task/{thread}/syscall")
    until(lambda: calls.read_text().split()[0] in _FUTEX_CALLS, "the ninth call sleeps in the driver")
    child.send("go on")
    assert child.get() == "done"
    child.end()


def test_a_host_function_may_use_its_own_full_stream(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_CAPACITY", "2")
    child = Child(_from_within)
    assert child.get() == "done"
    child.end()


def _from_within(connection: Any) -> None:
    start()
    stream, event = ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuEventCreate(IPC))

    def host(_data: object) -> None:
        for _ in range(5):
            ok(drv.cuEventRecord(event, stream))

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(host)
    ok(drv.cuLaunchHostFunc(stream, drv.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0))
    ok(drv.cuStreamSynchronize(stream))
    ok(drv.cuEventSynchronize(event))
    connection.send("done")
