"""Why nobody answers at an endpoint: each cause has a text of its own, and says what to do."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import ipcsync
from ipcsync._board.runtime_dir import SHUT
from ipcsync._session import handshake
from ipcsync._session.handshake import Reader
from ipcsync._wire import endpoints
from tests.faults import fixtures
from tests.kit.until import DEADLINE_S

_START = "start one with: ipcsync coordinator"


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where nothing is; nor is there anything of this user elsewhere."""
    monkeypatch.setattr(handshake, "_usual_directories", lambda: [str(tmp_path / "elsewhere")])
    return f"ipc://{tmp_path}/coordinator.sock"


def _path(endpoint: str) -> Path:
    return Path(endpoints.socket_path(endpoint))


def test_nothing_there(endpoint: str) -> None:
    assert handshake.why_no_answer(endpoint) == f"there is no socket; {_START}"
    assert handshake.why_no_answer("ipc:///dev/null/coordinator.sock") == f"there is no socket; {_START}"


def test_a_file_that_is_no_socket(endpoint: str) -> None:
    _path(endpoint).touch()
    assert handshake.why_no_answer(endpoint) == f"{_path(endpoint)} is not a socket: remove it, and {_START}"


def test_a_stale_socket(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(_path(endpoint)))
    assert handshake.why_no_answer(endpoint) == f"the socket is stale, since its coordinator has ended: {_START}"


def test_a_stale_socket_that_is_removed_meanwhile(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Removing(socket.socket):
        def connect_ex(self, address: Any) -> int:
            failure = super().connect_ex(address)
            _path(endpoint).unlink()
            return failure

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(_path(endpoint)))
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Removing)
        said = handshake.why_no_answer(endpoint)
    assert said == f"the socket is stale, since its coordinator has ended: {_START}"


@contextmanager
def _mute(path: Path, backlog: int = 8) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(backlog)
        yield listening


def test_a_process_that_is_no_coordinator(endpoint: str) -> None:
    with _mute(_path(endpoint)):
        assert handshake.why_no_answer(endpoint) == (
            f"a process (pid {os.getpid()}) listens there, but it is not a coordinator, which would lock "
            f"{_path(endpoint).parent}: end it, and {_START}"
        )


def test_one_that_does_not_even_accept(endpoint: str) -> None:
    with _mute(_path(endpoint), 0), socket.socket(socket.AF_UNIX) as first:
        first.connect(str(_path(endpoint)))
        assert handshake.why_no_answer(endpoint).startswith("a process listens there, but it is not a coordinator")


def test_a_coordinator_without_descriptors_has_hidden_its_socket(endpoint: str) -> None:
    Path(f"{_path(endpoint)}{SHUT}").touch()
    assert "no file descriptors left" in handshake.why_no_answer(endpoint)
    assert "ulimit -n" in handshake.why_no_answer(endpoint)


def test_a_coordinator_in_another_directory(
    endpoint: str, coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = coordinator.runtime_dir
    monkeypatch.setattr(handshake, "_usual_directories", lambda: ["/nowhere", elsewhere])
    why = handshake.why_no_answer(endpoint)
    advice = rf"connect to {coordinator.endpoint}, by IPCSYNC_ENDPOINT for example"
    assert re.fullmatch(rf"there is no socket, but a coordinator \(pid \d+\) serves {elsewhere}: {advice}", why)
    with pytest.raises(ipcsync.ConnectError, match=advice):
        ipcsync.connect(endpoint, timeout=0.1)


def test_the_socket_of_notices(coordinator: ipcsync.Coordinator) -> None:
    feed = coordinator.endpoint.replace("coordinator.sock", "feed.sock")
    with pytest.raises(ipcsync.ConnectError, match=f"it takes requests at {coordinator.endpoint}"):
        ipcsync.connect(feed, timeout=0.1)


def test_the_usual_directories_are_those_chosen_of_login_of_none_and_of_the_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", "/chosen")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/xdg")
    monkeypatch.setenv("LOGNAME", "alice")
    uid = os.getuid()
    assert handshake._usual_directories() == [
        "/chosen",
        "/xdg/ipcsync",
        f"/run/user/{uid}/ipcsync",
        f"/tmp/ipcsync-{uid}",
        "/run/ipcsync-alice",
    ]


@pytest.mark.parametrize(
    ("keeper", "said"), [(False, "is stopped: continue it with: kill -CONT"), (True, "its keeper")]
)
def test_a_coordinator_that_stands_still(
    new_coordinator: Callable[..., ipcsync.Coordinator], keeper: bool, said: str
) -> None:
    one = new_coordinator(keeper=keeper)
    with Reader(one.endpoint, 10.0) as reader:
        pid = reader.stats()["pid"]
        fixtures.stop(pid)
        try:
            with pytest.raises(ipcsync.ConnectError, match=said) as raised:
                ipcsync.connect(one.endpoint, timeout=0.2)
            assert raised.value.endpoint == one.endpoint
            reader.timeout = 0.2
            with pytest.raises(ipcsync.ConnectError, match=said):
                reader.stats()
        finally:
            fixtures.resume(pid)
        reader.timeout = 10.0
        assert reader.stats()["pid"] == pid, "it goes on once there is an answer"


def test_a_coordinator_whose_socket_was_removed(endpoint: str, coordinator: ipcsync.Coordinator) -> None:
    directory = Path(coordinator.runtime_dir)
    fixtures.stop(coordinator.pid)  # or it makes another one
    try:
        (directory / "coordinator.sock").unlink()
        assert f"serves {directory}, but its socket was removed" in handshake.why_no_answer(coordinator.endpoint)
    finally:
        fixtures.resume(coordinator.pid)


def test_a_reader_waits_while_a_coordinator_binds_its_socket(coordinator: ipcsync.Coordinator) -> None:
    path = _path(coordinator.endpoint)
    shut = path.rename(f"{path}{SHUT}")  # as it is then
    try:
        with Reader(coordinator.endpoint, DEADLINE_S) as reader:
            asking = fixtures.Blocked(reader.stats, "_exchange")
            shut.rename(path)
            assert isinstance(asking.outcome(), dict)
    finally:
        with suppress(FileNotFoundError):
            shut.rename(path)


def test_a_reader_sees_a_socket_that_is_bound_between_its_looks(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _path(coordinator.endpoint)
    shut, exists = path.rename(f"{path}{SHUT}"), os.path.exists

    def look_and_bind(looked_at: str) -> bool:
        found = exists(looked_at)
        with suppress(FileNotFoundError):
            shut.rename(path)
        return found

    monkeypatch.setattr(os.path, "exists", look_and_bind)
    with Reader(coordinator.endpoint, DEADLINE_S) as reader:
        reader.stats()


def test_a_reader_of_another_users_coordinator_is_refused_unless_it_is_root(
    coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with Reader(coordinator.endpoint, 5.0) as reader, pytest.raises(ipcsync.ConnectError, match="belongs to uid"):
        reader.stats()
