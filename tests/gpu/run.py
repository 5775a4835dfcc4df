"""Everything that a machine with a GPU can show, in one command that needs no network and ends in time.

    python -m tests.gpu.run --out DIRECTORY [--minutes 9] [--lmcache DIRECTORY]

It leaves eight files there: summary.md, doctor.json, probed.md, tests.log, failures.md (the first failure of each kind,
with its trace), bench.jsonl (a line for each benchmark), figures.txt (one figure a line) and demo.log. What has no time
any more is left out, and the summary says so. Exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.gpu import lmcache_tests
from tests.gpu.probe_report import PROBES

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "ipcsync"]
_ROWS = ("beside_torch", "records", "pending", "completed", "chained", "wake_up", "hand_over")
_MATRIX = ("tests/client", "tests/events", "tests/cli", "tests/plugin", "tests/docs", "tests/faults")
_GRACE_S = 10.0  # for pytest to end by itself, with its report, once its time is over


@dataclass(frozen=True)
class Step:
    """One program. `file` gets its stdout, the log of all steps the rest; `tests` are run by pytest instead."""

    name: str
    command: Sequence[str]
    most_s: float
    file: str = ""
    tests: bool = False


def _pytest(*arguments: str, workers: int) -> list[str]:
    plugins = ["-p", "ipcsync", "-p", "xdist", "-p", "timeout", "-p", "no:cacheprovider"]
    spread = ["-n", str(workers), "--dist", "worksteal"]
    # Of a driver's call that never returns, a signal would not be seen: the worker is killed, and another one goes on.
    limits = ["--timeout=60", "--timeout-method=thread"]
    return [sys.executable, "-m", "pytest", "-q", *plugins, *limits, *spread, *arguments]


def steps(out: Path, workers: int, lmcache: Path | None = None) -> list[Step]:
    """What is run, in the order of what is most worth knowing; LMCache's own tests if `lmcache` has them."""
    matrix = [*_MATRIX, "-m", "driver and not thorough and not benchmark and not alone"]
    alone = ["tests/contract", "tests/events", "-m", "alone and not thorough"]
    others = [f"--ignore={probes}" for probes in PROBES] + ["-m", "not alone"]
    theirs = [sys.executable, "-m", "tests.gpu.lmcache_tests", str(lmcache)]
    has_theirs = lmcache is not None and lmcache_tests.are_in(lmcache) and find_spec("lmcache") is not None
    return [
        Step("doctor", [*CLI, "doctor", "--json"], 60, file="doctor.json"),
        Step("probes", [sys.executable, "-m", "tests.gpu.probe_report", "--out", str(out / "probed.md")], 100),
        Step("gpu", _pytest("tests/contract", "tests/gpu", *others, workers=workers), 120, tests=True),
        Step("alone", _pytest(*alone, workers=workers), 60, tests=True),
        Step("demo", [*CLI, "demo"], 45, file="demo.log"),
        *(
            Step(f"bench {name}", [*CLI, "bench", "--quick", "--json", "--only", name], 40, "bench.jsonl")
            for name in _ROWS
        ),
        Step("driver calls", [sys.executable, "-m", "tests.benchmarks.driver_calls"], 45),
        *([Step("lmcache", theirs, 100, tests=True)] if has_theirs else []),
        Step("suite", _pytest(*matrix, workers=workers), 400, tests=True),
    ]


@dataclass
class Outcome:
    """What came of a step: its exit status (None: it had no time), how long it took, and what its tests say."""

    name: str
    status: int | None
    took_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def in_words(self) -> str:
        """For the summary."""
        if self.status is None:
            return "left out: no time"
        counts = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        if self.status == -signal.SIGKILL:
            return f"killed at its time limit; {counts}" if counts else "killed at its time limit"
        said = "ok" if self.status == 0 else f"exit status {self.status}"
        return f"{said}; {counts}" if counts else said


@dataclass(frozen=True)
class Failure:
    """One failed test; two of one `kind` differ in numbers and names at most."""

    test: str
    kind: str
    trace: str


def kind_of(message: str) -> str:
    """What two failures of the same cause have in common: the message's first line, without numbers and quotes."""
    first = message.strip().split("\n")[0] if message.strip() else "no message"
    return re.sub(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"", "…", first)[:160]


def read_report(path: Path) -> tuple[dict[str, int], list[Failure]]:
    """The counts and the failures of a JUnit report; nothing of one that was not written."""
    if not path.exists():
        return {}, []
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        bad = [each for each in case if each.tag in ("failure", "error")]
        what = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[what] += 1
        name = f"{case.get('classname')}::{case.get('name')}"
        failures += [Failure(name, kind_of(each.get("message") or ""), each.text or "") for each in bad[:1]]
    return counts, failures


def run(step: Step, out: Path, log: Path, ends: float) -> Outcome:
    """Run one step within its own limit and what is left."""
    left = min(step.most_s, ends - time.monotonic())
    if left < 2 * _GRACE_S:
        return Outcome(step.name, None)
    report = out / f".{step.name}.xml"
    report.unlink(missing_ok=True)
    command = [*step.command]
    if step.tests:
        command += [f"--junitxml={report}", f"--session-timeout={left - _GRACE_S:.0f}"]
    began = time.monotonic()
    with open(log, "ab") as rest, open(out / step.file if step.file else log, "ab") as stdout:
        rest.write(f"\n=== {step.name}: {' '.join(command)}\n".encode())
        rest.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=rest, start_new_session=True)
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    counts, failures = read_report(report)
    report.unlink(missing_ok=True)
    return Outcome(step.name, status, time.monotonic() - began, counts, failures)


def device() -> str:
    """The driver and the device, asked in another process, so that this one holds no context."""
    code = "import ipcsync; print(ipcsync.driver_name(), '|', ipcsync.get_device_properties(0).name)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    except subprocess.TimeoutExpired:
        return "the driver did not answer within 30 s"
    return done.stdout.strip() or done.stderr.strip().split("\n")[-1]


def summary(outcomes: Sequence[Outcome], told: str) -> str:
    """The run on one page."""
    kinds = len({failure.kind for outcome in outcomes for failure in outcome.failures})
    return "\n".join(
        [
            "# A run on this machine",
            "",
            f"{date.today()}, `{told}`, {platform.platform()}, Python {platform.python_version()}.",
            "",
            "| step | seconds | what came of it |",
            "|---|---|---|",
            *(f"| {outcome.name} | {outcome.took_s:.0f} | {outcome.in_words()} |" for outcome in outcomes),
            "",
            f"{kinds} kinds of failures: failures.md has the first of each.",
            "",
        ]
    )


def first_failures(outcomes: Sequence[Outcome]) -> str:
    """The first failure of each kind, with its trace, and how many there are."""
    by_kind: dict[str, list[Failure]] = {}
    for outcome in outcomes:
        for failure in outcome.failures:
            by_kind.setdefault(failure.kind, []).append(failure)
    parts = [
        f"## {len(failures)} x {kind}\n\n`{failures[0].test}`\n\n```\n{failures[0].trace.strip()}\n```\n"
        for kind, failures in sorted(by_kind.items(), key=lambda item: -len(item[1]))
    ]
    return "# The first failure of each kind\n\n" + ("\n".join(parts) or "None.\n")


def figures(bench: Path) -> str:
    """One figure a line: row, peer, ours, theirs, unit."""
    rows: list[dict[str, Any]] = []
    for line in bench.read_text().splitlines():
        with suppress(ValueError):  # a run that was killed amid its line
            rows += json.loads(line)["rows"]
    return "".join(f"{row['row']}\t{row['peer']}\t{row['ours']}\t{row['theirs']}\t{row['unit']}\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description="All that a GPU can show.")
    parser.add_argument("--out", type=Path, required=True, help="the directory for the eight files")
    parser.add_argument("--minutes", type=float, default=9.0, help="the time for all of it (9)")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 2), help="of pytest (8 at most)")
    parser.add_argument("--lmcache", type=Path, help="where LMCache's two tests of events on a GPU are")
    chosen = parser.parse_args(arguments)
    out: Path = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * chosen.minutes
    os.environ.setdefault("IPCSYNC_DRIVER", "cuda")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else that machine's Python has
    paths = [
        str(ROOT),
        str(ROOT / "services"),
        os.environ.get("PYTHONPATH", ""),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    for name in ("tests.log", "doctor.json", "demo.log", "bench.jsonl"):
        (out / name).write_bytes(b"")
    outcomes: list[Outcome] = []
    told = device()
    lmcache: Path | None = chosen.lmcache and chosen.lmcache.resolve()
    for step in steps(out, chosen.workers, lmcache):
        outcomes.append(run(step, out, out / "tests.log", ends))
        sys.stdout.write(f"{step.name}: {outcomes[-1].in_words()}\n")
        sys.stdout.flush()
        # After each step: if this is killed, what was found is there.
        (out / "failures.md").write_text(first_failures(outcomes))
        (out / "figures.txt").write_text(figures(out / "bench.jsonl"))
        (out / "summary.md").write_text(summary(outcomes, told))
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
