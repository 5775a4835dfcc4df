"""`ipcsync bench`: what it prints, and the files that it writes. What it measures is in tests/benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

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


def test_a_run_stands_beside_an_older_one_in_each_form(tmp_path: Path) -> None:
    older, table, plot = tmp_path / "older.json", tmp_path / "table.md", tmp_path / "plot.svg"
    was = {"row": _ROW, "peer": _PEER, "ours": 12345.0, "ratio": 77.7}
    older.write_text(json.dumps({"rows": [was]}))
    files = ["--before", str(older), "--markdown", str(table), "--plot", str(plot)]
    done = _bench("--only", "completed", *files, "--held-to", "2")
    assert done.returncode == 0, done.stderr
    assert "completed: wait and query on a completed point" in done.stderr
    (line,) = [line for line in table.read_text().splitlines() if f"| {_ROW} |" in line]
    assert "12,345, 77.70" in line
    assert "<= 2 x before: yes" in line
    assert "12,345" in done.stdout
    assert "before" in done.stdout
    assert f"{_ROW} / {_PEER}" in plot.read_text()


def test_an_unknown_benchmark_and_a_missing_older_run_are_named(tmp_path: Path) -> None:
    for arguments, text in ((("--only", "nonsense"), "nonsense"), (("--before", str(tmp_path / "none")), "none")):
        done = _bench(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr
