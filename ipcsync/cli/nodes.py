"""`ipcsync nodes`: the nodes of the fleet, as the bridge of this one sees them."""

from __future__ import annotations

import click

from ipcsync.cli.asking import endpoint_of
from ipcsync.cli.output import Seconds, echo, print_json, print_table


@click.command("nodes")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")
@click.option("--runtime-dir", metavar="DIR", help="Where the coordinator serves. [IPCSYNC_ENDPOINT, else the user's]")
@click.option("--timeout", default=5.0, type=Seconds(0.1, 600), metavar="S", show_default=True)
def command(as_json: bool, runtime_dir: str | None, timeout: float) -> None:
    """Show the nodes of the fleet, this one first.

    \b
    Examples:
      ipcsync nodes
      ipcsync nodes --json

    The state is "linked" (events of it are mirrored here), "known" (it is in the store of names) or "lost", with the
    reason. Exit status 1 if there is no coordinator, no bridge beside it, or the store does not answer.
    """
    from msgspec.structs import asdict

    from ipcsync._session.reader import Reader

    with Reader(endpoint_of(None, runtime_dir), timeout) as reader:
        rows = [{**asdict(row), "epoch": row.epoch.hex()} for row in reader.nodes()]
    if as_json:
        print_json(rows)
        return
    echo("1 node" if len(rows) == 1 else f"{len(rows)} nodes")
    for row in rows:
        row["heard"] = "" if row["last_heard_s"] is None else f"{row['last_heard_s']:.1f} s ago"
        row["epoch"] = row["epoch"][:8]
    columns = ["name", "state", "links", "heard", "epoch", "reason"]
    print_table(["node", *columns[1:]], [[row[column] for column in columns] for row in rows])
