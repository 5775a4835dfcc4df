"""`python -m ipcsync_coordinator`, which `ipcsync coordinator` executes."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

import ipcsync
from ipcsync._linux.process import forget_parent
from ipcsync._logs import configure, fields
from ipcsync.cli import become
from ipcsync.cli.output import Command
from ipcsync_keeper import config

if TYPE_CHECKING:
    from ipcsync_coordinator.startup import Startup

log = logging.getLogger("ipcsync.coordinator")


PROGRAM = ["-m", "ipcsync_coordinator"]
"""The command that a keeper starts."""


@click.command("coordinator", cls=Command, context_settings={"show_default": False})
@click.option("--config", "config_file", metavar="FILE.toml", help="TOML file with settings, named like the flags.")
@click.option("--ready-fd", type=int, hidden=True, help="Descriptor that gets the endpoint once it serves.")
@click.option("--exit-with", metavar="PID:START", hidden=True, help="End with that process.")
@click.option("--kept", metavar="PID,FD,…", hidden=True, help="Serve for that keeper, with descriptors that it passes.")
def main(config_file: str | None, ready_fd: int | None, exit_with: str | None, kept: str | None, **flags: Any) -> None:
    """Run the coordinator until SIGTERM or Ctrl-C.

    It owns every shared CUDA event of one runtime directory, and logs `ready` once it serves. It is two processes: a
    keeper, which holds the events, and the coordinator, which the keeper starts, also again when it dies. With
    --no-keeper it is one process, whose death ends every session.

    \b
    Examples:
      ipcsync coordinator
      ipcsync coordinator --runtime-dir /run/ipcsync --devices 0,1 --lease-ttl 10
      IPCSYNC_DRIVER=host ipcsync coordinator --exit-when-idle 60
    """
    forget_parent()
    os.umask(0o077)  # whatever it was: the sockets are for this user, and for all its processes
    try:
        settings = config.load(flags, config_file)
    except config.ConfigError as error:
        if kept is None:
            raise click.UsageError(str(error)) from None
        from ipcsync_coordinator import startup

        startup.refuse(kept, str(error))
        sys.exit(2)
    configure(settings.log_level, as_json=settings.log_json)
    if kept is None and settings.keeper:
        _become_keeper(settings, ready_fd, exit_with)
    sys.exit(asyncio.run(_serve(settings, kept, ready_fd, exit_with)))


def _become_keeper(settings: config.Settings, ready_fd: int | None, exit_with: str | None) -> None:
    """Exec, so that a supervisor's signals reach the keeper; each coordinator gets the same flags."""
    from ipcsync._linux.child import PYTHON
    from ipcsync_keeper.keeper import Plan

    command = [*PYTHON, *PROGRAM, *sys.argv[1:]]  # a kept one heeds neither --ready-fd nor --exit-with
    try:
        plan = msgspec.json.encode(Plan(settings, command, ready_fd, exit_with)).decode()
    except UnicodeEncodeError as error:
        raise click.UsageError(f"not UTF-8: {error.object!r}") from None
    if ready_fd is not None:
        os.set_inheritable(ready_fd, True)
    become("ipcsync_keeper", plan)


async def _serve(settings: config.Settings, kept: str | None, ready_fd: int | None, exit_with: str | None) -> int:
    """Serve with what a keeper hands over, or alone; returns the exit status."""
    # All that serving needs is imported before a kept one has to serve.
    from ipcsync._linux.process import watched
    from ipcsync._linux.service_manager import ServiceManager
    from ipcsync_coordinator import startup
    from ipcsync_coordinator.journal import JournalError
    from ipcsync_coordinator.server import Server
    from ipcsync_keeper.resources import UNREADABLE, report_failure

    what: Startup | None = None
    began, done = time.monotonic(), asyncio.Event()
    manager = ServiceManager()  # a keeper's, if there is one, is not told from here
    try:
        if kept is None:
            os.environ["IPCSYNC_DRIVER"] = settings.driver
            hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # nohup(1) ignores it
            for number in (signal.SIGTERM, signal.SIGINT, *hangup):  # before anything needs to be cleaned up
                asyncio.get_running_loop().add_signal_handler(number, done.set)
            what = startup.create(settings)
        else:
            _freeze()
            what = startup.inherit(kept, {"version": ipcsync.__version__, **dataclasses.asdict(settings)})
            began = time.monotonic()
            fixed = {name: getattr(what.config.settings, name) for name in config.FIXED}
            settings = dataclasses.replace(settings, **fixed)
        server = Server(settings, what, done, manager.alive)
    except JournalError as error:
        log.critical("the journal cannot be read", extra=fields(why=error))
        return UNREADABLE
    except Exception as caught:  # noqa: BLE001 - whatever it is, it is reported
        if what is not None and what.resources is not None:
            what.resources.close()
        return os.EX_TEMPFAIL if report_failure(caught, "a coordinator") and kept is not None else 1
    try:
        _freeze()
        start_s = round(time.monotonic() - began, 3)
        if what.resources is not None:
            server.parent = watched(exit_with) if exit_with is not None else None
            devices = len(what.config.devices)
            what.resources.report_ready(manager, ready_fd, devices=devices, pool=settings.pool, start_s=start_s)
        else:
            sessions, slots, starts = len(server.sessions), server.registry.in_use, what.config.starts
            more = fields(version=ipcsync.__version__, starts=starts, sessions=sessions, slots=slots, start_s=start_s)
            log.info("serving", extra=more)
        await server.run()
    finally:
        manager.stopping()
        server.close()
    if what.resources is None:
        logging.shutdown()
        os._exit(server.status)  # at once: the next coordinator waits for this end, and only memory is left to free
    log.info("stopped")
    return server.status


def _freeze() -> None:
    """Exclude present objects from the garbage collector: a full collection over them delays every request by 10 ms."""
    gc.collect()
    gc.freeze()


def _option(name: str, setting: dataclasses.Field[Any]) -> click.Option:
    """The option of a setting, so that flags, variables and TOML keys stay equal."""
    kind = type(setting.default)
    dashed = name.replace("_", "-")
    flag = f"--{dashed}" + (f"/--no-{dashed}" if kind is bool else "")
    text = f"{setting.metadata['help']} [IPCSYNC_{name.upper()}; default {setting.default!r}]"
    metavar = {bool: None, str: "TEXT", int: "N", float: "S"}[kind]
    value = {"flag_value": True} if kind is bool else {}  # without it click 8.2.0 has None for one that was given
    return click.Option([flag], type=kind, default=None, help=text, metavar=metavar, **value)


main.params[:0] = [_option(name, setting) for name, setting in config.FIELDS.items()]

if __name__ == "__main__":
    main(prog_name="ipcsync coordinator")
