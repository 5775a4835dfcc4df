"""Memory of one process and of several."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import pytest
from cuda.bindings import driver as drv

from tests.softcuda.kit import NONBLOCK, Latch, code, files, ok, open_memory, stat
from tests.softcuda.processes import MakeServers, py


def test_async_copies(ctx: Any) -> None:
    s = ok(drv.cuStreamCreate(NONBLOCK))
    p, latch = ok(drv.cuMemAlloc(64)), Latch(s)
    src = bytearray(b"x" * 64)
    ok(drv.cuMemcpyHtoDAsync(p, src, 64, s))  # pageable: taken before the call returns
    src[:] = b"y" * 64
    ok(drv.cuMemsetD8Async(int(p) + 60, 0, 4, s))
    host = ok(drv.cuMemAllocHost(64))
    ok(drv.cuMemcpyDtoHAsync(int(host), p, 64, s))  # pinned: really asynchronous
    assert code(drv.cuStreamQuery(s)) == 600
    latch.open()
    ok(drv.cuMemFree(p))  # behind the queued work
    assert code(drv.cuStreamQuery(s)) == 0
    assert ctypes.string_at(int(host), 64) == b"x" * 60 + b"\0" * 4
    w = ok(drv.cuMemAlloc(16))
    ok(drv.cuStreamWriteValue64(s, w, 5, 0))
    ok(drv.cuStreamWaitValue64(s, w, 5, 1))
    ok(drv.cuStreamSynchronize(s))


@pytest.mark.parametrize("call", ["cuMemFree", "cuMemFreeHost", "cuCtxDestroy", "cuStreamDestroy", "cuEventDestroy"])
def test_who_frees_memory_waits_for_the_work_of_its_context_and_who_destroys_its_streams_does_not(
    servers: MakeServers, call: str
) -> None:
    a, b = servers(2)
    a("python", "held.context = drv.cuCtxCreate(None, 0, 0)[1]")
    for x in (a, b):
        x("stream", 0)
        x("create", "e")
        x("hold", 0)
        x("record", "e", 0)
    arguments = {
        "cuMemFree": "drv.cuMemAlloc(64)[1]",
        "cuMemFreeHost": "drv.cuMemAllocHost(64)[1]",
        "cuCtxDestroy": "held.context",
        "cuStreamDestroy": "held.streams[0]",
        "cuEventDestroy": "held.events['e']",
    }
    a.send(("python", f"answer = int(drv.{call}({arguments[call]})[0])"))
    if "Destroy" in call and "Ctx" not in call:
        assert a.get() == 0
    else:
        a.until_blocked()
    b("let", 0)
    assert b("ssync", 0) == 0
    b("alloc", "m", 64)
    assert b("free", "m") == 0


@pytest.mark.usefixtures("ctx")
def test_a_registration_ends_with_its_context() -> None:
    page, size = mmap.mmap(-1, mmap.PAGESIZE), mmap.PAGESIZE
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    other = ok(drv.cuCtxCreate(None, 0, 0))
    ok(drv.cuMemHostRegister(address, size, 1))
    ok(drv.cuCtxPopCurrent())
    ok(drv.cuMemHostGetDevicePointer(address, 0))  # portable
    ok(drv.cuCtxDestroy(other))
    assert code(drv.cuMemHostGetDevicePointer(address, 0)) == 1
    assert code(drv.cuMemHostUnregister(address)) == 713
    ok(drv.cuMemHostRegister(address, size, 1))
    ok(drv.cuMemHostUnregister(address))


def test_who_has_freed_memory_open_keeps_it_and_nobody_else_opens_it(servers: MakeServers) -> None:
    a, b, c = servers(3)
    h = a("alloc", "m", 100_000)
    p = ok(open_memory(h))
    assert b("openmem", "m", h) == 0
    assert a("free", "m") == 0
    assert c("openmem", "late", h) == 400
    assert b("openmem", "again", h) == 0
    ok(drv.cuMemsetD8(p, 1, 10))
    ok(drv.cuIpcCloseMemHandle(p))


def test_shared_memory_of_the_dead_goes(servers: MakeServers) -> None:
    a, b = servers(2)
    a("alloc", "m", 1 << 20)
    b("alloc", "m", 1 << 20)
    mem, procs = stat("memory"), stat("processes")
    assert procs >= 3
    assert len(files("~m.*")) >= 2
    n = len(files("~m.*"))
    a.kill()
    a.p.join()
    stat("reap")
    assert stat("processes") == procs - 1
    assert stat("memory") == mem - (1 << 20)
    assert len(files("~m.*")) == n - 1
    b.end()
    assert stat("reap") == 1
    assert stat("processes") == procs - 2
    assert stat("memory") == mem - (2 << 20)
    assert len(files("~m.*")) == n - 2


def test_what_the_device_cannot_do_with_memory_is_refused(ctx: Any) -> None:
    """As its attributes say: it registers no memory that the CPU may only read, and waits for no remote writes."""
    pages = mmap.mmap(-1, 3 * 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert code(drv.cuMemHostRegister(address, 4096, 3 | 8)) == 801
    libc = ctypes.CDLL(None)
    for rights in (mmap.PROT_READ, 0):
        assert libc.mprotect(ctypes.c_void_p(address + 4096), 4096, rights) == 0
        assert code(drv.cuMemHostRegister(address, 3 * 4096, 3)) == 1
        assert code(drv.cuMemHostRegister(address + 4096, 4096, 3)) == 1
    ok(drv.cuMemHostRegister(address, 4096, 3))
    stream = ok(drv.cuStreamCreate(NONBLOCK))
    assert code(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(address), 0, 1 << 30)) == 801
    ok(drv.cuStreamWaitValue64(stream, drv.CUdeviceptr(address), 0, 0))
    ok(drv.cuMemHostUnregister(address))
    assert code(drv.cuMemAllocPitch((1 << 64) // 3 + 1, 3, 16)) == 2


def test_memory_of_another_process_is_opened_with_the_flag_that_is_required(servers: MakeServers) -> None:
    handle = servers()("alloc", "m", 4096)
    assert code(open_memory(handle, 0)) == 1
    ok(drv.cuIpcCloseMemHandle(ok(open_memory(handle))))


def test_registered_memory_is_its_pages_whatever_is_mapped_there_later(ctx: Any) -> None:
    """A GPU keeps to the pages. Two mappings side by side, and private memory, are taken by their address here."""
    py(
        """
    import ctypes, mmap
    start()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    def page(fd, address=None):
        flags = mmap.MAP_SHARED | (0x10 if address else 0)  # MAP_FIXED
        return libc.mmap(*map(ctypes.c_void_p, (address, 4096, 3, flags, fd, 0)))
    word = lambda address: ctypes.c_uint64.from_address(address)
    first, second = (os.memfd_create(name) for name in ("first", "second"))
    for fd in (first, second): os.ftruncate(fd, 4096)
    address, s = page(first), ok(drv.cuStreamCreate(NONBLOCK))
    at = lambda i: drv.CUdeviceptr(address + 8 * i)
    ok(drv.cuMemHostRegister(address, 4096, 3))
    latch = Latch(s)
    ok(drv.cuStreamWaitValue64(s, at(0), 1, 0))
    ok(drv.cuStreamWriteValue64(s, at(1), 2, 0))
    ok(drv.cuMemsetD32Async(at(2), 3, 2, s))
    ok(drv.cuMemcpyDtoDAsync(at(3), at(1), 8, s))
    assert page(second, address) == address
    there = page(first)
    latch.open()
    word(there).value = 1
    ok(drv.cuStreamSynchronize(s))
    assert [word(there + 8 * i).value for i in range(4)] == [1, 2, 3 << 32 | 3, 2]
    assert not any(word(address + 8 * i).value for i in range(4))
    ok(drv.cuMemHostUnregister(address))
    assert open("/proc/self/maps").read().count("memfd:first") == 1
    libc.munmap(ctypes.c_void_p(address), 4096)
    assert code(drv.cuMemHostRegister(address, 4096, 3)) == 1, "nothing is there"
    """
    )


_IN_LITTLE_ROOM = """
import tempfile
libc = ctypes.CDLL(None, use_errno=True)
here = tempfile.mkdtemp()
try:
    if libc.unshare({namespaces}) or libc.mount(b"none", b"/", None, 0x44000, None):  # MS_REC | MS_PRIVATE
        sys.exit(77)
    if libc.mount(b"none", here.encode(), b"tmpfs", 0, b"size=1m"):
        sys.exit(77)
    os.environ["IPCSYNC_HOST_DIR"] = here
    with open(here + "/other", "wb") as other:
        other.write(bytes((1 << 20) - {left}))
    assert code(drv.cuInit(0)) == {begun}
    if not {begun}:
        start()
        stream, word = ok(drv.cuStreamCreate(NONBLOCK)), ok(drv.cuMemAllocHost(4))
        made = [code(drv.cuEventCreate(IPC)) for _ in range(5000)]
        assert made[0] == 0 and made[-1] == 2, made
        made = [code(drv.cuStreamCreate(NONBLOCK)) for _ in range(500)]
        assert set(made) <= {{0, 2}}, made
        ok(drv.cuStreamWaitValue32(stream, drv.CUdeviceptr(int(word)), 1, 0))
        ctypes.c_uint32.from_address(int(word)).value = 1
        ok(drv.cuStreamSynchronize(stream))
finally:
    libc.umount2(here.encode(), 2)
    os.rmdir(here)
"""


@pytest.mark.parametrize(
    ("left", "begun", "profile"), [(0, 304, ""), (4096, 304, ""), (200 << 10, 0, ""), (200 << 10, 0, "h100")]
)
def test_a_full_file_system_is_an_error(left: int, begun: int, profile: str) -> None:
    """Not a SIGBUS at the first touch of a page that cannot be had."""
    new_mounts = 0x20000 if os.getuid() == 0 else 0x10020000  # CLONE_NEWNS, CLONE_NEWUSER
    program = "import ctypes\n" + _IN_LITTLE_ROOM.format(namespaces=new_mounts, left=left, begun=begun)
    done = py(program, succeeds=False, IPCSYNC_HOST_PROFILE=profile)
    if done.returncode == 77:
        pytest.skip("this process may not mount a small file system")
    assert done.returncode == 0, done.stdout + done.stderr
