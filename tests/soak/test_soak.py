"""Row 37: many processes at random, some of them killed; then the checker reads what they saw."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Long enough for some dozen deaths. `make test-all` takes a minute each, `make soak` ten.
_SECONDS = float(os.environ.get("IPCSYNC_SOAK_SECONDS", "3"))
_ENGINE = os.environ.get("IPCSYNC_SOAK_ENGINE", "")
_IS_SHORT = _SECONDS < 20
_MOST_S = _SECONDS + 180
_ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.process,
    pytest.mark.thorough,
    pytest.mark.timeout(5 * _MOST_S + 60),  # each may have to wait for the four others
]


@pytest.mark.parametrize("engine", [_ENGINE] if _ENGINE else ["both"] if _IS_SHORT else ["event", "timeline"])
def test_row_37_a_soak_breaks_no_promise_and_leaves_nothing_behind(engine: str) -> None:
    _soak("--engine", engine, "--kill-rate", "10" if _IS_SHORT else "5")


def test_row_37_the_same_while_the_coordinator_is_killed_again_and_again() -> None:
    _soak("--coordinator-kills", "2" if _IS_SHORT else "4", "--processes", "24", "--operations", "1000")


def _soak(*flags: str) -> None:
    _run("tests.soak", "--minutes", str(_SECONDS / 60), *flags)


def test_row_44_chains_of_three_whose_processes_are_killed_break_no_promise() -> None:
    _run("tests.soak.chains", "--seconds", str(_SECONDS), "--lanes", "1")


def test_row_65_replays_whose_processes_are_killed_break_no_promise() -> None:
    _run("tests.soak.graphs", "--seconds", str(_SECONDS), "--lanes", "1")


def _run(module: str, *flags: str) -> None:
    """A process of its own, whose workers are forks of one that never used ipcsync; one at a time on this machine."""
    with open(Path(tempfile.gettempdir()) / f"one-soak-at-a-time-{os.getuid()}", "w") as one:
        fcntl.flock(one, fcntl.LOCK_EX)  # two would keep each other's coordinator from answering in time
        command = [sys.executable, "-m", module, *flags]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_MOST_S, check=False)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
