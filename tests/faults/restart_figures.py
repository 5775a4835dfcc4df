"""How long requests pause when a coordinator dies under its keeper, or is replaced, and what both processes cost.

`python -m tests.faults.restart_figures [--restarts N] [--upgrades N] [--large]` prints a table; status 1 if a figure is
over its limit.
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
from ipcsync._board.runtime_dir import OUTCOME, RELOAD
from tests.faults.figures import Figures
from tests.kit.until import until

_LIMITS = {
    "restart": ("p99", 500.0),
    "restart with a spare": ("p99", 150.0),
    "restart, large": ("max", 1500.0),
    "upgrade: longest request": ("p99", 100.0),
    "idle: memory of both processes (MB)": ("max", 110.0),
}
_NO_LIMIT = ("p99", float("inf"))


@contextlib.contextmanager
def _world(sessions: int, events: int, *, spare: bool = False) -> Iterator[tuple[ipcsync.Coordinator, ipcsync.Client]]:
    """A kept coordinator with so many sessions, and as many CUDA events as depth 4 makes of `events`."""
    with (
        ipcsync.launch(keeper=True, spare=spare, log_level="error", pool=events, max_sessions=2 * sessions) as one,
        contextlib.ExitStack() as clients,
    ):
        opened = [clients.enter_context(ipcsync.connect(one.endpoint, timeout=30.0)) for _ in range(sessions)]
        for number, client in enumerate(opened):
            names = [f"{number}-{event}" for event in range(events // sessions // 4)]
            client.events(names, recorder=True, engine="event", timeout=60.0)
        yield one, opened[0]


def restarts(count: int, what: str, sessions: int, events: int, figures: Figures, *, spare: bool = False) -> None:
    """Kill the coordinator `count` times, and ask the next one for its counts."""
    with _world(sessions, events, spare=spare) as (one, client):
        for _ in range(count):
            if spare:
                until(lambda: len(_children(one.pid)) == 2, "a spare")
                time.sleep(0.5)  # its imports are not to be seen from outside
            pid = client.stats()["pid"]
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            stats = client.stats(timeout=30.0)
            figures.add(what, began, time.monotonic())
            assert stats["sessions"] == sessions


def hand_overs(count: int, figures: Figures) -> None:
    """Record and wait with a coordinator, and while there is none."""
    with (
        _world(1, 8) as (one, client),
        ipcsync.connect(one.endpoint) as other,
        client.event("handed", recorder=True) as event,
        other.event("handed") as seen,
    ):
        for what in ("record and wait, with a coordinator", "record and wait, while there is none"):
            if what.endswith("none"):
                os.kill(client.stats()["pid"], signal.SIGSTOP)  # killed, it would be back too soon to measure
            for _ in range(count):
                began = time.monotonic()
                seen.at(event.record().generation).synchronize(timeout=10.0)
                figures.add(what, began, time.monotonic())


def upgrades(count: int, figures: Figures) -> None:
    """Reload `count` times while another thread asks all the time; any error ends the measurement."""
    with _world(8, 64) as (one, client), ipcsync.connect(one.endpoint) as asker:
        done = threading.Event()
        longest = [0.0, 0.0]
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                while not done.is_set():
                    began = time.monotonic()
                    asker.event("asked", recorder=True, timeout=30.0).close()
                    if time.monotonic() - began > longest[1] - longest[0]:
                        longest[:] = [began, time.monotonic()]
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            outcome = Path(one.runtime_dir, OUTCOME)
            for number in range(count):
                longest[:] = [0.0, 0.0]
                outcome.unlink(missing_ok=True)
                os.kill(one.pid, RELOAD)
                until(outcome.exists, "the outcome")
                until(lambda: client.stats()["starts"] == number + 2, "the next start")  # noqa: B023 - called at once
                figures.add("upgrade: longest request", *longest)
        finally:
            done.set()
            thread.join()
        if failures:
            raise failures[0]


def memory(figures: Figures) -> None:
    """The memory of both processes, with 64 sessions and 10,000 events."""
    with _world(64, 10_000) as (one, client):
        time.sleep(1.0)  # idle
        kib = _rss(one.pid) + _rss(client.stats()["pid"])
        figures.add("idle: memory of both processes (MB)", 0.0, kib / 1024 / 1000)


def _rss(pid: int) -> int:
    """KiB: what is the process's own, and its share of what it has with others."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Measure restarts and upgrades of a coordinator that has a keeper.")
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--upgrades", type=int, default=100)
    parser.add_argument("--large", action="store_true", help="also with 1,000 sessions and 10,000 events")
    options = parser.parse_args()
    os.environ.setdefault("IPCSYNC_DRIVER", "host")
    for segment in ("IPCSYNC_HOST_SEGMENT", "SIMCUDA_SEGMENT"):
        os.environ.setdefault(segment, uuid.uuid4().hex[:8])
    figures = Figures()
    restarts(options.restarts, "restart", 64, 1000, figures)
    restarts(options.restarts, "restart with a spare", 64, 1000, figures, spare=True)
    if options.large:
        restarts(10, "restart, large", 1000, 10_000, figures)
    upgrades(options.upgrades, figures)
    hand_overs(2000, figures)
    memory(figures)
    lines = [f"driver {ipcsync.driver_name()}", *figures.table(lambda what: _LIMITS.get(what, _NO_LIMIT))]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any("OVER" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
