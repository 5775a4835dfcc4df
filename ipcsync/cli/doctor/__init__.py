"""`ipcsync doctor`: what this machine and two processes on it can do, tested with real calls."""

from __future__ import annotations

import click

from ipcsync.cli import become
from ipcsync.cli.asking import endpoint_of, with_endpoint


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")
@with_endpoint
@click.option(
    "--fleet",
    is_flag=False,
    flag_value="",
    metavar="[NAME]",
    help="Check what a bridge to other nodes needs; takes the bridge's options: --node, --nats, --tls-….",
)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
def doctor(
    as_json: bool, endpoint: str | None, runtime_dir: str | None, fleet: str | None, settings: tuple[str, ...]
) -> None:
    """Check what this machine and two processes on it can do.

    \b
    Examples:
      ipcsync doctor
      ipcsync doctor --json
      ipcsync doctor --endpoint ipc:///run/user/1000/ipcsync/coordinator.sock
      ipcsync doctor --fleet --node prefill-0 --nats nats://127.0.0.1:4222

    It starts processes that record and wait, one of which is killed while it records, on the running coordinator or on
    one of its own. They are gone when it ends. Each check says what was tried, the result, and what to do. With --fleet
    it checks the servers, permissions, certificates and names of a fleet instead. Exit status 1 if a check failed.
    """
    if fleet is not None:
        options = {"--fleet": fleet, "--endpoint": endpoint, "--runtime-dir": runtime_dir}
        given = [part for option, value in options.items() if value for part in (option, value)]
        become("ipcsync_bridge", "doctor", *(["--json"] if as_json else []), *given, *settings)
    if settings:
        raise click.UsageError(f"{settings[0]} is for --fleet only, or is no option")
    from ipcsync.cli.doctor import checks

    checks.run(endpoint_of(endpoint, runtime_dir)).print(as_json=as_json)
