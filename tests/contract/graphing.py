"""What the tests of graphs share: words that streams and this process see, host functions, captures."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from cuda import bindings

from ipcsync._drivers import handle_bytes, load
from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, finish, ok

WAIT_32, WRITE_32, WAIT_64, WRITE_64 = 1, 2, 4, 5  # CU_STREAM_MEM_OP_…
ADD, SET = 0, 1  # CU_STREAM_…_CAPTURE_DEPENDENCIES
UNJOINED, UPDATE_FAILURE = 904, 910
IS_CUDA_12 = bindings.__version__.startswith("12.")
MEMCPY, MEMSET, HOST, EMPTY, WAIT_EVENT, EVENT_RECORD, MEM_OPS = 1, 2, 3, 5, 6, 7, 12  # CU_GRAPH_NODE_TYPE_…


class Words:
    """Words of 64 bits in pinned memory, zeros at first; plain loads and stores here, a device pointer for streams."""

    def __init__(self, count: int = 16) -> None:
        drv = load()
        self._base = int(ok(drv.cuMemAllocHost(8 * count)))
        self._words = (ctypes.c_uint64 * count).from_address(self._base)
        ctypes.memset(self._base, 0, 8 * count)

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def at(self, index: int) -> Any:
        """The device pointer of a word."""
        return load().CUdeviceptr(self._base + 8 * index)

    def free(self) -> None:
        """Give the memory back."""
        ok(load().cuMemFreeHost(self._base))


class HostFunctions:
    """Host functions for streams, each of which adds its name to `ran`."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._kept: list[Any] = []  # what the driver has the address of

    def __call__(self, name: str) -> Any:
        """A function that notes `name`."""
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self.ran.append(name))
        self._kept.append(function)
        return load().CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)


class Graphs:
    """Captures, graphs and executables that end with the test."""

    def __init__(self, drv: ModuleType) -> None:
        self.drv = drv
        self._graphs: list[Any] = []
        self._executables: list[Any] = []

    @contextmanager
    def capture(self, stream: Any) -> Iterator[list[Any]]:
        """Captures what the block puts on the stream; the graph is in the list afterwards."""
        captured: list[Any] = []
        ok(self.drv.cuStreamBeginCapture(stream, self.drv.CUstreamCaptureMode(kit.THREAD_LOCAL)))
        try:
            yield captured
        except BaseException:
            self.drv.cuStreamEndCapture(stream)
            raise
        captured.append(self.own(ok(self.drv.cuStreamEndCapture(stream))))

    def own(self, graph: Any) -> Any:
        """Destroy the graph at the end."""
        self._graphs.append(graph)
        return graph

    def executable(self, graph: Any) -> Any:
        """Instantiate it."""
        self._executables.append(ok(self.drv.cuGraphInstantiate(graph, 0)))
        return self._executables[-1]

    def captured(self, stream: Any, put: Callable[[], None]) -> Any:
        """The executable of what `put` puts on the stream."""
        with self.capture(stream) as captured:
            put()
        return self.executable(captured[0])

    def destroy(self, executable: Any) -> None:
        """Destroy an executable now."""
        self._executables.remove(executable)
        ok(self.drv.cuGraphExecDestroy(executable))

    def end(self) -> None:
        """Destroy all that is left."""
        while self._executables:
            ok(self.drv.cuGraphExecDestroy(self._executables.pop()))
        while self._graphs:
            ok(self.drv.cuGraphDestroy(self._graphs.pop()))


def update_dependencies(drv: ModuleType, stream: Any, nodes: list[Any], how: int) -> tuple[Any, ...]:
    """Have what is captured next on the stream depend on nodes, too or alone."""
    edges = () if IS_CUDA_12 else ([drv.CUgraphEdgeData() for _ in nodes],)
    result: tuple[Any, ...] = drv.cuStreamUpdateCaptureDependencies(stream, nodes, *edges, len(nodes), how)
    return result


def memory_operation(operation: int, address: Any, value: int, flags: int = 0) -> Any:
    """An entry of a batch."""
    drv = load()
    entry = drv.CUstreamBatchMemOpParams()
    entry.operation = drv.CUstreamBatchMemOpType(operation)
    member = entry.waitValue if operation in (WAIT_32, WAIT_64) else entry.writeValue
    member.operation = drv.CUstreamBatchMemOpType(operation)
    member.address = address
    if operation in (WAIT_32, WRITE_32):
        member.value = drv.cuuint32_t(value)
    else:
        member.value64 = drv.cuuint64_t(value)
    member.flags = flags
    return entry


def read(drv: ModuleType, pointer: Any, size: int = 64) -> bytes:
    """What device memory holds."""
    data = bytearray(size)
    ok(drv.cuMemcpyDtoH(data, pointer, size))
    return bytes(data)


def fork(drv: ModuleType, event: Any, before: Any, after: Any) -> None:
    """Record the event on one stream and make the other wait for it."""
    ok(drv.cuEventRecord(event, before))
    ok(drv.cuStreamWaitEvent(after, event, 0))


def capture_into(drv: ModuleType, stream: Any, graph: Any, behind: Any) -> None:
    """Begin to capture the stream into a graph, behind one of its nodes."""
    mode = drv.CUstreamCaptureMode(kit.GLOBAL)
    ok(drv.cuStreamBeginCaptureToGraph(stream, graph, [behind], [drv.CUgraphEdgeData()], 1, mode))


def nodes(drv: ModuleType, graph: Any) -> list[Any]:
    """The nodes of a graph."""
    count = ok(drv.cuGraphGetNodes(graph, 0))[1]
    return list(ok(drv.cuGraphGetNodes(graph, count))[0]) if count else []


def types(drv: ModuleType, graph: Any) -> list[int]:
    """Their types, sorted."""
    return sorted(int(ok(drv.cuGraphNodeGetType(node))) for node in nodes(drv, graph))


def edges(drv: ModuleType, graph: Any) -> set[tuple[int, int]]:
    """Its edges, as pairs of types."""
    count = ok(drv.cuGraphGetEdges(graph, 0))[-1]
    if not count:
        return set()
    before, after = ok(drv.cuGraphGetEdges(graph, count))[:2]
    return {
        (int(ok(drv.cuGraphNodeGetType(a))), int(ok(drv.cuGraphNodeGetType(b))))
        for a, b in zip(before, after, strict=True)
    }


def dependencies(drv: ModuleType, stream: Any) -> list[int]:
    """The types of the nodes that the next one captured on the stream will depend on, sorted."""
    found = ok(drv.cuStreamGetCaptureInfo(stream))[3] or []
    return sorted(int(ok(drv.cuGraphNodeGetType(node))) for node in found)


def handle(event: Any) -> bytes:
    """The handle of a shareable event."""
    return handle_bytes(ok(load().cuIpcGetEventHandle(event)))


# ---- in peers

_executables: list[Any] = []


def capture_wait_and_record(waited: str, recorded: str) -> None:
    """Make a graph that waits for one event and then records the other, both by their names among the actions."""
    drv = load()
    stream = ok(drv.cuStreamCreate(kit.NON_BLOCKING))
    ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(kit.GLOBAL)))
    ok(drv.cuStreamWaitEvent(stream, actions.named(waited), 1))
    ok(drv.cuEventRecordWithFlags(actions.named(recorded), stream, 1))
    graph = ok(drv.cuStreamEndCapture(stream))
    _executables.append(ok(drv.cuGraphInstantiate(graph, 0)))
    ok(drv.cuGraphDestroy(graph))
    ok(drv.cuStreamDestroy(stream))


def launch(stream: str) -> None:
    """Launch that graph."""
    ok(load().cuGraphLaunch(_executables[-1], actions.named(stream)))


def destroy() -> None:
    """Destroy it."""
    ok(load().cuGraphExecDestroy(_executables.pop()))


def copies_that_pass_a_held_stream(count: int, wait_for_them: bool) -> int:
    """Hold one stream back and put a write behind that; how many of `count` other streams ran before the write.

    What they run is a copy of the word that is written. If they all pass, wait for each before the next, which then
    finds an empty hardware queue; else they may never.
    """
    drv = load()
    kit.use_device()
    kit.use_copies()
    words, held = Words(count + 1), ok(drv.cuStreamCreate(kit.NON_BLOCKING))
    streams = [ok(drv.cuStreamCreate(kit.NON_BLOCKING)) for _ in range(count)]
    for index in range(count):
        words[index + 1] = 99
    latch = Latch(held)
    ok(drv.cuStreamWriteValue64(held, words.at(0), 1, 0))
    for index, stream in enumerate(streams):
        ok(drv.cuMemcpyDtoDAsync(words.at(index + 1), words.at(0), 8, stream))
        if wait_for_them:
            finish(stream)
    latch.open()
    for stream in (held, *streams):
        finish(stream)
    return [words[index + 1] for index in range(count)].count(0)
