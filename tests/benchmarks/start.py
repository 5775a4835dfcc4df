"""Starting, attaching and memory."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import ipcsync
from ipcsync._linux.child import PYTHON
from ipcsync_bench.rows import Row, Target, at_most, at_most_more, below, compare, interleave
from tests.benchmarks.report import alone
from tests.benchmarks.workers import Worker, Workers


def _seconds_of(code: str, *, inside: bool = False) -> float:
    """Milliseconds that a fresh Python takes to run `code`; `inside`: what it prints instead."""
    start = time.perf_counter()
    command = [*PYTHON, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout) if inside else (time.perf_counter() - start) * 1e3


_IMPORT = "import time; t = time.perf_counter(); import {}; print((time.perf_counter() - t) * 1e3)"
_FIRST = """
import sys, time
import ipcsync
import ipcsync.client, zmq, cuda.bindings.driver
ipcsync.driver_name()  # imports the driver
t = time.perf_counter()
with ipcsync.connect({endpoint!r}) as client:
    client.event("bench/first", recorder=True).record(ipcsync.Stream())
    print((time.perf_counter() - t) * 1e3)
"""


def start(rounds: int, scale: float) -> Iterator[Row]:
    """Importing, a coordinator until it serves, the first event of a new process."""
    contest = {
        "ipcsync": lambda: _seconds_of(_IMPORT.format("ipcsync"), inside=True),
        "import zmq": lambda: _seconds_of(_IMPORT.format("zmq"), inside=True),
    }
    yield from compare("import ipcsync", interleave(contest, rounds), "ms", {"import zmq": below(40, "ms")})
    code = _IMPORT.format("ipcsync.client")
    yield alone("import all of a client", [_seconds_of(code, inside=True) for _ in range(rounds)], "ms", None)

    def launch() -> float:
        began = time.perf_counter()
        with ipcsync.launch(log_level="warning"):
            return (time.perf_counter() - began) * 1e3

    yield alone("coordinator ready", [launch() for _ in range(rounds)], "ms", below(400, "ms"))
    with ipcsync.launch(log_level="warning") as coordinator:
        code = _FIRST.format(endpoint=coordinator.endpoint)
        firsts = [_seconds_of(code, inside=True) for _ in range(rounds)]
    yield alone("first event in a new process, after its imports", firsts, "ms", below(15, "ms"))


def _attach(state: dict[str, Any], endpoint: str, count: int) -> None:
    client = state["client"] = ipcsync.connect(endpoint, timeout=60)
    state["events"] = client.events([f"bench/{number}" for number in range(count)], timeout=60)


def _detach(state: dict[str, Any]) -> None:
    state.pop("events")
    state.pop("client").close()


def attach(rounds: int, scale: float) -> Iterator[Row]:
    """64 processes attach to the same events."""
    processes = 64 if scale >= 1 else 8
    with Workers(processes) as workers:
        times: dict[int, list[float]] = {count: [] for count in (250, 500, 1000)}
        for _ in range(max(1, rounds if scale < 1 else min(rounds, 3))):
            for count, seconds in times.items():
                with ipcsync.launch(log_level="warning", lease_ttl=60) as coordinator:
                    with ipcsync.connect(coordinator.endpoint, lease_ttl=60) as client:
                        events = [client.event(f"bench/{number}", engine="event", depth=1) for number in range(count)]
                        began = time.perf_counter()
                        workers.together(processes, _attach, coordinator.endpoint, count)
                        seconds.append(time.perf_counter() - began)
                        assert len(events) == count
                    workers.together(processes, _detach)
        targets: dict[int, Target | None] = {250: None, 500: None, 1000: below(4, "s")}
        for count, seconds in times.items():
            yield alone(f"{processes} processes attach to {count} events", seconds, "s", targets[count])
        grown = {"ipcsync": times[1000], "the same to 500, doubled": [2 * figure for figure in times[500]]}
        yield from compare("attaching grows linearly", grown, "s", {"the same to 500, doubled": at_most(1.25)})


def _rss_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _import_zmq(state: dict[str, Any], endpoint: str) -> float:
    import zmq

    context = state["context"] = zmq.Context()
    socket = state["socket"] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    return _rss_mb(os.getpid())


def _connect(state: dict[str, Any], endpoint: str) -> float:
    client = state["client"] = ipcsync.connect(endpoint)
    client.event("bench/memory", engine="event").at(1).is_recorded  # noqa: B018 - looks at the board
    return _rss_mb(os.getpid())


def memory(rounds: int, scale: float) -> Iterator[Row]:
    """The coordinator's memory, and a client's share."""
    events, sessions = (10_000, 64) if scale >= 1 else (1000, 8)
    with ExitStack() as stack:
        coordinator = stack.enter_context(
            ipcsync.launch(
                log_level="warning", pool=events, max_cuda_events=events + 100, max_attachments=events, lease_ttl=60
            )
        )
        client = stack.enter_context(ipcsync.connect(coordinator.endpoint, lease_ttl=60))
        kept = [client.event(f"bench/{number}", engine="event", depth=1) for number in range(events - 1)]
        clients = [stack.enter_context(ipcsync.connect(coordinator.endpoint)) for _ in range(sessions - 1)]
        assert len(kept) == events - 1
        assert len(clients) == sessions - 1
        name = f"coordinator with {events} events and {sessions} sessions"
        yield alone(name, [_rss_mb(coordinator.pid)], "MB", below(90, "MB"))
    with ipcsync.launch(log_level="warning") as coordinator:
        figures: dict[str, list[float]] = {"ipcsync": [], "a bare pyzmq process": []}
        for _ in range(rounds):
            for name, taken in figures.items():
                with closing(Worker()) as worker:
                    call = _import_zmq if name == "a bare pyzmq process" else _connect
                    taken.append(worker.call(call, coordinator.endpoint))
        targets = {"a bare pyzmq process": at_most_more(12, "MB")}
        yield from compare("a client's memory", figures, "MB", targets)
