"""The findings, for people and for programs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import click

from ipcsync.cli.output import print_json, styled

Result = Literal["ok", "warn", "fail", "skipped"]
Outcome: TypeAlias = tuple[Result, str, str]
"""Of a check, as in its `Finding`."""

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "bright_black"}


@dataclass(frozen=True)
class Finding:
    """The result of one check: `detail` says what was tried and found, `advice` what to do (may be empty)."""

    name: str
    result: Result
    detail: str
    advice: str = ""


class Findings(list[Finding]):
    """Those of checks done one after another; `skips` is the outcome of all that a failure makes meaningless."""

    skips: Outcome | None = None

    def add(self, name: str, outcome: Outcome, *, is_vital: bool) -> None:
        """Add what came of a check; `is_vital`: whether the later ones mean nothing if it failed."""
        self.append(Finding(name, *outcome))
        if outcome[0] == "fail" and is_vital:
            self.skips = "skipped", f"not tried: {name} failed", ""

    def print(self, *, as_json: bool) -> None:
        """Print them; exit with status 1 if a check failed."""
        if as_json:
            print_json({"checks": [asdict(finding) for finding in self]})
        else:
            show(self)
        if any(finding.result == "fail" for finding in self):
            sys.exit(1)


def show(findings: Sequence[Finding]) -> None:
    """Print a line for each, the advice below it, and a summary in one line."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        result = styled(f"{finding.result:<7}", _COLOURS[finding.result])
        click.echo(f"{result}  {finding.name:<{width}}  {finding.detail}")
        for line in textwrap.wrap(finding.advice, 100):
            click.echo(f"{'':<{width + 13}}{line}")
    count = {result: sum(finding.result == result for finding in findings) for result in _COLOURS}
    click.echo(", ".join(f"{number} {result}" for result, number in count.items() if number))
