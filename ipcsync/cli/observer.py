"""`ipcsync observer`: becomes the observer, of which nothing is imported here."""

from __future__ import annotations

import os
import sys

import click

from ipcsync.cli.output import Failed


@click.command(
    "observer",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
    short_help="Serve a page and metrics of a coordinator.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Serve a page and metrics of a coordinator; its own --help tells its settings."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        # Exec, so that a supervisor's signals reach the observer itself.
        os.execv(sys.executable, [sys.executable, "-m", "ipcsync_observer", *arguments])  # noqa: S606 - no shell
    except OSError as error:
        raise Failed(f"cannot start {sys.executable}: {error.strerror}") from error
