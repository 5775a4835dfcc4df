"""The programs for a machine with a GPU, as far as they need none."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import instant, lmcache_tests, profile_check, report, run
from tests.gpu.probe_report import PROBES

_ORDERING = """
from lmcache.v1.platform.base.event_ipc import get_event_ipc_backend

backend = get_event_ipc_backend("cuda:0")
"""
_KINDS = """
def _make_backend(kind):
    if kind == "timeline_semaphore":
        return TimelineSemaphoreEventIPCBackend()
    return DefaultEventIPCBackend()

KINDS = ["default", "timeline_semaphore"]
"""


def _write(folder: Path, ordering: str = _ORDERING, kinds: str = _KINDS) -> None:
    (folder / lmcache_tests.ORDERING).write_text(ordering)
    (folder / lmcache_tests.KINDS).write_text(kinds)


def test_the_figures_of_each_benchmark_are_kept_whatever_became_of_the_next_one(tmp_path: Path) -> None:
    row = {"row": "record", "peer": "bare", "ours": 1.5, "theirs": 1.0, "unit": "µs"}
    bench = tmp_path / "bench.jsonl"
    bench.write_text(
        "".join(json.dumps({"rows": [{**row, "row": name}]}) + "\n" for name in ("a", "b")) + '{"rows": [{"ro'
    )
    assert report.figures(bench) == "a\tbare\t1.5\t1.0\tµs\nb\tbare\t1.5\t1.0\tµs\n"


def test_lmcaches_tests_are_run_only_where_they_and_lmcache_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> list[str]:
        return [step.name for step in run.steps(tmp_path, 1, tmp_path)]

    monkeypatch.setattr(run, "find_spec", lambda _: None)
    assert "lmcache" not in names()
    monkeypatch.setattr(run, "find_spec", lambda _: object())
    assert "lmcache" not in names()
    _write(tmp_path)
    assert "lmcache" in names()
    assert "lmcache" not in [step.name for step in run.steps(tmp_path, 1)]


def test_each_of_lmcaches_tests_is_run_with_our_events_too(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    _write(tmp_path)
    stock, ordering, kinds = (path.read_text() for path in lmcache_tests.prepare(tmp_path, target))
    assert stock == _ORDERING
    assert "lmcache.v1" not in ordering
    assert "IpcSyncEventBackend()" in ordering
    assert '["default", "timeline_semaphore", "ipcsync"]' in kinds
    compile(ordering, "ordering", "exec")
    compile(kinds, "kinds", "exec")


def test_another_version_of_lmcaches_tests_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    _write(tmp_path, kinds="KINDS = []\n")
    with pytest.raises(ValueError, match="another version of LMCache"):
        lmcache_tests.prepare(tmp_path, target)


_TESTS = """
import os

def test_passes():
    pass

def test_fails():
    assert "dog" == "cat"

def test_ends_the_process():
    os._exit(3)
"""


def test_each_outcome_is_on_disk_though_the_process_ends_amid_a_test(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = pytester.path / "outcomes.jsonl"
    monkeypatch.setenv("IPCSYNC_TEST_OUTCOMES", str(outcomes))
    monkeypatch.setenv("IPCSYNC_TEST_STEP", "some")
    monkeypatch.setenv("PYTHONPATH", str(run.ROOT))
    pytester.makepyfile(_TESTS)
    pytester.runpytest_subprocess("-p", instant.__name__, "-p", "no:ipcsync", "-p", "no:randomly")
    counts, failures = report.outcomes_of(outcomes, "some")
    assert counts == {"passed": 1, "failed": 1, "skipped": 0, "unfinished": 1}
    assert [failure.test.partition("::")[2] for failure in failures] == ["test_fails", "test_ends_the_process"]
    assert "dog" in failures[0].trace
    assert report.outcomes_of(outcomes, "another") == (dict.fromkeys(counts, 0), [])


def test_what_failed_is_run_again_and_nothing_else(tmp_path: Path) -> None:
    lines = [
        {"step": "contract", "test": "tests/contract/a.py::test_a", "what": "started"},
        {"step": "contract", "test": "tests/contract/a.py::test_a", "what": "passed"},
        {"step": "contract", "test": "tests/contract/b.py::test_b", "what": "started"},
        {"step": "contract", "test": "tests/contract/b.py::test_b", "what": "failed", "message": "no", "trace": ""},
        {"step": "suite", "test": "tests/events/c.py::test_c[event-1 of 2]", "what": "started"},
        {"step": "lmcache", "test": "test_theirs.py::test_d", "what": "failed", "message": "no", "trace": ""},
    ]
    assert run.again(tmp_path) == []
    (tmp_path / "tests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (step,) = run.again(tmp_path)
    assert step.command[-2:] == ["tests/contract/b.py::test_b", "tests/events/c.py::test_c[event-1 of 2]"]


def test_what_kills_processes_runs_one_at_a_time(tmp_path: Path) -> None:
    steps = {step.name: step.command for step in run.steps(tmp_path, 8)}
    death = "tests/contract/test_death.py"
    assert death in steps["contract-deaths"]
    assert death not in steps["contract"]
    assert steps["contract-deaths"][steps["contract-deaths"].index("-n") + 1] == "1"
    for name in ("contract", "contract-deaths", "graphs", "graphs-deaths", "suite", "suite-deaths"):
        assert not set(PROBES).intersection(steps[name])


@pytest.mark.process
@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_program_in_c_runs_on_the_software_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPCSYNC_DRIVER", "host")
    (costs,) = [step for step in run.steps(tmp_path, 1) if step.name == "costs"]
    outcome = run.run(replace(costs, most_s=100), tmp_path, time.monotonic() + 100)
    assert outcome.status == 0, (tmp_path / "all.log").read_text()
    assert "cuEventRecord, own, interprocess" in (tmp_path / costs.file).read_text()


def test_what_a_gpu_had_is_read_from_its_raw_output() -> None:
    folder = run.ROOT / "tests" / "gpu" / "h100-2026-11-26"
    costs, hops = (profile_check.figures((folder / name).read_text()) for name in ("costs.txt", "hops.txt"))
    assert costs["cuEventRecord, own, interprocess"] == 0.794
    assert costs["two processes' streams, a hop by words of a host page"] == 5.892
    assert hops["hop by events (interprocess)"] == 3.767


def test_a_profiles_figure_is_out_where_it_is_far_from_the_gpus() -> None:
    assert profile_check.judge_call("a call", 1.0, 1.2, cores=2).holds
    assert profile_check.judge_call("a call", 1.0, 1.3, cores=2).holds is False
    assert profile_check.judge_call("a call", 0.01, 5.0, cores=2).holds is None
    assert profile_check.judge_row("record", (1.1, 1.0), (2.5, 2.0), cores=2).holds
    assert profile_check.judge_row("record", (1.1, 1.0), (2.7, 2.0), cores=2).holds is False
    assert profile_check.judge_row("hand-over (event), p50", (156.0, 6.0), (7.0, 6.0), cores=2).holds is None
    assert profile_check.judge_row("hand-over (event), p50", (156.0, 6.0), (7.0, 6.0), cores=4).holds is False
    slept = "idle stream: write value -> CPU sees the word"
    assert profile_check.judge_call(slept, 5.5, 9.0, cores=2, wake_us=8.0).holds is None
    assert profile_check.judge_call(slept, 5.5, 9.0, cores=2, wake_us=4.0).holds is False
    near, far = (profile_check.judge_call("a call", 1.0, here, cores=2) for here in (1.1, 1.2))
    assert profile_check.nearer(near, far) == profile_check.nearer(far, near) == near


def test_a_run_on_a_stand_in_says_so() -> None:
    outcome = report.Outcome("gpu", 0)
    assert report.NOT_REAL in report.summary([outcome], "host | softcuda", False, {})
    assert report.NOT_REAL not in report.summary([outcome], "cuda | NVIDIA", True, {})


def test_what_is_left_out_on_a_gpu_is_a_test() -> None:
    for test, reason in run.LEFT_OUT.items():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (run.ROOT / path).read_text()
        assert reason
