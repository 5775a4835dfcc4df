"""Output of the commands: results to stdout, messages to stderr, plain text if the stream is not a terminal.

And what all have in common besides: errors of one line, the help, and the findings of both doctors.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal, TextIO, TypeAlias

import click

from ipcsync._linux.process import open_standard
from ipcsync._logs import printable
from ipcsync.errors import IpcSyncError

_GAP = 2  # blanks between columns
_SHORTENED = ("session", "event", "recorder")  # columns with names
_ENOUGH, _LEAST = 20, 8  # characters of a shortened cell
# Columns that others go before, the least important one first.
_LEFT_OUT = ("device", "attached", "known complete", "ended", "unconfirmed", "recorded", "connected s", "events")
_STATES = {"open": "green", "broken": "red", "closed": "bright_black"}
_RESULTS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "bright_black"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Failed(click.ClickException):
    """Ends the command with one line on stderr and status 1: it failed."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the line."""
        lines = f"ipcsync: {self.message}".split("\n")
        click.echo("\n".join(map(printable, lines)), file=file, err=file is None)


class WrongCall(Failed):
    """The same with status 2: its arguments are invalid."""

    exit_code = 2


class Seconds(click.FloatRange):
    """A number of seconds in a range, which NaN is not."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As of any type."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("nan is not a number of seconds", param, ctx)
        return seconds


@contextmanager
def one_line_for_errors() -> Iterator[None]:
    """One line on stderr and exit status 1 for an IpcSyncError, an invalid variable, or a stdout without room."""
    try:
        yield
        sys.stdout.flush()
    except IpcSyncError as error:
        raise Failed(str(error)) from error
    except ValueError as error:
        if not str(error).startswith("IPCSYNC_"):  # the variable of the environment that is invalid
            raise
        raise Failed(str(error)) from error
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        forget_output()
        raise Failed(f"cannot write the output: {error.strerror}") from None


class Command(click.Command):
    """A program's command, whose --help, too, ends in one line where stdout has no room."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the arguments; first have /dev/null for each standard stream that was closed, as by `>&-`."""
        open_standard()
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name may be in no encoding but UTF-8
        with one_line_for_errors():
            return super().make_context(*args, **extra)


def forget_output() -> None:
    """Discard buffered output, which the interpreter would try to write again at its exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def echo(text: str = "", *, err: bool = False) -> None:
    """Print one line on stdout or stderr; unprintable characters, as names may have them, are escaped."""
    click.echo(printable(text), err=err)


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def styled(text: str, colour: str | None, *, bold: bool = False) -> str:
    """The text in colour, or bold, where stdout is a terminal and NO_COLOR is not set; else as it is."""
    if not (colour or bold) or os.environ.get("NO_COLOR") or not is_terminal(sys.stdout):
        return text
    return click.style(text, fg=colour, bold=bold or None)


def print_json(value: object) -> None:
    """Print a value as indented JSON on stdout."""
    click.echo(json.dumps(value, indent=2))


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows with the same columns, one at least: aligned, numbers to the right, None as a dash; `fitted`."""
    from rich.cells import cell_len

    columns = list(rows[0])
    texts = [["-" if cell is None else printable(str(cell)) for cell in row.values()] for row in rows]
    is_number = {name: all(row[name] is None or isinstance(row[name], int | float) for row in rows) for name in columns}
    if is_terminal(sys.stdout):
        columns, texts = fitted(columns, texts, shutil.get_terminal_size().columns)
    widths = [max(map(cell_len, column)) for column in zip(columns, *texts, strict=True)]
    for row in [columns, *texts]:
        line = []
        for name, cell, width in zip(columns, row, widths, strict=True):
            blanks = " " * (width - cell_len(cell))
            shown = styled(cell, _STATES.get(cell) if name == "state" else None, bold=row is columns)
            line.append(blanks + shown if is_number[name] else shown + blanks)
        click.echo((" " * _GAP).join(line).rstrip())


def fitted(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """The columns of a table that there is room for on a terminal of that `width`, and the rows with these.

    Columns are left out, the least important first, until those with names have room for 20 characters; cells of these
    then lose their middle, the longest first, down to 8 characters.
    """
    from rich.cells import cell_len

    kept = list(range(len(columns)))
    natural = [max(map(cell_len, [name, *(row[i] for row in rows)])) for i, name in enumerate(columns)]
    enough, least = (
        [min(length, limit) if name in _SHORTENED else length for name, length in zip(columns, natural, strict=True)]
        for limit in (_ENOUGH, _LEAST)
    )

    def room(widths: Sequence[int]) -> int:
        return width - sum(widths[i] for i in kept) - _GAP * (len(kept) - 1)

    for name in _LEFT_OUT:
        if room(enough) < 0 and name in columns:
            kept.remove(columns.index(name))
    widths = list(natural)
    while room(widths) < 0 and (longer := [i for i in kept if widths[i] > least[i]]):
        widths[max(longer, key=lambda i: widths[i])] -= 1
    return [columns[i] for i in kept], [[_without_middle(row[i], widths[i]) for i in kept] for row in rows]


def _without_middle(text: str, width: int) -> str:
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    head, tail = text[: (width - 1) // 2], text[-(width // 2) :]
    while cell_len(short := f"{head}…{tail}") > width:  # some characters take two columns, or change those beside them
        head, tail = (head[:-1], tail) if len(head) >= len(tail) else (head, tail[1:])
    return short


# --- the findings of a doctor -----------------------------------------------------------------------------------------

Result = Literal["ok", "warn", "fail", "skipped"]
Outcome: TypeAlias = tuple[Result, str, str]
"""Of a check, as in its `Finding`."""


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
        """Print a line for each, the advice below it, and a summary, or JSON; exit with status 1 if a check failed."""
        if as_json:
            print_json({"checks": [asdict(finding) for finding in self]})
        else:
            width = max(len(finding.name) for finding in self)
            for finding in self:
                result = styled(f"{finding.result:<7}", _RESULTS[finding.result])
                click.echo(f"{result}  {finding.name:<{width}}  {finding.detail}")
                for line in textwrap.wrap(finding.advice, 100):
                    click.echo(f"{'':<{width + 13}}{line}")
            count = {result: sum(finding.result == result for finding in self) for result in _RESULTS}
            click.echo(", ".join(f"{number} {result}" for result, number in count.items() if number))
        if any(finding.result == "fail" for finding in self):
            sys.exit(1)
