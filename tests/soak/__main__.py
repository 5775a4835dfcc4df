"""The soak: many processes that do at random what users do, some of them killed; then a look at what they saw.

    python -m tests.soak --minutes 10 --processes 64 --kill-rate 5 --seed 1 --driver host --engine both
    python -m tests.soak --minutes 10 --coordinator-kills 5    the coordinator under a keeper, killed every 5 s

Ends with a table, and with status 1 if any promise was broken or anything was left behind; the histories are kept then.

This process imports what the workers need and uses none of it, so that each worker is a fork that costs milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ipcsync
from tests.kit.descriptors import descriptors
from tests.soak.history import Op, Result
from tests.soak.history_checker import check
from tests.soak.history_facts import Report, Violation
from tests.soak.leaks import (
    ask,
    board_of,
    kill_children_of,
    private_kib,
    shared_files,
    starts_of,
    warm_up,
)
from tests.soak.oracle import Truth
from tests.soak.processes import TICK_S, TTL_S, Herd, Options
from tests.soak.session import Plan

_FLAT_KIB = 1024  # an arena of Python's allocator, which may have been taken in the last minute
_FILLED_S = 600  # shorter soaks end while the memory still fills what is bounded


class Soak:
    """One soak, from the coordinator's start to the table."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.leaks: list[str] = []
        self.private: list[tuple[float, int]] = []  # (seconds, KiB) of the coordinator
        self.stats: dict[str, Any] = {}
        self.coordinator_kills = 0
        self.board = ""

    def run(self) -> Report:
        """Soak, then check."""
        options = self.options
        segment = f"soak-{uuid.uuid4().hex[:12]}"
        os.environ.update(IPCSYNC_DRIVER=options.driver, IPCSYNC_HOST_SEGMENT=segment)
        mine = len(descriptors())
        keeper = options.coordinator_kills > 0
        runtime_dir = (
            self.directory / "runtime"
        )  # which the coordinator makes, and so removes: `launch` leaves it alone
        with ipcsync.launch(
            runtime_dir=str(runtime_dir), lease_ttl=TTL_S, log_level="error", keeper=keeper
        ) as coordinator:
            self.board = board = board_of(coordinator.pid, coordinator.runtime_dir)
            plan = Plan(
                self.directory, coordinator.endpoint, options.processes, options.names, options.engine, options.seed,
                options.processes / options.operations,
            )  # fmt: skip
            truth = Truth(options.lives)
            warm_up(coordinator.endpoint)
            before = self._settled_descriptors(coordinator.pid, 0)
            self.herd = Herd(options, plan, truth)
            gc.collect()
            gc.freeze()  # the children share these pages for as long as nobody counts in them
            self._soak(coordinator.pid)
            self.herd.end()
            self.stats = ask(coordinator.endpoint, 15.0)
            self._look_for_leaks(coordinator, before)
        if coordinator.stop() != 0:
            self.leaks.append(f"the coordinator ended with status {coordinator.stop()}")
        left = shared_files(segment, board)
        if left:
            self.leaks.append(f"left in shared memory: {sorted(left)}")
        if runtime_dir.exists():
            self.leaks.append(f"left: {runtime_dir} with {sorted(os.listdir(runtime_dir))}")
        if len(now := descriptors()) > mine:
            self.leaks.append(f"{mine} file descriptors here became {len(now)}: {now}")
        report = check(self.directory, ttl_s=TTL_S)
        report.violations.extend(Violation("hang", life, "it did not end when told") for life in self.herd.hung)
        return report

    def _soak(self, pid: int) -> None:
        self.herd.start()
        began = time.monotonic()
        kill_at = None  # of the coordinator that serves now
        while (now := time.monotonic() - began) < self.options.seconds:
            self.herd.tick()
            # From when it serves: on a machine so busy that a start takes seconds, requests would find none to answer.
            if self.options.coordinator_kills and starts_of(self.board) == self.coordinator_kills + 1:
                kill_at = now + self.options.coordinator_kills if kill_at is None else kill_at
                if now >= kill_at:
                    kill_at = None
                    self.coordinator_kills += kill_children_of(pid)
            if now >= len(self.private):
                self.private.append((now, private_kib(pid)))
            select.select([], [], [], TICK_S)

    @staticmethod
    def _settled_descriptors(pid: int, enough: int) -> dict[int, str]:
        """Those open once they are down to `enough`, or else after two seconds: sockets are closed by other threads."""
        deadline = time.monotonic() + 2.0
        while len(found := descriptors(pid)) > enough and time.monotonic() < deadline:
            select.select([], [], [], 0.05)
        return found

    def _look_for_leaks(self, coordinator: ipcsync.Coordinator, before: dict[int, str]) -> None:
        stats = self.stats
        if not stats:
            self.leaks.append("the coordinator did not tell its counts")
            return
        if stats["starts"] != 1 + self.coordinator_kills:
            self.leaks.append(
                f"{stats['starts']} starts of a coordinator that was killed {self.coordinator_kills} times"
            )
        for name, expected in (("pool_in_use", 0), ("quarantined", 0), ("events", 0), ("sessions", 1)):
            if stats[name] != expected:
                self.leaks.append(f"{name} is {stats[name]}, not {expected}: {stats['rows']}")
        after = self._settled_descriptors(coordinator.pid, len(before))
        if len(after) > len(before):
            self.leaks.append(f"the coordinator's file descriptors {before} became {after}")
        if self.growth > _FLAT_KIB:
            self.leaks.append(f"the coordinator's memory grew by {self.growth:.0f} KiB in its last three minutes")

    @property
    def growth(self) -> float:
        """KiB by which the coordinator's memory grew in its last three minutes; 0 if the soak is too short to say.

        For some six minutes it fills what is bounded: kept replies, and all that grows with the most slots and events.
        Three minutes of 64 processes open some 20,000 events: 60 bytes that are left of each are found.
        """
        end = self.options.seconds
        before = [kib for at, kib in self.private if end - 240 <= at < end - 180]
        last = [kib for at, kib in self.private if at >= self.options.seconds - 60]
        if self.options.seconds < _FILLED_S or not before or not last:
            return 0.0
        return sum(last) / len(last) - sum(before) / len(before)

    # --- the table ----------------------------------------------------------------------------------------------------

    def table(self, report: Report) -> str:
        """What was done, and what came of it."""
        count = report.count
        rows: list[tuple[str, object]] = [
            ("driver, engine, seed", f"{self.options.driver}, {self.options.engine}, {self.options.seed}"),
            ("seconds, processes, names", f"{self.options.seconds:g}, {self.options.processes}, {self.options.names}"),
            ("lives, kills, stops", f"{self.herd.lives}, {self.herd.kills}, {self.herd.stops}"),
            ("coordinator's kills", self.coordinator_kills),
            ("operations", sum(n for (_, result), n in report.counts.items() if result != Result.BEGUN)),
            ("sessions", count(Op.CONNECT, result=Result.OK)),
            ("events opened, points attached", f"{count(Op.OPEN_RECORDER, Op.OPEN_WAITER)}, {count(Op.ATTACH)}"),
            ("records", count(Op.RECORD, result=Result.OK)),
            ("stream waits, streams seen past them", f"{count(Op.WAIT)}, {count(Op.STREAM)}"),
            ("host waits, queries", f"{count(Op.SYNCHRONIZE)}, {count(Op.QUERY)}"),
            ("ended by RecorderLost", self._ended(report, Result.RECORDER_LOST)),
            ("ended by SessionExpired", self._ended(report, Result.SESSION_EXPIRED)),
            ("ended by their timeout", self._ended(report, Result.TIMEOUT)),
            ("coordinator: deaths seen", self.stats.get("deaths")),
            ("coordinator: slots at most", self.stats.get("pool_high_water")),
            (
                "coordinator: KiB at the minutes",
                [kib for at, kib in self.private if at % 60 < 1] + [self.private[-1][1]],
            ),
            (
                "coordinator: in its last minutes",
                f"{self.growth:+.0f} KiB" if self.options.seconds >= _FILLED_S else "too short",
            ),
            ("violations", len(report.violations)),
            ("leaks", len(self.leaks)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    @staticmethod
    def _ended(report: Report, result: Result) -> int:
        return sum(n for (_, how), n in report.counts.items() if how == result)


def parse(arguments: list[str] | None) -> Options:
    """The command line's options; exits with status 2 for wrong ones."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0] if __doc__ else None)
    plain = Options()
    parser.add_argument("--minutes", type=float, default=plain.minutes)
    parser.add_argument("--processes", type=int, default=plain.processes)
    parser.add_argument("--kill-rate", type=float, default=plain.kill_rate, help="a second")
    parser.add_argument("--seed", type=int, default=plain.seed)
    parser.add_argument("--driver", default=os.environ.get("IPCSYNC_DRIVER", plain.driver), choices=("host", "cuda"))
    parser.add_argument("--engine", default=plain.engine, choices=("event", "timeline", "both"))
    parser.add_argument("--names", type=int, default=plain.names)
    parser.add_argument("--operations", type=int, default=plain.operations, help="a second, of all processes together")
    parser.add_argument(
        "--coordinator-kills", type=float, default=plain.coordinator_kills, metavar="S", help="seconds apart"
    )
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: list[str] | None = None) -> int:
    """Run a soak; 0 if every promise held."""
    options = parse(arguments)
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(options, directory)
    report = soak.run()
    out = sys.stdout
    out.write(soak.table(report) + "\n")
    for violation in report.violations[:50]:
        out.write(f"VIOLATION {violation}\n")
    for leak in soak.leaks:
        out.write(f"LEAK {leak}\n")
    if report.violations or soak.leaks:
        for file in sorted(directory.glob("*.errors"))[:3]:
            out.write(f"--- {file.name}\n{file.read_text()[:3000]}\n")
        out.write(f"The histories are in {directory}\n")
        return 1
    with contextlib.suppress(FileNotFoundError):  # a tidy /tmp is all that this is for
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
