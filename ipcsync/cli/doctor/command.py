"""The command: run the checks, show them, and leave nothing behind."""

from __future__ import annotations

import sys

import click

from ipcsync.cli.output import Failed, print_json


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")
@click.option(
    "--endpoint", metavar="ENDPOINT", help="Which coordinator. [IPCSYNC_ENDPOINT, else the runtime directory's]"
)
def command(as_json: bool, endpoint: str | None) -> None:
    """Try what this machine and two of its processes can do.

    \b
    Examples:
      ipcsync doctor
      ipcsync doctor --json
      ipcsync doctor --endpoint ipc:///run/user/1000/ipcsync/coordinator.sock

    It starts processes of its own that record, wait, and one that is killed while it records; with the coordinator that
    runs, else with one of its own. Nothing of it is left. Each check says what was tried, what came of it, and what to
    do. Exit status 1 if a check failed.
    """
    from ipcsync._wire import endpoints
    from ipcsync.cli.doctor import checks, report

    try:
        where = endpoint or endpoints.default_endpoint()
    except ValueError as error:
        raise Failed(str(error)) from None
    endpoints.socket_path(where)  # refuses what is no endpoint
    found = checks.run(where)
    if as_json:
        print_json(report.as_json(found))
    else:
        report.show(found)
    if any(finding.result == "fail" for finding in found):
        sys.exit(1)
