"""Holds the software driver's profile of a GPU to what was measured there: `python -m tests.gpu.profile_check`.

Three tables. Calls and hops from C (costs.c) beside the raw figures of the GPU, within a factor of 1.25. Rows of
`tests.benchmarks` as differences to the bare call of the same run, within 1.5 or half a microsecond. And what must hold
between rows: words hand over sooner than events where two processes share a GPU, and alike under MPS. Exit status 1 if
a row is out.

For an idle machine: each table is repeated while a row is out (--tries), and the try that is nearest counts, since
other load only adds. A row that this machine cannot meet is held to nothing, and says why: more threads run for it than
there are cores here, or a thread that slept needs longer here to run (costs.c measures that too) than the GPU for all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from ipcsync._drivers import LIBRARY

_HERE = Path(__file__).parent
_MEASURED = _HERE / "h100-2026-11-26"
_FIGURE = re.compile(r"^(?P<name>.+?)(?: \(with the calls\))?\s{2,}(?:p50\s+)?(?P<figure>\d+\.\d+)", re.MULTILINE)
_CALLS_FACTOR, _ROWS_FACTOR, _ROWS_FLOOR_US, _ALIKE = 1.25, 1.5, 0.5, 1.25
_NOT_PACED_US = 0.05
_BLOCKING = "a CPU's store -> blocking cuEventSynchronize returns, after milliseconds"
_STORE = "a CPU's store ends a stream's wait, by its query"
_OTHERWISE = {  # of probed.md and hops.txt, by the name that costs.c has for it
    _STORE: 5.2,
    _BLOCKING: 87.8,
    "cuEventCreate, interprocess": 0.9,
    "cuIpcGetEventHandle": 1.7,
    "cuIpcOpenEventHandle": 0.5,
    "cuEventDestroy, imported": 0.5,
}
_THREADS = {"write value -> the other process's CPU sees the word": 3}  # that run at once; else at most 2
_WAKE = "this machine: a thread that slept runs"
_SLEPT = (_STORE, "idle stream: write value -> CPU sees the word")  # a stream's thread has to be woken for these
_HELD_TO_NOTHING = {
    "hop by events (disable timing)": "two threads need longer to see each other's stores",
    "WriteValue64 + cuEventRecord(plain) (timeline with marker)": "two operations for the stream's thread, which takes"
    " each from the caller's core",
}

# Of figures.txt and bursts.txt of that run: ours and the bare call's, in µs. Left out is what no later run can have
# again, since the product or the bench has changed, and what a profile cannot give: records once in 100 µs (cold caches
# of a CPU) and waits for pending points (the bare call is the binding's: 1.5 µs beside the driver's there, 0.8 here).
_BENCH: Mapping[tuple[str, str], tuple[float, float]] = {
    ("record (event)", "bare cuEventRecord"): (1.962, 1.827),
    ("record (timeline)", "bare cuStreamWriteValue64"): (2.670, 2.203),
    ("query on a completed point (event)", "bare cuEventQuery"): (0.101, 0.729),
    ("query on a completed point (timeline)", "bare cuEventQuery"): (0.103, 0.705),
    ("wait on a completed point (event)", "bare cuEventQuery"): (0.295, 0.653),
    ("wait on a completed point (timeline)", "bare cuEventQuery"): (0.262, 0.665),
    ("wait and record behind it (event)", "bare wait and record"): (9.730, 4.134),
    ("wait and record behind it (timeline)", "bare wait and record"): (15.719, 4.066),
    ("hand-over (event), p50", "bare futex"): (160.807, 6.611),
    ("hand-over (timeline), p50", "bare futex"): (8.542, 6.611),
    ("wake to stream (event), p50", "bare futex"): (14.295, 6.611),
}
_BENCH_ONLY = ("records", "completed", "chained", "hand_over")
_HAND_OVER_CORES = 4  # two processes, each with its stream's thread
_HAND_OVERS = ("hand-over", "wake to stream")


@dataclass(frozen=True)
class Verdict:
    """One row: what a GPU had, what the profile has, and whether that holds; None: held to nothing, and why."""

    name: str
    there: float
    here: float
    holds: bool | None
    note: str = ""

    def line(self) -> str:
        """The row as text."""
        word = {True: "ok", False: "OUT", None: "-"}[self.holds]
        ratio = f"{self.here / self.there:6.2f}" if self.there > 0 else "      "
        return f"{self.name:74s} {self.there:9.3f} {self.here:9.3f} {ratio}  {word} {self.note}".rstrip()


def figures(text: str) -> dict[str, float]:
    """The medians in the output of costs.c or of the hops, in µs."""
    return {match["name"].strip(): float(match["figure"]) for match in _FIGURE.finditer(text)}


def nearer(first: Verdict, second: Verdict) -> Verdict:
    """The one whose figure is nearer to the GPU's."""
    return min(first, second, key=lambda verdict: (verdict.holds is False, abs(verdict.here - verdict.there)))


def judge_call(name: str, there: float, here: float, cores: int, wake_us: float = 0) -> Verdict:
    """A call or a hop beside the GPU's, on a machine where a thread that slept runs after `wake_us`."""
    threads = _THREADS.get(name, 2)
    if there < _NOT_PACED_US:
        return Verdict(name, there, here, None, "below 0.05 µs: not paced")
    if threads > cores:
        return Verdict(name, there, here, None, f"needs {threads} cores")
    if name in _HELD_TO_NOTHING:
        return Verdict(name, there, here, None, _HELD_TO_NOTHING[name])
    if name in _SLEPT and wake_us > there * _CALLS_FACTOR:
        return Verdict(name, there, here, None, f"a thread that slept runs after {wake_us:.1f} µs here")
    return Verdict(name, there, here, there / _CALLS_FACTOR <= here <= there * _CALLS_FACTOR)


def judge_row(name: str, there: tuple[float, float], here: tuple[float, float], cores: int) -> Verdict:
    """Ours and the bare call, beside the GPU's: their difference."""
    before, now = there[0] - there[1], here[0] - here[1]
    if name.startswith(_HAND_OVERS) and cores < _HAND_OVER_CORES:
        return Verdict(name, before, now, None, f"needs {_HAND_OVER_CORES} cores")
    room = max(abs(before) * (_ROWS_FACTOR - 1), _ROWS_FLOOR_US)
    return Verdict(name, before, now, abs(now - before) <= room)


def _environment(**settings: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("IPCSYNC_HOST_")}
    return clean | {
        "IPCSYNC_DRIVER": "host",
        "IPCSYNC_HOST_PROFILE": "h100",
        "IPCSYNC_HOST_SEGMENT": f"profile-check-{os.getpid()}",
        **settings,
    }


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def calls(cores: int) -> list[Verdict]:
    """The table of costs.c."""
    there = figures((_MEASURED / "costs.txt").read_text()) | figures((_MEASURED / "hops.txt").read_text()) | _OTHERWISE
    with tempfile.TemporaryDirectory() as folder:
        program, library = str(Path(folder, "costs")), str(LIBRARY)
        compiler = os.environ.get("CC", "cc")
        _run([compiler, "-O2", "-o", program, str(_HERE / "costs.c"), library, "-lpthread"], dict(os.environ))
        here = figures(_run([program], _environment(LD_PRELOAD=library)))
    return [judge_call(name, there[name], here[name], cores, here[_WAKE]) for name in here if name in there]


def _bench(only: tuple[str, ...], **settings: str) -> dict[tuple[str, str], tuple[float, float]]:
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", *(f"--only={name}" for name in only)]
    rows = json.loads(_run(command, _environment(**settings)))["rows"]
    return {(row["row"], row["peer"]): (row["ours"], row["theirs"]) for row in rows}


def rows(cores: int) -> list[Verdict]:
    """The bench's rows as differences to the bare call."""
    here = _bench(_BENCH_ONLY)
    return [judge_row(key[0], there, here[key], cores) for key, there in _BENCH.items() if key in here]


def relations(cores: int) -> list[Verdict]:
    """How the engines' hand-overs stand to each other, without MPS and under it."""
    verdicts = []
    for mps, there in (("0", 160.807 / 8.542), ("1", 8.754 / 8.870)):  # medians of handover.txt under MPS
        here = _bench(("hand_over",), IPCSYNC_HOST_MPS=mps)
        event, timeline = (here[f"hand-over ({engine}), p50", "bare futex"][0] for engine in ("event", "timeline"))
        ratio = event / timeline
        note = f"({event:.1f} and {timeline:.1f} µs)"
        holds: bool | None = ratio > 5 if mps == "0" else 1 / _ALIKE <= ratio <= _ALIKE
        if mps == "1" and cores < _HAND_OVER_CORES:  # of the timeline's: recorder, its stream's thread, waiter
            holds, note = None, f"needs {_HAND_OVER_CORES} cores {note}"
        name = f"hand-over, event / timeline, {'under' if mps == '1' else 'without'} MPS"
        verdicts.append(Verdict(name, there, ratio, holds, note))
    return verdicts


_TABLES = {"calls": calls, "rows": rows, "relations": relations}


@click.command()
@click.option("--only", type=click.Choice([*_TABLES]), multiple=True, help="Only this table; may be repeated.")
@click.option("--tries", type=click.IntRange(1, 20), default=3, help="How often a table is measured, at most.")
def main(only: tuple[str, ...], tries: int) -> None:
    """Hold the software driver's profile to a GPU's figures."""
    cores, is_out = len(os.sched_getaffinity(0)), False
    for table in only or tuple(_TABLES):
        verdicts: dict[str, Verdict] = {}
        for turn in range(1, tries + 1):  # noqa: B007 - said below
            for verdict in _TABLES[table](cores):
                verdicts[verdict.name] = nearer(verdicts.get(verdict.name, verdict), verdict)
            if all(verdict.holds is not False for verdict in verdicts.values()):
                break
        click.echo(f"\n{table}, {turn} tries; µs on the GPU, on the profile, ratio; {cores} cores here")
        for verdict in verdicts.values():
            click.echo(verdict.line())
            is_out |= verdict.holds is False
    sys.exit(is_out)


if __name__ == "__main__":
    main()
