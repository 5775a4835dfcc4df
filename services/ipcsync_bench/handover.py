"""Hand-over: a record in one process until a peer's `synchronize` on that generation returns.

Each contestant plays ping-pong between two processes; half of a round trip is one hand-over.
"""

from __future__ import annotations

import mmap
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Any

import ipcsync
from ipcsync._linux.futex import Futex
from ipcsync._linux.process import start_time
from ipcsync.typing import EngineName
from ipcsync_bench.peers import Manager, Redis, RedisConnection
from ipcsync_bench.rows import Row, Target, at_most, compare, interleave
from ipcsync_bench.workers import Worker, Workers

_SLICE_NS = 1_000_000_000
Turn = Callable[[int], None]


def _rally(mine: Turn, theirs: Turn, count: int, *, serves: bool) -> float:
    """Play `count` round trips; seconds a hand-over. `mine(n)` tells the peer, `theirs(n)` waits for its n-th."""
    start = time.perf_counter()
    for number in range(1, count + 1):
        if serves:
            mine(number)
            theirs(number)
        else:
            theirs(number)
            mine(number)
    return (time.perf_counter() - start) / count / 2


# --- in a worker ------------------------------------------------------------------------------------------------------


def _points(
    state: dict[str, Any], endpoint: str, round_name: str, engine: EngineName, count: int, serves: bool
) -> float:
    """ipcsync: each side records on its own event and waits for the next generation of the other's."""
    client = state.get("client")
    if client is None:
        client = state["client"] = ipcsync.connect(endpoint)
    names = [f"{round_name}/a", f"{round_name}/b"]
    mine, theirs = names if serves else names[::-1]
    stream = ipcsync.Stream()
    with client.event(mine, recorder=True, engine=engine) as recorder, client.event(theirs, engine=engine) as waiter:

        def tell(_number: int) -> None:
            recorder.record(stream)

        recorder.record(stream).synchronize(10)  # both sides are there
        waiter.at(1).synchronize(10)
        seconds = _rally(
            tell,
            lambda number: waiter.at(number + 1).synchronize(10),
            count,
            serves=serves,
        )
        waiter.at(count + 1).synchronize(10)
        recorder.at(count + 1).synchronize(10)
    return seconds


def _futex(_state: dict[str, Any], path: str, count: int, serves: bool) -> float:
    """The limit: two words of shared memory, a plain store, a wake, a wait."""
    import ctypes

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

    return _rally(tell, wait, count, serves=serves)


def _redis(_state: dict[str, Any], path: str, count: int, serves: bool) -> float:
    """Redis lists: LPUSH to the peer's, BLPOP from one's own."""
    names = [b"a", b"b"]
    mine, theirs = names if serves else names[::-1]
    with closing(RedisConnection(path)) as redis:

        def tell(_number: int) -> None:
            redis.send(b"LPUSH", mine, b"x")
            redis.receive()

        def wait(_number: int) -> None:
            redis.send(b"BLPOP", theirs, b"10")
            redis.receive()

        return _rally(tell, wait, count, serves=serves)


def _play_inherited(kind: str, mine: Any, theirs: Any, count: int, answer: Connection | None) -> float:
    """`multiprocessing.Event`, `Pipe` or `Manager().Event`: what a process can only be given when it starts."""
    if kind == "Pipe":

        def tell(_number: int) -> None:
            mine.send_bytes(b"x")

        def wait(_number: int) -> None:
            mine.recv_bytes()
    else:

        def tell(_number: int) -> None:
            mine.set()

        def wait(_number: int) -> None:
            theirs.wait(10)
            theirs.clear()

    seconds = _rally(tell, wait, count, serves=answer is None)
    if answer is not None:
        answer.send(seconds)
    return seconds


# --- rows -------------------------------------------------------------------------------------------------------------


def _inherited(kind: str, manager: Manager, count: int) -> float:
    context = multiprocessing.get_context("spawn")
    ours: Any
    theirs: Any
    if kind == "Pipe":
        ours, theirs = context.Pipe()
        peer_args = (kind, theirs, None)
        my_args = (kind, ours, None)
    else:
        make = context.Event if kind == "multiprocessing.Event" else manager.event
        ours, theirs = make(), make()
        peer_args = (kind, theirs, ours)
        my_args = (kind, ours, theirs)
    read, write = context.Pipe(duplex=False)
    process = context.Process(target=_play_inherited, args=(*peer_args, count, write), daemon=True)
    process.start()
    seconds: list[float] = []
    thread = threading.Thread(target=lambda: seconds.append(_play_inherited(*my_args, count, None)))
    thread.start()
    theirs_seconds: float = read.recv()
    thread.join()
    process.join()
    return theirs_seconds * 1e6  # the peer's clock starts with its first wait, once it is there


def _pair(workers: list[Worker], fn: Callable[..., Any], *args: Any) -> float:
    for worker, serves in zip(workers, (True, False), strict=True):
        worker.begin(fn, *args, serves)
    return max(float(worker.result()) for worker in workers) * 1e6


def hand_over(rounds: int, scale: float) -> Iterator[Row]:
    """One record until the peer's `synchronize` returns."""
    count = max(200, int(2000 * scale))
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="warning"))
        workers = stack.enter_context(Workers(2)).all
        manager = stack.enter_context(closing(Manager()))
        page = stack.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="ipcsync-bench-"))
        page.truncate(4096)
        tag = f"bench-{start_time(workers[0].pid)}"
        turns = iter(range(1 << 30))

        def ours(engine: EngineName) -> float:
            return _pair(workers, _points, coordinator.endpoint, f"{tag}/{next(turns)}", engine, count)

        def futex() -> float:
            with open(page.name, "r+b") as file:
                file.write(bytes(4096))
            return _pair(workers, _futex, page.name, count)

        contest: dict[str, Callable[[], float]] = {
            "ipcsync": lambda: ours("event"),
            "ipcsync, timeline": lambda: ours("timeline"),
            "bare futex": futex,
            "Pipe": lambda: _inherited("Pipe", manager, count),
            "multiprocessing.Event": lambda: _inherited("multiprocessing.Event", manager, count),
            "Manager().Event": lambda: _inherited("Manager().Event", manager, max(50, count // 10)),
        }
        if Redis.is_installed():
            redis = stack.enter_context(closing(Redis()))
            contest["Redis lists"] = lambda: _pair(workers, _redis, redis.path, count)
        figures = interleave(contest, rounds)
        targets: dict[str, Target] = {"bare futex": at_most(1.5), "multiprocessing.Event": at_most(0.6)}
        timeline = figures.pop("ipcsync, timeline")
        yield from compare("hand-over (event)", figures, "µs", targets)
        figures["ipcsync"] = timeline
        yield from compare("hand-over (timeline)", figures, "µs", targets)
