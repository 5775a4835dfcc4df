"""How soon deaths are told: `python -m tests.faults.figures [--deaths N] [--coordinators N]` prints a table.

Promised: of 100 deaths of holders, 99 are told to their peers within 100 ms; the coordinator's death is noticed by
every blocked client within 1 s. Exit status 1 if a figure is over its limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import ipcsync
from ipcsync.typing import EngineName
from tests.faults import actions, fixtures
from tests.faults.fixtures import Blocked, Held
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

_BATCH = 10
_DEATH_LIMIT_MS = 100.0
_COORDINATOR_LIMIT_MS = 1000.0


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
            figures = " ".join(f"{self.figure(what, kind):8.1f}" for kind in ("p50", "p99", "max"))
            yield f"{what:64} {len(times):5} {figures}   {kind} <= {limit:g}{over}"

    def figure(self, what: str, kind: str) -> float:
        """The median ("p50"), the 99th percentile ("p99") or the longest ("max") of a row."""
        times = sorted(self.rows[what])
        return times[min(len(times) - 1, int({"p50": 0.5, "p99": 0.99, "max": 1.0}[kind] * len(times)))]


class _Listener:
    """When each event was announced as broken."""

    def __init__(self, client: ipcsync.Client) -> None:
        self.broken: dict[str, float] = {}
        self._notices = client.watch(timeout=DEADLINE_S)
        next(self._notices)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for notice in self._notices:
                if notice.kind == "broken":
                    self.broken[notice.name] = time.monotonic()
        except ipcsync.IpcSyncError:
            return  # the client was closed: it is over

    def at(self, name: str) -> float:
        """When `name` was announced as broken; waits for it."""
        until(lambda: name in self.broken, f"the notice of {name}")
        return self.broken[name]


def deaths_of_holders(count: int, engine: EngineName, figures: Figures) -> None:
    """Kill `count` recorders, one after the other, each with a waiter for a record and a waiter for unfinished work."""
    with ipcsync.launch(log_level="error") as coordinator, ipcsync.connect(coordinator.endpoint) as client:
        listener = _Listener(client)
        for batch in range(0, count, _BATCH):
            peers = {f"e-{number}": Peer() for number in range(batch, min(batch + _BATCH, count))}
            for name, peer in peers.items():
                peer.call(actions.open_recorder, coordinator.endpoint, name, engine)
                peer.call(remote.hold)
            for name, peer in peers.items():
                _kill_one(client, listener, name, peer, engine, figures)
            for peer in peers.values():
                peer.close()


def _kill_one(
    client: ipcsync.Client, listener: _Listener, name: str, peer: Peer, engine: EngineName, figures: Figures
) -> None:
    unfinished = client.point(peer.call(actions.record, name))
    event = client.event(name)
    waits = {
        "a wait for its next record": Blocked(event.at(2).synchronize),
        "a wait for its unfinished work": Blocked(unfinished.synchronize),
    }
    began = time.monotonic()
    os.kill(peer.pid, signal.SIGKILL)
    for what, call in waits.items():
        outcome = call.outcome()
        assert isinstance(outcome, ipcsync.RecorderLost), outcome
        figures.add(f"holder's death, {engine}: {what}", began, call.ended)
    figures.add(f"holder's death, {engine}: the feed", began, listener.at(name))
    assert client.event(name, recorder=True).generation == 0  # the name is free
    event.close()


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


def _limit(what: str) -> tuple[str, float]:
    return ("max", _COORDINATOR_LIMIT_MS) if what.startswith("coordinator") else ("p99", _DEATH_LIMIT_MS)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Measure how soon deaths are told.")
    parser.add_argument("--deaths", type=int, default=100, help="recorders to kill, of each engine")
    parser.add_argument("--coordinators", type=int, default=10, help="coordinators to kill, for each engine")
    options = parser.parse_args()
    # Read at the first use of the driver, here and in the processes started from here.
    os.environ.setdefault("IPCSYNC_DRIVER", "host")
    os.environ.setdefault("IPCSYNC_HOST_SEGMENT", uuid.uuid4().hex[:8])
    figures = Figures()
    for engine in fixtures.ENGINES:
        deaths_of_holders(options.deaths, engine, figures)
        deaths_of_coordinators(options.coordinators, engine, figures)
    lines = [f"driver {ipcsync.driver_name()}", *figures.table(_limit)]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any("OVER" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
