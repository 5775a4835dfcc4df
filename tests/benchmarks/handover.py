"""Hand-over by ipcsync beside what else there is: pipes, `multiprocessing.Event`, a Manager's, Redis."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import ipcsync
from ipcsync._drivers import EVENT_DISABLE_TIMING, load, unwrap
from ipcsync_bench import handover
from ipcsync_bench.handover import FUTEX, MORE, Contest, Table, Times, Turn, figures_of, ours_of, rally
from ipcsync_bench.rows import Row, Target, at_most, compare
from tests.benchmarks.busy import BUSY_THREADS, begin_busy_threads
from tests.benchmarks.peers import Manager, Redis, RedisConnection
from tests.benchmarks.workers import Worker

_CALLS = "bare record, futex, bare query"

# --- in a worker ------------------------------------------------------------------------------------------------------


def _redis(path: str, count: int, serves: bool) -> Times:
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

        return rally(tell, wait, count, serves=serves)


def _play_inherited(kind: str, mine: Any, theirs: Any, count: int, answer: Connection | None) -> Times:
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

    seconds = rally(tell, wait, count, serves=answer is None)
    if answer is not None:
        answer.send(seconds)
    return seconds


def _inherited(kind: str, manager: Manager, count: int) -> Times:
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
    thread = threading.Thread(target=_play_inherited, args=(*my_args, count, None))
    thread.start()
    times: Times = read.recv()
    thread.join()
    process.join()
    return times  # the peer's clock starts once it is there; its first turn has no part in a percentile


def _rally_with_calls(mine: Turn, theirs: Turn, count: int, *, serves: bool) -> Times:
    """With the two calls of the driver that a hand-over cannot do without: a record before, a question behind."""
    driver, stream = load(), ipcsync.Stream()
    event = unwrap(driver.cuEventCreate(EVENT_DISABLE_TIMING), "cuEventCreate")

    def tell(number: int) -> None:
        driver.cuEventRecord(event, stream._handle)
        mine(number)

    def wait(number: int) -> None:
        theirs(number)
        driver.cuEventQuery(event)

    return rally(tell, wait, count, serves=serves)


def _be_busy(_state: dict[str, Any]) -> None:
    while True:
        sum(range(1000))


# --- rows -------------------------------------------------------------------------------------------------------------


def hand_over(rounds: int, scale: float) -> Iterator[Row]:
    """The rows of `ipcsync bench`, those beside the others, and the same under load."""
    yield from handover.hand_over(rounds, scale)
    count = max(200, int(2000 * scale))
    with ExitStack() as stack:
        table = Table(stack)
        yield from _beside_others(table, rounds, count, stack)
        with Worker() as busy:
            busy.begin(_be_busy)
            yield from _under_load(table, ours_of(table, count), rounds, count, at_most(1.1), "beside a busy process")
            busy.kill()
        for player in table.players:
            player.call(begin_busy_threads)
        few = max(20, count // 80)
        ours: Contest = {"hand-over (event)": partial(table.ours, "event", few)}
        yield from _under_load(table, ours, rounds, few, at_most(1.3), f"{BUSY_THREADS} busy threads in each")


def _under_load(table: Table, ours: Contest, rounds: int, count: int, target: Target, load: str) -> Iterator[Row]:
    peers = {FUTEX: partial(table.futex, count), _CALLS: partial(table.futex, count, _rally_with_calls)}
    p50, _ = figures_of({**ours, **peers}, rounds * MORE)
    for name in ours:
        held = {"ipcsync": p50[name], **{peer: p50[peer] for peer in peers}}
        yield from compare(f"{name}, {load}, p50", held, "µs", dict.fromkeys(peers, target))


def _beside_others(table: Table, rounds: int, count: int, stack: ExitStack) -> Iterator[Row]:
    manager = stack.enter_context(closing(Manager()))
    peers: Contest = {
        "Pipe": lambda: _inherited("Pipe", manager, count),
        "multiprocessing.Event": lambda: _inherited("multiprocessing.Event", manager, count),
        "Manager().Event": lambda: _inherited("Manager().Event", manager, max(50, count // 10)),
    }
    if Redis.is_installed():
        redis = stack.enter_context(closing(Redis()))
        peers["Redis lists"] = lambda: table.play(_redis, redis.path, count)
    ours = ours_of(table, count)
    p50, _ = figures_of({**ours, **peers}, rounds)
    for name in ours:
        held = {"ipcsync": p50[name], **{peer: p50[peer] for peer in peers}}
        yield from compare(f"{name}, p50", held, "µs", {"multiprocessing.Event": at_most(0.6)})
