"""What lies in the runtime directory, and what is written over: rows 12, 13, 14, 38 and 48."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync._board import layout
from ipcsync._board.runtime_dir import OUTCOME, RuntimeDir
from ipcsync_bridge.session import BridgeSession
from tests.kit.peer import Peer
from tests.kit.raw_client import run_coordinator
from tests.kit.until import until

pytestmark = [pytest.mark.keeper, pytest.mark.own_coordinator, pytest.mark.process]

NewCoordinator = Callable[..., ipcsync.Coordinator]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A runtime directory as it should be."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def shm_directory() -> Path:
    """A runtime directory on tmpfs, where the board lies in it too."""
    path = Path(f"/dev/shm/ipcsync-test-{os.getpid()}-{threading.get_ident()}")
    path.mkdir(mode=0o700)
    return path


_FILES = {"coordinator.sock", "feed.sock", "lock"}
_KEEPERS = {OUTCOME, OUTCOME + ".new"}  # if there is one


def _boards() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"ipcsync-board-{os.getuid()}-*")}


# --- row 12 -----------------------------------------------------------------------------------------------------------


def test_row_12_stale_socket_and_board_of_a_dead_coordinator_are_taken_over(
    new_coordinator: NewCoordinator, directory: Path
) -> None:
    first = new_coordinator(runtime_dir=str(directory))
    with ipcsync.connect(first.endpoint) as client:
        (board,) = [path for path in _boards() if path.endswith(client.epoch.hex())]
        os.kill(first.pid, signal.SIGKILL)
        first.stop()
    assert (directory / "coordinator.sock").exists()
    second = new_coordinator(runtime_dir=str(directory))
    assert board not in _boards()
    with ipcsync.connect(second.endpoint) as client:
        assert client.event("e", recorder=True).record(ipcsync.Stream()).generation == 1


def test_row_12_a_stale_board_on_tmpfs_is_removed_and_nothing_is_left_after_an_ordinary_end(
    new_coordinator: NewCoordinator, shm_directory: Path
) -> None:
    try:
        first = new_coordinator(runtime_dir=str(shm_directory))
        os.kill(first.pid, signal.SIGKILL)
        first.stop()
        (stale,) = shm_directory.glob("board-*")
        second = new_coordinator(runtime_dir=str(shm_directory))
        assert not stale.exists()
        assert second.stop() == 0
        assert list(shm_directory.iterdir()) == []
    finally:
        for path in shm_directory.iterdir():
            path.unlink()
        shm_directory.rmdir()


def test_row_12_a_stale_socket_that_was_shut_for_want_of_descriptors_is_removed(
    new_coordinator: NewCoordinator, directory: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(directory / "coordinator.sock.full"))
    coordinator = new_coordinator(runtime_dir=str(directory))
    assert {path.name for path in directory.iterdir()} - _KEEPERS == _FILES
    coordinator.stop()


# --- row 13 -----------------------------------------------------------------------------------------------------------


def _state(path: Path) -> list[tuple[str, int, bytes]]:
    """Names, modes and contents of all that is in a directory."""
    return sorted(
        (entry.name, entry.lstat().st_mode, entry.read_bytes() if entry.is_file() else b"") for entry in path.iterdir()
    )


def _make_file(path: Path) -> None:
    path.write_text("precious")


def _make_link(path: Path) -> None:
    path.with_name("precious").write_text("precious")
    path.symlink_to(path.with_name("precious"))


def _make_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("coordinator.sock", _make_file),
        ("coordinator.sock", _make_link),
        ("coordinator.sock", _make_dangling_link),
        ("feed.sock", Path.mkdir),
    ],
)
def test_row_13_what_is_no_socket_at_the_sockets_path_is_refused_and_left_untouched(
    directory: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(directory / name)
    before = _state(directory)
    ended = run_coordinator("--runtime-dir", str(directory))
    assert ended.returncode == 1
    assert f"{directory / name} is not a socket" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert _state(directory) == before


@pytest.mark.parametrize("mode", [0o755, 0o500])
def test_row_13_a_runtime_directory_of_another_mode_is_refused_and_left_untouched(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    ended = run_coordinator("--runtime-dir", str(directory))
    assert ended.returncode == 1
    assert f"has mode {mode:04o}; it must be 0700" in ended.stderr
    assert stat.S_IMODE(directory.stat().st_mode) == mode
    assert list(directory.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another owner")
def test_row_13_a_runtime_directory_of_another_owner_is_refused_and_left_untouched(directory: Path) -> None:
    os.chown(directory, 65534, 65534)
    ended = run_coordinator("--runtime-dir", str(directory))
    assert ended.returncode == 1
    assert "belongs to uid 65534, not to 0" in ended.stderr
    assert list(directory.iterdir()) == []


def test_row_13_a_link_or_file_in_place_of_the_runtime_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    file = tmp_path / "file"
    file.touch()
    for path in (link, file):
        ended = run_coordinator("--runtime-dir", str(path))
        assert ended.returncode == 1
        assert "is not a directory" in ended.stderr
    assert list(directory.iterdir()) == []


# --- row 14 -----------------------------------------------------------------------------------------------------------


def test_row_14_a_socket_path_over_107_bytes_is_a_clear_configuration_error(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    ended = run_coordinator("--runtime-dir", str(long))
    assert ended.returncode == 1
    assert "Linux allows 107" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not long.exists()
    with pytest.raises(ipcsync.ConnectError, match="bytes, but Linux allows 107") as caught:
        ipcsync.connect(f"ipc://{long}/coordinator.sock")
    assert caught.value.endpoint == f"ipc://{long}/coordinator.sock"


def test_row_14_a_path_of_exactly_107_bytes_works(new_coordinator: NewCoordinator, tmp_path: Path) -> None:
    room = 107 - len(str(tmp_path)) - len("//coordinator.sock")
    directory = tmp_path / ("x" * room)
    coordinator = new_coordinator(runtime_dir=str(directory))
    assert len(coordinator.endpoint) == len("ipc://") + 107
    with ipcsync.connect(coordinator.endpoint) as client:
        assert client.is_connected
    assert coordinator.stop() == 0
    assert not directory.exists()


# --- row 38 -----------------------------------------------------------------------------------------------------------

_kept: dict[str, object] = {}


def _open(endpoint: str) -> None:
    """In the peer."""
    client = ipcsync.connect(endpoint, name="peer")
    _kept.update(client=client, event=client.event("e"))


def _wait_for_ever() -> str:
    event = _kept["event"]
    assert isinstance(event, ipcsync.SharedEvent)
    return _error_of(lambda: event.at(1).synchronize())


def _use() -> list[str]:
    event, client = _kept["event"], _kept["client"]
    assert isinstance(event, ipcsync.SharedEvent)
    assert isinstance(client, ipcsync.Client)
    uses: list[Callable[[], object]] = [
        lambda: event.at(1),
        client.list_events,
        lambda: client.event("f"),
        lambda: client.record(ipcsync.Stream()),
    ]
    return [_error_of(use) for use in uses]


def _error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except ipcsync.ProtocolError as error:
        return error.code
    return "nothing"


def _words(index: int, count: int, value: int) -> Callable[[mmap.mmap], None]:
    def write(board: mmap.mmap) -> None:
        for word in range(index, index + count):
            board[word * 8 : word * 8 + 8] = value.to_bytes(8, "little")

    return write


@pytest.mark.parametrize(
    "overwrite",
    [
        _words(0, 512, 0),
        _words(layout.H_EPOCH_2, 1, 5),
        _words(layout.H_VERSION, 1, 9),
        _words(layout.H_STATE, 1, 77),
    ],
    ids=["all", "epoch", "version", "state"],
)
def test_row_38_an_overwritten_header_is_a_typed_error_at_the_next_use_in_every_process(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, overwrite: Callable[[mmap.mmap], None]
) -> None:
    mine = client.event("e", recorder=True)
    point = mine.at(1)
    peer.call(_open, coordinator.endpoint)
    peer.begin(_wait_for_ever)
    (path,) = [path for path in Path("/dev/shm").glob("ipcsync-board-*") if path.name.endswith(client.epoch.hex())]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), layout.HEADER) as board:
        overwrite(board)
    assert peer.result() == "board"
    assert peer.call(_use) == ["board"] * 4
    uses: list[Callable[[], object]] = [
        lambda: mine.record(ipcsync.Stream()),
        point.query,
        point.synchronize,
        client.stats,
    ]
    assert [_error_of(use) for use in uses] == ["board"] * 4
    with (
        pytest.raises((ipcsync.ProtocolError, ipcsync.ConnectError), match="board"),
        ipcsync.connect(coordinator.endpoint) as late,
    ):
        late.list_events()
    assert coordinator.is_running


# --- row 48 -----------------------------------------------------------------------------------------------------------


def _take_over(new_coordinator: NewCoordinator, directory: Path) -> ipcsync.Coordinator:
    """A cleaner removes the directory under its coordinator, and another one starts there."""
    shutil.rmtree(directory)
    return new_coordinator(runtime_dir=str(directory))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_48_the_end_of_the_first_coordinator_leaves_the_seconds_files_alone(
    new_coordinator: NewCoordinator, directory: Path, number: signal.Signals
) -> None:
    first = new_coordinator(runtime_dir=str(directory))
    with ipcsync.connect(first.endpoint) as old:  # so that it does not end by itself
        old.event("e", recorder=True)
        second = _take_over(new_coordinator, directory)
        files = {path.name: path.stat().st_ino for path in directory.iterdir()}
        assert set(files) - _KEEPERS == _FILES
        with ipcsync.connect(second.endpoint) as client:
            os.kill(first.pid, number)
            until(lambda: not first.is_running, "the first one's end")
            assert {path.name: path.stat().st_ino for path in directory.iterdir()} == files
            assert client.is_connected
            assert {notice.kind for notice in client.watch(timeout=0.1)} == {"session_opened"}
        with ipcsync.connect(second.endpoint) as late:
            late.event("e", recorder=True).record(ipcsync.Stream()).synchronize(10)
    assert second.stop() == 0
    assert not directory.exists()


def test_row_48_the_first_one_says_so_serves_whom_it_has_and_ends_with_the_last(
    new_coordinator: NewCoordinator, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = new_coordinator(runtime_dir=str(directory))
    said = ""

    def has_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "level=error" in said

    with ipcsync.connect(first.endpoint, name="old") as client:
        second = _take_over(new_coordinator, directory)
        until(has_said, "an error in the log")
        assert "the runtime directory was removed or belongs to another coordinator now" in said
        assert f"path={directory}" in said
        client.event("e", recorder=True).record(ipcsync.Stream()).synchronize(10)
        assert [row.name for row in client.list_sessions()] == ["old"]
    until(lambda: not first.is_running, "its end")
    assert first.stop() == 1
    with ipcsync.connect(second.endpoint) as client:
        assert client.list_sessions() != []


@pytest.mark.parametrize("keeper", [False, True], ids=["alone", "kept"])
def test_row_48_one_whose_board_has_no_name_any_more_says_so_once_serves_and_ends_with_its_last_session(
    new_coordinator: NewCoordinator, directory: Path, capfd: pytest.CaptureFixture[str], keeper: bool
) -> None:
    first = new_coordinator(runtime_dir=str(directory), keeper=keeper)
    said, told = "", "the board's file was removed"

    def has_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return told in said

    with ipcsync.connect(first.endpoint, name="old") as client:
        board = Path(client._session.lease.board.path)
        board.unlink()  # as at a logout, where the system cleans up behind users
        until(has_said, "an error in the log")
        assert f"board={board}" in said
        assert "level=error" in said
        client.event("e", recorder=True).record(ipcsync.Stream()).synchronize(10)
        assert [row.name for row in client.list_sessions()] == ["old"]
    until(lambda: not first.is_running, "its end")
    assert first.stop() == 1
    has_said()
    assert said.count(told) == 1
    assert os.listdir(directory) == []


def test_row_48_a_bridge_keeps_none_that_no_client_can_find(new_coordinator: NewCoordinator, directory: Path) -> None:
    first = new_coordinator(runtime_dir=str(directory))

    async def bridge() -> BridgeSession:
        return BridgeSession.opened(first.endpoint, "bridge", 10)

    session = asyncio.run(bridge())
    os.unlink(session.board.path)
    until(lambda: not first.is_running, "its end")
    session.close(says_goodbye=False)
    assert first.stop() == 1


def test_row_48_one_whose_path_leads_through_a_file_now_ends_with_its_last_session(
    new_coordinator: NewCoordinator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    first = new_coordinator(runtime_dir=str(parent / "run"))
    with ipcsync.connect(first.endpoint) as client:
        parent.rename(tmp_path / "moved")
        parent.touch()
        client.event("e", recorder=True).record(ipcsync.Stream()).synchronize(10)
    until(lambda: not first.is_running, "its end")
    assert first.stop() == 1
    assert "Traceback" not in capfd.readouterr().err


def test_row_48_descriptors_that_run_short_shut_nobody_elses_sockets(
    new_coordinator: NewCoordinator, directory: Path
) -> None:
    """The gate renames the sockets that it bound; those of the second one keep their names."""
    owned = RuntimeDir(str(directory))
    bound = [socket.socket(socket.AF_UNIX) for _ in owned.sockets]
    for each, path in zip(bound, owned.sockets, strict=True):
        each.bind(path)
    owned.shut()
    assert sorted(path.name for path in directory.iterdir()) == [
        "coordinator.sock.full",
        "feed.sock.full",
        "lock",
    ]
    owned.reopen()
    assert sorted(path.name for path in directory.iterdir()) == ["coordinator.sock", "feed.sock", "lock"]
    second = _take_over(new_coordinator, directory)
    owned.shut()
    owned.reopen()
    assert not owned.is_own
    ipcsync.connect(second.endpoint).close()
    for each in bound:
        each.close()
    owned.close()
    ipcsync.connect(second.endpoint).close()
