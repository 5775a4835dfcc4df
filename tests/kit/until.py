"""Waiting for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 30.0
"""How long a test waits for what must happen. Nothing takes that long but what never comes."""


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """The condition's first true value; AssertionError if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.002)
    return value
