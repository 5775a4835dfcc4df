"""A table of what this machine's driver answers where CUDA promises nothing.

    IPCSYNC_DRIVER=cuda python -m tests.gpu.probe_report --out tests/gpu/probed.md

runs the probe tests of the contract suite and writes the table. With --answers FILE it makes the table of answers that
an earlier run wrote there (IPCSYNC_PROBE_OUT=FILE pytest tests/contract). The answers of the software
driver are marked as such: they say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_GRACE_S = 10.0
PROBES = ("tests/contract/test_probes.py", "tests/contract/test_work_probes.py")
_SOURCES = {
    "gpu": "Answers of a real GPU's driver.",
    "software": "**Not a real GPU.** These are the answers of the software driver; they say nothing of a GPU.",
}


@dataclass(frozen=True)
class Answer:
    """What one driver said to one row. `kind` is gpu or software; `version` is 13000 for CUDA 13.0."""

    row: str
    answer: str
    driver: str
    kind: str
    device: str
    version: int
    date: str

    def as_json(self) -> str:
        """As `tests.contract.probes.write_down` writes it."""
        return json.dumps(asdict(self), sort_keys=True)


def read(path: Path) -> list[Answer]:
    """The answers in the file, the last one for each row and device; in the order of the rows' names."""
    lines = path.read_text(encoding="utf-8").splitlines()
    answers = [Answer(**json.loads(line)) for line in lines if line.strip()]
    latest = {(each.kind, each.device, each.row): each for each in answers}
    return [latest[key] for key in sorted(latest)]


def run_probes(path: Path, seconds: float) -> int:
    """Run the probe tests, which write to `path`, on the driver that the environment selects; pytest's exit status.

    A driver's call that never returns costs the answer of one test: its process is killed, and another one goes on.
    """
    plugins = ["-p", "ipcsync", "-p", "timeout", "-p", "xdist"]
    limits = ["-n", "1", "--timeout=30", "--timeout-method=thread", f"--session-timeout={seconds:.0f}"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *limits, *PROBES]
    settings = {**os.environ, "IPCSYNC_PROBE_OUT": str(path)}
    process = subprocess.Popen(command, cwd=_ROOT, env=settings, start_new_session=True)
    try:
        return process.wait(seconds + _GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(answers: Sequence[Answer]) -> str:
    """The answers as Markdown: a section for each device, headed by what it is, its driver's version and the date."""
    parts = ["# What drivers answer where CUDA promises nothing", ""]
    sections = sorted({(each.kind, each.device, each.version) for each in answers})
    for kind, device, version in sections:
        mine = [each for each in answers if (each.kind, each.device, each.version) == (kind, device, version)]
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        parts += [
            f"## {_cell(device)}",
            "",
            _SOURCES[kind],
            "",
            f"Driver `{mine[0].driver}`, CUDA {cuda}, asked on {max(each.date for each in mine)}.",
            "",
            "| row | answer |",
            "|---|---|",
            *(f"| {_cell(each.row)} | {_cell(each.answer)} |" for each in mine),
            "",
        ]
    return "\n".join(parts).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when the table was written, 1 when there was nothing to write or a probe failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.probe_report", description="Make a table of what this machine's driver answers."
    )
    parser.add_argument("--out", type=Path, help="the file to write (default: standard output)")
    parser.add_argument("--seconds", type=float, default=80.0, help="the time for the probes (80)")
    parser.add_argument("--answers", type=Path, help="answers of an earlier run, instead of running the probes now")
    chosen = parser.parse_args(arguments)
    status = 0
    if chosen.answers is not None:
        answers = read(chosen.answers)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "answers.jsonl"
            path.touch()
            status = run_probes(path, chosen.seconds)
            answers = read(path)
    if not answers:
        sys.stderr.write("no answers: the probe tests wrote nothing\n")
        return 1
    text = table(answers)
    if chosen.out is None:
        sys.stdout.write(text)
    else:
        chosen.out.write_text(text, encoding="utf-8")
    if {each.kind for each in answers} != {"gpu"}:
        sys.stderr.write("note: these are not the answers of a real GPU; do not keep them as such\n")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
