"""`python -m ipcsync_bridge`, and what `ipcsync bridge` and `ipcsync doctor --fleet` become."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Any

import click

from ipcsync.cli.output import Command
from ipcsync_bridge import config

_SETTINGS = {"show_default": True, "auto_envvar_prefix": config.VARIABLES}


@click.command("bridge", cls=Command, context_settings=_SETTINGS)
@config.options
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-json", is_flag=True, help="Log JSON instead of key=value.")
@click.option("--try-handover", hidden=True, help="Only say whether a bridge of these formats can be gone on with.")
def main(log_level: str, log_json: bool, try_handover: str | None, **given: Any) -> None:
    """Link the events of this host's coordinator with those of other nodes, over NATS.

    \b
    Examples:
      ipcsync bridge --node prefill-0 --nats nats://127.0.0.1:4222
      ipcsync bridge --node prefill-0 --nats tls://nats:4222 --tls-ca ca.pem --tls-cert node.pem --tls-key node.key

    It is an ordinary client of the coordinator, with one more right. It needs the extra ipcsync[fleet]. SIGHUP has it
    go on with the code and the certificates that are on disk now, and no link is lost. If it has a terminal, SIGUSR2
    does that, and SIGHUP ends it.

    Each option can be a variable, IPCSYNC_BRIDGE_LINK_TTL for --link-ttl; several values are separated by spaces.

    Exit status: 0 when told to stop, 1 when it failed or its coordinator ended, 3 when another machine took its name.
    """
    from ipcsync._logs import configure

    settings = config.load(given)  # before what needs nats-py, whose absence it reports
    from ipcsync_bridge import bridge, upgrade

    if try_handover is not None:
        upgrade.answer(try_handover, settings)
        return
    configure(log_level, as_json=log_json, libraries=("asyncio", "py.warnings", "nats"))
    signal.pthread_sigmask(signal.SIG_BLOCK, bridge.SIGNALS)  # of each thread that is started before there are handlers
    if status := bridge.run(settings):
        raise SystemExit(status)


@click.command("doctor --fleet", cls=Command, context_settings=_SETTINGS)
@config.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")
def doctor(as_json: bool, **given: Any) -> None:
    """Try what a bridge with these settings needs: servers, permissions, certificates, the store, the node's name.

    \b
    Examples:
      ipcsync doctor --fleet --node prefill-0 --nats nats://127.0.0.1:4222

    Nothing is left behind, and a bridge that runs is not disturbed. Exit status 1 if a check failed.
    """
    logging.getLogger("ipcsync.bridge").addHandler(logging.NullHandler())  # the findings say it
    settings = config.load(given)
    from ipcsync_bridge import doctor

    asyncio.run(doctor.run(settings)).print(as_json=as_json)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "default")
    if sys.argv[1:2] == ["doctor"]:
        doctor(sys.argv[2:], prog_name="ipcsync doctor --fleet")
    main(prog_name="ipcsync bridge")
