"""`python -m ipcsync_bridge.doctor`, and what `ipcsync doctor --fleet` becomes: whether a bridge could work here."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import click

from ipcsync.cli.output import Command
from ipcsync_bridge import config


@click.command(
    "doctor --fleet", cls=Command, context_settings={"show_default": True, "auto_envvar_prefix": config.VARIABLES}
)
@config.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")
def main(as_json: bool, **given: Any) -> None:
    """Try what a bridge with these settings needs: servers, permissions, certificates, the store, the node's name.

    \b
    Examples:
      ipcsync doctor --fleet --node prefill-0 --nats nats://127.0.0.1:4222

    Nothing is left behind, and a bridge that runs is not disturbed. Exit status 1 if a check failed.
    """
    logging.getLogger("ipcsync.bridge").addHandler(logging.NullHandler())  # the findings say it
    settings = config.load(given)  # before what needs nats-py, whose absence it reports
    from ipcsync_bridge import checks

    asyncio.run(checks.run(settings)).print(as_json=as_json)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "default")
    main(prog_name="ipcsync doctor --fleet")
