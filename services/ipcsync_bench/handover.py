"""Hand-over: a record in one process until a peer's wait for that generation returns.

Each contestant plays ping-pong between two processes; half of a round trip is one hand-over.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ipcsync
from ipcsync._linux.child import Worker
from ipcsync._linux.futex import Futex
from ipcsync.typing import EngineName
from ipcsync_bench.rows import Figures, Row, at_most, at_most_more, compare, interleave, percentile

_SLICE_NS = 1_000_000_000
_ANSWER_S = 120.0
MORE = 4  # so many times the rounds: how long a wake-up takes depends on the machine's other work, which changes
FUTEX = "bare futex"

Turn = Callable[[int], None]
Times = tuple[float, float]
"""p50 and p99 of a hand-over, in seconds."""
Contest = dict[str, Callable[[], Times]]


def rally(mine: Turn, theirs: Turn, count: int, *, serves: bool) -> Times:
    """Play `count` round trips. `mine(n)` signals the peer, `theirs(n)` waits for its n-th signal."""
    first, second = (mine, theirs) if serves else (theirs, mine)
    times = []
    last = time.perf_counter()
    for number in range(1, count + 1):
        first(number)
        second(number)
        now = time.perf_counter()
        times.append((now - last) / 2)
        last = now
    return percentile(times, 50), percentile(times, 99)


# --- in a worker ------------------------------------------------------------------------------------------------------


def _points(endpoint: str, round_name: str, engine: EngineName, by: str, count: int, serves: bool) -> Times:
    """ipcsync: each side records on its own event and waits for the next generation of the other's.

    By `synchronize`, or by `wait` on a stream, which returns once the wait is queued.
    """
    names = [f"{round_name}/a", f"{round_name}/b"]
    mine, theirs = names if serves else names[::-1]
    stream = ipcsync.Stream()
    with (
        ipcsync.connect(endpoint) as client,
        client.event(mine, recorder=True, engine=engine) as recorder,
        client.event(theirs, engine=engine) as waiter,
    ):

        def tell(_number: int) -> None:
            recorder.record(stream)

        first = 2 * recorder.depth  # so many turns until both sides are there and have opened both rings
        waiting = ipcsync.Stream()

        def hear(number: int) -> None:
            point = waiter.at(number + first)
            point.wait(waiting) if by == "wait" else point.synchronize(10)

        for number in range(1 - first, 1):
            tell(number)
            hear(number)
        seconds = rally(tell, hear, count, serves=serves)
        waiter.at(count + first).synchronize(10)
        recorder.at(count + first).synchronize(10)
    return seconds


def _futex(path: str, play: Callable[..., Times], count: int, serves: bool) -> Times:
    """The limit: two words of shared memory, a plain store, a wake, a wait."""
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)
    words = memoryview(page).cast("I")
    anchor = ctypes.c_char.from_buffer(page)
    address = ctypes.addressof(anchor)
    mine, theirs = (0, 16) if serves else (16, 0)
    mine_futex, their_futex = Futex(address + 4 * mine), Futex(address + 4 * theirs)

    def tell(_number: int) -> None:
        words[mine] += 1
        mine_futex.wake()

    def wait(number: int) -> None:
        while (seen := words[theirs]) != number:
            their_futex.wait(seen, _SLICE_NS)

    return play(tell, wait, count, serves=serves)


# --- rows -------------------------------------------------------------------------------------------------------------


class Table:
    """Two processes that play, and what they play by."""

    def __init__(self, stack: ExitStack) -> None:
        self.coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        self.players = [stack.enter_context(Worker()) for _ in range(2)]
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ipcsync-bench-"))
        self._page = Path(folder, "page")
        self._turns = itertools.count()

    def play(self, function: Callable[..., Any], *arguments: Any) -> Times:
        """The worse side's times. `function` plays one side; its last argument says whether it serves."""
        for player, serves in zip(self.players, (True, False), strict=True):
            player.begin(function, *arguments, serves)
        first, second = (player.result(_ANSWER_S) for player in self.players)
        return max(first[0], second[0]), max(first[1], second[1])

    def ours(self, engine: EngineName, count: int, by: str = "synchronize") -> Times:
        return self.play(_points, self.coordinator.endpoint, f"bench/{next(self._turns)}", engine, by, count)

    def futex(self, count: int, play: Callable[..., Times] = rally) -> Times:
        self._page.write_bytes(bytes(4096))
        return self.play(_futex, str(self._page), play, count)


def figures_of(contest: Contest, rounds: int) -> tuple[Figures, Figures]:
    """Each contestant's p50 and p99 of each round, in microseconds."""
    times = interleave(contest, rounds)
    p50, p99 = ({name: [run[which] * 1e6 for run in runs] for name, runs in times.items()} for which in (0, 1))
    return p50, p99


def ours_of(table: Table, count: int) -> Contest:
    return {
        "hand-over (event)": partial(table.ours, "event", count),
        "hand-over (timeline)": partial(table.ours, "timeline", count),
        "wake to stream (event)": partial(table.ours, "event", count, "wait"),
    }


def hand_over(rounds: int, scale: float) -> Iterator[Row]:
    """One record until the peer's `synchronize`, or its `wait` on a stream, returns."""
    with ExitStack() as stack:
        goal = at_most_more(4.3, "µs", 1.15)  # so long a stream's write takes on an H100, from the record to a CPU
        table, count = Table(stack), max(200, int(2000 * scale))
        ours = ours_of(table, count)
        p50, p99 = figures_of({**ours, FUTEX: partial(table.futex, count)}, rounds * MORE)
        for name in ours:
            for what, figures, target in (("p50", p50, goal), ("p99", p99, at_most(1.3))):
                held = {"ipcsync": figures[name], FUTEX: figures[FUTEX]}
                yield from compare(f"{name}, {what}", held, "µs", {FUTEX: target})
