"""What the coordinator tells a service manager: sd_notify(3), over a real socket."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import ipcsync

pytestmark = pytest.mark.process

_DEADLINE_S = 30.0


class Manager:
    """A service manager's side: the socket it listens on."""

    def __init__(self, address: str | bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(_DEADLINE_S)

    def hear(self) -> dict[str, str]:
        """The next message."""
        lines = self._socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def hear_until(self, key: str) -> dict[str, str]:
        """The next message that has `key`; before it there are only signs of life."""
        while key not in (said := self.hear()):
            assert said == {"WATCHDOG": "1"}
        return said

    def has_heard_nothing(self) -> bool:
        """Whether there is no message."""
        return not select.select([self._socket], [], [], 0)[0]

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """One that listens on a path."""
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


@pytest.fixture(params=["--keeper", "--no-keeper"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a coordinator as a service manager does, in each of both ways; none outlives the test."""
    with ExitStack() as ends:

        def run(**env: str) -> subprocess.Popen[bytes]:
            directory = tmp_path / "run"
            directory.mkdir(mode=0o700)
            command = [sys.executable, "-m", "ipcsync_coordinator", request.param, "--runtime-dir", str(directory)]
            settings = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), **env}
            if "SYSTEMD_EXEC_PID" not in env:
                settings.pop("SYSTEMD_EXEC_PID", None)  # of a service in which the tests run
            process = subprocess.Popen(command, env=settings, stderr=subprocess.PIPE)
            ends.enter_context(process)
            ends.callback(process.kill)
            return process

        yield run


def _end(process: subprocess.Popen[bytes]) -> str:
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0, log
    return log.decode()


def test_it_says_ready_once_it_serves_and_stopping_when_it_ends(
    start: Callable[..., subprocess.Popen[bytes]], manager: Manager, tmp_path: Path
) -> None:
    process = start()
    endpoint = f"ipc://{tmp_path}/run/coordinator.sock"
    assert manager.hear() == {"READY": "1", "STATUS": f"serves {endpoint}"}
    with ipcsync.connect(endpoint) as client:
        assert client.is_connected
    process.send_signal(signal.SIGTERM)
    assert manager.hear() == {"STOPPING": "1"}  # and no sign of life, for which nobody asked
    assert process.wait(_DEADLINE_S) == 0


def test_it_tells_the_watchdog_again_and_again(start: Callable[..., subprocess.Popen[bytes]], manager: Manager) -> None:
    process = start(WATCHDOG_USEC="400000")
    assert manager.hear()["READY"] == "1"
    for _ in range(3):
        assert manager.hear() == {"WATCHDOG": "1"}
    process.send_signal(signal.SIGTERM)
    assert manager.hear_until("STOPPING") == {"STOPPING": "1"}


def test_a_watchdog_that_is_meant_for_another_process_is_not_told(
    start: Callable[..., subprocess.Popen[bytes]], manager: Manager, tmp_path: Path
) -> None:
    process = start(WATCHDOG_USEC="1", WATCHDOG_PID="1")
    assert manager.hear()["READY"] == "1"
    with ipcsync.connect(f"ipc://{tmp_path}/run/coordinator.sock") as client:
        for _ in range(3):
            client.stats()
    process.send_signal(signal.SIGTERM)
    assert manager.hear() == {"STOPPING": "1"}


def test_a_process_that_the_services_own_program_started_says_nothing(
    start: Callable[..., subprocess.Popen[bytes]], manager: Manager, tmp_path: Path
) -> None:
    process = start(SYSTEMD_EXEC_PID="1", WATCHDOG_USEC="1")
    ipcsync.connect(f"ipc://{tmp_path}/run/coordinator.sock", timeout=_DEADLINE_S).close()
    _end(process)
    assert manager.has_heard_nothing()


def test_it_speaks_to_an_abstract_address(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    name = f"ipcsync-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    process = start(NOTIFY_SOCKET=f"@{name}")
    assert manager.hear()["READY"] == "1"
    _end(process)
    manager.close()


def test_a_manager_that_is_gone_is_logged_once_and_the_daemon_serves(
    start: Callable[..., subprocess.Popen[bytes]], manager: Manager, tmp_path: Path
) -> None:
    process = start(WATCHDOG_USEC="200000")
    assert manager.hear()["READY"] == "1"
    manager.close()
    with ipcsync.connect(f"ipc://{tmp_path}/run/coordinator.sock", name="a") as client:
        notices = client.watch(timeout=_DEADLINE_S)
        uptime = client.stats()["uptime_s"]
        while client.stats()["uptime_s"] < uptime + 0.5:  # some ticks of the daemon, each with a sign of life due
            with ipcsync.connect(client.endpoint, name="b"):
                next(notices)
    assert _end(process).count("the service manager cannot be notified") == 1


@pytest.mark.parametrize("start", ["--keeper"], indirect=True)
def test_a_reload_by_sighup_is_told_from_its_beginning_to_its_end(
    start: Callable[..., subprocess.Popen[bytes]], manager: Manager, tmp_path: Path
) -> None:
    """As `Type=notify-reload` has it: systemd sends SIGHUP, and waits for RELOADING and a READY behind it."""
    process = start(IPCSYNC_LOG_LEVEL="error")
    assert manager.hear()["READY"] == "1"
    with ipcsync.connect(f"ipc://{tmp_path}/run/coordinator.sock", timeout=_DEADLINE_S) as client:
        for starts in (2, 3):
            asked_us = time.monotonic_ns() // 1000
            process.send_signal(signal.SIGHUP)
            said = manager.hear()
            assert said["RELOADING"] == "1"
            assert int(said["MONOTONIC_USEC"]) >= asked_us
            assert manager.hear() == {"READY": "1", "STATUS": "reloaded"}
            assert client.stats()["starts"] == starts
    _end(process)
