"""Waiting for a condition, never for a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = float(os.environ.get("IPCSYNC_TEST_DEADLINE_S", "30"))
"""How long a test waits for what must happen. Nothing takes that long but what never comes: `tests.gpu.run`,
whose time is short, waits for less."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.02


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """The condition's first true value; AssertionError if there is none within `seconds`.

    It is asked for less often the longer it takes: many conditions are requests, which keep two processes busy.
    """
    began = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        assert now - began < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(min(_SHORTEST_PAUSE_S + (now - began) / 20, _LONGEST_PAUSE_S))
    return value
