"""A coordinator with a fault built in: `python -m tests.faults.patched PATCH [flags of the coordinator]`."""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.faults import actions

LATE_S = 0.45


def late_replies() -> None:
    """Each attachment is decided at once, and its reply is sent late."""
    from ipcsync_coordinator.handlers import Handlers

    decide = Handlers._open

    def decide_and_dawdle(self: Handlers, entry: Any, body: Any) -> Any:
        reply = decide(self, entry, body)
        end = time.monotonic() + LATE_S
        while body.name.startswith("late") and time.monotonic() < end:
            continue
        return reply

    Handlers._open = decide_and_dawdle  # type: ignore[method-assign]


def jumping_wall_clock() -> None:
    """The wall clock jumps about by years."""
    actions.jump_the_wall_clock()


def main() -> None:
    """Patch, then be a coordinator."""
    patches = {"late-replies": late_replies, "jumping-wall-clock": jumping_wall_clock}
    patches[sys.argv.pop(1)]()
    from ipcsync_coordinator.__main__ import main as coordinate

    coordinate(prog_name="ipcsync coordinator")


if __name__ == "__main__":
    main()
