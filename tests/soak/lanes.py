"""The streams of a soak's worker: some to record on, held back by gates at times, and some to wait on.

And the commands of the soaks whose lanes are groups of processes.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import heapq
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ipcsync
from ipcsync import _drivers
from ipcsync._drivers import STREAM_WAIT_VALUE_GEQ, unwrap
from tests.soak.oracle import CELL_WORDS, combined

if TYPE_CHECKING:
    from tests.soak.session import Known

LOOK_NS = 1_500_000_000
_BEAT_S = 0.5
_WORDS = 512  # of pinned memory, in all


class Pinned:
    """A page of pinned memory: words that streams wait for, or copy to."""

    def __init__(self) -> None:
        self.address = int(unwrap(_drivers.load().cuMemAllocHost(_WORDS * 8), "cuMemAllocHost"))
        self.words = (ctypes.c_uint64 * _WORDS).from_address(self.address)
        ctypes.memset(self.address, 0, _WORDS * 8)
        self._next = 0

    def take(self, count: int) -> int:
        """The index of the first of `count` words that nobody has; they are not given back."""
        first, self._next = self._next, self._next + count
        assert self._next <= _WORDS
        return first


class Gates:
    """Opens gates when they are due, from a thread of its own: also while the worker is inside a call.

    `on_late(due, ran)` is told, in ns, when that thread ran much later than it was to.
    """

    def __init__(self, pinned: Pinned, on_late: Callable[[int, int], None]) -> None:
        self._pinned = pinned
        self._on_late = on_late
        self._due: list[tuple[float, int, int]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="gates", daemon=True).start()

    def hold(self, stream: ipcsync.Stream, word: int, count: int, seconds: float) -> None:
        """Hold the stream's later work for so long; `count` is how many gates this word has had, with this one."""
        driver = _drivers.load()
        address = self._pinned.address + word * 8
        pointer = unwrap(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer")
        result = driver.cuStreamWaitValue64(stream.cuda_stream, pointer, count, STREAM_WAIT_VALUE_GEQ)
        unwrap(result, "cuStreamWaitValue64")
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, word, count))
            self._changed.notify()

    def _run(self) -> None:
        words = self._pinned.words
        with self._changed:
            while True:
                now = time.monotonic()
                while self._due and self._due[0][0] <= now:
                    _, word, count = heapq.heappop(self._due)
                    words[word] = max(words[word], count)
                until = min(now + _BEAT_S, self._due[0][0] if self._due else now + _BEAT_S)
                self._changed.wait(until - now)
                if (ran := time.monotonic()) - until > _BEAT_S:
                    self._on_late(int(until * 1e9), int(ran * 1e9))


class RecordLane:
    """A stream to record on."""

    def __init__(self, pinned: Pinned, gates: Gates) -> None:
        self.stream = ipcsync.Stream()
        self._gates = gates
        self._word = pinned.take(1)
        self._count = 0

    def hold(self, seconds: float) -> None:
        """Hold its later work for so long."""
        self._count += 1
        self._gates.hold(self.stream, self._word, self._count, seconds)


@dataclass
class Queued:
    """A wait queued on a stream, with the copy of the truth behind it."""

    known: Known
    cell: int
    start: int
    word: int
    marker: Any
    look_at: int  # when to ask why the stream does not get on
    strikes: int = 0


class WaitLane:
    """A stream to wait on, which copies the truth to a word of its own behind each wait."""

    DEPTH = 8

    def __init__(self, pinned: Pinned) -> None:
        self.stream = ipcsync.Stream()
        self.queued: deque[Queued] = deque()
        self._pinned = pinned
        self._words = deque(pinned.take(CELL_WORDS) for _ in range(self.DEPTH))

    @property
    def is_full(self) -> bool:
        """Whether as many waits are queued as it looks after."""
        return not self._words

    def put(self, known: Known, start: int, cell: int, truth: Any) -> None:
        """Look, behind all that the stream has to do, at how far the point's work is."""
        word = self._words.popleft()
        self._pinned.words[word] = self._pinned.words[word + 1] = 0
        handle = self.stream.cuda_stream
        truth.copy_behind(handle, cell, self._pinned.address + word * 8)
        marker = ipcsync.Event()
        marker.record(self.stream)
        self.queued.append(Queued(known, cell, start, word, marker, time.monotonic_ns() + LOOK_NS))

    def take_done(self) -> tuple[Queued, int] | None:
        """The oldest wait that the stream is past, and what it saw then."""
        if not self.queued or not self.queued[0].marker.query():
            return None
        done = self.queued.popleft()
        self._words.append(done.word)
        words = self._pinned.words
        return done, combined(int(words[done.word]), int(words[done.word + 1]))


class Group(Protocol):
    """A lane of processes. `wrong` tells what broke a promise, `counts` what happened."""

    wrong: list[str]
    counts: collections.Counter[str]

    def run(self, deadline: float) -> None:
        """Go on until then."""


def run_groups(groups: Sequence[Group], seconds: float) -> tuple[collections.Counter[str], list[str]]:
    """Run each on a thread for so long; what happened in all of them, and what was wrong."""
    deadline = time.monotonic() + seconds
    threads = [threading.Thread(target=group.run, args=(deadline,), name="lane") for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [each for group in groups for each in group.wrong]
    return sum((group.counts for group in groups), collections.Counter()), wrong


def command(
    name: str,
    description: str | None,
    soak: Callable[[float, int, int], tuple[collections.Counter[str], list[str]]],
    arguments: Sequence[str] | None,
) -> int:
    """Run `soak`, given seconds, lanes and a seed, and print a table; 0 if every promise held."""
    parser = argparse.ArgumentParser(prog=f"soak.{name}", description=description)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    os.environ.setdefault("IPCSYNC_DRIVER", ipcsync.driver_name())  # found once, and said once, for all processes
    counts, wrong = soak(options.seconds, options.lanes, options.seed)
    for what, count in sorted(counts.items()):
        sys.stdout.write(f"{name}: {what:<14}  {count}\n")
    for each in wrong[:20]:
        sys.stdout.write(f"VIOLATION {each}\n")
    return 1 if wrong or not counts["complete"] else 0
