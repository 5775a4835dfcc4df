"""How much of what can be tried without end is tried: in the everyday tests less than in those that take their time."""

from __future__ import annotations

import os
from typing import Any

import hypothesis

LONG = os.environ.get("IPCSYNC_TEST_LONG") == "1"
"""Whether this run takes its time, as `make test-models`, `make test-all` and `make mutants` do."""
_SHARE, _LEAST = 3, 20


def examples(count: int, **settings: Any) -> hypothesis.settings:
    """Settings with so many examples in a long run, and a third of them, new ones each time, in an everyday one."""
    return hypothesis.settings(max_examples=count if LONG else max(count // _SHARE, _LEAST), **settings)
