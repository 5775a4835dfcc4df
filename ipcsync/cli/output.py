"""Output of the commands: results to stdout, messages to stderr, plain text if the stream is not a terminal."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, TextIO

import click

from ipcsync._logs import printable
from ipcsync.errors import IpcSyncError

_GAP = "  "
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Failed(click.ClickException):
    """Ends the command with one line on stderr and status 1: it failed."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the line."""
        lines = f"ipcsync: {self.message}".split("\n")
        click.echo("\n".join(map(printable, lines)), file=file, err=file is None)


class WrongCall(Failed):
    """The same with status 2: its arguments are invalid."""

    exit_code = 2


class Seconds(click.FloatRange):
    """A number of seconds in a range, which NaN is not."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - the base class's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """As of any type."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("nan is not a number of seconds", param, ctx)
        return seconds


def open_closed_streams() -> None:
    """Have /dev/null for each standard stream that was closed, as by `>&-`: what is executed here expects three."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(_nowhere(fd), "w" if fd else "r"))  # noqa: SIM115 - for as long as the process lives


def _nowhere(fd: int) -> int:
    """A descriptor of /dev/null: `fd`, if no other file has that number by now."""
    opened = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(fd)
    except OSError:
        os.dup2(opened, fd)
        os.close(opened)
        return fd
    os.set_inheritable(opened, opened == fd)
    return opened


@contextmanager
def one_line_for_errors() -> Iterator[None]:
    """Turn an IpcSyncError, or a stdout without room, into one line on stderr and exit status 1."""
    try:
        yield
        sys.stdout.flush()
    except IpcSyncError as error:
        raise Failed(str(error)) from error
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        forget_output()
        raise Failed(f"cannot write the output: {error.strerror}") from None


def forget_output() -> None:
    """Discard buffered output, which the interpreter would try to write again at its exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def echo(text: str = "", *, err: bool = False) -> None:
    """Print one line on stdout or stderr; unprintable characters, as names may have them, are escaped."""
    click.echo(printable(text), err=err)


def label_of(event: Mapping[str, Any]) -> str:
    """The label of an event in a list: its name, or the recorder of an unnamed one."""
    if event["name"]:
        return str(event["name"])
    return f"(unnamed, of {event['recorder']})" if event["recorder"] else f"(unnamed, slot {event['slot']})"


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def print_json(value: object) -> None:
    """Print a value as indented JSON on stdout."""
    click.echo(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of at least one row on stdout: with lines and bold heads on a terminal, else aligned with blanks.

    Numbers are aligned to the right; None is shown as a dash.
    """
    texts = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    is_right = [
        all(cell is None or isinstance(cell, int | float) for cell in column) for column in zip(*rows, strict=True)
    ]
    if is_terminal(sys.stdout):
        _print_rich(columns, texts, is_right)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *texts, strict=True)]
    for row in [list(columns), *texts]:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_right, strict=True)
        ]
        click.echo(_GAP.join(cells).rstrip())


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], is_right: Sequence[bool]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in zip(columns, is_right, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as text: a name may look like markup
    Console().print(table)
