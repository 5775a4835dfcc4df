"""The `ipcsync` command. A subcommand's module is imported when it is called."""

from __future__ import annotations

import importlib
import os

import click

from ipcsync import __version__
from ipcsync._linux.inherited import forget_parent
from ipcsync.cli.output import Command, one_line_for_errors

COMMANDS = {
    "bench": "ipcsync.cli.programs:bench",
    "bridge": "ipcsync.cli.programs:bridge",
    "coordinator": "ipcsync.cli.programs:coordinator",
    "demo": "ipcsync.cli.programs:demo",
    "doctor": "ipcsync.cli.doctor.command:command",
    "nodes": "ipcsync.cli.nodes:command",
    "observer": "ipcsync.cli.programs:observer",
    "reload": "ipcsync.cli.reload:command",
    "status": "ipcsync.cli.status:command",
    "top": "ipcsync.cli.top:command",
    "trace": "ipcsync.cli.trace:command",
}
"""Each subcommand as "module:attribute". The modules import heavy dependencies inside their functions."""


class LazyGroup(Command, click.Group):
    """A group that imports a subcommand's module when the subcommand is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click passes it
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click passes it
        """The subcommand of a name, None for an unknown one."""
        where = COMMANDS.get(cmd_name)
        if where is None:
            return None
        module, _, attribute = where.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
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
