"""`ipcsync trace`: what the processes of a run wrote, as one trace."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ipcsync.cli.output import Failed, WrongCall

if TYPE_CHECKING:
    from ipcsync._trace.merge import Summary
    from ipcsync._trace.reader import ProcessTrace


@click.group("trace")
def command() -> None:
    """Work with what processes write while IPCSYNC_TRACE names a directory.

    \b
    Examples:
      IPCSYNC_TRACE=traces ipcsync demo
      ipcsync trace merge traces -o trace.json
    """


@command.command("merge")
@click.argument("directory")
@click.option("-o", "--output", default="trace.json", show_default=True, metavar="FILE", help="Where to; - is stdout.")
def merge(directory: str, output: str) -> None:
    """Make one file of all traces in DIRECTORY, for Perfetto and chrome://tracing.

    \b
    Examples:
      ipcsync trace merge traces
      ipcsync trace merge traces -o run.json

    A process is a track group, with a track for each stream, and an arrow from each record to the waits that it
    released. Processes that were killed, or still run, are there up to their last entry.

    Exit status: 1 if there is no trace there, or one that cannot be read; 2 if the output cannot be written.
    """
    from ipcsync._trace.merge import Merge
    from ipcsync._trace.reader import TraceError

    try:
        merged = Merge(_read(directory))
        if output == "-":
            summary = merged.write(sys.stdout)
        else:
            with open(output, "w", encoding="utf-8") as file:
                summary = merged.write(file)
    except TraceError as error:
        raise Failed(str(error)) from None
    except OSError as error:
        raise WrongCall(f"cannot write {output}: {error.strerror}") from None
    click.echo(_told(summary, output), err=True)


def _read(directory: str) -> list[ProcessTrace]:
    from ipcsync._trace import reader

    paths = reader.files_in(directory)
    if not paths:
        raise Failed(f"there is no trace in {directory}; processes write one while IPCSYNC_TRACE names the directory")
    try:
        return [reader.read(path) for path in paths]
    except OSError as error:
        raise Failed(f"cannot read {error.filename}: {error.strerror}") from None


def _told(summary: Summary, output: str) -> str:
    text = (
        f"{output}: {summary.processes} processes, {summary.records} records, {summary.waits} waits, "
        f"{summary.synchronizations} synchronizations, {summary.arrows} arrows"
    )
    if summary.unmatched:
        text += f"; {summary.unmatched} releases whose record is in none of the files"
    if summary.lost:
        text += f"; {summary.lost} entries lost, which later ones were written over"
    return text
