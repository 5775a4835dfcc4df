"""`python -m ipcsync_coordinator`, and what `ipcsync coordinator` becomes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from typing import Any

import click

from ipcsync._logs import configure, fields
from ipcsync_coordinator import config

log = logging.getLogger("ipcsync.coordinator")


def _options(command: click.Command) -> click.Command:
    """One option a setting, so that flags, variables and TOML keys cannot drift apart."""
    for name, setting in reversed(config.FIELDS.items()):
        kind = type(setting.default)
        text = f"{setting.metadata['help']} [IPCSYNC_{name.upper()}; default {setting.default!r}]"
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            option = click.Option([flag], is_flag=True, default=None, help=text)
        else:
            option = click.Option([flag], type=kind, default=None, help=text, metavar=_METAVARS[kind])
        command.params.insert(0, option)
    return command


_METAVARS = {str: "TEXT", int: "N", float: "S"}


@click.command("coordinator", context_settings={"show_default": False})
@click.option("--config", "config_file", metavar="FILE.toml", help="TOML file with settings, named like the flags.")
@click.option("--ready-fd", type=int, hidden=True, help="Descriptor that gets the endpoint once it serves.")
@click.option("--exit-with", metavar="PID:START", hidden=True, help="End with that process.")
def main(config_file: str | None, ready_fd: int | None, exit_with: str | None, **flags: Any) -> None:
    """Run the coordinator until SIGTERM or Ctrl-C.

    It owns every shared CUDA event of one runtime directory, and logs one line when it is ready.

    \b
    Examples:
      ipcsync coordinator
      ipcsync coordinator --runtime-dir /run/ipcsync --devices 0,1 --lease-ttl 10
      IPCSYNC_DRIVER=host ipcsync coordinator --exit-when-idle 60
    """
    try:
        settings = config.load(flags, config_file)
    except config.ConfigError as error:
        raise click.UsageError(str(error)) from None
    configure(settings.log_level, as_json=settings.log_json)
    sys.exit(asyncio.run(_serve(settings, ready_fd, exit_with)))


async def _serve(settings: config.Settings, ready_fd: int | None, exit_with: str | None) -> int:
    os.environ["IPCSYNC_DRIVER"] = settings.driver
    began = time.monotonic()
    from ipcsync_coordinator.notify import ServiceManager
    from ipcsync_coordinator.runtime_dir import RuntimeDir, RuntimeDirError
    from ipcsync_coordinator.server import Server

    manager = ServiceManager()
    try:
        directory = RuntimeDir(settings.runtime_dir)
    except RuntimeDirError as error:
        log.error("cannot start", extra=fields(why=error))
        return 1
    try:
        server = Server(settings, directory, manager.alive)
    except Exception as error:
        directory.close()
        why = f"{type(error).__name__}: {error}"
        log.error("cannot start", extra=fields(why=why), exc_info=not isinstance(error, RuntimeError))
        return 1
    try:
        if exit_with is not None:
            pid, _, started = exit_with.partition(":")
            server.end_with(int(pid), int(started))
        from ipcsync import _drivers

        gc.collect()
        gc.freeze()  # what is there now stays: a full collection that goes through it holds up every request for 10 ms
        log.info(
            "ready",
            extra=fields(
                endpoint=directory.endpoint,
                driver=_drivers.name(),
                devices=len(server.effects.pool.devices),
                pool=settings.pool,
                epoch=server.epoch.hex()[:8],
                start_s=round(time.monotonic() - began, 3),
            ),
        )
        if ready_fd is not None:
            os.write(ready_fd, f"{directory.endpoint}\n".encode())
            os.close(ready_fd)
        manager.ready(f"serves {directory.endpoint}")
        await server.run()
    finally:
        manager.stopping()
        server.close()
    log.info("stopped")
    return server.status


main = _options(main)

if __name__ == "__main__":
    main(prog_name="ipcsync coordinator")
