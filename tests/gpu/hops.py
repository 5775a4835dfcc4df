"""What a hop between streams costs, by events and by words, and what hosts see of a stream.

    IPCSYNC_DRIVER=cuda python -m tests.gpu.hops

All that hops is queued behind a gate, so the host has no part in a hop: two streams of one context play ping-pong, and
one way is the time of all divided by their number. One figure a line, in µs: median, least, greatest.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ipcsync._drivers import load
from ipcsync.errors import IpcSyncError
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, finish, ok
from tests.kit.until import until

_TURNS, _ROUNDS = 150, 8  # with their waits, fewer operations than a stream takes in
_LATENCIES = 200
_PAUSE_S = 0.0002
_SIZE = 64 << 20


def say(name: str, seconds: Sequence[float]) -> None:
    """One figure a line."""
    times = [1e6 * each for each in seconds]
    figures = f"p50 {statistics.median(times):9.3f}  min {min(times):9.3f}  max {max(times):9.3f}"
    sys.stdout.write(f"{name:64s} {figures}\n")
    sys.stdout.flush()


class Hops:
    """Two streams, and a gate in front of the first."""

    def __init__(self) -> None:
        self.drv = load()
        kit.use_device(0)
        self.first, self.second = (ok(self.drv.cuStreamCreate(kit.NON_BLOCKING)) for _ in range(2))

    def rally(self, queue: Callable[[int], None]) -> Iterator[float]:
        """Seconds of one way, once a round; `queue(round)` puts all turns on both streams."""
        for number in range(_ROUNDS + 1):
            latch = kit.Latch(self.first)
            queue(number + 1)
            time.sleep(0.003)
            began = time.perf_counter()
            latch.open()
            ok(self.drv.cuStreamSynchronize(self.first))
            ok(self.drv.cuStreamSynchronize(self.second))
            if number:
                yield (time.perf_counter() - began) / (2 * _TURNS)

    def by_events(self, flags: int) -> Callable[[int], None]:
        """Each turn an event of its own, recorded on one stream and waited for by the other."""
        drv, first, second = self.drv, self.first, self.second
        pairs = [[ok(drv.cuEventCreate(flags)) for _ in range(2)] for _ in range(_TURNS)]

        def queue(_number: int) -> None:
            for there, back in pairs:
                ok(drv.cuEventRecord(there, first))
                ok(drv.cuStreamWaitEvent(second, there, 0))
                ok(drv.cuEventRecord(back, second))
                ok(drv.cuStreamWaitEvent(first, back, 0))

        return queue

    def by_words(self, address: int, *, one_stream: bool = False) -> Callable[[int], None]:
        """Two words, written by one stream and waited for by the other; or all of it on one stream."""
        drv, first = self.drv, self.first
        second = first if one_stream else self.second
        there, back = drv.CUdeviceptr(address), drv.CUdeviceptr(address + 512)

        def queue(number: int) -> None:
            for value in range(number * _TURNS + 1, (number + 1) * _TURNS + 1):
                ok(drv.cuStreamWriteValue64(first, there, value, 0))
                ok(drv.cuStreamWaitValue64(second, there, value, kit.GEQ))
                ok(drv.cuStreamWriteValue64(second, back, value, 0))
                ok(drv.cuStreamWaitValue64(first, back, value, kit.GEQ))

        return queue

    def all(self, page: int) -> None:
        """Each kind of hop; `page` is a registered page of tmpfs."""
        for what, flags in (("plain", kit.DISABLE_TIMING), ("timing", 0), ("interprocess", kit.SHAREABLE)):
            say(f"hop by {what} events", list(self.rally(self.by_events(flags))))
        pinned = int(ok(self.drv.cuMemAllocHost(4096)))
        ctypes.memset(pinned, 0, 4096)
        device = int(ok(self.drv.cuMemAlloc(4096)))
        ok(self.drv.cuMemsetD8(self.drv.CUdeviceptr(device), 0, 4096))
        for what, address in (("pinned host memory", pinned), ("a tmpfs page", page), ("device memory", device)):
            say(f"hop by words, {what}", list(self.rally(self.by_words(address))))
        for what, address in (("a tmpfs page", page + 1024), ("device memory", device + 1024)):
            say(f"write and wait on one stream, {what}", list(self.rally(self.by_words(address, one_stream=True))))


def hosts(hops: Hops, page: kit.Page, address: int) -> None:
    """From a store of the CPU, through a stream, to what a host sees."""
    drv, stream = hops.drv, hops.first
    gate, answer = drv.CUdeviceptr(address + 2048), drv.CUdeviceptr(address + 3072)
    words, numbers = page.words, iter(range(1, 1 << 30))

    def bounce() -> float:
        number = next(numbers)
        ok(drv.cuStreamWaitValue64(stream, gate, number, kit.GEQ))
        ok(drv.cuStreamWriteValue64(stream, answer, number, 0))
        time.sleep(_PAUSE_S)
        began = time.perf_counter()
        words[256] = number
        while words[384] < number:
            pass
        return time.perf_counter() - began

    say("a CPU's store, a stream, a CPU's load", [bounce() for _ in range(_LATENCIES)])

    def by_event(flags: int, see: Callable[[Any], None]) -> float:
        event, number, stored = ok(drv.cuEventCreate(flags)), next(numbers), 0.0
        ok(drv.cuStreamWaitValue64(stream, gate, number, kit.GEQ))
        ok(drv.cuEventRecord(event, stream))

        def store() -> None:
            nonlocal stored
            time.sleep(0.002)
            stored = time.perf_counter()
            words[256] = number

        thread = threading.Thread(target=store)
        thread.start()
        see(event)
        took = time.perf_counter() - stored
        thread.join()
        ok(drv.cuEventDestroy(event))
        return took

    spin, block = kit.DISABLE_TIMING, kit.DISABLE_TIMING | kit.BLOCKING_SYNC
    for what, flags in (("spinning", spin), ("blocking", block)):
        times = [by_event(flags, lambda event: ok(drv.cuEventSynchronize(event))) for _ in range(_LATENCIES // 2)]
        say(f"a CPU's store, a stream, a {what} cuEventSynchronize", times)


def memory() -> None:
    """What it costs to make and share 64 MiB, as a file descriptor and by a handle."""
    drv = load()
    prop = drv.CUmemAllocationProp()
    prop.type = drv.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = drv.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind = drv.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.requestedHandleTypes = kind
    figures: dict[str, list[float]] = {"create": [], "export as a descriptor": [], "map and set access": []}
    for _ in range(5):
        times = [time.perf_counter()]
        handle = ok(drv.cuMemCreate(_SIZE, prop, 0))
        times.append(time.perf_counter())
        ok(drv.cuMemExportToShareableHandle(handle, kind, 0))
        times.append(time.perf_counter())
        address = ok(drv.cuMemAddressReserve(_SIZE, 0, drv.CUdeviceptr(0), 0))
        ok(drv.cuMemMap(address, _SIZE, 0, handle, 0))
        access = drv.CUmemAccessDesc()
        access.location = prop.location
        access.flags = drv.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        ok(drv.cuMemSetAccess(address, _SIZE, [access], 1))
        times.append(time.perf_counter())
        for number, each in enumerate(figures.values()):
            each.append(times[number + 1] - times[number])
    for what, each in figures.items():
        say(f"64 MiB: {what}", each)


def main() -> None:
    """All figures, one a line."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="ipcsync-hops-") as file:
        file.truncate(4096)
        page = kit.Page(file.name)
        hops, address = Hops(), page.register()
        hops.all(address)
        hosts(hops, page, address)
        until(lambda: code(hops.drv.cuStreamQuery(hops.first)) == kit.SUCCESS, "the stream is empty")
        finish(hops.second)
        try:
            memory()
        except (AttributeError, IpcSyncError) as error:
            sys.stdout.write(f"memory as a file descriptor: {error}\n")


if __name__ == "__main__":
    main()
