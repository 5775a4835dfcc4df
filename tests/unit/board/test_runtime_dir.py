"""The runtime directory: private, locked by one, and cleaned only of what is dead."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ipcsync._board import Board, runtime_dir
from ipcsync._board.board import is_abandoned
from ipcsync._board.runtime_dir import (
    OUTCOME,
    SERVING,
    Outcome,
    Place,
    RuntimeDir,
    RuntimeDirError,
    Serving,
    read_outcome,
    who_serves,
)
from ipcsync._linux.process import pid_namespace
from ipcsync._wire import endpoints
from ipcsync.errors import ConnectError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a runtime directory may be made."""
    return tmp_path / "a" / "run"


def _said(path: Path) -> tuple[int, str, int] | None:
    """Who serves there, as any process is told."""
    found = who_serves(str(path))
    return None if found is None else (found.pid, found.role, found.namespace)


def _shared_board() -> Path:
    return Path(f"/dev/shm/ipcsync-board-{os.getuid()}-{os.urandom(16).hex()}")


def test_a_directory_is_made_private_whatever_the_umask_and_removed_when_it_was_made_here(path: Path) -> None:
    old = os.umask(0o277)
    try:
        directory = RuntimeDir(str(path))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert directory.endpoint == f"ipc://{path}/coordinator.sock"
    assert _said(path) == (os.getpid(), "", pid_namespace())
    directory.close()
    assert not path.exists()


def test_a_directory_that_was_there_stays_with_all_that_is_not_ours(path: Path) -> None:
    path.mkdir(parents=True, mode=0o700)
    (path / "mine").touch()
    RuntimeDir(str(path)).close()
    assert [entry.name for entry in path.iterdir()] == ["mine"]


def test_a_directory_made_here_stays_if_somebody_put_something_in_it(path: Path) -> None:
    directory = RuntimeDir(str(path))
    (path / "theirs").touch()
    directory.close()
    assert [entry.name for entry in path.iterdir()] == ["theirs"]


def test_a_second_one_is_refused_and_the_first_untouched(path: Path) -> None:
    first = RuntimeDir(str(path))
    (path / "coordinator.sock").touch()
    with pytest.raises(RuntimeDirError, match=f"another coordinator \\(pid {os.getpid()}\\) serves"):
        RuntimeDir(str(path))
    assert (path / "coordinator.sock").exists()
    assert (path / "lock").exists()
    first.close()
    RuntimeDir(str(path)).close()


def test_a_lock_of_a_directory_that_is_no_longer_there_excludes_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One opens the directory, and before it locks it the last owner has ended and removed it."""
    last = RuntimeDir(str(path))
    flock = fcntl.flock
    calls: list[int] = []

    def end_first(fd: int, how: int) -> None:
        if not calls:
            calls.append(fd)
            last.close()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", end_first)
    late = RuntimeDir(str(path))
    assert calls
    with pytest.raises(RuntimeDirError, match="another coordinator"):
        RuntimeDir(str(path))
    late.close()


def test_one_that_only_looks_who_serves_does_not_refuse_one_that_starts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RuntimeDir(str(path)).close()
    path.mkdir(0o700)
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    sleep = time.sleep
    slept: list[float] = []

    def look_for_a_while(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)
        if len(slept) == 3:
            os.close(looking)

    monkeypatch.setattr(time, "sleep", look_for_a_while)
    started = RuntimeDir(str(path))
    assert len(slept) == 3
    assert _said(path) == (os.getpid(), "", pid_namespace())
    started.close()


def test_one_that_has_the_lock_and_does_not_say_who_it_is_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.mkdir(0o700, parents=True)
    cleaner = os.open(path, os.O_RDONLY)
    fcntl.flock(cleaner, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda _: os.close(cleaner))
    RuntimeDir(str(path)).close()


@pytest.mark.process
def test_a_dead_keepers_coordinator_that_still_starts_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the keeper's lock, and ends once it looks for the keeper."""
    with subprocess.Popen([sys.executable, "-c", _KEEPER, str(path)], stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        starting = int(keeper.stdout.readline())
        keeper.kill()

    def sleep(_: float) -> None:
        monkeypatch.undo()
        os.kill(starting, signal.SIGKILL)

    monkeypatch.setattr(time, "sleep", sleep)
    RuntimeDir(str(path)).close()


_KEEPER = """
import subprocess, sys, time
from ipcsync._board.runtime_dir import KEEPER, RuntimeDir
directory = RuntimeDir(sys.argv[1])
directory.sign(KEEPER)
print(subprocess.Popen(["sleep", "60"], pass_fds=[directory.lock]).pid, flush=True)
time.sleep(60)
"""


def test_one_that_looks_for_ever_is_named_as_that(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_dir, "_LONGEST_LOOK_S", 0.01)
    path.mkdir(0o700, parents=True)
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    with pytest.raises(
        RuntimeDirError, match=f"no coordinator serves {path}, but a process locks that directory: end it"
    ):
        RuntimeDir(str(path))
    assert who_serves(str(path)) is None
    os.close(looking)


@pytest.mark.parametrize(
    "text",
    [
        *(f'{{"sockets": {sockets}}}' for sockets in ("5", "null", "[[1], {}]", '{"a": 1}')),
        *(f'{{"pid": {pid}, "role": "keeper", "namespace": 0}}' for pid in ("1e999", "-5", "9" * 20, "9" * 5000)),
        "[" * 100_000,
        "[1]",
        "\xff",
    ],
    ids=lambda text: text[:30],
)
def test_what_is_not_ours_in_the_file_that_says_who_serves_stops_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(runtime_dir, "_LONGEST_LOOK_S", 0.01)
    path.mkdir(0o700, parents=True)
    (path / SERVING).write_bytes(text.encode("latin1"))
    directory = RuntimeDir(str(path))
    (path / SERVING).write_bytes(text.encode("latin1"))
    assert who_serves(str(path)) == Serving(0, "", 0)
    with pytest.raises(RuntimeDirError, match=r"another coordinator \(pid unknown\) serves"):
        RuntimeDir(str(path))
    place = Place(str(path), directory.lock, os.getpid())
    assert place.lost_sockets() == place.sockets  # which were removed too, as far as anybody knows
    (path / OUTCOME).write_bytes(text.encode("latin1"))
    assert read_outcome(str(path)) == Outcome()
    directory.close()
    assert list(path.iterdir()) == []


def test_a_directory_in_which_nothing_can_be_written_is_not_left_behind(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(RuntimeDirError, match=f"cannot write {path}/lock: File too large"):
            RuntimeDir(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()


def _start(path: Path, barrier: threading.Barrier, made: list[RuntimeDir], refused: list[str]) -> None:
    barrier.wait(10)
    try:
        made.append(RuntimeDir(str(path)))
    except RuntimeDirError as error:
        refused.append(str(error))


def test_of_many_that_start_at_once_exactly_one_serves(path: Path) -> None:
    for _ in range(20):
        barrier = threading.Barrier(4)
        made: list[RuntimeDir] = []
        refused: list[str] = []

        threads = [threading.Thread(target=_start, args=(path, barrier, made, refused)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(made) == 1
        assert all("another coordinator" in said for said in refused)
        assert len(refused) == 3
        made[0].close()


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o750, 0o600, 0o1700])
def test_another_mode_is_refused(path: Path, mode: int) -> None:
    path.mkdir(parents=True)
    path.chmod(mode)
    with pytest.raises(RuntimeDirError, match=f"{mode:04o}"):
        RuntimeDir(str(path))
    assert list(path.iterdir()) == []
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_parent_that_is_no_directory_and_a_file_that_cannot_be_written_are_refused(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(RuntimeDirError, match="cannot make the runtime directory"):
        RuntimeDir(str(path))
    (tmp_path / "a").unlink()
    (path / "lock").mkdir(parents=True)
    path.chmod(0o700)
    with pytest.raises(RuntimeDirError, match=f"cannot write {path}/lock: Is a directory"):
        RuntimeDir(str(path))
    (path / "lock").rmdir()
    for name in ("lock", "lock.new"):
        (path / name).symlink_to(tmp_path / "elsewhere")
    RuntimeDir(str(path)).close()
    assert not (tmp_path / "elsewhere").exists()


def test_whatever_the_file_says_a_locked_directory_is_served(path: Path) -> None:
    directory = RuntimeDir(str(path))
    for said in ("", "[1]", '{"pid": 1}', '{"pid": "x", "role": "", "namespace": 0}'):
        (path / "lock").write_text(said)
        assert who_serves(str(path)) == Serving(0, "", 0)
    directory.close()


def test_what_is_no_socket_is_refused_and_neither_lock_nor_directory_is_left(path: Path) -> None:
    path.mkdir(parents=True, mode=0o700)
    (path / "feed.sock").write_text("precious")
    with pytest.raises(RuntimeDirError, match="is not a socket"):
        RuntimeDir(str(path))
    assert [entry.name for entry in path.iterdir()] == ["feed.sock"]
    assert (path / "feed.sock").read_text() == "precious"


def test_boards_of_the_living_stay_and_those_of_the_dead_go(path: Path) -> None:
    living, dead = _shared_board(), _shared_board()
    board = Board.create(str(living), os.urandom(16), 2, 2)
    Board.create(str(dead), os.urandom(16), 2, 2).close()
    try:
        RuntimeDir(str(path)).close()
        assert living.exists()
        assert not dead.exists()
    finally:
        board.close()
        board.unlink()


def test_a_board_that_cannot_be_made_in_full_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    path = _shared_board()
    with pytest.raises(OSError, match="No space left"):
        Board.create(str(path), os.urandom(16), 2, 2)
    assert not path.exists()


def test_a_file_that_is_gone_or_a_link_is_not_judged_abandoned(tmp_path: Path) -> None:
    assert not is_abandoned(str(tmp_path / "none"))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_bytes(bytes(4096))
    assert not is_abandoned(str(tmp_path / "link"))
    os.mkfifo(tmp_path / "pipe")
    assert not is_abandoned(str(tmp_path / "pipe"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_file_of_another_user_is_not_judged_abandoned(tmp_path: Path) -> None:
    theirs = tmp_path / "board"
    theirs.write_bytes(bytes(4096))
    assert is_abandoned(str(theirs))
    os.chown(theirs, 54322, 54322)
    assert not is_abandoned(str(theirs))


def test_a_directory_whose_name_is_a_pattern_is_taken_literally(tmp_path: Path) -> None:
    (tmp_path / "runx").mkdir(mode=0o700)
    (tmp_path / "runx" / "board-0").write_bytes(bytes(4096))
    RuntimeDir(str(tmp_path / "run?")).close()
    assert (tmp_path / "runx" / "board-0").exists()


def test_the_board_lies_in_the_directory_on_tmpfs_and_elsewhere_on_dev_shm(path: Path) -> None:
    directory = RuntimeDir(str(path))
    on_shm = RuntimeDir(f"/dev/shm/ipcsync-test-{os.urandom(8).hex()}")
    epoch = os.urandom(16)
    assert on_shm.board_path(epoch) == f"{on_shm.path}/board-{epoch.hex()}"
    if not directory.board_path(epoch).startswith(directory.path):
        assert directory.board_path(epoch) == f"/dev/shm/ipcsync-board-{os.getuid()}-{epoch.hex()}"
    on_shm.close()
    directory.close()
    assert not os.path.exists(on_shm.path)


def test_where_the_runtime_directory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IPCSYNC_ENDPOINT", raising=False)
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", "/chosen")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    assert endpoints.default_endpoint() == "ipc:///chosen/coordinator.sock"
    monkeypatch.delenv("IPCSYNC_RUNTIME_DIR")
    assert endpoints.runtime_dir() == "/run/user/5/ipcsync"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert endpoints.runtime_dir() == f"/tmp/ipcsync-{os.getuid()}"
    monkeypatch.setenv("IPCSYNC_ENDPOINT", "ipc:///other.sock")
    assert endpoints.default_endpoint() == "ipc:///other.sock"


def test_endpoints_are_limited_to_what_a_unix_socket_takes() -> None:
    assert endpoints.endpoint_in("/" + "x" * 80) == f"ipc:///{'x' * 80}/coordinator.sock"
    longest = "/" + "x" * (107 - len("//coordinator.sock"))
    assert endpoints.socket_path(endpoints.endpoint_in(longest)) == f"{longest}/coordinator.sock"
    with pytest.raises(ValueError, match="is 108 bytes, but Linux allows 107"):
        endpoints.endpoint_in(longest + "x")
    with pytest.raises(RuntimeDirError, match="Linux allows 107"):
        RuntimeDir(longest + "é")


@pytest.mark.parametrize("endpoint", ["", "ipc://", "tcp://127.0.0.1:5555", "/run/x.sock", f"ipc://{'x' * 108}"])
def test_another_kind_of_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConnectError) as caught:
        endpoints.socket_path(endpoint)
    assert caught.value.endpoint == endpoint


def test_an_endpoint_that_is_no_text_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        endpoints.socket_path(5)  # type: ignore[arg-type] # that is what is tried
