"""Coordinators that cannot start, and those that end by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from tests.faults import fixtures
from tests.kit.until import DEADLINE_S
from tests.kit.zygote import IPCSYNC

pytestmark = [pytest.mark.own_coordinator, pytest.mark.process]


def _start(directory: Path, *flags: str, **environment: str) -> subprocess.Popen[str]:
    command = [*IPCSYNC, "coordinator", "--runtime-dir", str(directory), *flags]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("keeper", ["--keeper", "--no-keeper"])
def test_a_coordinator_for_a_device_that_is_not_there_says_so_and_leaves_nothing(tmp_path: Path, keeper: str) -> None:
    process = _start(tmp_path / "run", keeper, "--devices", "0,7", IPCSYNC_DRIVER="host")
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "cannot start" in said
    assert "there is no device 7: 1 are visible" in said
    assert "Traceback" not in said or "InvalidDevice" in said
    assert not list((tmp_path / "run").glob("*.sock"))


def test_a_second_coordinator_in_a_directory_says_who_serves_it(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    one = new_coordinator()
    process = _start(Path(one.runtime_dir), "--no-keeper")
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert str(one.pid) in said
    with ipcsync.connect(one.endpoint) as client:
        assert client.is_connected


def test_a_coordinator_that_was_stopped_itself_was_not_idle_meanwhile(
    new_coordinator: Callable[..., ipcsync.Coordinator],
) -> None:
    one = new_coordinator(exit_when_idle=3.0)
    fixtures.stop(one.pid)
    time.sleep(3.5)  # the length is tested: longer than it may be idle
    fixtures.resume(one.pid)
    with ipcsync.connect(one.endpoint) as client:
        assert client.is_connected


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_hangup_ends_a_coordinator_without_a_keeper_as_sigterm_does_unless_it_is_ignored(
    tmp_path: Path, *, is_ignored: bool
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if is_ignored else None  # as nohup(1) does
    try:
        process = _start(tmp_path / "run", "--no-keeper", IPCSYNC_TEST_ZYGOTE="0")
    finally:
        if before is not None:
            signal.signal(signal.SIGHUP, before)
    with ipcsync.connect(f"ipc://{tmp_path / 'run'}/coordinator.sock", timeout=DEADLINE_S) as client:
        process.send_signal(signal.SIGHUP)
        if is_ignored:
            client.stats()
            process.terminate()
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert "event=stopped" in said
    assert not list((tmp_path / "run").glob("*.sock"))


@pytest.mark.parametrize("keeper", ["--keeper", "--no-keeper"])
def test_an_idle_coordinator_ends_once_its_last_session_is_gone_and_not_before(tmp_path: Path, keeper: str) -> None:
    for idle_s in (0.3, 5.0):  # on a busy machine it may be idle for the shorter time before the client has come
        process = _start(tmp_path / "run", keeper, "--exit-when-idle", str(idle_s))
        try:
            client = ipcsync.connect(f"ipc://{tmp_path / 'run'}/coordinator.sock", timeout=10 * idle_s)
        except ipcsync.ConnectError:
            process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0
            continue
        break
    with client:
        until = time.monotonic() + 2 * idle_s
        while time.monotonic() < until:
            assert client.list_sessions()
            time.sleep(idle_s / 10)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert "reason=idle" in said
    assert not list((tmp_path / "run").glob("*.sock"))
