"""Driver, devices and contexts, and the variables that choose them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from cuda.bindings import driver as drv

from tests.softcuda.kit import SIM, code, ok, stat
from tests.softcuda.processes import py

_MPS_ENABLED = "drv.CUdevice_attribute(133)"


def test_driver(ctx: Any) -> None:
    assert ok(drv.cuDriverGetVersion()) == 13000
    assert ok(drv.cuDeviceGetCount()) == 1
    assert ok(drv.cuGetErrorName(drv.CUresult.CUDA_ERROR_NOT_READY)) == b"CUDA_ERROR_NOT_READY"
    assert ok(drv.cuGetErrorString(drv.CUresult.CUDA_ERROR_INVALID_VALUE)) == b"invalid argument"
    assert code(drv.cuInit(1)) == 1
    assert code(drv.cuDeviceGet(1)) == 101
    assert int(ok(drv.cuDeviceGetByPCIBusId(ok(drv.cuDeviceGetPCIBusId(20, 0)).split(b"\0")[0]))) == 0
    assert code(drv.cuMemAllocAsync(64, 0)) == 801  # not simulated: says so
    assert ok(drv.cuCtxGetStreamPriorityRange()) == (0, -5)


def test_entry_points() -> None:
    f = SIM.cuGetProcAddress_v2
    f.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]

    def get(name: bytes, version: int, flags: int = 0) -> tuple[int, int | None, int]:
        p, st = ctypes.c_void_p(), ctypes.c_int(-1)
        return f(name, ctypes.byref(p), version, flags, ctypes.byref(st)), p.value, st.value

    def exported(name: str) -> int | None:
        return ctypes.cast(getattr(SIM, name), ctypes.c_void_p).value

    assert get(b"cuMemAlloc", 13000) == (0, exported("cuMemAlloc_v2"), 0)
    assert get(b"cuCtxCreate", 3020)[1] == exported("cuCtxCreate_v2")
    assert get(b"cuCtxCreate", 11040)[1] == exported("cuCtxCreate_v3")
    assert get(b"cuCtxCreate", 13000)[1] == exported("cuCtxCreate_v4")
    assert get(b"cuEventRecord", 13000, 1)[1] == exported("cuEventRecord")
    assert get(b"cuEventRecord", 13000, 2)[1] == exported("cuEventRecord_ptsz")
    assert get(b"cuMemcpyHtoD", 13000, 2)[1] == exported("cuMemcpyHtoD_v2_ptds")
    assert get(b"cuEventQuery", 13000, 2)[1] == exported("cuEventQuery")
    assert get(b"cuNoSuchThing", 13000) == (0, None, 1)
    assert get(b"cuCtxGetId", 11000) == (0, None, 2)
    assert get(b"cuInit", 99990)[0] == 1


def test_contexts(ctx: Any) -> None:
    dev = ok(drv.cuCtxGetDevice())
    assert ok(drv.cuDevicePrimaryCtxGetState(dev))[1] == 1
    c2 = ok(drv.cuCtxCreate(None, 0, dev))
    assert int(ok(drv.cuCtxGetCurrent())) == int(c2)
    assert stat("contexts") == 2
    s2 = ok(drv.cuStreamCreate(0))
    assert int(ok(drv.cuStreamGetCtx(s2))) == int(c2)
    e1_in_c2 = ok(drv.cuEventCreate(0))
    assert int(ok(drv.cuCtxPopCurrent())) == int(c2)
    ok(drv.cuCtxSetCurrent(ctx))
    s1 = ok(drv.cuStreamCreate(0))
    assert code(drv.cuEventRecord(e1_in_c2, s1)) == 400  # event of another context
    ok(drv.cuEventRecord(e1_in_c2, s2))
    ok(drv.cuStreamWaitEvent(s1, e1_in_c2, 0))  # waiting for it is fine
    ok(drv.cuCtxDestroy(c2))
    assert stat("contexts") == 1
    assert code(drv.cuStreamQuery(s2)) == 400
    assert code(drv.cuEventQuery(e1_in_c2)) == 400
    assert code(drv.cuCtxSetCurrent(c2)) != 0
    seen: list[int] = []
    t = threading.Thread(target=lambda: seen.append(code(drv.cuStreamCreate(0))))
    t.start()
    t.join()
    assert seen == [201]  # a thread starts without a context


def test_devices() -> None:
    out = py(
        """
    start()
    assert ok(drv.cuDeviceGetCount()) == 3
    for i in range(3): print(bytes(ok(drv.cuDeviceGetUuid(i)).bytes).hex())
    """,
        IPCSYNC_HOST_DEVICES=3,
    ).stdout.split()
    assert len(set(out)) == 3
    u = out[2]
    text = f"GPU-{u[:8]}-{u[8:12]}-{u[12:16]}-{u[16:20]}-{u[20:]}"
    show = "start(); print(*[bytes(ok(drv.cuDeviceGetUuid(i)).bytes).hex() for i in range(ok(drv.cuDeviceGetCount()))])"
    for visible, want in [("2,0", [2, 0]), (text, [2]), (f"{text[:12]},1", [2, 1]), ("1,9,0", [1]), ("1,-1,0", [1])]:
        shown = py(show, IPCSYNC_HOST_DEVICES=3, CUDA_VISIBLE_DEVICES=visible).stdout.split()
        assert shown == [out[i] for i in want], visible
    for visible in ("", "7", "0,0"):
        none = "assert code(drv.cuInit(0)) == 100 and code(drv.cuDeviceGetCount()) == 3"
        py(none, IPCSYNC_HOST_DEVICES=3, CUDA_VISIBLE_DEVICES=visible)


def test_latency_and_async() -> None:
    py(
        """
    start(); s = ok(drv.cuStreamCreate(NONBLOCK)); e = ok(drv.cuEventCreate(2))
    t = time.monotonic()
    for i in range(5): ok(drv.cuEventRecord(e, s))
    assert code(drv.cuEventQuery(e)) == 600
    ok(drv.cuEventSynchronize(e)); assert time.monotonic() - t >= 0.5
    """,
        IPCSYNC_HOST_LATENCY_US=100000,
    )
    py(
        """
    start(); s = ok(drv.cuStreamCreate(NONBLOCK)); e = ok(drv.cuEventCreate(2))
    ok(drv.cuEventRecord(e, s)); ok(drv.cuEventSynchronize(e))
    """,
        IPCSYNC_HOST_ASYNC=1,
    )


def test_event_limit() -> None:
    py(
        """
    start(); es = [ok(drv.cuEventCreate(IPC)) for _ in range(10)]
    assert code(drv.cuEventCreate(IPC)) == 2 and code(drv.cuEventCreate(2)) == 0
    ok(drv.cuEventDestroy(es.pop())); ok(drv.cuEventCreate(IPC))
    """,
        IPCSYNC_HOST_EVENT_LIMIT=10,
    )


def test_per_thread_default_stream() -> None:
    py(
        """
    start(); b = ok(drv.cuStreamCreate(0)); latch = Latch(b)
    e = ok(drv.cuEventCreate(2)); ok(drv.cuEventRecord(e, 0))      # 0 is this thread's stream now
    ok(drv.cuEventSynchronize(e))
    ok(drv.cuEventRecord(e, drv.CU_STREAM_LEGACY)); assert code(drv.cuEventQuery(e)) == 600
    latch.open(); ok(drv.cuEventSynchronize(e))
    """,
        CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1,
    )


def test_only_under_mps_is_it_said_to_be_mps() -> None:
    for setting, is_mps in (("", 0), ("0", 0), ("1", 1)):
        py(f"start(); assert ok(drv.cuDeviceGetAttribute({_MPS_ENABLED}, 0)) == {is_mps}", IPCSYNC_HOST_MPS=setting)
