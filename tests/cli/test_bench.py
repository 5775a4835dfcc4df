"""`ipcsync bench`: what it prints, and the files that it writes. What it measures is in tests/benchmarks."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.kit.until import DEADLINE_S
from tests.kit.zygote import IPCSYNC

pytestmark = pytest.mark.process

_ROW = "query on a completed point (timeline)"
_PEER = "bare cuEventQuery"


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*IPCSYNC, "bench", "--quick", "--rounds", "1", *arguments]
    env = {**os.environ, "IPCSYNC_DRIVER": "host"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)


def test_a_run_is_printed_as_json_and_says_what_it_measures() -> None:
    done = _bench("--only", "completed", "--json")
    assert done.returncode == 0, done.stderr
    assert "completed: wait and query on a completed point" in done.stderr
    rows = {(row["row"], row["peer"]): row for row in json.loads(done.stdout)["rows"]}
    assert rows[_ROW, _PEER]["ours"] > 0


def test_an_unknown_benchmark_is_named() -> None:
    done = _bench("--only", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense" in done.stderr
