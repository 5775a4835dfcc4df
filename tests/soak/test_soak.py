"""Row 37: many processes at random, some of them killed; then the checker reads what they saw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipcsync.typing import EngineName

_SECONDS = os.environ.get("IPCSYNC_SOAK_SECONDS")  # longer ones are for `make soak`
_ENGINE = os.environ.get("IPCSYNC_SOAK_ENGINE", "")
_ROOT = Path(__file__).parents[2]


def _seconds(engine: EngineName) -> float:
    """A minute on one driver and engine, a quarter of it on the others."""
    if _SECONDS:
        return float(_SECONDS)
    is_the_one = os.environ.get("IPCSYNC_DRIVER") == "host" and not os.environ.get("IPCSYNC_HOST_ASYNC")
    return 60.0 if is_the_one and engine == "event" else 15.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", [_ENGINE] if _ENGINE else ["event", "timeline"])
def test_row_37_a_soak_breaks_no_promise_and_leaves_nothing_behind(engine: EngineName) -> None:
    seconds = _seconds(engine)
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(seconds / 60), "--engine", engine]
    # A process of its own: its workers are forks of one that never used ipcsync.
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=seconds + 180, check=False)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
