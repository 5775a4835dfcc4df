"""How soon deaths are told: `python -m tests.faults.figures [--deaths N] [--coordinators N]` prints a table.

A recorder is killed that is idle, has held work, has work under way, or is torn down late. The goal, for one death at
a time, an idle coordinator and processors to spare: of 100, 99 are told within 2 ms, to host waits and to streams that
wait on `timeline` together; within 8 ms where the kernel refuses `futex_waitv` (`--without-waitv`). The coordinator's
death is noticed by every blocked client within 1 s. Exit status 1 if a figure is over its limit; what has none is
only shown.

The kernel tears down a killed process for some milliseconds, on the processor where it ran. So recorders have the last
processor, and all others the rest; and one call waits for each death, of another kind in each turn, since several would
wait for each other where the rest is one processor. Each death begins once the one before is over. The software
driver's work under way runs while nothing else wants the processor, since a GPU's takes none: the kernel marks the word
once it has run the dying thread. How late the machine itself is, a bare death beside each shows, without ipcsync: the
holder of a robust mutex is killed, for which a process waits that then writes to the one that killed. Where of 100 of
those more than one takes a millisecond, the goal is a millisecond more than they took in that row.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import ipcsync
from ipcsync._linux.process import PidFd
from ipcsync._native import context
from ipcsync.typing import EngineName
from tests.contract import actions as contract
from tests.contract import probe_actions
from tests.faults import actions, fixtures
from tests.faults.fixtures import Held
from tests.kit import driver_kit, remote
from tests.kit.peer import Peer
from tests.kit.refused import refuse
from tests.kit.until import DEADLINE_S

_BATCH = 10
_WORKS = ("idle", "held", "long", "torn down late")
_TEARDOWN_MS = "50"
_LONG = (64 << 20, 10)  # bytes and copies: some 0.1 s
_COORDINATOR_LIMIT_MS = 1000.0
_BARE_MS = 1.0  # what a bare death may take of the goal
_CROWD, _STARTS = 32, 64
_FEED, _GONE = _UNBOUNDED = ("the feed", "(gone, by its pidfd)")
_BARE = "(a bare death)"
_ALL = "all that waits"  # a kind of call alone is too few for a 99th percentile
_SECONDS = struct.Struct("d")
_PROCESSORS = sorted(os.sched_getaffinity(0))


def _run_on(processors: list[int], *pids: int) -> None:
    """Have all threads of these processes run there, if there is any."""
    for pid in pids if processors else ():
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), processors)


def _yield_processor(pid: int) -> None:
    """Have the work under way of a process, which a child of it does, run while nothing else wants the processor."""
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            os.sched_setscheduler(int(child), os.SCHED_IDLE, os.sched_param(0))


class Figures:
    """Measured times in ms, by what was measured."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    def add(self, what: str, began: float, ended: float) -> None:
        """One more, from two readings of the monotonic clock in seconds."""
        self.rows.setdefault(what, []).append((ended - began) * 1e3)

    def table(self, limits: Callable[[str], tuple[str, float]]) -> Iterator[str]:
        """A line for each row: how many, median, 99th percentile, longest, and the limit that it must keep."""
        yield f"{'':64} {'n':>5} {'p50':>8} {'p99':>8} {'max':>8}   ms"
        for what, times in self.rows.items():
            kind, limit = limits(what)
            over = "" if self.figure(what, kind) <= limit else "   OVER"
            figures = " ".join(f"{self.figure(what, kind):8.2f}" for kind in ("p50", "p99", "max"))
            yield f"{what:64} {len(times):5} {figures}   {f'{kind} <= {limit:.3g}{over}' if limit < math.inf else ''}"

    def figure(self, what: str, kind: str) -> float:
        """The median ("p50"), the 99th percentile ("p99") or the longest ("max") of a row."""
        times = sorted(self.rows[what])
        return times[min(len(times) - 1, int({"p50": 0.5, "p99": 0.99, "max": 1.0}[kind] * len(times)))]


def _await_break(notices: Iterator[ipcsync.Notice], name: str) -> None:
    while (notice := next(notices)).kind != "broken" or notice.name != name:
        pass


def record_long(name: str) -> bytes:
    """In the recorder: a record behind work under way."""
    driver_kit.use_device(0)
    contract.create_stream("long")
    probe_actions.submit_long_work("long", *_LONG)
    return bytes(remote.event(name).record(int(contract._named["long"])))


class _Waits:
    """Calls on threads of their own, and when each ended."""

    def __init__(self, calls: dict[str, Callable[[], object]]) -> None:
        self._ended: dict[str, float] = {}
        self._threads = [threading.Thread(target=self._run, args=call, daemon=True) for call in calls.items()]
        for thread in self._threads:
            thread.start()

    def _run(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ipcsync.RecorderLost:
            self._ended[what] = time.monotonic()
        else:
            self._ended[what] = time.monotonic()

    def add_to(self, figures: Figures, row: str, began: float) -> None:
        """Wait for all of them, and add a figure for each."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for what, ended in self._ended.items():
            figures.add(f"{row}: {what}", began, ended)
        assert len(self._ended) == len(self._threads), self._ended


def _lock_and_tell(address: int, processors: list[int], pipe: int) -> int:
    """Fork a process that says that it is there, takes the mutex, says that it has it, and sleeps."""
    pid = os.fork()
    if not pid:
        _run_on(processors, os.getpid())
        os.write(pipe, b"t")
        ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(address))
        os.write(pipe, b"m")
        signal.pause()
        os._exit(0)
    return pid


def _kill_bare_holders(asked: int, told: int) -> None:
    """For each byte asked, kill the holder of a robust mutex, for which a process waits that tells this one."""
    library, attributes, shared = ctypes.CDLL(None), ctypes.create_string_buffer(64), mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    library.pthread_mutexattr_init(attributes)
    library.pthread_mutexattr_setpshared(attributes, 1)
    library.pthread_mutexattr_setrobust(attributes, 1)
    _run_on(_PROCESSORS[:-1], os.getpid())
    heard, pipe = os.pipe()
    while os.read(asked, 1):
        library.pthread_mutex_init(ctypes.c_void_p(address), attributes)
        holder = _lock_and_tell(address, _PROCESSORS[-1:], pipe)
        for _ in ("it is there", "it has the mutex"):
            os.read(heard, 1)
        waiter = _lock_and_tell(address, _PROCESSORS[:-1], pipe)
        os.read(heard, 1)
        time.sleep(0.01)  # it waits
        began = time.monotonic()
        os.kill(holder, signal.SIGKILL)
        os.read(heard, 1)
        os.write(told, _SECONDS.pack(time.monotonic() - began))
        os.kill(waiter, signal.SIGKILL)
        for pid in (holder, waiter):
            os.waitpid(pid, 0)


def start_bare_deaths() -> Callable[[], float]:
    """A call that has one bare death take place, and returns its seconds; made before this process has threads."""
    (asked, ask), (hear, told) = os.pipe(), os.pipe()
    if not os.fork():
        os.close(ask)
        with suppress(KeyboardInterrupt):
            _kill_bare_holders(asked, told)
        os._exit(0)

    def bare_death() -> float:
        os.write(ask, b"?")
        return float(_SECONDS.unpack(os.read(hear, _SECONDS.size))[0])

    return bare_death


def deaths_of_holders(
    count: int, engine: EngineName, work: str, figures: Figures, bare_death: Callable[[], float]
) -> None:
    """Kill `count` recorders, one after the other, each with one that waits; behind each a bare death."""
    with ipcsync.launch(log_level="error") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        environment = {"IPCSYNC_HOST_TEARDOWN_MS": _TEARDOWN_MS} if work == "torn down late" else {}
        for batch in range(0, count, _BATCH):
            peers = {f"e-{number}": Peer(environment) for number in range(batch, min(batch + _BATCH, count))}
            for name, peer in peers.items():
                peer.call(actions.open_recorder, coordinator.endpoint, name, engine)
                if work in ("held", "torn down late"):
                    peer.call(remote.hold)
            for name, peer in peers.items():
                _run_on(_PROCESSORS[-1:], peer.pid)
                _run_on(_PROCESSORS[:-1], os.getpid(), coordinator.pid)
                _kill_one(client, name, peer, engine, work, figures)
                figures.add(f"a death, {engine}, {work}: {_BARE}", 0.0, bare_death())
            for peer in peers.values():
                peer.close()
    _run_on(_PROCESSORS, os.getpid())


def _kill_one(client: ipcsync.Client, name: str, peer: Peer, engine: EngineName, work: str, figures: Figures) -> None:
    """Kill a recorder that one call waits for, which is of another kind in each turn."""
    record = {"idle": actions.record_complete, "long": record_long}.get(work, actions.record)
    point = client.point(peer.call(record, name))
    event, row = client.event(name), f"a death, {engine}, {work}"
    notices = client.watch(timeout=DEADLINE_S)
    with closing(PidFd(peer.pid)) as pidfd:
        calls: dict[str, Callable[[], object]] = {
            "a wait for its next record": event.at(2).synchronize,
            "a wait for its unfinished work": point.synchronize,
            "a stream that waits": lambda: context.driver().cuStreamSynchronize(stream.cuda_stream),
            _FEED: partial(_await_break, notices, name),
            _GONE: partial(pidfd.has_ended, DEADLINE_S),
        }
        if work == "idle":
            del calls["a wait for its unfinished work"]
        if engine == "event":
            del calls["a stream that waits"]
        kinds = list(calls)
        kind = kinds[int(name.removeprefix("e-")) % len(kinds)]
        if kind == _FEED:
            next(notices)
        if kind == "a stream that waits":
            stream = ipcsync.Stream()
            event.at(2).wait(stream, ahead=True)
        waits = _Waits({kind: calls[kind]})
        time.sleep(0.01)  # it waits, and the coordinator is idle
        _yield_processor(peer.pid)
        began = time.monotonic()
        os.kill(peer.pid, signal.SIGKILL)
        waits.add_to(figures, row, began)
        if kind not in _UNBOUNDED:
            figures.rows.setdefault(f"{row}: {_ALL}", []).append(figures.rows[f"{row}: {kind}"][-1])
        pidfd.has_ended(DEADLINE_S)
    event.close()


def deaths_in_a_crowd(engine: EngineName, figures: Figures) -> None:
    """Kill many recorders with held work at once, while clients start."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(ipcsync.launch(log_level="error"))
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint))
        peers = [Peer() for _ in range(_CROWD)]
        calls: dict[str, Callable[[], object]] = {}
        for number, peer in enumerate(peers):
            peer.call(actions.open_recorder, coordinator.endpoint, str(number), engine)
            peer.call(remote.hold)
            calls[str(number)] = client.point(peer.call(actions.record, str(number))).synchronize
        waits = _Waits(calls)
        time.sleep(0.05)
        began = time.monotonic()
        for peer in peers:
            os.kill(peer.pid, signal.SIGKILL)
        for _ in range(_STARTS):
            start = time.monotonic()
            stack.enter_context(ipcsync.connect(coordinator.endpoint))
            figures.add(
                f"{_CROWD} deaths at once, {engine}: a client's start, {_STARTS} in turn", start, time.monotonic()
            )
        of_each = Figures()
        waits.add_to(of_each, "", began)
        figures.rows[f"{_CROWD} deaths at once, {engine}: a wait for unfinished work"] = [
            took for row in of_each.rows.values() for took in row
        ]
        for peer in peers:
            peer.close()


def deaths_of_coordinators(count: int, engine: EngineName, figures: Figures) -> None:
    """Kill `count` coordinators while a client is blocked in every kind of call."""
    for _ in range(count):
        with ipcsync.launch(log_level="error") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
            held = Held(client, engine)
            fixtures.stop(coordinator.pid)
            held.ask()
            began = time.monotonic()
            fixtures.kill(coordinator, client)
            for what, call in held.calls.items():
                outcome = call.outcome()
                assert isinstance(outcome, ipcsync.CoordinatorLost), outcome
                figures.add(f"coordinator's death, {engine}: {what}", began, call.ended)
            held.end()


def _limit(what: str, figures: Figures, told_ms: float) -> tuple[str, float]:
    if what.startswith("coordinator"):
        return "max", _COORDINATOR_LIMIT_MS
    if not what.endswith(_ALL):
        return "p99", math.inf
    bare_ms = figures.figure(what.removesuffix(_ALL) + _BARE, "p99")
    return "p99", told_ms + max(0.0, bare_ms - _BARE_MS)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Measure how soon deaths are told.")
    parser.add_argument(
        "--deaths",
        type=int,
        default=100,
        help="recorders to kill, of each engine and work: for each kind of call a third to a fifth of them",
    )
    parser.add_argument("--coordinators", type=int, default=10, help="coordinators to kill, for each engine")
    parser.add_argument("--without-waitv", action="store_true", help="as in a sandbox that refuses futex_waitv")
    options = parser.parse_args()
    # Read at the first use of the driver, here and in the processes started from here.
    os.environ.setdefault("IPCSYNC_DRIVER", "host")
    os.environ.setdefault("IPCSYNC_HOST_SEGMENT", uuid.uuid4().hex[:8])
    if options.without_waitv:
        os.environ["IPCSYNC_TEST_ZYGOTE"] = "0"
        refuse("futex_waitv", errno.ENOSYS)
    figures, bare_death = Figures(), start_bare_deaths()
    for engine in fixtures.ENGINES:
        for work in _WORKS:
            deaths_of_holders(options.deaths, engine, work, figures, bare_death)
        deaths_in_a_crowd(engine, figures)
        deaths_of_coordinators(options.coordinators, engine, figures)
    limit = partial(_limit, figures=figures, told_ms=8.0 if options.without_waitv else 2.0)
    lines = [f"driver {ipcsync.driver_name()}", *figures.table(limit)]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    status = int(any("OVER" in line for line in lines))
    os._exit(status)  # on `event` streams of this process may stand behind the dead for ever


if __name__ == "__main__":  # the peers import what they call by its own name
    sys.exit(importlib.import_module("tests.faults.figures").main())
