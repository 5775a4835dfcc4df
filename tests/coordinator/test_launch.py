"""Coordinators of one's own, and the directories that they live in."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync import _launch
from ipcsync._board.runtime_dir import who_serves
from ipcsync._launch import Coordinator, directory_prefix
from ipcsync._linux.process import pid_namespace
from tests.faults.forking import Child
from tests.kit.zygote import EXEC, IPCSYNC

pytestmark = [pytest.mark.own_coordinator, pytest.mark.process]

_LAUNCH = "import ipcsync\nwith ipcsync.launch(log_level='error'):\n    pass\n"


def test_a_launch_removes_what_killed_processes_left_once_their_coordinator_has_ended(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    left = Path(tempfile.mkdtemp(prefix=f"{directory_prefix()}{2**22}-1-"))
    lock = os.open(left, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the coordinator has it until its end
        new_coordinator()
        assert left.exists()
    finally:
        os.close(lock)
    new_coordinator()
    assert not left.exists()


def test_a_launch_that_can_start_no_process_leaves_no_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(_launch, "start_daemon", none_left)
    with pytest.raises(ipcsync.QuotaExceeded):
        ipcsync.launch()
    assert list(tmp_path.iterdir()) == []


def test_a_launch_where_there_is_no_directory_for_temporary_files_says_what_to_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    with pytest.raises(ipcsync.ConnectError, match=r"can be started here: .*removed.*; name a runtime_dir"):
        ipcsync.launch()


def test_a_launch_in_an_empty_directorys_name_has_a_directory_of_its_own(
    new_coordinator: Callable[..., ipcsync.Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as here:
        monkeypatch.chdir(here)
        coordinator = new_coordinator(runtime_dir="")
        assert coordinator.runtime_dir.startswith(os.path.join(tempfile.gettempdir(), directory_prefix()))
        coordinator.stop()
        assert not os.path.exists(coordinator.runtime_dir)
        assert os.listdir(here) == []


def test_a_forked_child_sees_whether_the_coordinator_runs(new_coordinator: Callable[..., ipcsync.Coordinator]) -> None:
    coordinator = new_coordinator()
    assert coordinator.is_running
    assert Child("os.fork", lambda: coordinator.is_running).result()
    assert coordinator.stop() == 0
    assert not coordinator.is_running
    assert not Child("os.fork", lambda: coordinator.is_running).result()


def test_a_coordinator_that_does_not_end_though_it_is_killed_is_an_error_and_no_wait(
    new_coordinator: Callable[..., ipcsync.Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = new_coordinator()
    with monkeypatch.context() as stuck:
        stuck.setattr(_launch, "ends_within", lambda *_: False)
        with pytest.raises(ipcsync.WaitTimeout, match=f"pid {coordinator.pid}"):
            coordinator.stop(0)
    assert not os.path.exists(coordinator.runtime_dir)
    assert coordinator.stop() in (0, -signal.SIGKILL)


def test_a_coordinator_that_gives_up_its_start_and_does_not_end_did_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_launch, "_STOP_S", 0.01)
    program = "import os, sys, time; os.close(int(sys.argv[-1])); time.sleep(600)"
    with pytest.raises(ipcsync.ConnectError, match="does not serve after"):
        Coordinator([sys.executable, "-c", program], dict(os.environ), str(tmp_path), temporary=False)


def test_a_launch_in_another_pid_namespace_removes_nothing_of_ours(
    new_coordinator: Callable[..., ipcsync.Coordinator], tmp_path: Path
) -> None:
    coordinator = new_coordinator()
    # A driver in software tells dead processes by their pids: each pid namespace must have one of its own.
    segment = f"{os.environ['IPCSYNC_HOST_SEGMENT']}-inside"
    env = {**os.environ, "IPCSYNC_HOST_SEGMENT": segment, "IPCSYNC_HOST_DIR": str(tmp_path)}
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", _LAUNCH]
    other = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if "unshare failed" in other.stderr or "Operation not permitted" in other.stderr:
        pytest.skip(f"no pid namespace can be made here: {other.stderr.strip()}")
    assert other.returncode == 0, other.stderr
    with ipcsync.connect(coordinator.endpoint) as client:
        assert client.is_connected


def test_directories_that_others_made_under_like_names_are_left_alone(
    new_coordinator: Callable[..., ipcsync.Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = ["\u00b2-1-x", "1-\u0662-x", "1e3-1-x", "-1-x", "x", f"{'9' * 200}-1-x"]
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets need
        monkeypatch.setattr(tempfile, "tempdir", folder)
        theirs = [Path(folder, f"{directory_prefix()}{rest}") for rest in rests]
        for each in theirs:
            each.mkdir()
        coordinator = new_coordinator()
        assert all(each.exists() for each in theirs)
        assert coordinator.stop() == 0


def test_a_launch_works_where_new_directories_get_the_set_group_id_bit(
    new_coordinator: Callable[..., ipcsync.Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets need
        Path(folder).chmod(0o2700)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        coordinator = new_coordinator()
        assert Path(coordinator.runtime_dir).parent == Path(folder)
        with ipcsync.connect(coordinator.endpoint) as client:
            assert client.is_connected
        assert coordinator.stop() == 0


@pytest.mark.parametrize("keeper", [False, True])
def test_an_endpoint_is_good_in_any_working_directory(
    new_coordinator: Callable[..., ipcsync.Coordinator], monkeypatch: pytest.MonkeyPatch, *, keeper: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.chdir(directory)
        coordinator = new_coordinator(runtime_dir="here", keeper=keeper)
        monkeypatch.chdir("/")
        with ipcsync.connect(coordinator.endpoint) as client:
            assert client.is_connected
        serving = who_serves(f"{directory}/here")
        assert serving is not None
        told = serving.pid, serving.role, serving.namespace
        assert told == (coordinator.pid, "keeper" if keeper else "", pid_namespace())
        coordinator.stop()


def test_a_setting_that_is_off_is_off_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IPCSYNC_LOG_JSON", "1")
    for is_json in (True, False):
        with ipcsync.launch(log_json=is_json):
            assert ('"event": "ready"' in capfd.readouterr().err) == is_json


def test_a_coordinator_does_not_travel_but_its_endpoint_does(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    with pytest.raises(TypeError, match="send its endpoint"):
        pickle.dumps(new_coordinator())


@pytest.mark.program
@pytest.mark.parametrize(
    ("flags", "env", "has_keeper"),
    [
        ([], {}, True),
        (["--no-keeper"], {}, False),
        ([], {"IPCSYNC_KEEPER": "0"}, False),
        (["--keeper"], {"IPCSYNC_KEEPER": "0"}, True),
    ],
)
def test_the_command_has_a_keeper_unless_it_is_told_otherwise(
    flags: list[str], env: dict[str, str], has_keeper: bool, tmp_path: Path
) -> None:
    command = [*IPCSYNC, "coordinator", *flags]
    command += ["--runtime-dir", str(tmp_path / "run"), "--log-level", "error"]
    with (
        Coordinator(command, {**os.environ, **EXEC, **env}, str(tmp_path / "run"), temporary=False) as one,
        ipcsync.connect(one.endpoint) as client,
    ):
        stats = client.stats()
        assert stats["keeper_pid"] == one.pid
        assert (stats["pid"] != one.pid) == has_keeper
        assert stats["memory_bytes"] > 1e6
        assert stats["keeper_memory_bytes"] > 1e6
        shown = subprocess.run(
            [*command[:3], "status", "--endpoint", one.endpoint], capture_output=True, text=True, check=True
        ).stdout
        assert f"pid {stats['pid']}, " in shown
        assert (f"keeper {one.pid}, " in shown) == has_keeper


@pytest.mark.parametrize("variable", [{}, {"IPCSYNC_KEEPER": "1"}])
def test_a_launch_has_none_unless_it_asks_for_one(variable: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    for keeper in (False, True):
        with ipcsync.launch(keeper=keeper, log_level="error") as one, ipcsync.connect(one.endpoint) as client:
            assert (client.stats()["pid"] != one.pid) == keeper
