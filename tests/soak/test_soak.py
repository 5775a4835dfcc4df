"""Row 37: many processes at random, some of them killed; then the checker reads what they saw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.thorough]

# Long enough for some dozen deaths. `make test-all` takes a minute each, `make soak` ten.
_SECONDS = float(os.environ.get("IPCSYNC_SOAK_SECONDS", "3"))
_ENGINE = os.environ.get("IPCSYNC_SOAK_ENGINE", "")
_IS_SHORT = _SECONDS < 20
_ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", [_ENGINE] if _ENGINE else ["both"] if _IS_SHORT else ["event", "timeline"])
def test_row_37_a_soak_breaks_no_promise_and_leaves_nothing_behind(engine: str) -> None:
    _soak("--engine", engine, "--kill-rate", "10" if _IS_SHORT else "5")


@pytest.mark.timeout(900)
def test_row_37_the_same_while_the_coordinator_is_killed_again_and_again() -> None:
    _soak("--coordinator-kills", "2" if _IS_SHORT else "4", "--processes", "24", "--operations", "1000")


def _soak(*flags: str) -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(_SECONDS / 60), *flags]
    # A process of its own: its workers are forks of one that never used ipcsync.
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_SECONDS + 180, check=False)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_row_44_chains_of_three_whose_processes_are_killed_break_no_promise() -> None:
    _lanes("tests.soak.chains", 1)


@pytest.mark.timeout(300)
def test_row_65_replays_whose_processes_are_killed_break_no_promise() -> None:
    _lanes("tests.soak.graphs", 1)


def _lanes(module: str, lanes: int) -> None:
    command = [sys.executable, "-m", module, "--seconds", str(_SECONDS), "--lanes", str(lanes)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_SECONDS + 180, check=False)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
