"""The commands that ask a running coordinator, without a session: status, top, nodes, reload."""

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
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from ipcsync.cli.output import Failed, Seconds, WrongCall, echo, is_terminal, print_json, print_table
from ipcsync.errors import ConnectError, IpcSyncError

if TYPE_CHECKING:
    from ipcsync._rates import Tracks
    from ipcsync._session.handshake import Reader

_TIMEOUT_S = 2.0
_SAMPLES = 16
_LINES_AROUND = 18  # of `top`: lines for heads, blank lines, the summary, and the last lines
_PATIENCE_S = 60.0  # of `reload`


def with_endpoint(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that takes --endpoint and --runtime-dir."""
    text = "Where the coordinator serves. [IPCSYNC_ENDPOINT, else the user's]"
    command = click.option("--runtime-dir", metavar="DIR", help=text)(command)
    return click.option("--endpoint", metavar="ENDPOINT", help="Its endpoint, in place of its directory.")(command)


def endpoint_of(endpoint: str | None, runtime_dir: str | None) -> str:
    """The endpoint given, else that of the directory given, else the user's. WrongCall if there can be none."""
    from ipcsync._wire import endpoints

    try:
        found = endpoint or (endpoints.endpoint_in(runtime_dir) if runtime_dir else endpoints.default_endpoint())
        endpoints.socket_path(found)
    except (ConnectError, ValueError) as error:
        raise WrongCall(str(error)) from None
    return found


def _look(reader: Reader, tracks: Tracks) -> dict[str, Any]:
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


def _session_row(session: Mapping[str, Any]) -> dict[str, object]:
    return {
        "session": session["name"] or "(no name)",
        "pid": session["pid"],
        "events": session["events"],
        "connected s": round(session["connected_s"], 1),
        "seen s ago": round(session["last_seen_s"], 1),
        "id": session["id"],
    }


def _event_row(event: Mapping[str, Any]) -> dict[str, object]:
    return {
        "event": event["label"],
        "engine": event["engine"],
        "state": event["state"],
        "recorded": event["generation"],
        "known complete": event["completed"],  # as the board has it; more may be complete by now
        "attached": event["attached"],
        "recorder": event["recorder"] or None,
    }


# --- status -----------------------------------------------------------------------------------------------------------


@click.command
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")
@with_endpoint
def status(as_json: bool, endpoint: str | None, runtime_dir: str | None) -> None:
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

    with Reader(endpoint_of(endpoint, runtime_dir), _TIMEOUT_S) as reader:
        found = _look(reader, Tracks(1))
    print_json(found) if as_json else _print_status(found)


def _print_status(found: dict[str, Any]) -> None:
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
    echo()
    if sessions:
        print_table([_session_row(session) for session in sessions])
        _print_rest(stats["sessions"] - len(sessions))
    else:
        echo("no sessions")
    echo()
    if events:
        print_table([{**_event_row(event), "ended": _ended(event), "device": event["device"]} for event in events])
        _print_rest(stats["pool_in_use"] - len(events))
    else:
        echo("no events")


def _processes(stats: dict[str, Any]) -> str:
    own = f"pid {stats['pid']}, {stats['memory_bytes'] / 1e6:.0f} MB"
    if stats["pid"] == stats["keeper_pid"]:
        return f"{own}; no keeper: its death ends every session"
    return f"{own}; keeper {stats['keeper_pid']}, {stats['keeper_memory_bytes'] / 1e6:.0f} MB"


def _starts(stats: dict[str, Any]) -> str:
    if stats["starts"] == 1:
        return "1"
    why = ", ".join(f"{count} {reason}" for reason, count in stats["restarts"].items() if count)
    return f"{stats['starts']} ({why}); the last {stats['start_s']:.0f} s ago, after {stats['pause_s'] * 1000:.0f} ms"


def _print_rest(count: int, what: str = "") -> None:
    """Say how many more there are: beyond the coordinator's limit or the screen, or ended since they were counted."""
    if count > 0:
        echo(f"{count} more {what}".rstrip())


def _ended(event: Mapping[str, Any]) -> str | None:
    return None if event["ended_s"] is None else f"{event['cause'] or event['state']} {event['ended_s']:.0f} s ago"


# --- top --------------------------------------------------------------------------------------------------------------


@click.command
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a sample, for a program.")
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.option("--period", type=Seconds(0.1, 3600), default=1.0, metavar="S", help="Seconds between samples. [1]")
@with_endpoint
def top(as_json: bool, once: bool, period: float, endpoint: str | None, runtime_dir: str | None) -> None:
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
    where = endpoint_of(endpoint, runtime_dir)
    with Reader(where, _TIMEOUT_S) as reader, suppress(KeyboardInterrupt):  # the usual end

        def sample() -> dict[str, Any]:
            return {"time": time.time(), **_look(reader, tracks)}

        if not as_json and not once and is_terminal(sys.stdout):
            _show(sample, period)
            return
        while True:
            click.echo(json.dumps(sample())) if as_json else _print_sample(sample())
            if once:
                return
            time.sleep(period)


def _print_sample(found: dict[str, Any], height: int | None = None) -> None:
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
        f"up {stats['uptime_s']:.0f} s   sessions {stats['sessions']}   events {stats['events']}   "
        f"pool {stats['pool_in_use']}/{stats['pool_size']}"
    )
    echo(f"quarantined {stats['quarantined']}   deaths {deaths}   refusals {refusals}")
    if sessions:
        echo()
        print_table([_session_row(session) for session in sessions[:for_sessions]])
    if events:
        echo()
        shown = events[:for_events]
        late = [(event, f"{since:.1f} s" if (since := event["pending_s"]) else None) for event in shown]
        print_table([{**_event_row(event), "/s": event["rate"], "unconfirmed": told} for event, told in late])
    echo()
    _print_rest(stats["sessions"] - for_sessions, "sessions")
    _print_rest(stats["pool_in_use"] - for_events, "events")


def _show(sample: Callable[[], dict[str, Any]], period: float) -> None:
    from rich.console import Console

    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the terminal is restored
    with _keys() as pressed, console.screen():
        while True:
            console.clear()
            try:
                found = sample()
                echo(found["endpoint"])
                _print_sample(found, console.height)
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


# --- nodes ------------------------------------------------------------------------------------------------------------


@click.command
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")
@with_endpoint
@click.option("--timeout", default=5.0, type=Seconds(0.1, 600), metavar="S", show_default=True)
def nodes(as_json: bool, endpoint: str | None, runtime_dir: str | None, timeout: float) -> None:
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

    with Reader(endpoint_of(endpoint, runtime_dir), timeout) as reader:
        found = reader.nodes()
    if as_json:
        print_json([{**asdict(node), "epoch": node.epoch.hex()} for node in found])
        return
    echo("1 node" if len(found) == 1 else f"{len(found)} nodes")
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
            for node in found
        ]
    )


# --- reload -----------------------------------------------------------------------------------------------------------


@click.command
@click.option("--runtime-dir", metavar="DIR", help="Where it serves. [IPCSYNC_RUNTIME_DIR, else the user's]")
def reload(runtime_dir: str | None) -> None:
    """Replace the coordinator by one with the code and settings that are on disk now. No session ends.

    \b
    Examples:
      ipcsync reload
      ipcsync reload --runtime-dir /run/ipcsync

    The new code is started beside the old one, and takes over if it speaks the same versions of everything; requests
    pause meanwhile for some milliseconds. It says which settings changed, and which only a restart changes. Exit status
    1, and why, if it cannot: the old one goes on then.
    """
    from ipcsync._board.runtime_dir import KEEPER, RELOAD, read_outcome, who_serves
    from ipcsync._linux.process import PidFd, pid_namespace
    from ipcsync._wire import endpoints

    path = runtime_dir or endpoints.runtime_dir()
    found = who_serves(path)
    if found is None:
        raise Failed(f"no coordinator that uid {os.getuid()} can see serves {path}")
    pid = found.pid
    if not pid:
        raise Failed(f"a coordinator serves {path}, but the file lock there does not say which: try again in a second")
    if found.namespace not in (0, pid_namespace()):
        raise Failed(f"the keeper (pid {pid}) has its pid in another pid namespace: run `ipcsync reload` in that one")
    if found.role != KEEPER:
        raise Failed(f"the coordinator (pid {pid}) has no keeper: only a restart, which ends all sessions, changes it")
    asked_ns = time.monotonic_ns()
    try:
        keeper = PidFd(pid)
        if who_serves(path) != found:
            raise ProcessLookupError
        signal.pidfd_send_signal(keeper.fileno(), RELOAD)
    except ProcessLookupError:
        raise Failed("the coordinator has just ended") from None
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and not keeper.has_ended(0.01):
        outcome = read_outcome(path)
        if outcome.began_ns > asked_ns:
            if outcome.why_not:
                raise Failed(f"not reloaded: {outcome.why_not}")
            echo(f"reloaded: {outcome.note}" if outcome.note else "reloaded")
            return
    raise Failed("the keeper ended" if keeper.has_ended() else f"no outcome within {_PATIENCE_S:g} s; see its log")
