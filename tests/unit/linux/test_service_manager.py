"""Notifications reach a service manager that was not reading, or was gone, for a while."""

from __future__ import annotations

import contextlib
import logging
import socket
from pathlib import Path

import pytest

from ipcsync._linux.service_manager import ServiceManager


class Manager:
    """A service manager's socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """What has come."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(self._socket.recv(4096).decode())
        return messages

    def fill(self) -> None:
        """Have no room left."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            other.connect(str(self._path))
            with contextlib.suppress(BlockingIOError):
                while True:
                    other.send(b"another unit")

    def close(self) -> None:
        """Be gone."""
        self._socket.close()
        self._path.unlink()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it listens, as the environment says; the watchdog waits for 10 s."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "10000000")
    return tmp_path / "notify"


def test_what_there_was_no_room_for_is_sent_at_the_next_tick(path: Path) -> None:
    manager, told = Manager(path), ServiceManager()
    manager.fill()
    told.ready("serves")
    told.alive()
    assert set(manager.heard()) == {"another unit"}
    told.alive()
    assert manager.heard() == ["READY=1\nSTATUS=serves", "WATCHDOG=1"]
    told.alive()
    assert manager.heard() == []  # half a period was not over
    told.stopping()
    told.alive()
    assert manager.heard() == ["STOPPING=1"]
    manager.close()


def test_signs_of_life_go_on_though_the_manager_was_gone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = ServiceManager()
    with caplog.at_level(logging.WARNING, "ipcsync.coordinator"):
        told.ready("serves")
        for _ in range(3):
            told.alive()
    assert len(caplog.records) == 1
    manager = Manager(path)
    told.alive()
    assert manager.heard() == ["WATCHDOG=1"]
    told.stopping()
    manager.close()


def test_without_a_manager_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "10000000")
    told = ServiceManager()
    told.ready("serves")
    told.alive()
    told.stopping()
