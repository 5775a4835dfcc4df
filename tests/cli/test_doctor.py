"""`ipcsync doctor`: every check is made for real, none hangs, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._linux.child import WorkerError
from ipcsync.cli.doctor.workers import Worker, Workers, close, connect
from tests.kit.until import until
from tests.kit.zygote import IPCSYNC
from tests.unit.cli.test_cli import run_on_terminal

pytestmark = [pytest.mark.own_coordinator, pytest.mark.process]

NAMES = [
    "driver",
    "devices",
    "mps",
    "compute-mode",
    "coordinator",
    "pid-namespace",
    "event-handles",
    "timeline",
    "hardware-queues",
    "cpu-writes",
    "recorder-death",
]
IS_SOFTWARE = "NVIDIA" not in ipcsync.get_device_properties(0).name


def doctor(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, which must come by itself."""
    command = [*IPCSYNC, "doctor", *options]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100, check=False)


def checks_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """The checks by name; the JSON must be exactly as promised."""
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found) == ["checks"]
    for check in found["checks"]:
        assert list(check) == ["name", "result", "detail", "advice"]
        assert check["result"] in ("ok", "warn", "fail", "skipped")
        assert all(isinstance(value, str) for value in check.values())
    assert [check["name"] for check in found["checks"]] == NAMES
    return {check["name"]: check for check in found["checks"]}


def test_with_a_coordinator_that_runs_everything_works_and_nothing_is_left(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client
) -> None:
    done = doctor("--json", "--endpoint", coordinator.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = checks_of(done)
    assert f"pid {coordinator.pid}" in checks["coordinator"]["detail"]
    assert "without a keeper" in checks["coordinator"]["detail"]
    assert "--no-keeper" in checks["coordinator"]["advice"]
    for name in NAMES[NAMES.index("coordinator") : -1]:
        assert checks[name]["result"] == "ok", checks[name]
    assert checks["recorder-death"]["detail"].count("RecorderLost") == 2
    if IS_SOFTWARE:  # it is called what it is
        assert checks["driver"]["result"] == "warn"
        assert "software driver" in checks["driver"]["detail"]
        assert checks["compute-mode"]["result"] == "skipped"
        assert ipcsync.get_device_properties(0).uuid in checks["devices"]["detail"]
    assert [row.name for row in client.list_sessions()] == ["main"]
    # The kernel closes the last file of the recorder that was killed in its own time: that shows that its work is over.
    until(lambda: client.list_events() == [], "no event is left")
    until(lambda: client.stats()["pool_in_use"] == 0, "nothing of the pool is in use")


def test_streams_that_share_a_hardware_queue_are_told_and_nothing_fails(coordinator: ipcsync.Coordinator) -> None:
    options = ("--json", "--endpoint", coordinator.endpoint)
    done = doctor(*options, CUDA_DEVICE_MAX_CONNECTIONS="1", IPCSYNC_HOST_QUEUES="1")
    checks = checks_of(done)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checks["hardware-queues"]["result"], checks["cpu-writes"]["result"]) == ("warn", "skipped")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in checks["hardware-queues"]["advice"]


def test_without_a_coordinator_it_brings_its_own_and_says_so(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/coordinator.sock"
    mark = uuid.uuid4().hex
    done = doctor("--json", IPCSYNC_ENDPOINT=endpoint, DOCTORS_MARK=mark)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = checks_of(done)
    assert endpoint in checks["coordinator"]["detail"]
    assert "ipcsync coordinator" in checks["coordinator"]["advice"]
    assert checks["timeline"]["result"] == "ok"
    assert list(tmp_path.iterdir()) == []
    assert _processes_with(mark) == []


def _processes_with(mark: str) -> list[str]:
    """The processes that run with a mark in their environment, the doctor's coordinator too."""
    found = []
    for entry in Path("/proc").iterdir():
        # Gone meanwhile, or another user's.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, NotADirectoryError, PermissionError):
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
    return found


def test_for_people_it_prints_plain_lines_where_no_terminal_reads_them(coordinator: ipcsync.Coordinator) -> None:
    done = doctor("--endpoint", coordinator.endpoint)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    for name in NAMES:
        assert any(name in line.split() for line in lines), name
    assert "ok" in lines[-1]


def test_on_a_terminal_it_prints_in_colours_and_no_color_turns_them_off(coordinator: ipcsync.Coordinator) -> None:
    coloured, plain = (
        run_on_terminal("doctor", "--endpoint", coordinator.endpoint, NO_COLOR=no_color) for no_color in ("", "1")
    )
    assert "\x1b[32mok " in coloured
    assert "\x1b" not in plain


def test_without_a_driver_it_fails_at_once_and_skips_the_rest() -> None:
    if _has_libcuda():
        pytest.skip("this machine has a libcuda")
    done = doctor("--json", IPCSYNC_DRIVER="cuda", CUDA_VISIBLE_DEVICES="none")
    assert done.returncode == 1
    checks = checks_of(done)
    assert checks["driver"]["result"] == "fail"
    assert "NoDriver" in checks["driver"]["detail"]
    assert {check["result"] for name, check in checks.items() if name != "driver"} == {"skipped"}


def _has_libcuda() -> bool:
    import ctypes.util

    return ctypes.util.find_library("cuda") is not None


def test_a_device_list_that_is_empty_fails(coordinator: ipcsync.Coordinator) -> None:
    done = doctor("--json", "--endpoint", coordinator.endpoint, CUDA_VISIBLE_DEVICES="none")
    assert done.returncode == 1
    assert "fail" in {check["result"] for check in checks_of(done).values()}


def test_a_socket_that_nobody_serves_is_told_and_the_rest_is_tried(tmp_path: Path) -> None:
    (tmp_path / "coordinator.sock").touch()
    done = doctor("--json", "--endpoint", f"ipc://{tmp_path}/coordinator.sock")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = checks_of(done)
    assert checks["coordinator"]["result"] == "warn"
    assert checks["event-handles"]["result"] == "ok"


@pytest.mark.parametrize("options", [["--endpoint", "tcp://127.0.0.1:1"], ["--nothing"], ["more"]])
def test_a_wrong_call_is_no_success(options: list[str]) -> None:
    done = doctor(*options)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr


@pytest.mark.parametrize("descriptors", [7, *(pytest.param(few, marks=pytest.mark.thorough) for few in (8, 9)), 11])
def test_too_few_descriptors_are_a_failure_that_says_so(descriptors: int) -> None:
    command = f"ulimit -n {descriptors}; {shlex.join([*IPCSYNC, 'doctor', '--json'])}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    failed = [check["detail"] for check in checks_of(done).values() if check["result"] == "fail"]
    assert len(failed) == 1
    assert "descriptors" in failed[0] or "Too many open files" in failed[0]


# --- its processes ----------------------------------------------------------------------------------------------------


def test_a_process_that_does_not_answer_is_killed_and_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with Workers() as workers:
        first = workers["one"]
        assert first.call(os.getpid) == first.pid
        monkeypatch.setattr(first, "_seconds", 0.2)
        os.kill(first.pid, 19)  # SIGSTOP: as stuck as in a driver that hangs
        began = time.monotonic()
        with pytest.raises(WorkerError, match="did not finish 'getpid' in time"):
            first.call(os.getpid)
        assert time.monotonic() - began < 10
        assert first.status is not None
        second = workers["one"]
        assert second.call(os.getpid) == second.pid != first.pid
    assert second.status is not None


def test_a_process_that_dies_or_fails_is_told_as_what_it_is() -> None:
    with Workers() as workers:
        with pytest.raises(WorkerError, match="IndexError"):
            workers["one"].call(close)  # what nothing was opened for
        with pytest.raises(WorkerError, match="ConnectError"):
            workers["one"].call(connect, endpoint="tcp://nowhere")
        workers["one"].begin(os.getpid)
        worker: Worker = workers["one"]
        worker.kill()
        with pytest.raises(WorkerError, match="ended: killed by SIGKILL"):
            worker.call(os.getpid)
