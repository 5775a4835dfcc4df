"""`ipcsync status`: a coordinator, its sessions and its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ipcsync.cli.asking import endpoint_of, look, print_events, print_sessions, with_endpoint
from ipcsync.cli.output import echo, print_json

_TIMEOUT_S = 2.0


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")
@with_endpoint
def command(as_json: bool, endpoint: str | None) -> None:
    """Show the coordinator, its sessions and its events.

    \b
    Examples:
      ipcsync status
      ipcsync status --json
      ipcsync status --endpoint ipc:///run/user/1000/ipcsync/coordinator.sock

    It takes no session, so it also works while all are taken, and as root. Exit status 1 if there is no coordinator.
    """
    from ipcsync._rates import Tracks
    from ipcsync._session.handshake import Reader

    with Reader(endpoint_of(endpoint), _TIMEOUT_S) as reader:
        found = look(reader, Tracks(1))
    print_json(found) if as_json else _show(found)


def _processes(stats: dict[str, Any]) -> str:
    own = f"pid {stats['pid']}, {_megabytes(stats['memory_bytes'])}"
    if stats["pid"] == stats["keeper_pid"]:
        return f"{own}; no keeper: its death ends every session"
    return f"{own}; keeper {stats['keeper_pid']}, {_megabytes(stats['keeper_memory_bytes'])}"


def _starts(stats: dict[str, Any]) -> str:
    if stats["starts"] == 1:
        return "1"
    why = ", ".join(f"{count} {reason}" for reason, count in stats["restarts"].items() if count)
    return f"{stats['starts']} ({why}); the last {stats['start_s']:.0f} s ago, after {stats['pause_s'] * 1000:.0f} ms"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _show(found: dict[str, Any]) -> None:
    stats, sessions, events = found["stats"], found["sessions"], found["events"]
    facts = {
        "coordinator": found["endpoint"],
        "version": found["version"],
        "epoch": found["epoch"],
        "driver": found["driver"],
        "up": f"{stats['uptime_s']:.0f} s",
        "processes": _processes(stats),
        "starts": _starts(stats),
        "sessions": f"{stats['sessions']} of {stats['max_sessions']}; TTL {stats['lease_ttl_s']:g} s by default",
        "events": f"{stats['pool_in_use']} of {stats['pool_size']}, {stats['quarantined']} in quarantine",
        "kept": ", ".join(f"{count} of {stats['kept_limit'][kind]} {kind}" for kind, count in stats["kept"].items()),
        "deaths": ", ".join(f"{count} by {how}" for how, count in stats["deaths"].items())
        + (", since the last start" if stats["starts"] > 1 else ""),
    }
    width = max(map(len, facts))
    for name, text in facts.items():
        echo(f"{name:<{width}}  {text}")
    click.echo()
    if sessions:
        print_sessions(sessions)
        _tell_rest(stats["sessions"] - len(sessions))
    else:
        click.echo("no sessions")
    click.echo()
    if events:
        print_events(events, {"ended": _ended, "device": lambda event: event["device"]})
        _tell_rest(stats["pool_in_use"] - len(events))
    else:
        click.echo("no events")


def _tell_rest(count: int) -> None:
    if count > 0:  # beyond the coordinator's limit, or ended since they were counted
        click.echo(f"{count} more")


def _ended(event: Mapping[str, Any]) -> str | None:
    return None if event["ended_s"] is None else f"{event['cause'] or event['state']} {event['ended_s']:.0f} s ago"
