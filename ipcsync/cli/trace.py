"""`ipcsync trace`: the traces of several processes as one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ipcsync.cli.output import Failed, WrongCall, echo, forget_output

if TYPE_CHECKING:
    from ipcsync._trace.file import ProcessTrace

_COUNTED = ("processes", "records", "waits", "synchronizations", "arrows")


@click.group
def trace() -> None:
    """Work with the traces that processes write while IPCSYNC_TRACE names a directory.

    \b
    Examples:
      IPCSYNC_TRACE=traces ipcsync demo
      ipcsync trace merge traces -o trace.json
    """


@trace.command
@click.argument("directory")
@click.option("-o", "--output", default="trace.json", show_default=True, metavar="FILE", help="Output; - is stdout.")
def merge(directory: str, output: str) -> None:
    """Make one file of all traces in DIRECTORY, for Perfetto and chrome://tracing.

    \b
    Examples:
      ipcsync trace merge traces
      ipcsync trace merge traces -o run.json

    Each process is a track group with a track for each stream; an arrow leads from each record to the waits that it
    released. Processes that were killed, or still run, appear up to their last entry.

    A file that is empty, damaged or not a trace is named on stderr, and left out.

    Exit status: 1 if no trace can be read; 2 if the output cannot be written.
    """
    from ipcsync._trace.file import TraceError
    from ipcsync._trace.merge import Merge

    try:
        merged = Merge(_read(directory))
        with click.open_file(output, "w", encoding="utf-8") as file:
            counts = merged.write(file)
            file.flush()
    except TraceError as error:
        raise Failed(str(error)) from None
    except OSError as error:
        if output == "-":
            forget_output()
        if isinstance(error, BrokenPipeError):
            raise  # its reader has enough: ended as the other commands are
        raise WrongCall(f"cannot write {output}: {error.strerror}") from None
    text = ", ".join(f"{counts[what]} {what}" for what in _COUNTED)
    if counts["unmatched"]:
        text += f"; {counts['unmatched']} releases whose record is in none of the files"
    if counts["lost"]:
        text += f"; {counts['lost']} entries lost, overwritten by later ones"
    echo(f"{output}: {text}", err=True)


def _read(directory: str) -> list[ProcessTrace]:
    """The traces in a directory; one that cannot be read is named on stderr."""
    from ipcsync._trace.file import TraceError, files_in, read

    if not os.path.isdir(directory):
        raise Failed(f"there is no directory {directory}: name the one that IPCSYNC_TRACE named")
    paths = files_in(directory)
    if not paths:
        raise Failed(f"there is no trace in {directory}; processes write one while IPCSYNC_TRACE names the directory")
    found = []
    for path in paths:
        try:
            found.append(read(path))
        except TraceError as error:  # noqa: PERF203 - once a file
            echo(f"ipcsync: left out: {error}", err=True)
        except OSError as error:
            echo(f"ipcsync: left out: cannot read {path}: {error.strerror}", err=True)
    if not found:
        raise Failed(f"none of the {len(paths)} files in {directory} is a readable trace")
    return found
