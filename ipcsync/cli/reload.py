"""`ipcsync reload`: load new code and settings into a coordinator that has a keeper."""

from __future__ import annotations

import signal
import time

import click

from ipcsync.cli.output import Failed, echo

_PATIENCE_S = 60.0


@click.command("reload")
@click.option("--runtime-dir", metavar="DIR", help="Where it serves. [IPCSYNC_RUNTIME_DIR, else the user's]")
def command(runtime_dir: str | None) -> None:
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
        raise Failed(f"no coordinator serves {path}")
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
    while time.monotonic() < deadline and not keeper.is_dead:
        outcome = read_outcome(path)
        if outcome.began_ns > asked_ns:
            if outcome.why_not:
                raise Failed(f"not reloaded: {outcome.why_not}")
            echo(f"reloaded: {outcome.note}" if outcome.note else "reloaded")
            return
        time.sleep(0.01)
    raise Failed(
        "the keeper ended meanwhile" if keeper.is_dead else f"no outcome within {_PATIENCE_S:g} s; see its log"
    )
