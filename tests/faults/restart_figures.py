"""How long requests pause when a coordinator dies under its keeper, or is replaced, and what both processes cost.

`python -m tests.faults.restart_figures [--restarts N] [--upgrades N] [--large] [--only WHAT]` prints a table; status 1
if a figure is over its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import ipcsync
from ipcsync._board.runtime_dir import RELOAD, read_outcome
from tests.faults.figures import Figures
from tests.faults.fixtures import launch_patched, private_dir
from tests.kit.until import until
from tests.kit.zygote import children_of

_LIMITS = {
    "restart": ("p99", 500.0),
    "restart with a spare": ("p99", 150.0),
    "restart, large": ("max", 1500.0),
    "upgrade: longest request": ("p99", 100.0),
    "idle: memory of both processes (MB)": ("max", 110.0),
    "p99 of record and wait, without a coordinator / the longest with one": ("p50", 1.0),
    "a changing request, with the journal / without": ("p50", 1.15),
}
_NO_LIMIT = ("p99", float("inf"))
_ROUNDS = 7


@contextlib.contextmanager
def _world(sessions: int, events: int, *, spare: bool = False) -> Iterator[tuple[ipcsync.Coordinator, ipcsync.Client]]:
    """A kept coordinator with so many sessions, and as many CUDA events as depth 4 makes of `events`."""
    with (
        ipcsync.launch(
            keeper=True, spare=spare, log_level="error", pool=max(1024, events), max_sessions=2 * sessions, lease_ttl=60
        ) as one,
        contextlib.ExitStack() as clients,
    ):
        opened = [clients.enter_context(ipcsync.connect(one.endpoint, timeout=30.0)) for _ in range(sessions)]
        for number, client in enumerate(opened):
            client.timeout = 60.0
            names = [f"{number}-{event}" for event in range(events // sessions // 4)]
            client.events(names, recorder=True, engine="event")
        yield one, opened[0]


def restarts(count: int, what: str, sessions: int, events: int, figures: Figures, *, spare: bool = False) -> None:
    """Kill the coordinator `count` times, and ask the next one for its counts."""
    with _world(sessions, events, spare=spare) as (one, client):
        for _ in range(count):
            pid = client.stats()["pid"]
            if spare:
                until(lambda: any(_waits(each) for each in children(one.pid) - {pid}), "a spare")  # noqa: B023 - at once
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            stats = client.stats(timeout=30.0)
            figures.add(what, began, time.monotonic())
            assert stats["sessions"] == sessions


def hand_overs(count: int, figures: Figures) -> None:
    """Record and wait with a coordinator, and while there is none: rounds of each in turn, and their p99s compared."""
    with (
        _world(1, 8) as (one, client),
        ipcsync.connect(one.endpoint) as other,
        client.event("handed", recorder=True) as event,
        other.event("handed") as seen,
    ):
        pid = client.stats()["pid"]
        p99s: dict[str, list[float]] = {"with a coordinator": [], "while there is none": []}
        for _ in range(_ROUNDS):
            for what, signal_before in (
                ("with a coordinator", signal.SIGCONT),
                ("while there is none", signal.SIGSTOP),
            ):
                os.kill(pid, signal_before)  # killed, it would be back too soon to measure
                round_of = Figures()
                for _ in range(count):
                    began = time.monotonic()
                    seen.at(event.record().generation).synchronize(timeout=10.0)
                    round_of.add(what, began, time.monotonic())
                p99s[what].append(round_of.figure(what, "p99"))
                figures.rows.setdefault(f"record and wait, {what}", []).extend(round_of.rows[what])
        os.kill(pid, signal.SIGCONT)
        ratio = sorted(p99s["while there is none"])[_ROUNDS // 2] / max(p99s["with a coordinator"])
        figures.rows["p99 of record and wait, without a coordinator / the longest with one"] = [ratio]


def journal(count: int, figures: Figures) -> None:
    """Requests that change something, to a coordinator that keeps its journal and to one that keeps none, in turn."""
    with (
        ipcsync.launch(log_level="error") as one,
        launch_patched("journal-off", private_dir(), "--log-level", "error") as other,
        ipcsync.connect(one.endpoint) as client,
        ipcsync.connect(other.endpoint) as unkept,
    ):
        kept, none = "open and close, with the journal", "open and close, without"
        ratios = []
        for _ in range(_ROUNDS):
            round_of = Figures()
            for _ in range(count):
                for who, what in ((client, kept), (unkept, none)):  # one after the other: both meet the same load
                    began = time.monotonic()
                    who.event("changed", recorder=True).close()
                    round_of.add(what, began, time.monotonic())
            ratios.append(round_of.figure(kept, "p50") / round_of.figure(none, "p50"))
            for what, times in round_of.rows.items():
                figures.rows.setdefault(what, []).extend(times)
        figures.rows["a changing request, with the journal / without"] = ratios


class Asker:
    """A thread that opens, records on, waits for and closes an event again and again; it remembers its longest turn."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.longest = (0.0, 0.0)
        self.turns = 0
        self._endpoint = endpoint
        self._name = name
        self._is_done = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            with ipcsync.connect(self._endpoint, name=self._name, timeout=30.0) as client:
                client.timeout = 30.0
                while not self._is_done:
                    began = time.monotonic()
                    with client.event(self._name, recorder=True) as event:
                        event.record().synchronize(timeout=30.0)
                    ended = time.monotonic()
                    self.turns += 1
                    if ended - began > self.longest[1] - self.longest[0]:
                        self.longest = (began, ended)
        except BaseException as error:  # noqa: BLE001 - raised by `end`
            self._failure = error

    def end(self) -> None:
        """End it; raises what it met."""
        self._is_done = True
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def upgrades(count: int, figures: Figures, askers: int = 4) -> None:
    """Reload `count` times under the load of some threads; any error that one of them meets ends the measurement."""
    with _world(8, 64) as (one, client):
        working = [Asker(one.endpoint, f"asker-{number}") for number in range(askers)]
        try:
            for number in range(count):
                for asker in working:
                    asker.longest = (0.0, 0.0)
                asked_ns = time.monotonic_ns()
                os.kill(one.pid, RELOAD)
                until(lambda: read_outcome(one.runtime_dir).began_ns > asked_ns, "the outcome")  # noqa: B023 - called at once
                why_not = read_outcome(one.runtime_dir).why_not
                assert not why_not, why_not
                turns = [asker.turns for asker in working]
                until(
                    lambda: all(asker.turns > before for asker, before in zip(working, turns, strict=True)),  # noqa: B023
                    "everyone goes on",
                )
                longest = max((asker.longest for asker in working), key=lambda turn: turn[1] - turn[0])
                figures.add("upgrade: longest request", *longest)
                assert client.stats()["restarts"] == {"died": 0, "hung": 0, "reloaded": number + 1}
        finally:
            for asker in working:
                asker.end()
        until(lambda: client.stats()["sessions"] == 8, "the askers' sessions are over")
        stats = client.stats()
        assert (sum(stats["deaths"].values()), stats["quarantined"], stats["starts"]) == (0, 0, count + 1), stats


def memory(figures: Figures) -> None:
    """The memory of both processes, with 64 sessions and 10,000 events."""
    with _world(64, 10_000) as (one, client):
        kib = _rss(one.pid) + _rss(client.stats()["pid"])
        figures.add("idle: memory of both processes (MB)", 0.0, kib / 1024 / 1000)


def _rss(pid: int) -> int:
    """KiB: what is the process's own, and its share of what it has with others."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))


def children(pid: int) -> set[int]:
    return set(children_of(pid))


def _waits(pid: int) -> bool:
    """Whether a coordinator has done its imports and greets its keeper: then it heeds no SIGTERM any more."""
    (ignored,) = [
        line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")
    ]
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Measure restarts and upgrades of a coordinator that has a keeper.")
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--upgrades", type=int, default=100)
    parser.add_argument("--large", action="store_true", help="also with 1,000 sessions and 10,000 events")
    parser.add_argument("--only", choices=["restarts", "upgrades", "calls", "journal", "memory"])
    options = parser.parse_args()
    os.environ.setdefault("IPCSYNC_DRIVER", "host")
    os.environ.setdefault("IPCSYNC_HOST_SEGMENT", uuid.uuid4().hex[:8])
    figures = Figures()
    if options.only in (None, "restarts"):
        restarts(options.restarts, "restart", 64, 1000, figures)
        restarts(options.restarts, "restart with a spare", 64, 1000, figures, spare=True)
        if options.large:
            restarts(10, "restart, large", 1000, 10_000, figures)
    if options.only in (None, "upgrades"):
        upgrades(options.upgrades, figures)
    if options.only in (None, "calls"):
        hand_overs(1000, figures)
    if options.only in (None, "journal"):
        journal(500, figures)
    if options.only in (None, "memory"):
        memory(figures)
    lines = [f"driver {ipcsync.driver_name()}", *figures.table(lambda what: _LIMITS.get(what, _NO_LIMIT))]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any("OVER" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
