"""The programs for a machine with a GPU, as far as they need none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import lmcache_tests, run

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
    assert run.figures(bench) == "a\tbare\t1.5\t1.0\tµs\nb\tbare\t1.5\t1.0\tµs\n"


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
