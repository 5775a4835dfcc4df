"""What the questions' peers do, beside `tests.contract.actions`, and how answers are looked for."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ipcsync._drivers import load
from tests.contract import actions
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import code, ok
from tests.kit.peer import Peer

FULL = 2**62
_shared: list[Any] = []
LONG = {"gpu": (2 << 30, 20), "software": (8 << 20, 20)}
"""Memory that is set so often: some 15 ms of work."""


@contextmanager
def peers(count: int = 1, **env: str) -> Iterator[list[Peer]]:
    """So many processes with a context of device 0; killed at the end, whatever they do."""
    made = [Peer(env) for _ in range(count)]
    try:
        for each in made:
            each.call(actions.start)
        yield made
    finally:
        for each in made:
            each.kill()


@contextmanager
def shared_page() -> Iterator[tuple[str, kit.Page]]:
    """A page of tmpfs, and its path."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="ipcsync-question-") as file:
        file.truncate(4096)
        yield file.name, kit.Page(file.name)


def milliseconds(condition: Callable[[], Any], seconds: float) -> float | None:
    """How long until it was true, asked without a pause; None if it was not within so many seconds."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > seconds:
            return None
    return 1e3 * (time.perf_counter() - began)


def when(took: float | None, seconds: float) -> str:
    """The answer of `milliseconds` in words."""
    return f"not within {seconds:g} s" if took is None else f"after {took:.2f} ms"


def is_done(stream: Any) -> bool:
    """Whether the stream's work is done."""
    return code(load().cuStreamQuery(stream)) == kit.SUCCESS


def new_stream() -> Any:
    """A stream of this process."""
    return ok(load().cuStreamCreate(kit.NON_BLOCKING))


def word(address: int, number: int = 0) -> Any:
    """A word behind a device address."""
    return load().CUdeviceptr(address + 64 * number)


def device_words(count: int) -> int:
    """Words of device memory, 64 bytes apart, all 0: the address of the first."""
    address = ok(load().cuMemAlloc(64 * count))
    ok(load().cuMemsetD8(address, 0, 64 * count))
    return int(address)


# --- in a peer --------------------------------------------------------------------------------------------------------


def work_and_write(stream: str, page: str, index: int, times: int) -> None:
    """So often: some milliseconds of work, then a word: 1, 2, 3 …"""
    drv = load()
    size, sets = LONG[kit.driver_kind()]
    memory = ok(drv.cuMemAlloc(size))
    for number in range(1, times + 1):
        for value in range(sets):
            ok(drv.cuMemsetD8Async(memory, value, size, actions._named[stream]))
        assert actions.write_word(stream, page, index, number) == kit.SUCCESS


def share_events(count: int) -> int:
    """Create and export so many more; how many there are."""
    for _ in range(count):
        _shared.append(ok(load().cuEventCreate(kit.SHAREABLE)))
        ok(load().cuIpcGetEventHandle(_shared[-1]))
    return len(_shared)


def fork_a_sleeper(seconds: float) -> int:
    """A child that does nothing, but has what was open; its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forking beside other threads
        pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    return pid
