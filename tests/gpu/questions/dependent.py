"""Words beside kernels with programmatic dependent launch: is a write behind the last kernel behind the others too?"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

from ipcsync._drivers import load
from tests.gpu.questions import peers as asked
from tests.gpu.questions.graphs import captured
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import SUCCESS, code, ok

_SLOW_NS, _QUICK_NS = 2_000_000, 0
_PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry work(.param .u64 word, .param .u64 nanoseconds)
{
    .reg .u64 %word, %start, %now, %wanted;
    .reg .pred %goes;
    ld.param.u64 %word, [word];
    ld.param.u64 %wanted, [nanoseconds];
    griddepcontrol.launch_dependents;
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %goes, %now, %wanted;
    @%goes bra again;
    st.volatile.global.u64 [%word], 1;
    ret;
}
"""
"""A kernel that lets its dependents begin at once, works for so long and then writes its word."""


def has_kernels() -> bool:
    """Whether this driver loads kernels."""
    return code(load().cuModuleLoadData(_PTX + b"\0")) == SUCCESS


def loaded() -> Any:
    """The kernel, in the current context."""
    drv = load()
    return ok(drv.cuModuleGetFunction(ok(drv.cuModuleLoadData(_PTX + b"\0")), b"work"))


def launch_work(function: Any, stream: Any, word: int, nanoseconds: int, *, early: bool) -> None:
    """Queue it: so long work, then its word. `early`: it may begin before what is in front of it has ended."""
    drv = load()
    config = drv.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    if early:
        attribute = drv.CUlaunchAttribute()
        attribute.id = drv.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    arguments = ((word, nanoseconds), (ctypes.c_uint64, ctypes.c_uint64))
    ok(drv.cuLaunchKernelEx(config, function, arguments, 0))


def dependent_launches() -> Iterator[tuple[str, str]]:
    """A slow kernel, a quick one that may begin before that ends, and a write of a word: which is seen first?"""
    drv = load()
    if not has_kernels():
        yield "words beside programmatic dependent launches", "not asked: this driver loads no kernels"
        return
    function, stream = loaded(), asked.new_stream()
    page = int(ok(drv.cuMemAllocHost(4096)))
    seen = (ctypes.c_uint64 * 3).from_address(page)

    def queue() -> None:
        launch_work(function, stream, page, _SLOW_NS, early=False)
        launch_work(function, stream, page + 8, _QUICK_NS, early=True)
        ok(drv.cuStreamWriteValue64(stream, page + 16, 1, 0))

    graph = captured(stream, queue)
    for how in ("on a stream", "in a graph"):
        ctypes.memset(page, 0, 24)
        if how == "in a graph":
            ok(drv.cuGraphLaunch(graph, stream))
        else:
            queue()
        until = time.perf_counter() + 1.0
        while not seen[2] and time.perf_counter() < until:
            pass
        first = "after both kernels" if seen[0] else "while the first kernel works" if seen[2] else "not within 1 s"
        kit.finish(stream)
        yield f"a word behind a programmatic dependent launch, {how}, is written", first
