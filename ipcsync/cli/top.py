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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ipcsync._logs import printable
from ipcsync.cli.output import Failed, Seconds, echo, fitted, is_terminal, labels_of, print_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_TIMEOUT_S = 2.0
# "Known complete" is what the recorder last published; later records are unconfirmed, and may be complete by now.
_EVENTS = ("event", "state", "engine", "recorded", "known complete", "/s", "unconfirmed", "recorder", "attached")
_SESSIONS = ("session", "pid", "events", "connected", "seen", "id")
_TEXTS = ("event", "state", "engine", "recorder", "session", "id")
_SHORTENED = ("event", "recorder", "session")
_LEFT_OUT = {
    _EVENTS: ("attached", "known complete", "unconfirmed", "recorded"),
    _SESSIONS: ("connected", "events"),
}
_SAMPLES = 16
_LINES_AROUND = 11  # lines for heads, blank lines, the summary, and the last line


@click.command("top")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a sample, for a program.")
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.option("--period", type=Seconds(0.1, 3600), default=1.0, metavar="S", help="Seconds between samples. [1]")
@click.option("--endpoint", metavar="ENDPOINT", help="Where it is. [IPCSYNC_ENDPOINT, else the runtime directory's]")
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
    from ipcsync._wire import endpoints

    try:
        where = endpoint or endpoints.default_endpoint()
    except ValueError as error:
        raise Failed(str(error)) from None
    watcher = _Watcher(where)
    try:
        if as_json or once or not is_terminal(sys.stdout):
            _print(watcher, period, as_json=as_json, once=once)
        else:
            _show(watcher, period)
    except KeyboardInterrupt:
        return  # the usual end
    finally:
        watcher.close()


class _Watcher:
    """Takes samples of the coordinator at one endpoint, whichever that is at the moment."""

    def __init__(self, endpoint: str) -> None:
        from ipcsync._rates import Tracks
        from ipcsync._session.reader import Reader

        self._reader = Reader(endpoint, _TIMEOUT_S)
        self._epoch = ""
        self._tracks = Tracks(_SAMPLES)

    def sample(self) -> dict[str, Any]:
        """The present state. Raises IpcSyncError if the coordinator cannot be asked."""
        from msgspec.structs import asdict

        reader = self._reader
        stats = reader.stats()
        if stats["epoch"] != self._epoch:
            self._epoch = stats["epoch"]
            self._tracks.clear()
        tracks = self._tracks.see(reader.list_events(), time.monotonic())
        rows = [asdict(track.info) for track in tracks]
        return {
            "time": time.time(),
            "version": stats["version"],
            "endpoint": reader.endpoint,
            "epoch": stats["epoch"],
            "driver": stats["driver"],
            "stats": stats,
            "sessions": [asdict(row) for row in reader.list_sessions()],
            "events": [
                {**row, "label": label, "rate": track.rate, "pending_s": round(track.pending_s, 3)}
                for row, label, track in zip(rows, labels_of(rows), tracks, strict=True)
            ],
        }

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()


# --- as text ----------------------------------------------------------------------------------------------------------


def _print(watcher: _Watcher, period: float, *, as_json: bool, once: bool) -> None:
    while True:
        found = watcher.sample()
        if as_json:
            click.echo(json.dumps(found))
        else:
            echo(_summary(found))
            if found["sessions"]:
                echo()
                _print_table(_SESSIONS, [_session(session) for session in found["sessions"]])
            if found["events"]:
                echo()
                _print_table(_EVENTS, [_event(event) for event in found["events"]])
            echo()
        sys.stdout.flush()
        if once:
            return
        time.sleep(period)


def _print_table(columns: tuple[str, ...], rows: Sequence[Sequence[object]]) -> None:
    print_table(columns, rows, shortened=_SHORTENED, left_out=_LEFT_OUT[columns])


def _summary(found: dict[str, Any]) -> str:
    stats = found["stats"]
    deaths = sum(stats["deaths"].values())
    return (
        f"up {stats['uptime_s']:.0f} s   sessions {len(found['sessions'])}   events {stats['events']}   "
        f"pool {stats['pool_in_use']}/{stats['pool_size']}   quarantined {stats['quarantined']}   deaths {deaths}   "
        f"refusals {sum(stats['refusals'].values())}"
    )


def _session(session: dict[str, Any]) -> list[object]:
    return [
        session["name"] or "(no name)",
        session["pid"],
        session["events"],
        f"{session['connected_s']:.0f} s",
        f"{session['last_seen_s']:.1f} s ago",
        session["id"],
    ]


def _event(event: dict[str, Any]) -> list[object]:
    rate = event["rate"]
    return [
        event["label"],
        event["state"],
        event["engine"],
        event["generation"],
        event["completed"],
        None if rate is None else round(rate, 1),
        f"{event['pending_s']:.1f} s" if event["pending_s"] else None,
        event["recorder"] or None,
        event["attached"],
    ]


# --- on a terminal ----------------------------------------------------------------------------------------------------


def _show(watcher: _Watcher, period: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the terminal is restored
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(watcher, console), refresh=True)
            if pressed(period) in (b"q", b"Q", b"\x04"):
                return


def _screen(watcher: _Watcher, console: Console) -> RenderableType:
    from rich.text import Text

    from ipcsync.errors import IpcSyncError

    try:
        return _picture(watcher.sample(), console.width, console.height)
    except IpcSyncError as error:
        return Text(f"{printable(str(error))}\n\nwaiting for it; q ends", style="bold red")


def _picture(found: dict[str, Any], width: int, height: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    styles = {"open": "green", "broken": "bold red", "closed": "dim"}
    # Broken and stuck ones first, then the busiest: the rest may not fit.
    events = sorted(
        found["events"], key=lambda row: (row["state"] != "broken", -row["pending_s"], -(row["rate"] or 0), row["name"])
    )
    # The longest silent first, since they may be stuck.
    sessions = sorted(found["sessions"], key=lambda row: (-round(row["last_seen_s"]), row["name"], row["id"]))
    room = max(height - _LINES_AROUND, 2)
    for_sessions = min(len(sessions), max(room // 3, room - len(events), 1))
    for_events = max(room - for_sessions, 1)
    session_table = _table(_SESSIONS, [_session(session) for session in sessions[:for_sessions]], width)
    state_styles = [styles.get(event["state"], "") for event in events[:for_events]]
    event_table = _table(_EVENTS, [_event(event) for event in events[:for_events]], width, state_styles)
    left_out = [
        f"{count} more {what}"
        for count, what in ((len(sessions) - for_sessions, "sessions"), (len(events) - for_events, "events"))
        if count > 0
    ]
    return Group(
        Text(printable(found["endpoint"]), style="bold", no_wrap=True, overflow="ellipsis"),
        Text(_summary(found), no_wrap=True, overflow="ellipsis"),
        session_table,
        event_table,
        Text("; ".join([*left_out, "q ends"]), style="dim"),
    )


def _table(
    columns: tuple[str, ...], rows: Sequence[Sequence[object]], width: int, state_styles: Sequence[str] = ()
) -> Table:
    """A table in which state, engine, rate and recorder are always to be seen: names are shortened before."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    texts = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    kept, texts = fitted(columns, texts, width, _SHORTENED, _LEFT_OUT[columns])
    names = [columns[i] for i in kept]
    table = Table(box=box.SIMPLE, pad_edge=False, expand=True)
    for name in names:
        is_text = name in _TEXTS
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    for number, row in enumerate(texts):
        cells = [Text(cell) for cell in row]  # as text: names may look like markup
        if state_styles:
            cells[names.index("state")].stylize(state_styles[number])
        table.add_row(*cells)
    return table


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """A function that waits up to `seconds` for a key, and returns it, or b""."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: os.read(fd, 1) if select.select([fd], [], [], seconds)[0] else b""
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> bytes:
    time.sleep(seconds)
    return b""
