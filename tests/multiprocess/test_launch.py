"""Coordinators of one's own, and the directories that they live in."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync._launch import directory_prefix

pytestmark = pytest.mark.process

_LAUNCH = "import ipcsync\nwith ipcsync.launch(log_level='error'):\n    pass\n"


def test_a_launch_removes_what_killed_processes_left(new_coordinator: Callable[..., ipcsync.Coordinator]) -> None:
    left = Path(tempfile.mkdtemp(prefix=f"{directory_prefix()}{2**22}-1-"))
    new_coordinator()
    assert not left.exists()


def test_a_launch_in_another_pid_namespace_removes_nothing_of_ours(
    new_coordinator: Callable[..., ipcsync.Coordinator], tmp_path: Path
) -> None:
    coordinator = new_coordinator()
    # A driver in software tells dead processes by their pids: each pid namespace must have one of its own.
    segment = f"{os.environ['IPCSYNC_HOST_SEGMENT']}-inside"
    env = {**os.environ, "IPCSYNC_HOST_SEGMENT": segment, "SIMCUDA_SEGMENT": segment, "SIMCUDA_DIR": str(tmp_path)}
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", _LAUNCH]
    other = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if "unshare failed" in other.stderr or "Operation not permitted" in other.stderr:
        pytest.skip(f"no pid namespace can be made here: {other.stderr.strip()}")
    assert other.returncode == 0, other.stderr
    with ipcsync.connect(coordinator.endpoint) as client:
        assert client.is_connected


def test_a_coordinator_does_not_travel_but_its_endpoint_does(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    with pytest.raises(TypeError, match="send its endpoint"):
        pickle.dumps(new_coordinator())
