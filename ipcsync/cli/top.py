"""`ipcsync top`: a live view of a coordinator's events and sessions."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from ipcsync.cli.asking import endpoint_of, look, print_events, print_sessions, with_endpoint
from ipcsync.cli.output import Seconds, echo, is_terminal

_TIMEOUT_S = 2.0
_SAMPLES = 16
_LINES_AROUND = 18  # lines for heads, blank lines, the summary, and the last lines


@click.command("top")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a sample, for a program.")
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.option("--period", type=Seconds(0.1, 3600), default=1.0, metavar="S", help="Seconds between samples. [1]")
@with_endpoint
def command(as_json: bool, once: bool, period: float, endpoint: str | None) -> None:
    """Show the coordinator's events and sessions, live; q or Ctrl-C ends it.

    \b
    Examples:
      ipcsync top
      ipcsync top --period 0.2
      ipcsync top --json --once

    It takes no session, so it also works while all are taken, and as root. On a terminal it waits for a coordinator
    that is gone; else it prints each sample as text, and ends with status 1 if there is no coordinator.
    """
    from ipcsync._rates import Tracks
    from ipcsync._session.handshake import Reader

    tracks = Tracks(_SAMPLES)
    with Reader(endpoint_of(endpoint), _TIMEOUT_S) as reader:

        def sample() -> dict[str, Any]:
            return {"time": time.time(), **look(reader, tracks)}

        try:
            if as_json or once or not is_terminal(sys.stdout):
                _print_each(sample, period, as_json=as_json, once=once)
            else:
                _show(sample, period)
        except KeyboardInterrupt:
            return  # the usual end


# --- as text ----------------------------------------------------------------------------------------------------------


def _print_each(sample: Callable[[], dict[str, Any]], period: float, *, as_json: bool, once: bool) -> None:
    while True:
        found = sample()
        if as_json:
            click.echo(json.dumps(found))
        else:
            _print(found)
        if once:
            return
        time.sleep(period)


def _print(found: dict[str, Any], height: int | None = None) -> None:
    """Print a sample, in so many lines if `height` is given."""
    # Broken and stuck ones first, then the busiest: the rest may not fit.
    events = sorted(
        found["events"], key=lambda row: (row["state"] != "broken", -row["pending_s"], -(row["rate"] or 0), row["name"])
    )
    # The longest silent first, since they may be stuck.
    sessions = sorted(found["sessions"], key=lambda row: (-round(row["last_seen_s"]), row["name"], row["id"]))
    room = len(sessions) + len(events) if height is None else max(height - _LINES_AROUND, 2)
    for_sessions = min(len(sessions), max(room // 3, room - len(events), 1))
    for_events = max(room - for_sessions, 1)
    stats = found["stats"]
    deaths, refusals = sum(stats["deaths"].values()), sum(stats["refusals"].values())
    echo(
        f"up {stats['uptime_s']:.0f} s   sessions {len(sessions)}   events {stats['events']}   "
        f"pool {stats['pool_in_use']}/{stats['pool_size']}"
    )
    echo(f"quarantined {stats['quarantined']}   deaths {deaths}   refusals {refusals}")
    if sessions:
        echo()
        print_sessions(sessions[:for_sessions])
    if events:
        echo()
        print_events(events[:for_events], {"/s": lambda event: event["rate"], "unconfirmed": _unconfirmed})
    echo()
    for count, what in ((len(sessions) - for_sessions, "sessions"), (len(events) - for_events, "events")):
        if count > 0:
            echo(f"{count} more {what}")


def _unconfirmed(event: Mapping[str, Any]) -> str | None:
    return f"{event['pending_s']:.1f} s" if event["pending_s"] else None


# --- on a terminal ----------------------------------------------------------------------------------------------------


def _show(sample: Callable[[], dict[str, Any]], period: float) -> None:
    from rich.console import Console

    from ipcsync.errors import IpcSyncError

    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the terminal is restored
    with _keys() as pressed, console.screen():
        while True:
            console.clear()
            try:
                found = sample()
                echo(found["endpoint"])
                _print(found, console.height)
                echo("q ends")
            except IpcSyncError as error:
                echo(str(error))
                echo("waiting for it; q ends")
            if pressed(period) in (b"q", b"Q", b"\x04"):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """A function that waits up to `seconds` for a key, and returns it, or b""."""
    fds = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    before = [termios.tcgetattr(fd) for fd in fds]
    for fd in fds:
        tty.setcbreak(fd)
    try:
        yield lambda seconds: os.read(fds[0], 1) if select.select(fds, [], [], seconds)[0] else b""
    finally:
        for fd, modes in zip(fds, before, strict=True):
            termios.tcsetattr(fd, termios.TCSADRAIN, modes)
