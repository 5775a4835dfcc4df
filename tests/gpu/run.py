"""Everything that a machine with a GPU can show, in one command that needs no network and ends in time.

    python -m tests.gpu.run --out DIRECTORY [--minutes 9] [--only STEP …] [--failed] [--lmcache DIRECTORY]

The most telling first. Each step has a limit, and each answer is written as soon as it is there: a step that is killed
has told what it found. The directory has

- summary.md; failures.md (the first failure of each kind, with its trace); tests.jsonl (each outcome)
- probed.md, questions.md: what the driver answers where CUDA promises nothing
- bench.jsonl, figures.txt (one figure a line); costs.txt, hops.txt, replay_costs.txt, wakes.txt, deaths.txt,
  under_mps.txt, death_wait.txt: the output of each program
- doctor.json, demo.log, torch_layers.txt (two processes of torch and a graph), all.log

With --failed only the tests that failed, or were not finished, in the last run into that directory; what comes of them
is in its folder `again`. IPCSYNC_DRIVER (cuda) chooses the driver; what is not a real GPU is marked so. Exit status 1
if anything failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ipcsync._drivers import LIBRARY
from tests.gpu import lmcache_tests
from tests.gpu.probe_report import PROBES
from tests.gpu.report import Outcome, figures, first_failures, outcomes_of, summary

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "ipcsync"]
LEFT_OUT = {
    "tests/contract/test_events.py::test_recording_on_a_stream_of_another_context_is_an_invalid_handle": "a record of "
    "a shareable event on a stream of another context of the device ends in SIGSEGV in NVIDIA's driver 580.159.04",
}
"""Tests that end the process in NVIDIA's driver, and why."""

_ROWS = ("records", "completed", "pending", "chained", "graphs", "wake_up", "hand_over", "deaths")
_ROUNDS = {"hand_over": 1}  # else 3
_SUITE = ("tests/events", "tests/client", "tests/plugin", "tests/faults", "tests/cli", "tests/docs")
_USUAL = "driver and not thorough and not benchmark and not model and not planted"
# Processes that die with streams held back are long in dying, and who starts meanwhile waits: they run one at a time.
_KILLS = ("kill(", "SIGKILL", "die_")
_GRACE_S = 10.0  # for pytest to end by itself once its time is over
_DEADLINE_S = {"IPCSYNC_TEST_DEADLINE_S": "10"}  # for what never comes; a context takes 5 s beside 20 processes
_IMPORTS = {"IPCSYNC_TEST_DEADLINE_S": "20"}  # torch, in a new process, from a cold disk


@dataclass(frozen=True)
class Step:
    """One program. `file` gets its stdout, the log of all steps the rest; `tests`: it is pytest."""

    name: str
    command: Sequence[str]
    most_s: float
    file: str = ""
    tests: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def _pytest(name: str, most_s: float, workers: int, *chosen: str, env: Mapping[str, str] = _DEADLINE_S) -> Step:
    plugins = ["-p", "ipcsync", "-p", "xdist", "-p", "timeout", "-p", "no:cacheprovider", "-p", "tests.gpu.instant"]
    # Of a driver's call that never returns, a signal would not be seen: the worker is killed, and another one goes on.
    limits = ["--timeout=30", "--timeout-method=thread", "-n", str(workers), "--dist", "worksteal"]
    return Step(name, [sys.executable, "-m", "pytest", "-q", *plugins, *limits, *chosen], most_s, tests=True, env=env)


def files(*folders: str, kill: bool) -> list[str]:
    """The test files that kill processes, or the others; without the probes, which are a step of their own."""
    found = dict.fromkeys(path for folder in folders for path in sorted((ROOT / folder).rglob("test_*.py")))
    names = {path: str(path.relative_to(ROOT)) for path in found}
    does_kill = {path: any(word in path.read_text(encoding="utf-8") for word in _KILLS) for path in found}
    return [name for path, name in names.items() if name not in PROBES and does_kill[path] == kill]


def _program(name: str, most_s: float, *arguments: str) -> Step:
    return Step(name, [sys.executable, "-m", f"tests.gpu.{name}", *arguments], most_s, file=f"{name}.txt")


def _source(name: str, out: Path) -> Step:
    """A program in C of this folder, compiled and run."""
    source, binary = shlex.quote(str(Path(__file__).with_name(f"{name}.c"))), shlex.quote(str(out / f".{name}"))
    build = f"cc -O2 -o {binary} {source} -lpthread"
    if os.environ.get("IPCSYNC_DRIVER") == "host":
        library = shlex.quote(str(LIBRARY))  # preloaded, it is the libcuda.so.1 that the program needs
        return Step(name, ["sh", "-c", f"{build} {library} && LD_PRELOAD={library} {binary}"], 40, file=f"{name}.txt")
    script = f"for cuda in -lcuda -l:libcuda.so.1; do {build} $cuda && exec {binary}; done; exit 1"
    folders = (os.environ.get("LD_LIBRARY_PATH", ""), "/usr/local/cuda/lib64/stubs")
    env = {"LIBRARY_PATH": os.pathsep.join(filter(None, folders))}
    return Step(name, ["sh", "-c", script], 40, file=f"{name}.txt", env=env)


def steps(out: Path, workers: int, lmcache: Path | None = None) -> list[Step]:
    """What is run, in the order of what is most worth knowing; LMCache's own tests if `lmcache` has them.

    The last one, whose tests run one at a time, has what is left of the time.
    """
    parted, alone = ["-m", f"{_USUAL} and not alone"], ["-m", f"{_USUAL} and alone"]
    theirs = [sys.executable, "-m", "tests.gpu.lmcache_tests", str(lmcache), "-p", "tests.gpu.instant"]
    has_theirs = lmcache is not None and lmcache_tests.are_in(lmcache) and find_spec("lmcache") is not None
    probes = [sys.executable, "-m", "tests.gpu.probe_report", "--out", str(out / "probed.md"), "--seconds", "50"]
    layers = [sys.executable, "-m", "tests.gpu.torch_layers"]
    bench = [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", "--only"]
    return [
        Step("doctor", [*CLI, "doctor", "--json"], 40, file="doctor.json"),
        _pytest("contract", 60, workers, *files("tests/contract", kill=False), *parted),
        _pytest("contract-deaths", 60, 1, *files("tests/contract", kill=True), *parted),
        _pytest("gpu", 60, 2, "tests/gpu", env=_IMPORTS),
        Step("probes", probes, 60, env=_DEADLINE_S),
        Step("questions", [sys.executable, "-m", "tests.gpu.questions", "--out", str(out / "questions.md")], 120),
        _source("costs", out),
        *(
            Step(f"bench-{name}", [*bench, name, "--rounds", str(_ROUNDS.get(name, 3))], 40, "bench.jsonl")
            for name in _ROWS
        ),
        _pytest("graphs", 60, workers, *files("tests/graphs", kill=False), *parted),
        _pytest("graphs-deaths", 60, 1, *files("tests/graphs", kill=True), *parted),
        _pytest("suite", 120, workers, *files(*_SUITE, kill=False), *parted),
        Step("demo", [*CLI, "demo"], 30, file="demo.log"),
        *(
            Step("-".join(["layers", *how]), [*layers, *(f"--{word}" for word in how)], 40, "torch_layers.txt")
            for how in ([], ["break"], ["kill=prefill"], ["kill=decode"])
        ),
        _pytest("alone", 45, 1, "tests/contract", "tests/graphs", *_SUITE, *alone),
        _program("hops", 30),
        _program("replay_costs", 30),
        _program("wakes", 50),
        _program("deaths", 45),
        Step("bench-beside_torch", [*bench, "beside_torch"], 40, "bench.jsonl"),
        _program("under_mps", 45),
        _source("death_wait", out),
        *([Step("lmcache", theirs, 60, tests=True)] if has_theirs else []),
        _pytest("suite-deaths", 480, 1, *files("tests/faults", *_SUITE, kill=True), *parted),
    ]


def again(out: Path) -> list[Step]:
    """What failed in an earlier run into `out`, or was not finished, one at a time."""
    _, failures = outcomes_of(out / "tests.jsonl")
    tests = [failure.test for failure in failures if failure.test.startswith("tests/")]
    return [_pytest("failed", 480, 1, *tests, env=_IMPORTS)] if tests else []


def run(step: Step, out: Path, ends: float) -> Outcome:
    """Run one step within its own limit and what is left."""
    left = min(step.most_s, ends - time.monotonic())
    if left < min(2 * _GRACE_S, step.most_s):
        return Outcome(step.name, None)
    log, told = out / "all.log", out / "tests.jsonl"
    command = [*step.command, *([f"--session-timeout={left - _GRACE_S:.0f}"] if step.tests else [])]
    env = {**os.environ, **step.env, "IPCSYNC_TEST_OUTCOMES": str(told), "IPCSYNC_TEST_STEP": step.name}
    began = time.monotonic()
    with open(log, "ab") as rest, open(out / step.file if step.file else log, "ab") as stdout:
        rest.write(f"\n=== {step.name}: {' '.join(command)}\n".encode())
        rest.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=rest, env=env, start_new_session=True)
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    counts, failures = outcomes_of(told, step.name) if step.tests else ({}, [])
    return Outcome(step.name, status, time.monotonic() - began, counts, failures)


def device() -> tuple[str, bool]:
    """The driver and the device, and whether it is a real GPU; another process asks, so this one holds no context."""
    code = "from tests.kit import driver_kit as kit; from ipcsync import _drivers; kit.use_device()\n"
    code += "print(_drivers.name(), '|', kit.device_name()); print(kit.driver_kind())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    except subprocess.TimeoutExpired:
        return "the driver did not answer within 30 s", False
    told, _, kind = done.stdout.strip().partition("\n")
    return told or done.stderr.strip().split("\n")[-1], kind == "gpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description="All that a GPU can show.")
    parser.add_argument("--out", type=Path, required=True, help="the directory for the files")
    parser.add_argument("--minutes", type=float, default=9.0, help="the time for all of it (9)")
    parser.add_argument("--only", action="append", default=[], metavar="STEP", help="only this step; may be repeated")
    parser.add_argument("--failed", action="store_true", help="only the tests that failed in the last run into --out")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="test processes at once (4)")
    parser.add_argument("--lmcache", type=Path, help="where LMCache's own tests of events on a GPU are")
    chosen = parser.parse_args(arguments)
    out: Path = chosen.out.resolve()
    ends = time.monotonic() + 60 * chosen.minutes
    os.environ.setdefault("IPCSYNC_DRIVER", "cuda")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else that machine's Python has
    paths = [str(ROOT), str(ROOT / "services"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    planned = again(out) if chosen.failed else steps(out, chosen.workers, chosen.lmcache and chosen.lmcache.resolve())
    if unknown := set(chosen.only) - {step.name for step in planned}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in planned)}")
    planned = [step for step in planned if not chosen.only or step.name in chosen.only]
    if chosen.failed:
        sys.stdout.write("" if planned else "no test failed\n")
        out = out / "again"  # beside what was found first
    out.mkdir(parents=True, exist_ok=True)
    for name in {"all.log", "tests.jsonl", "bench.jsonl", *(step.file for step in planned if step.file)}:
        (out / name).write_bytes(b"")
    told, is_real = device()
    left_out = LEFT_OUT if is_real else {}
    if left_out:
        os.environ["PYTEST_ADDOPTS"] = " ".join(f"--deselect {test}" for test in left_out)
    outcomes: list[Outcome] = []
    for step in planned:
        outcomes.append(run(step, out, ends))
        sys.stdout.write(f"{step.name}: {outcomes[-1].in_words()}\n")
        sys.stdout.flush()
        # After each step: if this is killed, what was found is there.
        (out / "failures.md").write_text(first_failures(outcomes))
        (out / "figures.txt").write_text(figures(out / "bench.jsonl"))
        (out / "summary.md").write_text(summary(outcomes, told, is_real, left_out))
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
