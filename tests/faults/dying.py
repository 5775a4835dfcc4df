"""A coordinator that dies where a script says: run by `tests.faults.patched scripted`, with or without a keeper.

The script is a file of one line. "die N": SIGKILL at the N-th step from then on that a transition takes, once: the file
is emptied before. "crash": end at the start, with an x in the file "crashes". "short": have too few descriptors to
serve, with an x there. "unread": end at the journal. "version": speak another version of the journal. "noise": greet
the keeper as no coordinator does. "dismissed": at the next events that a request makes it waits until the keeper has
let go of it, once. What is not there, or empty, says nothing.
Whatever it says, a request for an event whose name begins with "poison" ends it, and one with "out of memory" has it
killed.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def follow(path: str) -> None:
    """Have this process follow the script."""
    script = Path(path)
    words = _words(script)
    if words[0] in ("crash", "short"):
        with script.with_name("crashes").open("a") as crashes:
            crashes.write("x")
        if words[0] == "crash":
            sys.exit(7)
        few = len(os.listdir("/proc/self/fd")) + 9  # enough to greet the keeper, too few for ZeroMQ
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    if words[0] == "noise":
        from ipcsync_coordinator import startup

        startup.versions = lambda: {"journal": ["a list"]}  # type: ignore[dict-item] # as no coordinator does
    if words[0] == "version":
        from ipcsync_keeper import resources

        resources.JOURNAL_VERSION += 1
    from ipcsync_coordinator.effects import Effects
    from ipcsync_coordinator.handlers import Handlers
    from ipcsync_coordinator.journal import Journal
    from ipcsync_coordinator.state import SessionTable
    from ipcsync_keeper.link import DriverClient

    if words[0] == "unread":
        Journal.read = lambda _: os._exit(7)  # type: ignore[method-assign,assignment]
    steps = _Steps(script)
    Journal._write = steps.after(Journal._write)  # type: ignore[method-assign] # written, and not valid yet
    Effects._store = steps.before(Effects._store)  # type: ignore[method-assign]
    Journal.carried_out = steps.before(Journal.carried_out)  # type: ignore[method-assign]
    SessionTable.keep = steps.after(steps.before(SessionTable.keep))  # type: ignore[method-assign]
    make = DriverClient.make

    def make_once_dismissed(self: DriverClient, device: str, count: int, then: Any) -> None:
        if _words(script)[0] == "dismissed":
            script.write_text("")
            poll = select.poll()
            poll.register(self.link.socket, select.POLLRDHUP)
            poll.poll()
        make(self, device, count, then)

    DriverClient.make = make_once_dismissed  # type: ignore[method-assign]
    decide = Handlers._open

    def die_of_poison(self: Handlers, session: Any, body: Any) -> Any:
        if body.name.startswith("poison"):
            os._exit(7)
        if body.name.startswith("out of memory"):
            os.kill(os.getpid(), signal.SIGKILL)
        return decide(self, session, body)

    Handlers._open = die_of_poison  # type: ignore[method-assign]


def _words(script: Path) -> list[str]:
    try:
        return script.read_text().split() or [""]
    except FileNotFoundError:
        return [""]


class _Steps:
    """Counts steps while the script says at which to die."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._count = 0

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._step()
            return call(*arguments)

        return counted

    def after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            result = call(*arguments)
            self._step()
            return result

        return counted

    def _step(self) -> None:
        words = _words(self._script)
        if words[0] != "die":
            self._count = 0
            return
        self._count += 1
        if self._count >= int(words[1]):
            self._script.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
