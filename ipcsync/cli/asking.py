"""What the commands have in common that ask a coordinator without a session: where it is, and what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ipcsync.cli.output import Failed, print_table

if TYPE_CHECKING:
    from ipcsync._rates import Tracks
    from ipcsync._session.handshake import Reader


def with_endpoint(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes --endpoint."""
    text = "The coordinator. [IPCSYNC_ENDPOINT, else the runtime directory's]"
    return click.option("--endpoint", metavar="ENDPOINT", help=text)(command)


def endpoint_of(endpoint: str | None, runtime_dir: str | None = None) -> str:
    """The endpoint given, else that of the directory given, else the user's. Failed if there can be none."""
    from ipcsync._wire import endpoints

    try:
        return endpoint or (endpoints.endpoint_in(runtime_dir) if runtime_dir else endpoints.default_endpoint())
    except ValueError as error:
        raise Failed(str(error)) from None


def look(reader: Reader, tracks: Tracks) -> dict[str, Any]:
    """The coordinator, its sessions and its events, as --json prints them."""
    from msgspec.structs import asdict

    stats = reader.stats()
    events = [asdict(event) for event in tracks.see(stats["epoch"], reader.list_events(), time.monotonic())]
    for event in events:
        del event["lane"]
    return {
        "version": stats["version"],
        "endpoint": reader.endpoint,
        "epoch": stats["epoch"],
        "driver": stats["driver"],
        "stats": stats,
        "sessions": [asdict(row) for row in reader.list_sessions()],
        "events": events,
    }


def print_sessions(sessions: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of at least one session."""
    print_table(
        [
            {
                "session": row["name"] or "(no name)",
                "pid": row["pid"],
                "events": row["events"],
                "connected s": round(row["connected_s"], 1),
                "seen s ago": round(row["last_seen_s"], 1),
                "id": row["id"],
            }
            for row in sessions
        ]
    )


def print_events(
    events: Sequence[Mapping[str, Any]], more: Mapping[str, Callable[[Mapping[str, Any]], object]]
) -> None:
    """Print a table of at least one event; `more` is what stands in its further columns."""
    print_table(
        [
            {
                "event": row["label"],
                "engine": row["engine"],
                "state": row["state"],
                "recorded": row["generation"],
                "known complete": row["completed"],  # as the recorder last published it; more may be complete by now
                "attached": row["attached"],
                "recorder": row["recorder"] or None,
                **{name: column(row) for name, column in more.items()},
            }
            for row in events
        ]
    )
