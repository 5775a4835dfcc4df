"""What peers of the probes are asked to do, beside `actions`, whose named objects they use."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from ipcsync._drivers import handle_from_bytes, load
from ipcsync._linux import futex
from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, ok
from tests.kit.until import DEADLINE_S, until


def hold_robustly(page: str, index: int) -> None:
    """Hold a word of the page as a robust futex, on a thread that never ends by itself."""
    is_held = threading.Event()

    def hold() -> None:
        with futex.held(actions._named[page].address + 8 * index) as held:
            assert held
            is_held.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    assert is_held.wait(DEADLINE_S)


def submit_long_work(stream: str, size: int, times: int) -> None:
    """Put so many sets of `size` bytes of device memory on the stream."""
    drv = load()
    memory = ok(drv.cuMemAlloc(size))
    for value in range(times):
        ok(drv.cuMemsetD8Async(memory, value % 251, size, actions._named[stream]))


def go_on_beside_a_wait(others: int) -> dict[str, int]:
    """How many of so many streams do their work while another one waits; by what that waits for."""
    drv = load()
    first, second, *rest = [ok(drv.cuStreamCreate(kit.NON_BLOCKING)) for _ in range(others + 2)]
    memory, event = ok(drv.cuMemAlloc(4096)), ok(drv.cuEventCreate(kit.DISABLE_TIMING))
    for stream in (first, second, *rest):  # the first use of each may wait for all
        ok(drv.cuMemsetD8Async(memory, 0, 4096, stream))
        kit.finish(stream)
    went_on = {}
    for what in ("a word", "an event"):
        latch = kit.Latch(first)
        ok(drv.cuMemsetD8Async(memory, 1, 4096, first))
        if what == "an event":
            ok(drv.cuEventRecord(event, first))
            ok(drv.cuStreamWaitEvent(second, event, 0))
            ok(drv.cuMemsetD8Async(memory, 2, 4096, second))
        for stream in rest:
            ok(drv.cuMemsetD8Async(memory, 3, 4096, stream))
        with suppress(AssertionError):
            until(lambda: all(code(drv.cuStreamQuery(each)) == kit.SUCCESS for each in rest), "all go on", 1.0)
        went_on[what] = sum(code(drv.cuStreamQuery(each)) == kit.SUCCESS for each in rest)
        latch.open()
        for stream in (first, second, *rest):
            kit.finish(stream)
    return went_on


def time_opening(handles: list[bytes]) -> tuple[list[float], list[float]]:
    """Seconds for opening each handle, and for destroying each import."""
    drv = load()
    opened, closed, events = [], [], []
    for handle in handles:
        raw = handle_from_bytes(drv.CUipcEventHandle, handle)
        began = time.perf_counter()
        events.append(ok(drv.cuIpcOpenEventHandle(raw)))
        opened.append(time.perf_counter() - began)
    for event in events:
        began = time.perf_counter()
        ok(drv.cuEventDestroy(event))
        closed.append(time.perf_counter() - began)
    return opened, closed
