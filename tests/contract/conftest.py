"""The driver under test, its context and streams, and the processes beside this one."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ipcsync._drivers import load
from tests.contract import actions
from tests.contract.graphing import Graphs, HostFunctions, Words
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import ok
from tests.kit.peer import Peer

_segments = itertools.count()


@pytest.fixture(scope="session")
def drv() -> ModuleType:
    """The driver that the environment selects."""
    return load()


@pytest.fixture(scope="session")
def kind(drv: ModuleType) -> str:
    """Which kind of driver it is: host, software or gpu."""
    return kit.driver_kind()


@pytest.fixture(scope="session")
def _primary(drv: ModuleType) -> Any:
    context = kit.use_device(0)
    kit.use_copies()
    return context


@pytest.fixture
def ctx(drv: ModuleType, _primary: Any) -> Iterator[Any]:
    """The current context: device 0's primary one. Afterwards every latch is open."""
    ok(drv.cuCtxSetCurrent(_primary))
    yield _primary
    kit.open_all_latches()
    ok(drv.cuThreadExchangeStreamCaptureMode(drv.CUstreamCaptureMode(kit.GLOBAL)))
    ok(drv.cuCtxSetCurrent(_primary))


@pytest.fixture
def new_stream(drv: ModuleType, ctx: Any) -> Iterator[Callable[..., Any]]:
    """Creates streams (non-blocking, unless given flags) that end with the test, after every latch was opened."""
    made = []

    def create(flags: int = kit.NON_BLOCKING) -> Any:
        made.append(ok(drv.cuStreamCreate(flags)))
        return made[-1]

    yield create
    kit.open_all_latches()
    for stream in made:
        ok(drv.cuStreamDestroy(stream))


@pytest.fixture
def stream(new_stream: Callable[..., Any]) -> Any:
    """A stream of the current context."""
    return new_stream()


@pytest.fixture
def new_event(drv: ModuleType, ctx: Any) -> Iterator[Callable[..., Any]]:
    """Creates events (shareable ones, unless given flags) that end with the test."""
    made = []

    def create(flags: int = kit.SHAREABLE) -> Any:
        made.append(ok(drv.cuEventCreate(flags)))
        return made[-1]

    yield create
    kit.open_all_latches()
    for event in made:
        ok(drv.cuEventDestroy(event))


@pytest.fixture
def ipc_event(new_event: Callable[..., Any]) -> Any:
    """A shareable event of the current context."""
    return new_event()


@pytest.fixture
def partner(new_peer: Callable[..., Peer]) -> Peer:
    """A second process, which has device 0's primary context current."""
    one = new_peer()
    one.call(actions.start)
    return one


@pytest.fixture
def third(new_peer: Callable[..., Peer]) -> Peer:
    """A third process like that."""
    another = new_peer()
    another.call(actions.start)
    return another


@pytest.fixture
def two_devices(kind: str, new_peer: Callable[..., Peer]) -> Callable[..., Peer]:
    """Spawns processes that see two devices, in a segment of their own; on a GPU machine with one device it skips."""
    segment = f"contract-{os.getpid()}-{next(_segments)}"
    settings = {"IPCSYNC_HOST_DEVICES": "2", "IPCSYNC_HOST_SEGMENT": segment}

    def spawn(visible: str | None = None) -> Peer:
        chosen = {} if kind == "gpu" else {**settings, "CUDA_VISIBLE_DEVICES": "0,1"}
        if visible is not None:
            chosen["CUDA_VISIBLE_DEVICES"] = visible
        another = new_peer(**chosen)
        if visible is None and another.call(actions.device_count) < 2:
            pytest.skip("this machine has one GPU: the test needs two")
        return another

    return spawn


@pytest.fixture
def page_path() -> Iterator[str]:
    """The path of a page of zeros on tmpfs."""
    fd, path = tempfile.mkstemp(prefix="ipcsync-contract-", dir="/dev/shm")
    try:
        os.posix_fallocate(fd, 0, os.sysconf("SC_PAGESIZE"))
        yield path
    finally:
        os.close(fd)
        Path(path).unlink()


@pytest.fixture
def page(page_path: str) -> Iterator[kit.Page]:
    """That page, mapped in this process."""
    mapped = kit.Page(page_path)
    yield mapped
    mapped.close()


@pytest.fixture
def begin(drv: ModuleType, new_stream: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Begins captures; those still running at the end of the test are ended."""
    capturing = []

    def start(mode: int = kit.GLOBAL, flags: int = kit.NON_BLOCKING) -> Any:
        stream = new_stream(flags)
        ok(drv.cuStreamBeginCapture(stream, drv.CUstreamCaptureMode(mode)))
        capturing.append(stream)
        return stream

    yield start
    for stream in capturing:
        if kit.capture_status(drv, stream) != kit.NONE:
            kit.end_capture(drv, stream)


# ---- graphs


@pytest.fixture
def graphs(drv: ModuleType, ctx: Any) -> Iterator[Graphs]:
    """Makes captures and executables, which end with the test."""
    if not hasattr(drv, "cuGraphLaunch"):
        pytest.skip("this driver has no graphs")
    made = Graphs(drv)
    yield made
    kit.open_all_latches()
    made.end()


@pytest.fixture
def words(graphs: Graphs) -> Iterator[Words]:
    """Words of pinned memory."""
    made = Words()
    yield made
    for index in range(16):
        made[index] = 2**62  # what still waits for one goes on
    kit.open_all_latches()
    ok(graphs.drv.cuStreamSynchronize(graphs.drv.CUstream(kit.LEGACY)))
    made.free()


@pytest.fixture
def host(graphs: Graphs) -> HostFunctions:
    """Host functions that note that they ran."""
    return HostFunctions()


@pytest.fixture
def memory(drv: ModuleType, words: Words) -> Iterator[Any]:
    """The address of device memory, all zeros."""
    pointer = ok(drv.cuMemAlloc(512))
    ok(drv.cuMemsetD8(pointer, 0, 512))
    ok(drv.cuStreamSynchronize(drv.CUstream(kit.LEGACY)))
    yield pointer
    ok(drv.cuStreamSynchronize(drv.CUstream(kit.LEGACY)))
    ok(drv.cuMemFree(pointer))
