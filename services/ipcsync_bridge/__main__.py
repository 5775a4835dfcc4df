"""`python -m ipcsync_bridge`, and what `ipcsync bridge` becomes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ipcsync._wire import endpoints
from ipcsync.cli.output import Failed
from ipcsync_bridge import config

if TYPE_CHECKING:
    from ipcsync_bridge.config import Settings
    from ipcsync_bridge.handover import State

log = logging.getLogger("ipcsync.bridge")
_T = TypeVar("_T")

_FENCED = 3
_ENDS = {"stopped": 0, "restarted": 1, "expired": 1, "replaced": _FENCED}


@click.command("bridge", context_settings={"show_default": True, "auto_envvar_prefix": config.VARIABLES})
@config.options
@click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--log-json", is_flag=True, help="Log JSON instead of key=value.")
@click.option("--try-handover", hidden=True, help="Only say whether a bridge of these formats can be gone on with.")
def main(runtime_dir: str | None, log_level: str, log_json: bool, try_handover: str | None, **given: Any) -> None:
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

    directory = runtime_dir or endpoints.runtime_dir()
    settings = config.load(directory, given)  # before what needs nats-py, whose absence it reports
    from ipcsync_bridge import reload

    if try_handover is not None:
        reload.answer(try_handover, settings)
        return
    configure(log_level, as_json=log_json, libraries=("asyncio", "py.warnings", "nats"))
    signal.pthread_sigmask(signal.SIG_BLOCK, reload.SIGNALS)  # of each thread that is started before there are handlers
    ended = _run(_serve(settings, directory))
    if isinstance(ended, tuple):
        reload.go_on(*ended)
    if ended:
        raise SystemExit(ended)


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run it in uvloop's loop, in which a word takes a fifth less time, or in asyncio's if there is no uvloop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _serve(settings: Settings, directory: str) -> int | tuple[State, dict[str, str]]:
    """The exit status, or what the code that is on disk now is to go on with."""
    from ipcsync import errors
    from ipcsync._linux.service_manager import ServiceManager
    from ipcsync._logs import fields
    from ipcsync_bridge import handover
    from ipcsync_bridge.bridge import Bridge
    from ipcsync_bridge.reload import SIGNALS, Reloads
    from ipcsync_bridge.session import BridgeSession
    from ipcsync_bridge.store import owner_id
    from ipcsync_bridge.transport import Transport, Unavailable

    try:
        left = handover.take()
        if left is not None:
            session = BridgeSession.resumed(settings.endpoint, left.session)
        else:
            session = BridgeSession.opened(settings.endpoint, f"bridge {settings.node}", 5.0)
    except errors.IpcSyncError as error:
        raise Failed(str(error)) from None
    why = "restarted"
    try:
        owner = owner_id(directory, settings.fleet, settings.node)
        bridge = Bridge(settings, session, Transport(settings), owner, left)
        manager = ServiceManager()
        reloads = Reloads(bridge, manager)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, bridge.stop, "stopped")
        for number in reloads.signals:
            loop.add_signal_handler(number, reloads.begin)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        why = await bridge.run(lambda: manager.ready("serving"))
    except (errors.NodeNameTaken, Unavailable) as error:
        raise Failed(str(error)) from None
    finally:
        if why != "reloaded":
            session.close(says_goodbye=why in ("stopped", "replaced"))
    if why == "reloaded":
        return reloads.leave()
    log.info("ended", extra=fields(why=why))
    return _ENDS[why]


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "default")
    main(prog_name="ipcsync bridge")
