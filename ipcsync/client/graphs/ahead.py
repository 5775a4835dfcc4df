"""Whether streams of a context can pass each other: what a replay that waits ahead of records relies on.

Streams share hardware queues, and in one queue what waits for a word stops everything behind it. The environment's
CUDA_DEVICE_MAX_CONNECTIONS does not tell how many there are, so three streams are asked once.
"""

from __future__ import annotations

import time

from ipcsync._drivers import unwrap
from ipcsync._locks import CallLock, under
from ipcsync._native import context
from ipcsync._native.context import OnDevice
from ipcsync._native.stream import Stream
from ipcsync.client.graphs import _words as words
from ipcsync.client.graphs._words import Batch
from ipcsync.errors import EngineMismatch

_LONGEST_S = 1.0
_STREAMS = 3

_lock = CallLock()
_known: dict[int, bool] = {}


def check(ordinal: int) -> None:
    """Raise EngineMismatch if streams of the current context of device `ordinal` do not pass each other."""
    with OnDevice(ordinal) as inside, inside:
        here = int(unwrap(context.driver().cuCtxGetCurrent(), "cuCtxGetCurrent"))
        if here not in _known:
            under(_lock, _ask, here, ordinal)
    if not _known[here]:
        raise EngineMismatch(
            "ahead=True needs streams that pass one that waits, and those of this context share a hardware queue: set "
            "CUDA_DEVICE_MAX_CONNECTIONS to 8 or more before CUDA is initialised"
        )


def _ask(here: int, ordinal: int) -> None:
    """Each stream waits for a word that the next one writes, so the first goes on only if all pass each other."""
    streams = [Stream(ordinal) for _ in range(_STREAMS)]
    row = [words.take(ordinal) for _ in range(_STREAMS + 1)]
    for number, stream in enumerate(streams):
        steps = [words.write(row[number], 1)] if number == _STREAMS - 1 else []
        steps = steps or [words.wait(row[number + 1], 1), words.write(row[number], 1)]
        Batch(steps).put(stream._handle, ordinal, 0)
    deadline = time.monotonic() + _LONGEST_S
    while not row[0].value and time.monotonic() < deadline:
        time.sleep(50e-6)
    _known[here] = bool(row[0].value)
    for word in row:
        word.release()
