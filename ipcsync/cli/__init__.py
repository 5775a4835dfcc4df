"""The `ipcsync` command. A subcommand's module is imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

from ipcsync import __version__
from ipcsync._linux.process import forget_parent
from ipcsync.cli.output import Command, Failed, one_line_for_errors

PROGRAMS = {
    "bench": "Measure ipcsync beside the limit.",
    "bridge": "Link this host's events with those of other nodes.",
    "coordinator": "Run the coordinator until SIGTERM or Ctrl-C.",
    "demo": "Send a file through a pipeline of processes, and check what comes out.",
    "observer": "Serve a page and metrics of a coordinator.",
}
"""The commands that execute `python -m ipcsync_NAME`, which has a --help of its own; nothing of it is imported here."""
MODULES = {
    "doctor": "ipcsync.cli.doctor",
    "nodes": "ipcsync.cli.asking",
    "reload": "ipcsync.cli.asking",
    "status": "ipcsync.cli.asking",
    "top": "ipcsync.cli.asking",
    "trace": "ipcsync.cli.trace",
}
"""Where the function of each other one is. The modules import heavy dependencies inside their functions."""
COMMANDS = sorted({*PROGRAMS, *MODULES})


def become(module: str, *arguments: str) -> NoReturn:
    """Go on as `python -m module`, so that a supervisor's signals, or Ctrl-C, reach the program itself."""
    from ipcsync._linux.child import PYTHON

    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(sys.executable, [*PYTHON, "-m", module, *arguments])  # noqa: S606 - no shell
    except OSError as error:
        raise Failed(f"cannot start {sys.executable}: {error.strerror}") from error


class LazyGroup(Command, click.Group):
    """A group that imports a subcommand's module when the subcommand is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click passes it
        """The names, in their order."""
        return COMMANDS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click passes it
        """The subcommand of a name, None for an unknown one."""
        if cmd_name in PROGRAMS:
            return click.Command(
                cmd_name,
                callback=lambda arguments: become(f"ipcsync_{cmd_name}", *arguments),
                params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
                context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
                add_help_option=False,
                short_help=PROGRAMS[cmd_name],
            )
        if cmd_name not in MODULES:
            return None
        command: click.Command = getattr(importlib.import_module(MODULES[cmd_name]), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; an IpcSyncError becomes one line on stderr, and exit status 1."""
        forget_parent()
        with one_line_for_errors():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, name="ipcsync")
@click.version_option(__version__, prog_name="ipcsync")
def main() -> None:
    """Shared CUDA events for processes that share GPUs.

    \b
    Examples:
      ipcsync demo                      see it work: a pipeline of real processes
      ipcsync coordinator               run the daemon that owns the events
      ipcsync status                    what it holds, and for whom
      ipcsync status --json             the same for a program
      ipcsync top                       the same, live
      ipcsync reload                    load new code into the coordinator; no session ends
      ipcsync bridge --help             link it with other nodes, over NATS
      ipcsync nodes                     list the nodes
      ipcsync observer                  serve a page and metrics of it
      ipcsync coordinator --help        every setting of the daemon

    Without a GPU everything runs on the software driver; IPCSYNC_DRIVER=cuda or host chooses. NO_COLOR: no colours.

    Exit status: 0 on success, 1 if the command failed, 2 for invalid arguments.
    """
    driver = os.environ.get("IPCSYNC_DRIVER") or "auto"
    if driver not in ("auto", "cuda", "host"):
        raise click.UsageError(f"IPCSYNC_DRIVER must be auto, cuda or host, but is {driver!r}")
