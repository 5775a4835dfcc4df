"""Two processes take turns on a GPU: which work makes a turn dear?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from ipcsync._drivers import load
from tests.contract import actions
from tests.gpu.questions import peers as asked
from tests.gpu.questions.dependent import has_kernels, launch_work, loaded
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import ok

_TURNS, _WARM = 120, 20
_ANSWER, _OWN = 128, 256  # words of the page beside the two that say whose turn it is
_LIMIT_S = 3.0
KINDS = (
    "no work",
    "a record of a plain event",
    "a record of an own interprocess event",
    "a record of an own interprocess event, which the other one looks at",
    "a record of an imported interprocess event",
    "a write of a word of host memory",
    "a write of a word of device memory, then a plain record",
    "a set of 4 KB of device memory, then a plain record",
    "records of an imported interprocess event, on two streams in turn",
    "a kernel, then a plain record",
    "a kernel, then a write of a word of host memory",
    "a kernel, then a record of an own interprocess event",
    "a kernel, then a record of an imported interprocess event",
)
_KERNELS = KINDS[9:]


def _see(done: Callable[[], bool]) -> None:
    assert asked.milliseconds(done, _LIMIT_S) is not None, "work of a turn is not done"


def _work(kind: str, page: kit.Page, address: int, mine: int) -> Callable[[int], None]:
    """What is done in one turn, and seen to be done."""
    drv, named = load(), actions._named
    stream = asked.new_stream()
    plain = ok(drv.cuEventCreate(kit.DISABLE_TIMING))
    memory, host = ok(drv.cuMemAlloc(4096)), drv.CUdeviceptr(address + 8 * (_OWN + mine))

    streams = (stream, asked.new_stream())
    kernel = loaded() if kind in _KERNELS else None

    def on_two(number: int) -> None:
        ok(drv.cuEventRecord(named["e"], streams[number % 2]))
        _see(lambda: ready(named["e"]))

    def launch() -> None:
        launch_work(kernel, stream, int(host), 0, early=False)

    def write_behind_a_kernel(number: int) -> None:
        launch()
        write(number)

    def ready(event: Any) -> bool:
        return kit.is_ready(drv.cuEventQuery(event))

    def recorded(event: Any, before: Callable[[], object] = lambda: None) -> Callable[[int], None]:
        def work(_number: int) -> None:
            before()
            ok(drv.cuEventRecord(event, stream))
            _see(lambda: ready(event))

        return work

    def other_looks(_number: int) -> None:
        _see(lambda: ready(named["e"]))  # the other one's record of the turn before
        ok(drv.cuEventRecord(named["own"], stream))

    def write(number: int) -> None:
        ok(drv.cuStreamWriteValue64(stream, host, number, 0))
        _see(lambda: page.words[_OWN + mine] == number)

    return {
        KINDS[0]: lambda _number: None,
        KINDS[1]: recorded(plain),
        KINDS[2]: recorded(named["own"]),
        KINDS[3]: other_looks,
        KINDS[4]: recorded(named["e"]),
        KINDS[5]: write,
        KINDS[6]: recorded(plain, lambda: ok(drv.cuStreamWriteValue64(stream, memory, 1, 0))),
        KINDS[7]: recorded(plain, lambda: ok(drv.cuMemsetD8Async(memory, 1, 4096, stream))),
        KINDS[8]: on_two,
        KINDS[9]: recorded(plain, launch),
        KINDS[10]: write_behind_a_kernel,
        KINDS[11]: recorded(named["own"], launch),
        KINDS[12]: recorded(named["e"], launch),
    }[kind]


def play(kind: str, path: str, serves: bool) -> list[float]:
    """In each of both: so many turns; the seconds of each, of both sides."""
    page = kit.Page(path)
    address = page.register()
    mine, theirs = (0, 16) if serves else (16, 0)
    work = _work(kind, page, address, mine)
    times = []
    for number in range(1, _TURNS + _WARM + 1):
        began = time.perf_counter()
        if serves:
            work(number)
            page.words[mine] = number
        _see(lambda number=number: page.words[theirs] == number)  # type: ignore[misc]
        if not serves:
            work(number)
            page.words[mine] = number
        times.append(time.perf_counter() - began)
    _see(lambda: page.words[theirs] == _TURNS + _WARM)
    ok(load().cuCtxSynchronize())
    assert page.unregister() == kit.SUCCESS
    return times[_WARM:]


def turns() -> Iterator[tuple[str, str]]:
    """Microseconds of one turn, half of there and back, for each kind of work; both sides look without a pause."""
    with asked.peers(2) as both:
        handles = [each.call(actions.share_event, "own") for each in both]
        for each, handle in zip(both, reversed(handles), strict=True):
            assert each.call(actions.open_event, "e", handle) == kit.SUCCESS
        for kind in KINDS if has_kernels() else [each for each in KINDS if each not in _KERNELS]:
            with asked.shared_page() as (path, _):
                for each, serves in zip(both, (True, False), strict=True):
                    each.begin(play, kind, path, serves)
                times, _ = (each.result(_LIMIT_S + 2) for each in both)
            halves = sorted(1e6 * each / 2 for each in times)
            yield f"turns of two processes: {kind}", f"{statistics.median(halves):.1f} µs (p90 {halves[-12]:.1f})"
