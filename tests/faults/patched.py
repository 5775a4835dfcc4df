"""A coordinator with a fault built in: `python -m tests.faults.patched PATCH [flags of the coordinator]`."""

from __future__ import annotations

import os
import runpy
import sys
import time
from functools import partial
from typing import Any

from ipcsync.cli import become
from tests.faults import actions

LATE_S = 0.45


def late_replies() -> None:
    """Each attachment is decided at once, and its reply is sent late."""
    from ipcsync_coordinator.handlers import Handlers

    decide = Handlers._open

    def decide_and_dawdle(self: Handlers, session: Any, body: Any) -> Any:
        reply = decide(self, session, body)
        if body.name.startswith("late"):
            time.sleep(LATE_S)
        return reply

    Handlers._open = decide_and_dawdle  # type: ignore[method-assign]


def jumping_wall_clock() -> None:
    """The wall clock jumps about by years."""
    actions.jump_the_wall_clock()


def journal_off() -> None:
    """No journal is kept: what one costs is seen beside it."""
    from ipcsync_coordinator.journal import Journal

    for name in ("append", "carried_out", "make_room", "end_request"):
        setattr(Journal, name, lambda *_: None)
    Journal.begin_request = lambda *_: False  # type: ignore[method-assign]


def hanging_driver() -> None:
    """The driver makes no event while the file named by IPCSYNC_TEST_SCRIPT exists; half a second is waited for it.

    A coordinator without a heartbeat is killed after a quarter of the usual time.
    """
    from ipcsync_keeper import keeper, link
    from ipcsync_keeper.resources import EventStore

    make = EventStore.make

    def make_later(self: EventStore, device: str, count: int) -> Any:
        while os.path.exists(os.environ["IPCSYNC_TEST_SCRIPT"]):
            time.sleep(0.01)
        return make(self, device, count)

    EventStore.make = make_later  # type: ignore[method-assign]
    link._PATIENCE_S = 0.5
    keeper._PATIENCE_S = 2.5


def scripted() -> None:
    """What the file named by IPCSYNC_TEST_SCRIPT says, each time anew: see `tests.faults.dying`."""
    from tests.faults import dying

    dying.follow(os.environ["IPCSYNC_TEST_SCRIPT"])


def main() -> None:
    """Patch, then be a coordinator."""
    patches = {
        "hanging-driver": hanging_driver,
        "journal-off": journal_off,
        "late-replies": late_replies,
        "jumping-wall-clock": jumping_wall_clock,
        "scripted": scripted,
    }
    name = sys.argv.pop(1)
    patches[name]()
    if sys.argv[1:2] == ["ipcsync_keeper"]:
        del sys.argv[1]
        runpy.run_module("ipcsync_keeper", run_name="__main__", alter_sys=True)
    from ipcsync_coordinator import __main__ as program

    program.PROGRAM[:] = ["-m", "tests.faults.patched", name]
    if name == "hanging-driver":  # it is the keeper's, if there is one
        program.become = partial(become, "tests.faults.patched", name)  # type: ignore[attr-defined]
    coordinate = program.main
    coordinate(prog_name="ipcsync coordinator")


if __name__ == "__main__":
    main()
