"""The commands that execute a program of their own, of which nothing is imported here."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from ipcsync.cli.output import Failed


def _program(name: str, summary: str) -> click.Command:
    """The command that executes `python -m ipcsync_NAME`, which has a --help of its own."""
    return click.Command(
        name,
        callback=lambda arguments: become(f"ipcsync_{name}", *arguments),
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        add_help_option=False,
        short_help=summary,
    )


def become(module: str, *arguments: str) -> NoReturn:
    """Go on as `python -m module`, so that a supervisor's signals, or Ctrl-C, reach the program itself."""
    from ipcsync._linux.child import PYTHON

    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(sys.executable, [*PYTHON, "-m", module, *arguments])  # noqa: S606 - no shell
    except OSError as error:
        raise Failed(f"cannot start {sys.executable}: {error.strerror}") from error


bench: click.Command = _program("bench", "Measure ipcsync beside the limit.")
bridge: click.Command = _program("bridge", "Link this host's events with those of other nodes.")
coordinator: click.Command = _program("coordinator", "Run the coordinator until SIGTERM or Ctrl-C.")
demo: click.Command = _program("demo", "Send a file through a pipeline of processes, and check what comes out.")
observer: click.Command = _program("observer", "Serve a page and metrics of a coordinator.")
