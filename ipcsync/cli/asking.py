"""What the commands have in common that ask a coordinator without a session: where it is, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ipcsync.cli.output import Failed, print_table

if TYPE_CHECKING:
    from ipcsync._session.reader import Reader
    from ipcsync._wire.messages import EventInfo


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


def look(reader: Reader) -> tuple[dict[str, Any], list[EventInfo]]:
    """The coordinator, its sessions and its events, as --json prints them; the events as they came, too."""
    from msgspec.structs import asdict

    stats, events = reader.stats(), reader.list_events()
    found = {
        "version": stats["version"],
        "endpoint": reader.endpoint,
        "epoch": stats["epoch"],
        "driver": stats["driver"],
        "stats": stats,
        "sessions": [asdict(row) for row in reader.list_sessions()],
        "events": [asdict(row) for row in events],
    }
    return found, events


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
