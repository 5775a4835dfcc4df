"""What cuda.core does on it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from cuda.bindings import driver as drv

from tests.softcuda.kit import Latch, ok
from tests.softcuda.processes import Child


def _core_child(conn: Connection) -> None:
    from cuda.core import Device

    dev = Device()
    dev.set_current()
    e = conn.recv()
    conn.send((e.is_ipc_enabled, e.is_timing_enabled, e.is_done))
    s = dev.create_stream()
    s.wait(e)
    conn.send("waiting")
    s.sync()
    conn.send(e.is_done)


def test_cuda_core(ctx: Any) -> None:
    from cuda.core import Device, EventOptions, StreamOptions

    dev = Device()
    dev.set_current()
    assert dev.uuid
    assert dev.name.startswith("softcuda")
    assert dev.properties.stream_priorities_supported
    s = dev.create_stream(options=StreamOptions(priority=-1, nonblocking=True))
    assert s.priority == -1
    assert s.is_nonblocking
    assert s.device == dev
    t = EventOptions(timing_enabled=True)
    e1 = s.record(options=t)
    e2 = s.record(options=t)
    e2.sync()
    assert e2.is_done
    assert e2 - e1 >= 0
    latch = Latch(s.handle)
    e = s.record(options=EventOptions(ipc_enabled=True))
    c = Child(_core_child)
    c.send(e)
    assert c.get() == (True, False, False)
    assert c.get() == "waiting"
    latch.open()
    assert c.get() is True
    c.end()
    buf = dev.memory_resource.allocate(1024, stream=s)
    assert buf.size == 1024
    buf.close(stream=s)


def test_cuda_core_graphs(ctx: Any) -> None:
    from cuda.core import Device

    dev = Device()
    dev.set_current()
    s, p, called = dev.create_stream(), int(ok(drv.cuMemAlloc(64))), []
    ok(drv.cuMemsetD8(p, 0, 64))
    ok(drv.cuCtxSynchronize())

    def building(value: int) -> Any:
        builder = dev.create_graph_builder().begin_building()
        ok(drv.cuMemsetD8Async(p, value, 8, builder.stream.handle))
        return builder

    def run(graph: Any) -> bytes:
        graph.upload(s)
        graph.launch(s)
        s.sync()
        data = bytearray(16)
        ok(drv.cuMemcpyDtoH(data, p, 16))
        return bytes(data)

    builder = building(5)
    one, other = builder.split(2)
    ok(drv.cuStreamWriteValue64(other.stream.handle, p + 8, 9, 0))
    joined = type(builder).join(one, other)
    joined.callback(lambda: called.append(1))
    joined.end_building()
    graph = joined.complete()
    assert (run(graph), called) == (b"\5" * 8 + b"\t" + bytes(7), [1])
    first = building(6)
    first.end_building()
    updated = first.complete()
    second = building(7)
    second.end_building()
    updated.update(second)
    assert run(updated)[:8] == b"\7" * 8
    ok(drv.cuMemFree(p))
