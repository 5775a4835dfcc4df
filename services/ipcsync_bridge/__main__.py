"""`python -m ipcsync_bridge`, and what `ipcsync bridge` becomes."""

from __future__ import annotations

import os
import signal
from typing import Any

import click

from ipcsync.cli.output import Command
from ipcsync_bridge import config


@click.command("bridge", cls=Command, context_settings={"show_default": True, "auto_envvar_prefix": config.VARIABLES})
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

    Each option can be a variable, IPCSYNC_BRIDGE_LINK_TTL for --link-ttl; what may be given more than once is separated
    by spaces.

    Exit status: 0 when it was told to stop, 1 when it failed or its coordinator ended, 3 when another machine has taken
    the node's name.
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


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "default")
    main(prog_name="ipcsync bridge")
