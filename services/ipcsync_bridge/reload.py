"""A bridge's process, to its end or to the code that is on disk then: that is tried first, and goes on by exec."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from typing import NoReturn

from ipcsync._board.runtime_dir import RELOAD
from ipcsync._linux.process import has_terminal
from ipcsync._linux.service_manager import ServiceManager
from ipcsync._logs import fields
from ipcsync._wire.endpoints import endpoint_in
from ipcsync.cli.output import Failed
from ipcsync.errors import IpcSyncError, NodeNameTaken
from ipcsync_bridge import handover
from ipcsync_bridge.bridge import Bridge
from ipcsync_bridge.config import Settings
from ipcsync_bridge.session import BridgeSession
from ipcsync_bridge.store import owner_id
from ipcsync_bridge.transport import Transport, Unavailable, tls_of

log = logging.getLogger("ipcsync.bridge")

SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, RELOAD))
"""The signals with a handler. They are blocked until there is one, so that none is lost or kills the process."""

_ENDS = {"stopped": 0, "restarted": 1, "expired": 1, "replaced": 3}
_TRIAL_S = 30.0


def run(settings: Settings) -> int:
    """Run a bridge; its exit status. It does not return if other code goes on in this process. Raises Failed."""
    try:
        import uvloop
    except ImportError:
        ended = asyncio.run(_serve(settings))
    else:
        ended = uvloop.run(_serve(settings))  # in which a word takes a fifth less time
    return ended if isinstance(ended, int) else _go_on(*ended)


async def _serve(settings: Settings) -> int | tuple[handover.State, dict[str, str]]:
    """The exit status, or what the code that is on disk now is to go on with."""
    try:
        left, endpoint = handover.take(), endpoint_in(settings.directory)
        if left is not None:
            session = BridgeSession.resumed(endpoint, left.session)
        else:
            session = BridgeSession.opened(endpoint, f"bridge {settings.node}", 5.0)
    except IpcSyncError as error:
        raise Failed(str(error)) from None
    why = "restarted"
    try:
        owner = owner_id(settings.owner_file)
        bridge = Bridge(settings, session, Transport(settings), owner, left)
        manager = ServiceManager()
        reloads = Reloads(bridge, manager)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, bridge.stop, "stopped")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.difference(reloads.signals))
        why = await bridge.run(reloads.serve)
    except (NodeNameTaken, Unavailable) as error:
        raise Failed(str(error)) from None
    finally:
        if why != "reloaded":
            session.close(says_goodbye=why in ("stopped", "replaced"))
    if why == "reloaded":
        return bridge.leave(reloads.began), manager.environment
    log.info("ended", extra=fields(why=why))
    return _ENDS[why]


class Reloads:
    """Upgrades, which signals ask for. The old code goes on until the new one has said that it can."""

    def __init__(self, bridge: Bridge, manager: ServiceManager) -> None:
        self._bridge = bridge
        self._manager = manager
        self._is_under_way = False
        self.began = 0.0
        # Where a terminal can hang up, SIGHUP says that it did.
        self.signals = (RELOAD,) if has_terminal() else (RELOAD, signal.SIGHUP)

    def serve(self) -> None:
        """Take in their signals, since the bridge serves now."""
        for number in self.signals:
            asyncio.get_running_loop().add_signal_handler(number, self.begin)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        self._manager.ready("serving")

    def begin(self) -> None:
        """Begin one, unless one is under way."""
        if not self._is_under_way:
            self._is_under_way = True
            self._manager.reloading()
            self._bridge.begin(self._reload())

    async def _reload(self) -> None:
        why_not = await _try()
        self.began = time.monotonic()
        if why_not is None and not await self._bridge.pause():
            why_not = "the coordinator does not answer what it was asked"
        if why_not is not None:
            log.error("reload", extra=fields(outcome=f"{why_not}; the old code goes on"))
            self._manager.ready(f"not reloaded: {why_not}")
            self._is_under_way = False
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what comes from now on is the new code's
            self._bridge.stop("reloaded")


def _command(*more: str) -> list[str]:
    return [sys.executable, *sys.orig_argv[1:], *more]


async def _try() -> str | None:
    """Why the code on disk cannot go on, None if it can."""
    try:
        trial = await asyncio.create_subprocess_exec(
            *_command("--try-handover", handover.versions()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return f"the new code cannot be started: {error}"
    try:
        _, said = await asyncio.wait_for(trial.communicate(), _TRIAL_S)
    except asyncio.TimeoutError:
        return f"the new code has not said within {_TRIAL_S:g} s whether it can go on"
    finally:
        if trial.returncode is None:
            trial.kill()
            await trial.wait()
    lines = said.decode(errors="replace").strip().splitlines()
    return (lines[-1] if lines else f"status {trial.returncode}") if trial.returncode else None


def answer(theirs: str, settings: Settings) -> None:
    """Return if this code can go on with a state of the formats `theirs`; raise Failed with the reason if not."""
    if theirs != handover.versions():
        raise Failed(
            f"the running bridge has {theirs}, and the new code {handover.versions()}: stop it, and start anew"
        )
    try:
        tls_of(settings)
    except OSError as error:  # ssl.SSLError is one
        raise Failed(f"its certificates cannot be used: {error}") from None


def _go_on(left: handover.State, environment: dict[str, str]) -> NoReturn:
    """Become the code that is on disk now."""
    file = handover.put(left)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(  # noqa: S606 - no shell
        sys.executable, _command(), {**os.environ, **environment, handover.VARIABLE: str(file)}
    )
