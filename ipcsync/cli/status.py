"""`ipcsync status`: a coordinator, its sessions and its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ipcsync.cli.asking import endpoint_of, look, print_sessions, with_endpoint
from ipcsync.cli.output import echo, labels_of, print_json, print_table

if TYPE_CHECKING:
    from ipcsync import EventInfo

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
    from ipcsync._session.reader import Reader

    with Reader(endpoint_of(endpoint), _TIMEOUT_S) as reader:
        found, events = look(reader)
    if as_json:
        print_json(found)
    else:
        _show(found, events)


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


def _since(stats: dict[str, Any]) -> str:
    return ", since the last start" if stats["starts"] > 1 else ""


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _show(found: dict[str, Any], events: Sequence[EventInfo]) -> None:
    stats, sessions = found["stats"], found["sessions"]
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
        "deaths": ", ".join(f"{count} by {how}" for how, count in stats["deaths"].items()) + _since(stats),
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
        print_table([_event(label, row) for label, row in zip(labels_of(events), events, strict=True)])
        _tell_rest(stats["pool_in_use"] - len(events))
    else:
        click.echo("no events")


def _tell_rest(count: int) -> None:
    if count > 0:  # beyond the coordinator's limit, or ended since they were counted
        click.echo(f"{count} more")


def _event(label: str, event: EventInfo) -> dict[str, object]:
    cause = event.cause or event.state
    return {
        "event": label,
        "engine": event.engine,
        "state": event.state,
        "recorded": event.generation,
        "known complete": event.completed,  # as the recorder last published it; more may be complete by now
        "attached": event.attached,
        "recorder": event.recorder or None,
        "ended": None if event.ended_s is None else f"{cause} {event.ended_s:.0f} s ago",
        "device": event.device,
    }
