"""What a wait ahead of its record needs, beside the `timeline` engine."""

from __future__ import annotations

import ctypes
import time

from ipcsync._drivers import unwrap
from ipcsync._engines import Engine
from ipcsync._locks import CallLock, under
from ipcsync._native import context
from ipcsync._native.context import OnDevice
from ipcsync._native.pinned import take
from ipcsync._native.stream import Stream, stream_handle
from ipcsync._session.session import is_here
from ipcsync.errors import EngineMismatch
from ipcsync.typing import StreamLike

_LONGEST_S = 1.0
_STREAMS = 3

_lock = CallLock()
_passing: set[int] = set()  # contexts


def check(engine: Engine, stream: StreamLike | None) -> None:
    """Raise EngineMismatch if this process records the event, or `stream` might hold back others."""
    engine.check()
    if not isinstance(engine, Engine) or engine.kind == "event":
        return  # a use that is over, which is waited for no more; an engine that says more
    check_recorder(engine)
    check_passing(stream_handle(stream)[1])


def check_recorder(engine: Engine) -> None:
    """Raise EngineMismatch if this process records the event."""
    if engine.is_recorder or is_here(engine.board.epoch, engine.recorder):
        raise EngineMismatch(
            f"{engine.label} is recorded in this process, where a stream that waits ahead may share a hardware queue "
            "with the one that is to record, and hold it back: record first, and wait without ahead=True"
        )


def check_passing(ordinal: int) -> None:
    """Raise EngineMismatch if streams of the current context of device `ordinal` do not pass each other.

    Streams share hardware queues, and in one queue what waits for a word stops everything behind it. The environment's
    CUDA_DEVICE_MAX_CONNECTIONS does not tell how many there are, so three streams are asked; once, if they do.
    """
    with OnDevice(ordinal) as inside, inside:
        here = int(unwrap(context.driver().cuCtxGetCurrent(), "cuCtxGetCurrent"))
        if here in _passing or under(_lock, _pass_each_other, ordinal):
            _passing.add(here)
            return
    raise EngineMismatch(
        "ahead=True needs streams that pass one that waits, and those of this context share a hardware queue: set "
        "CUDA_DEVICE_MAX_CONNECTIONS to 8 or more before CUDA is initialised"
    )


def _pass_each_other(ordinal: int) -> bool:
    """Each stream waits for a word that the next one writes, so the first goes on only if all pass each other."""
    driver = context.driver()
    streams = [Stream(ordinal) for _ in range(_STREAMS)]
    row = [take(ordinal, "lane", 8) for _ in range(_STREAMS + 1)]
    cells = [ctypes.c_uint64.from_address(host) for host, _ in row]
    for number, stream in enumerate(streams):
        if number < _STREAMS - 1:
            unwrap(driver.cuStreamWaitValue64(stream._handle, row[number + 1][1], 1, 0), "cuStreamWaitValue64")
        unwrap(driver.cuStreamWriteValue64(stream._handle, row[number][1], 1, 0), "cuStreamWriteValue64")
    deadline = time.monotonic() + _LONGEST_S
    while not cells[0].value and time.monotonic() < deadline:
        time.sleep(50e-6)
    has_passed = bool(cells[0].value)
    for cell in cells:
        cell.value = 1
    return has_passed
