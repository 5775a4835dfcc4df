"""What came of a run's steps, and the files that say it: summary.md, failures.md, figures.txt."""

from __future__ import annotations

import json
import platform
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

NOT_REAL = "**Not a real GPU.** Nothing here says anything of one."


@dataclass(frozen=True)
class Failure:
    """One failed test; two of one `kind` differ in numbers and names at most."""

    test: str
    kind: str
    trace: str


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
        said = "ok" if self.status == 0 else f"exit status {self.status}"
        if self.status == -signal.SIGKILL:
            said = "killed at its time limit"
        counts = ", ".join(f"{count} {what}" for what, count in self.counts.items() if count)
        return f"{said}; {counts}" if counts else said


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # a run that was killed amid its line
                yield json.loads(line)


def kind_of(message: str) -> str:
    """What two failures of the same cause have in common: the message's first line, without numbers and quotes."""
    first = message.strip().split("\n")[0] if message.strip() else "no message"
    return re.sub(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"", "…", first)[:160]


def outcomes_of(path: Path, step: str = "") -> tuple[dict[str, int], list[Failure]]:
    """The counts and the failures that `tests.gpu.instant` wrote, of one step or of all.

    A test that is never heard of again counts as unfinished, and as failed: its driver's call did not return.
    """
    last: dict[str, dict[str, Any]] = {}
    for line in _lines(path):
        if not step or line["step"] == step:
            before = last.get(line["test"], {}).get("what")
            if line["what"] == "started" or before != "failed":  # a failed call, then a teardown that is skipped
                last[line["test"]] = line
    names = {"started": "unfinished"}
    counts = dict.fromkeys(("passed", "failed", "skipped", "unfinished"), 0)
    failures = []
    for test, line in last.items():
        counts[names.get(line["what"], line["what"])] += 1
        if line["what"] == "failed":
            failures.append(Failure(test, kind_of(line["message"]), line["trace"]))
        elif line["what"] == "started":
            failures.append(Failure(test, "it was under way when its step was killed", "no trace"))
    return counts, failures


def summary(outcomes: Sequence[Outcome], device: str, is_real: bool, left_out: dict[str, str]) -> str:
    """The run on one page."""
    kinds = len({failure.kind for outcome in outcomes for failure in outcome.failures})
    return "\n".join(
        [
            "# A run on this machine",
            "",
            *([] if is_real else [NOT_REAL, ""]),
            f"{date.today()}, `{device}`, Linux {platform.release()}, Python {platform.python_version()}.",
            "",
            "| step | seconds | what came of it |",
            "|---|---|---|",
            *(f"| {outcome.name} | {outcome.took_s:.0f} | {outcome.in_words()} |" for outcome in outcomes),
            "",
            f"{kinds} kinds of failures: failures.md has the first of each.",
            "",
            *(f"Left out: `{test}`: {reason}." for test, reason in left_out.items()),
            *([""] if left_out else []),
        ]
    )


def first_failures(outcomes: Sequence[Outcome]) -> str:
    """The first failure of each kind, with its trace, and which tests failed so."""
    by_kind: dict[str, list[Failure]] = {}
    for outcome in outcomes:
        for failure in outcome.failures:
            by_kind.setdefault(failure.kind, []).append(failure)
    parts = []
    for kind, failures in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        tests = "\n".join(f"- `{failure.test}`" for failure in failures)
        parts.append(f"## {len(failures)} x {kind}\n\n{tests}\n\n```\n{failures[0].trace.strip()}\n```\n")
    return "# The first failure of each kind\n\n" + ("\n".join(parts) or "None.\n")


def figures(bench: Path) -> str:
    """One figure a line: row, peer, ours, theirs, unit."""
    rows = [row for run in _lines(bench) for row in run["rows"]]
    return "".join(f"{row['row']}\t{row['peer']}\t{row['ours']}\t{row['theirs']}\t{row['unit']}\n" for row in rows)
