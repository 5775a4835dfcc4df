"""This process's state in the host driver: none before cuInit, then one member of one segment."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from cuda.bindings.driver import CUresult

if TYPE_CHECKING:
    from ipcsync._drivers.host.segment import Segment
    from ipcsync._linux.fork import ForkMark


class Process:
    """The one object `process`: its attributes but the first two stand for something only after cuInit."""

    __slots__ = ("asynchronous", "mark", "numbers", "refusal", "segment", "words")

    segment: Segment
    words: memoryview  # the segment, in words of 8 bytes

    def __init__(self) -> None:
        self.mark: ForkMark | None = None  # made by cuInit, so that it shows forks after that
        self.refusal: Any = CUresult.CUDA_ERROR_NOT_INITIALIZED  # the result of calls while there is no mark
        self.asynchronous = False  # IPCSYNC_HOST_ASYNC: nothing is finished within the call
        # One sequence for handles of all kinds: no handle is ever another object's, and none is 0, 1 or 2.
        self.numbers = itertools.count(0x1000, 0x10)


process = Process()
