"""A cleaner of /tmp removes single files of a runtime directory in use: they are made anew, and no session ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ipcsync
from ipcsync._board.runtime_dir import RuntimeDir, who_serves
from ipcsync._wire import endpoints
from tests.kit.raw_client import run_coordinator
from tests.kit.until import DEADLINE_S, until
from tests.kit.zygote import IPCSYNC

_FILES = {"who serves": ["lock"], "sockets": ["coordinator.sock", "feed.sock"], "one socket": ["feed.sock"]}
_FILES["all"] = [*_FILES["who serves"], *_FILES["sockets"]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(params=["--keeper", "--no-keeper"])
def served(request: pytest.FixtureRequest, directory: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator there, which ends in order and leaves nothing."""
    command = [*IPCSYNC, "coordinator", "--runtime-dir", str(directory), request.param]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    yield process
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert not directory.exists()


@pytest.fixture
def served_client(served: subprocess.Popen[bytes], directory: Path) -> Iterator[ipcsync.Client]:
    with ipcsync.connect(endpoints.endpoint_in(str(directory)), name="old", timeout=DEADLINE_S) as one:
        one.timeout = DEADLINE_S  # a busy machine may take some seconds for the start of another coordinator
        yield one


def _assert_is_whole(directory: Path, client: ipcsync.Client, keeper: int) -> None:
    """All files are there, for new clients, and the lock is, against a second coordinator."""
    until(lambda: {path.name for path in directory.iterdir()} >= set(_FILES["all"]), "all files are there")
    until(lambda: (found := who_serves(str(directory))) and found.pid == keeper, "it says who serves")
    with ipcsync.connect(client.endpoint, name="new", timeout=DEADLINE_S) as new, new.event("e") as event:
        assert new.epoch == client.epoch
        assert {row.name for row in new.list_sessions()} == {"old", "new"}
        assert next(new.watch(timeout=DEADLINE_S)).kind == "session_opened"
        with client.event("e", recorder=True) as recorded:
            recorded.record().synchronize(DEADLINE_S)
        event.at(1).synchronize(DEADLINE_S)
    second = run_coordinator("--runtime-dir", str(directory), "--no-keeper")
    assert second.returncode == 1
    assert f"another coordinator (pid {keeper}) serves {directory}" in second.stderr


@pytest.mark.process
@pytest.mark.keeper
@pytest.mark.parametrize(
    "what",
    [each if each in ("one socket", "all") else pytest.param(each, marks=pytest.mark.thorough) for each in _FILES],
)
def test_single_files_that_are_removed_are_made_anew_and_that_is_logged(
    served_client: ipcsync.Client, directory: Path, tmp_path: Path, what: str
) -> None:
    stats = served_client.stats()
    for _ in range(2):
        for name in _FILES[what]:
            (directory / name).unlink()
        _assert_is_whole(directory, served_client, stats["keeper_pid"])
    log = (tmp_path / "log").read_text()
    assert log.count("the file that says who serves was removed: made anew") == 2 * ("lock" in _FILES[what])
    assert log.count("a socket in the runtime directory was removed: made anew") == 2 * len(
        [name for name in _FILES[what] if name != "lock"]
    )
    if stats["keeper_pid"] != stats["pid"]:
        os.kill(stats["pid"], signal.SIGSTOP)  # it cannot make anew what is removed now
        for name in _FILES[what]:
            (directory / name).unlink()
        os.kill(stats["pid"], signal.SIGKILL)
        until(lambda: served_client.stats()["starts"] == 2, "the next one serves")
        _assert_is_whole(directory, served_client, stats["keeper_pid"])
        command = [*IPCSYNC, "reload", "--runtime-dir", str(directory)]
        assert subprocess.run(command, timeout=2 * DEADLINE_S, check=False).returncode == 0
        _assert_is_whole(directory, served_client, stats["keeper_pid"])


_BY_MODE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []  # also for root


@pytest.mark.process
def test_a_directory_that_cannot_be_reached_for_a_while_is_served_again(tmp_path: Path) -> None:
    parent, log = tmp_path / "parent", tmp_path / "log"
    command = [*_BY_MODE, *IPCSYNC, "coordinator", "--no-keeper", "--runtime-dir", str(parent / "run")]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        endpoint = endpoints.endpoint_in(str(parent / "run"))
        try:
            with ipcsync.connect(endpoint, timeout=DEADLINE_S) as client:
                parent.chmod(0o600)
                until(lambda: "the runtime directory cannot be mended" in log.read_text(), "it has looked")
                assert client.stats()["sessions"] == 1
                parent.chmod(0o700)
                ipcsync.connect(endpoint, timeout=DEADLINE_S).close()
        finally:
            process.terminate()
        assert process.wait(DEADLINE_S) == 0
    assert "Traceback" not in log.read_text()


# --- the place, in one process ----------------------------------------------------------------------------------------


@pytest.fixture
def owned(directory: Path) -> Iterator[RuntimeDir]:
    """A directory that this process serves."""
    one = RuntimeDir(str(directory))
    sockets = [socket.socket(socket.AF_UNIX) for _ in one.sockets]
    for each, path in zip(sockets, one.sockets, strict=True):
        each.bind(path)
    one.sign()
    yield one
    for each in sockets:
        each.close()
    one.close()


def _nothing(_: Path) -> None:
    pass


def _gone(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def _of_another(directory: Path) -> None:
    directory.rename(directory.with_name("former"))
    directory.mkdir()


@pytest.mark.parametrize("change", [_nothing, _of_another, _gone])
def test_a_place_that_is_whole_or_anothers_is_left_alone(
    owned: RuntimeDir, directory: Path, change: Callable[[Path], None]
) -> None:
    change(directory)
    before = {path.name: path.stat().st_ino for path in directory.glob("*")}
    assert not owned.mend()
    assert {path.name: path.stat().st_ino for path in directory.glob("*")} == before
    assert directory.exists() is (change is not _gone)
    assert owned.is_own is (change is _nothing)


def test_a_socket_that_is_another_one_is_lost_and_one_by_its_other_name_is_not(owned: RuntimeDir) -> None:
    first, second = owned.sockets
    owned.shut()
    assert owned.lost_sockets() == []
    owned.saw_bound(second)
    assert owned.lost_sockets() == []
    owned.reopen()
    os.unlink(first)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(first)  # perhaps with the number that the first one had
        assert owned.lost_sockets() == [first]
        owned.saw_bound(first)
        assert owned.lost_sockets() == []
        os.unlink(second)
        assert owned.lost_sockets() == [second]


@pytest.mark.process
def test_a_reload_where_nothing_says_who_serves_is_refused(owned: RuntimeDir, directory: Path) -> None:
    (directory / "lock").write_text('{"pid": 1e999, "role": "keeper", "namespace": 0}')
    command = [*IPCSYNC, "reload", "--runtime-dir", owned.path]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert outcome.returncode == 1
    assert outcome.stderr.startswith(
        f"ipcsync: a coordinator serves {directory}, but the file lock there does not say which"
    )
