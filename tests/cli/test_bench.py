"""`ipcsync bench`: what it prints, and the files that it writes. What it measures is in tests/benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def _in_a_match() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run whose two workers play, and their process ids: it waits for their results, and imports nothing by then."""
    command = [*IPCSYNC, "bench", "--only", "hand_over"]
    env = {**os.environ, **EXEC, "IPCSYNC_DRIVER": "host"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:

        def workers() -> list[int]:
            pids = [pid for pid in children_of(process.pid) if "child.serve" in command_of(pid)]
            return pids if len(pids) == 2 else []

        try:
            yield process, until(workers, "two workers")
        finally:
            process.kill()


def test_a_process_that_dies_is_told_in_one_line() -> None:
    with _in_a_match() as (process, (pid, _)):
        os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert said.splitlines()[-1] == f"ipcsync: the worker process (pid {pid}) ended: killed by SIGKILL"
    assert "Traceback" not in said


def test_ctrl_c_ends_it_and_its_processes_without_a_traceback() -> None:
    with _in_a_match() as (process, _):
        started = children_of(process.pid)  # and the coordinator
        process.send_signal(signal.SIGINT)  # as a terminal does: each of the others has a session of its own
        said = "".join(process.communicate(timeout=DEADLINE_S))
    assert process.returncode == 1
    assert "Traceback" not in said
    until(lambda: not any(map(command_of, started)), "the end of what it had started")
