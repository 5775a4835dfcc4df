"""What a replay of a graph with waits and records costs on the host, part by part, and what its nodes cost a launch.

    IPCSYNC_DRIVER=cuda python -m tests.gpu.replay_costs

The driver is called by ctypes, so a call's time is the driver's but for some 0.3 µs. One figure a line, in µs.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import ipcsync
from ipcsync._drivers import load
from ipcsync._native.context import call as driver_call
from ipcsync.testing import StreamGate
from ipcsync_bench import graphs as bench
from tests.gpu.questions import peers as asked
from tests.gpu.questions.dependent import has_kernels, launch_work, loaded
from tests.gpu.questions.graphs import captured
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import ok

_LAYERS, _TIMES = 80, 40
_WAIT, _WRITE = 4, 5  # CU_STREAM_MEM_OP_{WAIT,WRITE}_VALUE_64
_SIZES = (1, 2, 10, 40, 80, 160, 240)
_EXTERNAL = 1


def say(name: str, microseconds: Sequence[float]) -> None:
    """One figure a line: median, least."""
    sys.stdout.write(f"{name:80s} p50 {statistics.median(microseconds):9.2f}  min {min(microseconds):9.2f}\n")
    sys.stdout.flush()


def timed(call: Callable[[], object], after: Callable[[], object], times: int = _TIMES) -> list[float]:
    """Microseconds of a call, so often; what follows it each time is not counted."""
    figures = []
    for number in range(times + 2):
        began = time.perf_counter()
        call()
        took = time.perf_counter() - began
        after()
        if number > 1:
            figures.append(1e6 * took)
    return figures


class Costs:
    """A stream, and words in device memory and in pinned host memory."""

    def __init__(self) -> None:
        kit.use_device(0)
        self.drv, self.stream = load(), asked.new_stream()
        self.library = ctypes.CDLL("libcuda.so.1")
        self.handle = ctypes.c_void_p(int(self.stream))
        self.device = asked.device_words(2 * _LAYERS + 2)
        self.host = int(ok(self.drv.cuMemAllocHost(64 * 256)))
        ctypes.memset(self.host, 1, 64 * 256)
        for number in range(2 * _LAYERS):
            ok(self.drv.cuMemsetD8(asked.word(self.device, number), 1, 8))

    def batch(self, operations: Sequence[tuple[int, int]]) -> Any:
        """An array of CUstreamBatchMemOpParams: each is six words of 64 bits."""
        array = (ctypes.c_uint64 * (6 * len(operations)))()
        for number, (kind, address) in enumerate(operations):
            array[6 * number : 6 * number + 3] = [kind, address, 1]
        return array

    def put(self, array: Any) -> None:
        """One cuStreamBatchMemOp."""
        assert self.library.cuStreamBatchMemOp_v2(self.handle, len(array) // 6, array, 0) == 0

    def finish(self) -> None:
        """Look until the stream's work is done."""
        assert asked.milliseconds(lambda: asked.is_done(self.stream), 5.0) is not None

    def batches(self) -> None:
        """The host's time of a call by the number of its operations."""
        kinds = {"writes": (_WRITE,), "waits, complete": (_WAIT,), "waits and writes in turn": (_WAIT, _WRITE)}
        for where, words in (("device memory", self.device), ("pinned memory", self.host)):
            for what, kind in kinds.items():
                for count in _SIZES:
                    made = [(kind[each % len(kind)], words + 64 * (each % 160)) for each in range(count)]
                    array = self.batch(made)
                    say(
                        f"cuStreamBatchMemOp, {count} {what}, {where}",
                        timed(lambda a=array: self.put(a), self.finish),  # type: ignore[misc]
                    )
        array = self.batch([(_WAIT, self.device), (_WRITE, self.device + 64)] * 80)

        def held() -> float:
            latch = kit.Latch(self.stream)
            began = time.perf_counter()
            self.put(array)
            took = time.perf_counter() - began
            latch.open()
            self.finish()
            return 1e6 * took

        say("cuStreamBatchMemOp, 160 waits and writes, on a stream held back", [held() for _ in range(_TIMES)])

    def launches(self) -> None:
        """The host's time of a launch by what is in the graph, and until all of it is done."""
        drv, stream = self.drv, self.stream
        memory = ok(drv.cuMemAlloc(8192))
        kernel = loaded() if has_kernels() else None
        shared = [ok(drv.cuEventCreate(kit.SHAREABLE)) for _ in range(_LAYERS)]
        plain = [ok(drv.cuEventCreate(kit.DISABLE_TIMING)) for _ in range(_LAYERS)]
        for each in (*shared, *plain):
            ok(drv.cuEventRecord(each, stream))
        self.finish()

        def gate(number: int) -> None:
            ok(drv.cuStreamWaitValue64(stream, asked.word(self.device, number), 1, kit.GEQ))

        def tap(number: int) -> None:
            ok(drv.cuStreamWriteValue64(stream, asked.word(self.device, _LAYERS + number), 1, 0))

        def fused(number: int) -> None:
            if number == 0:
                gate(0)
            else:
                before, now = self.device + 64 * (_LAYERS + number - 1), self.device + 64 * number
                self.put(self.batch([(_WRITE, before), (_WAIT, now)]))

        def work(number: int) -> None:
            if kernel is None:
                ok(drv.cuMemsetD8Async(memory, 1, 8, stream))
            else:
                launch_work(kernel, stream, int(memory), 0, early=False)

        def all_of(*puts: Callable[[int], object]) -> Callable[[int], object]:
            def put(number: int) -> None:
                for each in puts:
                    each(number)

            return put

        def copy_to(words: int) -> Callable[[int], object]:
            source = asked.word(self.device, 2 * _LAYERS + 1)
            return lambda each: ok(drv.cuMemcpyDtoDAsync(asked.word(words, _LAYERS + each), source, 4, stream))

        kinds: dict[str, Callable[[int], object]] = {
            "a copy": lambda _: ok(drv.cuMemcpyDtoDAsync(memory, asked.word(int(memory), 64), 8, stream)),
            "a set": lambda _: ok(drv.cuMemsetD8Async(memory, 1, 8, stream)),
            "a kernel": work,
            "a kernel and a wait": all_of(gate, work),
            "a kernel and a write": all_of(work, tap),
            "a wait, a kernel and a write": all_of(gate, work, tap),
            "a kernel, a write and the next one's wait in one node": all_of(fused, work),
            "a kernel and a set of a word": all_of(
                work, lambda each: ok(drv.cuMemsetD32Async(asked.word(self.device, _LAYERS + each), 1, 1, stream))
            ),
            "a kernel and a copy of a word to device memory": all_of(work, copy_to(self.device)),
            "a kernel and a copy of a word to pinned memory": all_of(work, copy_to(self.host)),
            "a wait, a kernel and a copy of a word to pinned memory": all_of(gate, work, copy_to(self.host)),
            "a kernel and an external wait, interprocess": all_of(
                work, lambda each: ok(drv.cuStreamWaitEvent(stream, shared[each], _EXTERNAL))
            ),
            "a kernel and an external record, interprocess": all_of(
                work, lambda each: ok(drv.cuEventRecordWithFlags(shared[each], stream, _EXTERNAL))
            ),
            "a kernel and an external record, plain": all_of(
                work, lambda each: ok(drv.cuEventRecordWithFlags(plain[each], stream, _EXTERNAL))
            ),
        }
        for what, put in kinds.items():
            for layers in (1, 8, _LAYERS) if what in ("a kernel", "a wait, a kernel and a write") else (_LAYERS,):

                def queue(put: Callable[[int], object] = put, layers: int = layers) -> None:
                    for number in range(layers):
                        put(number)

                graph = ctypes.c_void_p(int(captured(stream, queue)))
                ends: list[float] = []

                def launch(graph: ctypes.c_void_p = graph) -> None:
                    assert self.library.cuGraphLaunch(graph, self.handle) == 0

                def end(ends: list[float] = ends) -> None:
                    began = time.perf_counter()
                    self.finish()
                    ends.append(1e6 * (time.perf_counter() - began))

                say(f"cuGraphLaunch, {layers} x {what}", timed(launch, end))
                say(f"cuGraphLaunch, {layers} x {what}: from there to its end", ends[2:])


def replays() -> None:
    """A replay's parts: entering the block, the launch, leaving the block."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        client, other = (stack.enter_context(ipcsync.connect(coordinator.endpoint)) for _ in range(2))
        for layers in (1, 8, _LAYERS):
            made = bench.Replays(client, other, layers)
            parts: dict[str, list[float]] = {"entering": [], "the launch": [], "leaving": []}
            for _ in range(_TIMES):
                with StreamGate(made.sending) as gate:
                    points, records = made.send(), dict.fromkeys(made.records, made.done)
                    replaying = client.replay(points, records, stream=made.stream, timeout=bench.LONGEST_S)
                    times = [time.perf_counter()]
                    replay = replaying.__enter__()
                    times.append(time.perf_counter())
                    driver_call("cuGraphLaunch", made.graph, made.stream._handle)
                    times.append(time.perf_counter())
                    replaying.__exit__(None, None, None)
                    times.append(time.perf_counter())
                    gate.open()
                replay[made.records[-1]].synchronize(bench.LONGEST_S)
                for number, each in enumerate(parts.values()):
                    each.append(1e6 * (times[number + 1] - times[number]))
            for what, figures in parts.items():
                say(f"a replay with {bench.text_of(layers)}: {what}", figures[2:])


def main() -> None:
    """All figures, one a line."""
    replays()
    costs = Costs()
    costs.launches()
    costs.batches()


if __name__ == "__main__":
    main()
