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

    from ipcsync._session.handshake import Reader

    with Reader(endpoint_of(None, runtime_dir), timeout) as reader:
        nodes = reader.nodes()
    if as_json:
        print_json([{**asdict(node), "epoch": node.epoch.hex()} for node in nodes])
        return
    echo("1 node" if len(nodes) == 1 else f"{len(nodes)} nodes")
    print_table(
        [
            {
                "node": node.name,
                "state": node.state,
                "links": node.links,
                "heard": "" if node.last_heard_s is None else f"{node.last_heard_s:.1f} s ago",
                "epoch": node.epoch.hex()[:8],
                "reason": node.reason,
            }
            for node in nodes
        ]
    )
