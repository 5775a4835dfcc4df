"""What goes on after a process was killed, and what ends behind a stream that never does."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from cuda import bindings

from ipcsync._drivers import load
from tests.contract import actions
from tests.gpu.questions import peers as asked
from tests.gpu.questions.graphs import captured
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, ok
from tests.kit.peer import PeerError

_WATCHED_S = 1.5
_PATIENCE_S = 1.5


def lowered_words() -> Iterator[tuple[str, str]]:
    """A recorder is killed amid its work, and a store releases its word: how late do its own writes lower it?"""
    drv = load()
    with asked.shared_page() as (path, page), asked.peers() as (recorder,):
        address = page.register()
        recorder.call(actions.create_stream, "s")
        recorder.call(actions.register_page, "page", path)
        recorder.call(asked.work_and_write, "s", "page", 0, 40)
        if asked.milliseconds(lambda: page.words[0] >= 3, 5.0) is None:
            yield "a released word is lowered by the dead", "not asked: the work did not begin"
            return
        waiter = asked.new_stream()
        before = page.words[0]
        began = time.perf_counter()
        os.kill(recorder.pid, signal.SIGKILL)
        lowered: list[float] = []
        last = 0
        page.words[0] = asked.FULL
        ok(drv.cuStreamWaitValue64(waiter, drv.CUdeviceptr(address), asked.FULL, kit.GEQ))
        while (now := time.perf_counter()) - began < _WATCHED_S:
            if (seen := page.words[0]) != asked.FULL:
                lowered.append(1e3 * (now - began))
                last = seen
                page.words[0] = asked.FULL
        said = f"{len(lowered)} times, the last after {lowered[-1]:.1f} ms (to {last} of 40)" if lowered else "never"
        yield f"a released word is lowered by the dead, killed at {before} of 40", said
        yield "a stream's wait for the released word", "ended" if asked.is_done(waiter) else "did not end"


def hold_for_ever() -> None:
    """In a peer: what the calls of `end` are about, and a stream that waits for a word of its own."""
    drv, named = load(), actions._named
    parameters = () if bindings.__version__.startswith("12.") else (None,)  # since CUDA 13
    named["context"] = ok(drv.cuCtxCreate(*parameters, 0, ok(drv.cuDeviceGet(0))))
    actions.create_stream("s")
    actions.create_event("e")
    named["host"], named["device"] = ok(drv.cuMemAllocHost(4096)), ok(drv.cuMemAlloc(4096))
    named["memory"] = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    named["address"] = ctypes.addressof(ctypes.c_char.from_buffer(named["memory"]))
    ok(drv.cuMemHostRegister(named["address"], mmap.PAGESIZE, 3))
    actions.create_stream("free")
    for name in ("graph", "other graph"):
        named[name] = captured(named["free"], lambda: ok(drv.cuMemsetD8Async(named["device"], 1, 8, named["free"])))
    ok(drv.cuGraphLaunch(named["graph"], named["free"]))
    kit.finish(named["free"])
    actions.hold("s")
    actions.record("e", "s")


def _calls() -> dict[str, Callable[[], Any]]:
    """What may stand still behind that stream."""
    drv, named = load(), actions._named
    return {
        "cuStreamDestroy": lambda: drv.cuStreamDestroy(named["s"]),
        "cuEventDestroy": lambda: drv.cuEventDestroy(named["e"]),
        "cuMemFree": lambda: drv.cuMemFree(named["device"]),
        "cuMemFreeHost": lambda: drv.cuMemFreeHost(named["host"]),
        "cuCtxDestroy": lambda: drv.cuCtxDestroy(named["context"]),
        "cuMemHostUnregister": lambda: drv.cuMemHostUnregister(named["address"]),
        "cuMemHostRegister": lambda: drv.cuMemHostRegister(named["address"] + mmap.PAGESIZE, mmap.PAGESIZE, 3),
        "cuMemAlloc": lambda: drv.cuMemAlloc(1 << 20),
        "cuMemAllocHost": lambda: drv.cuMemAllocHost(1 << 20),
        "cuStreamCreate": lambda: drv.cuStreamCreate(kit.NON_BLOCKING),
        "the first launch of a graph": lambda: drv.cuGraphLaunch(named["other graph"], named["free"]),
        "the launch of a graph that waits in the stream": lambda: drv.cuGraphLaunch(named["graph"], named["s"]),
        "the launch of that graph in another stream": lambda: (
            drv.cuGraphLaunch(named["graph"], named["s"]),
            drv.cuGraphLaunch(named["graph"], named["free"]),
        )[-1],
        "cuGraphExecDestroy": lambda: drv.cuGraphExecDestroy(named["other graph"]),
    }


def end(call: str) -> tuple[str, float]:
    """In a peer: the result of one call behind that stream, and its milliseconds."""
    began = time.perf_counter()
    result = code(_calls()[call]())
    return f"result {result}", 1e3 * (time.perf_counter() - began)


def _late(stream: Any, event: Any, is_over: Callable[[], bool] = lambda: False) -> str:
    """The longest record of this process until its query says so, for half of the patience or until that is over."""
    drv, began = load(), time.perf_counter()
    times: list[float] = []
    while (before := time.perf_counter()) - began < _PATIENCE_S / 2 and not (times and is_over()):
        ok(drv.cuEventRecord(event, stream))
        assert asked.milliseconds(lambda: kit.is_ready(drv.cuEventQuery(event)), 5.0) is not None
        times.append(1e3 * (time.perf_counter() - before))
    return f"{max(times):.2f} ms (median {sorted(times)[len(times) // 2]:.3f})"


_EXIT = """
from tests.gpu.questions.deaths import hold_for_ever
from tests.kit import driver_kit as kit
kit.use_device(0); hold_for_ever(); kit.at_end.clear(); print("held", flush=True)
"""


def never_ending_streams() -> Iterator[tuple[str, str]]:
    """Which calls, and which exit, do not return behind a stream that waits for ever?"""
    stream, event = asked.new_stream(), ok(load().cuEventCreate(kit.DISABLE_TIMING))
    yield "a bystander's record until its query says so, at worst, beside nothing", _late(stream, event)
    for call in _calls():
        with asked.peers() as (peer,):
            peer.call(hold_for_ever)
            peer.begin(end, call)
            if call == "cuCtxDestroy":
                yield f"the same beside {call}, behind a stream that never ends", _late(stream, event)
            try:
                result, took = peer.result(_PATIENCE_S)
                said = f"{result} after {took:.2f} ms"
            except PeerError:
                said = f"does not return within {_PATIENCE_S:g} s"
        yield f"behind a stream that never ends: {call}", said
    with subprocess.Popen([sys.executable, "-c", _EXIT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.perf_counter()
        late = _late(stream, event, lambda: process.poll() is not None)
        try:
            status = process.wait(2 * _PATIENCE_S)
            said = f"status {status} after {1e3 * (time.perf_counter() - began):.0f} ms"
        except subprocess.TimeoutExpired:
            said = f"not within {2 * _PATIENCE_S:g} s"
            process.kill()
        yield "behind a stream that never ends: the process's exit", said
        yield "the same beside an exit behind a stream that never ends", late
