"""Every benchmark in its quick form, as a look whether something became many times slower.

A row's ratio is held against what it was when it was last measured in full (RESULTS.md), and may be `_FACTOR` times
worse. A noisy machine can make one measurement worse than that, so a row fails only if every one of `_TRIES` is: a
mistake in a hot path is there each time. What a row is to reach stands in the benchmark.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.benchmarks.__main__ import ALL, FLEET
from tests.benchmarks.two_nodes import why_not

pytestmark = [pytest.mark.benchmark, pytest.mark.process]

_FACTOR = 20.0
_TRIES = 3
_TIMEOUT_S = 110

# The peer that a row is held against: the same work done barely.
_LIMITS = frozenset((
    "bare ROUTER/DEALER", "bare PUB/SUB", "bare futex", "bare cuEventRecord", "bare cuStreamWriteValue64",
    "bare cuEventQuery", "bare cuStreamWaitEvent", "bare cuStreamWaitValue64", "bare wait and record",
    "bare cuEventSynchronize", "torch.cuda.Event", "import zmq", "a bare pyzmq process",
    "the same to 500, doubled", "the pidfd", "bare cuGraphLaunch without them",
))  # fmt: skip


def _measure(name: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--rounds", "1", "--json", "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def _is_rate(row: dict[str, Any]) -> bool:
    return str(row["unit"]).endswith("/s")


def _too_slow(name: str) -> set[tuple[str, str]]:
    """Measure once; answer with each row, and its peer, that was many times worse."""
    rows = _measure(name)
    if not rows:
        pytest.skip("this driver has no such row")
    held = [row for row in rows if row["peer"] in _LIMITS]
    alone = [row for row in rows if not row["peer"]]
    assert held or alone, "a benchmark that is held against nothing"
    for row in alone:
        assert row["ours"] > 0, row
    times = {(row["row"], row["peer"]): 1 / row["ratio"] if _is_rate(row) else row["ratio"] for row in held}
    return {key for key, ratio in times.items() if ratio >= _FACTOR * _USUAL.get(key[0], 1.0)}


@pytest.mark.timeout(_TRIES * _TIMEOUT_S + 10)
@pytest.mark.parametrize("name", ALL)
def test_no_row_is_many_times_worse_than_it_was(name: str) -> None:
    too_slow = _too_slow(name)
    for _ in range(_TRIES - 1):
        too_slow = too_slow and too_slow & _too_slow(name)
    assert not too_slow


@pytest.mark.timeout(_TIMEOUT_S + 10)
@pytest.mark.parametrize("name", FLEET)
def test_between_nodes_each_row_has_a_figure(name: str) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    rows = _measure(name)
    assert rows
    for row in rows:
        assert row["ours"] > 0 or row["unit"] == "% of a core", row


# How many times the limit's time a row takes, from RESULTS.md, where it is more than 2.
_USUAL = {
    "wait and record behind it (event)": 2.5,
    "wait and record behind it (timeline)": 4.0,
    "record (event), 4 busy threads, mean": 3.0,
    # The bare futex takes a fifth of its usual time where its two processes happen to meet awake.
    "hand-over (event), p50": 3.0,
    "hand-over (timeline), p50": 3.0,
    "wake to stream (event), p50": 4.0,
    "a recorder's death to RecorderLost (event), p50": 10.0,
    "a recorder's death to RecorderLost (event), longest": 10.0,
    "a recorder's death to RecorderLost (timeline), p50": 10.0,
    "a recorder's death to RecorderLost (timeline), longest": 10.0,
    "a replay with 1 wait and 1 record, host": 35.0,
    "a replay with 8 waits and 8 records, host": 50.0,
    "a replay with 80 waits and 80 records, host": 130.0,
    "requests, 8 clients, 64 in flight": 4.0,
    "requests, 32 clients, 64 in flight": 3.0,
}
