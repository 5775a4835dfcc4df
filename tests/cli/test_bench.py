"""`ipcsync bench`: what it prints, and the files that it writes. What it measures is in tests/benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.kit.until import DEADLINE_S, until
from tests.kit.zygote import EXEC, IPCSYNC, children_of, command_of

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


def test_a_process_that_dies_is_told_in_one_line() -> None:
    command = [*IPCSYNC, "bench", "--only", "hand_over"]
    env = {**os.environ, **EXEC, "IPCSYNC_DRIVER": "host"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            pid = until(
                lambda: next((pid for pid in children_of(process.pid) if "child.serve" in command_of(pid)), 0),
                "one of its processes",
            )
            os.kill(pid, signal.SIGKILL)
            _, said = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 1
    assert said.splitlines()[-1] == f"ipcsync: the worker process (pid {pid}) ended: killed by SIGKILL"
    assert "Traceback" not in said


def test_ctrl_c_ends_it_and_its_processes_without_a_traceback() -> None:
    command = [*IPCSYNC, "bench", "--rounds", "100"]
    env = {**os.environ, "IPCSYNC_DRIVER": "host"}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("records:"), "it measures"
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            said = "".join(process.communicate(timeout=DEADLINE_S))
            # (-SIGINT: amid the `exec` of a text, as of a dataclass, CPython takes it for one that nobody handled.)
            assert process.returncode in (1, -signal.SIGINT)
            assert "Traceback" not in said
            with pytest.raises(ProcessLookupError):  # none is left of its own either
                os.killpg(process.pid, 0)
        finally:
            process.kill()
