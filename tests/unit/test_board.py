"""The board: where its words lie, what is no board, whose process lives, and a death between any two stores."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ipcsync._board import (
    BROKEN,
    CLOSED,
    FREE,
    INT64_MAX,
    LIVE,
    OPEN,
    STOPPED,
    Board,
    Peer,
    SessionLine,
    SlotLine,
    layout,
    peer_of,
)
from ipcsync._board.board import is_abandoned, is_tmpfs
from ipcsync._board.liveness import OwnPeer
from ipcsync._linux import robust
from ipcsync._linux.process import pid_namespace, start_time
from ipcsync.errors import CoordinatorLost, ProtocolError
from tests.peer import Peer as PeerProcess

EPOCH = bytes(range(16))
SESSIONS, SLOTS = 40, 70

kept: dict[str, Any] = {}


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    """A board of the test's own, made by this process."""
    board = Board.create(str(tmp_path / "board"), EPOCH, SESSIONS, SLOTS)
    yield board
    board.unlink()
    board.close()


# --- the layout -------------------------------------------------------------------------------------------------------


def test_the_layout_is_the_one_that_other_versions_read() -> None:
    """Whoever changes one of these changes layout.VERSION."""
    assert layout.VERSION == 2
    assert (layout.LINE, layout.HEADER) == (128, 4096)
    assert layout.MAGIC.to_bytes(8, "little") == b"PIBOARD1"
    assert (layout.slots_offset(1), layout.slots_offset(32), layout.slots_offset(33)) == (8192, 8192, 12288)
    assert (layout.size(32, 32), layout.size(33, 1)) == (12288, 16384)


_OTHERS_WORDS = (layout.S_HEARTBEAT, layout.S_OWNER, layout.L_RECORDED, layout.L_COMPLETED)


def test_no_two_lines_overlap_and_none_crosses_a_page(board: Board) -> None:
    starts = [board.session(index).offset for index in range(SESSIONS)]
    starts += [board.slot(index).address - board.address for index in range(SLOTS)]
    assert starts[0] == layout.HEADER
    assert all(start % layout.LINE == 0 for start in starts)
    assert all(next_ - start >= layout.LINE for start, next_ in pairwise(starts))
    assert starts[-1] + layout.LINE <= layout.size(SESSIONS, SLOTS)
    # The pages of the slots are registered with CUDA; whoever registers one registers no session's line.
    assert board.page_of_slots % layout.PAGE == 0
    assert starts[SESSIONS - 1] + layout.LINE <= board.page_of_slots - board.address == starts[SESSIONS]


def test_what_the_coordinator_and_the_others_write_share_no_cache_line() -> None:
    coordinators = [layout.S_STATE, layout.S_SERIAL, layout.S_PID, layout.S_START, layout.S_NAMESPACE]
    coordinators += [layout.L_INCARNATION, layout.L_STATE, layout.L_RECORDER, layout.L_WATERMARK]
    assert all(word * 8 < 64 for word in coordinators)
    assert all(64 <= word * 8 < layout.LINE for word in _OTHERS_WORDS)


def test_the_words_lie_where_they_are_said_to(board: Board) -> None:
    line = board.slot(3)
    line.open(5)
    line.set_recorder(6)
    line.set_watermark(7)
    line.publish(8)
    line.store_completed(9)
    with open(board.path, "rb") as file:
        file.seek(layout.slots_offset(SESSIONS) + 3 * layout.LINE)
        words = struct.unpack("=16Q", file.read(layout.LINE))
    assert words[:4] == (5, OPEN, 6, 7)
    assert words[8:10] == (8, 9)
    assert line.completed_address == line.address + 72
    assert (line.incarnation, line.state, line.recorder, line.watermark) == (5, OPEN, 6, 7)
    assert (line.recorded, line.completed) == (8, 9)
    assert layout.word_at(line.completed_address).value == 9


def test_every_process_sees_the_words(board: Board) -> None:
    other = Board.open(board.path)
    board.session(1).assign(0x7_0001, 11, 12, 13, 14)
    board.slot(69).publish(INT64_MAX)
    line = other.session(1)
    assert (line.state, line.serial, line.process, line.heartbeat) == (LIVE, 0x7_0001, (11, 12, 13), 14)
    assert other.slot(69).recorded == INT64_MAX
    line.heartbeat = 15
    assert board.session(1).heartbeat == 15
    assert (other.epoch, other.sessions, other.slots) == (EPOCH, SESSIONS, SLOTS)
    assert other.coordinator == (os.getpid(), start_time(os.getpid()), pid_namespace())
    other.close()


@pytest.mark.parametrize("index", [-1, SESSIONS, 1 << 40])
def test_a_session_that_is_none_is_refused(board: Board, index: int) -> None:
    with pytest.raises(ProtocolError):
        board.session(index)


@pytest.mark.parametrize("index", [-1, SLOTS, 1 << 40])
def test_a_slot_that_is_none_is_refused(board: Board, index: int) -> None:
    with pytest.raises(ProtocolError):
        board.slot(index)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_allocated_in_full_private_and_not_inherited(board: Board) -> None:
    status = os.stat(board.path)
    assert status.st_size == layout.size(SESSIONS, SLOTS)
    assert status.st_blocks * 512 >= status.st_size, "a sparse file is SIGBUS on a tmpfs that is full"
    assert status.st_mode & 0o777 == 0o600
    assert not any(os.get_inheritable(fd) for fd in _descriptors(board.path))


def _descriptors(path: str) -> list[int]:
    """This process's descriptors of the file, or of what lies in the folder, also what has no name there (yet)."""
    names = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in names if _leads_to(f"/proc/self/fd/{fd}", path)]


def _leads_to(link: str, path: str) -> bool:
    try:
        found = os.readlink(link)
    except FileNotFoundError:  # closed meanwhile: other tests' sockets go when they are garbage
        return False
    return found == path or found.startswith(f"{path}/")


def test_an_existing_file_is_neither_taken_nor_touched(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        Board.create(str(path), EPOCH, 1, 1)
    assert path.read_bytes() == b"somebody's"
    assert [entry.name for entry in tmp_path.iterdir()] == ["board"]
    assert not _descriptors(str(tmp_path))


def test_a_board_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(OSError, match="No space"):
        Board.create(str(tmp_path / "board"), EPOCH, 1, 1)
    assert list(tmp_path.iterdir()) == []
    assert not _descriptors(str(tmp_path))


def test_a_symlink_is_not_followed(board: Board, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(board.path)
    with pytest.raises(OSError, match="symbolic links"):
        Board.open(str(tmp_path / "link"))


def _header(**changes: int) -> Callable[[bytearray], None]:
    places = {"magic": 0, "version": 1, "sessions": 9, "slots": 10}

    def change(data: bytearray) -> None:
        for name, value in changes.items():
            struct.pack_into("=Q", data, 8 * places[name], value)

    return change


def _cut(length: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        del data[length:]

    return change


NO_BOARDS: dict[str, Callable[[bytearray], None]] = {
    "empty": _cut(0),
    "short": _cut(100),
    "only a header": _cut(4096),
    "zeros": lambda data: data.__setitem__(slice(None), bytes(len(data))),
    "noise": lambda data: data.__setitem__(slice(None), bytes((i * 197 + 31) & 255 for i in range(len(data)))),
    "another magic": _header(magic=1),
    "another version": _header(version=layout.VERSION + 1),
    "more sessions than there is room for": _header(sessions=10**6),
    "a number of slots that wraps round": _header(slots=2**64 - 1),
    "one page too long": lambda data: data.extend(bytes(4096)),
}


@pytest.mark.parametrize("name", NO_BOARDS)
def test_what_is_no_board_is_refused_and_leaves_no_descriptor(board: Board, tmp_path: Path, name: str) -> None:
    data = bytearray(Path(board.path).read_bytes())
    NO_BOARDS[name](data)
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(ProtocolError) as caught:
        Board.open(str(path))
    assert caught.value.code == "board"
    assert not _descriptors(str(path))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Board.open(str(tmp_path / "nothing"))


# --- the header -------------------------------------------------------------------------------------------------------


def test_a_good_header_passes_and_a_stopped_coordinator_is_lost(board: Board) -> None:
    other = Board.open(board.path)
    other.check()
    board.beat(12345)
    assert other.heartbeat == 12345
    other.check()
    board.stop()
    with pytest.raises(CoordinatorLost):
        other.check()
    other.close()


@pytest.mark.parametrize("word", [layout.H_MAGIC, layout.H_EPOCH, layout.H_EPOCH_2, layout.H_STATE])
@pytest.mark.parametrize("value", [0, 3, 2**64 - 1])
def test_an_overwritten_header_is_told_at_the_next_look(board: Board, word: int, value: int) -> None:
    board.words[word] = value
    with pytest.raises(ProtocolError) as caught:
        board.check()
    assert caught.value.code == "board"


def test_a_stop_wakes_who_waits_on_a_slot_in_use(board: Board, peer: PeerProcess) -> None:
    board.slot(2).open(1)
    peer.begin(_wait_for_the_stop, board.path)
    board.stop()
    assert peer.result() == STOPPED


def _wait_for_the_stop(path: str) -> int:
    board = Board.open(path)
    while board.words[layout.H_STATE] != STOPPED:
        board.slot(2).wait_recorded(0, 50_000_000)
    return board.words[layout.H_STATE]


# --- lifelines --------------------------------------------------------------------------------------------------------


def test_a_lifeline_is_held_by_one_and_seen_by_the_others(board: Board) -> None:
    first, second = Board.open(board.path), Board.open(board.path)
    line = board.session(4)
    assert not board.has_lifeline(line)
    assert first.hold_lifeline(line)
    assert board.has_lifeline(line)
    assert second.has_lifeline(line)
    assert not second.hold_lifeline(line)
    assert second.hold_lifeline(board.session(5)), "each line has its own"
    first.close()
    assert not board.has_lifeline(line)
    assert second.hold_lifeline(line)
    second.close()


def test_the_coordinators_lifeline_goes_with_its_descriptor(board: Board) -> None:
    other = Board.open(board.path)
    assert other.coordinator_holds_lifeline
    assert not is_abandoned(board.path)
    board.close()
    assert not other.coordinator_holds_lifeline
    assert is_abandoned(board.path)
    other.close()
    assert not other.coordinator_holds_lifeline


def test_what_is_not_there_is_not_abandoned(tmp_path: Path) -> None:
    assert not is_abandoned(str(tmp_path / "nothing"))


def test_the_mapping_outlives_the_descriptor(board: Board) -> None:
    other = Board.open(board.path)
    line = other.slot(0)
    other.close()
    other.close()
    board.slot(0).publish(3)
    assert line.recorded == 3


def _hold(path: str, index: int) -> bool:
    kept["board"] = Board.open(path)
    return bool(kept["board"].hold_lifeline(kept["board"].session(index)))


def _fork_and_drop(drops: bool) -> int:
    """A child that lets go of the descriptor, as forked children do, or does not; it lives on."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        if drops:
            kept["board"].drop_descriptor()
        os.write(write, b"!")
        signal.pause()
    os.read(read, 1)
    return child


@pytest.mark.parametrize("drops", [True, False])
def test_a_killed_process_loses_its_lifeline_unless_a_forked_child_kept_it(
    board: Board, peer: PeerProcess, drops: bool
) -> None:
    assert peer.call(_hold, board.path, 4)
    child = peer.call(_fork_and_drop, drops)
    try:
        assert board.has_lifeline(board.session(4))
        peer.kill()
        assert board.has_lifeline(board.session(4)) is not drops
    finally:
        os.kill(child, signal.SIGKILL)


# --- whose process lives ----------------------------------------------------------------------------------------------


def _assign(board: Board, index: int, pid: int, *, namespace: int | None = None) -> int:
    serial = (9 << 16) | index
    namespace = pid_namespace() if namespace is None else namespace
    board.session(index).assign(serial, pid, start_time(pid) or 0, namespace, 1)
    return serial


def test_this_processs_own_session_lives_as_long_as_it_has_its_line(board: Board) -> None:
    serial = _assign(board, 1, os.getpid())
    mine = peer_of(board, serial)
    assert isinstance(mine, OwnPeer)
    assert mine.is_alive()
    board.session(1).assign(serial + (1 << 16), os.getpid(), 0, 0, 1)
    assert not mine.is_alive()


def test_a_peer_is_dead_once_it_was_killed_reaped_or_not(board: Board) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        peer = peer_of(board, _assign(board, 2, process.pid))
        assert type(peer) is Peer
        assert peer.is_alive()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not peer.is_alive()
    assert not peer.is_alive()


def test_a_peer_is_dead_once_another_session_has_its_line(board: Board) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        serial = _assign(board, 2, process.pid)
        peer = peer_of(board, serial)
        assert peer.is_alive()
        board.session(2).assign(serial + (1 << 16), process.pid, start_time(process.pid) or 0, pid_namespace(), 1)
        assert not peer.is_alive()
        process.kill()


@pytest.mark.parametrize("knows_pid", [True, False])
def test_a_peer_of_another_pid_namespace_is_asked_for_its_lifeline(
    board: Board, peer: PeerProcess, knows_pid: bool
) -> None:
    """Its pid, which is another process's here or not known at all, says nothing."""
    serial = _assign(board, 3, os.getpid() if knows_pid else 0, namespace=1 if knows_pid else None)
    other = peer_of(board, serial)
    assert not other.is_alive()
    assert peer.call(_hold, board.path, 3)
    assert other.is_alive()
    peer.kill()
    assert not other.is_alive()


def _beat(path: str, index: int) -> None:
    """In a peer: a thread that holds the owner's word of a session line from now on."""
    kept["board"] = board = Board.open(path)
    is_held = threading.Event()

    def hold() -> None:
        with robust.held(board.session(index).owner_address):
            is_held.set()
            threading.Event().wait()

    threading.Thread(target=hold, daemon=True).start()
    assert is_held.wait(20)


@pytest.mark.parametrize("knows_pid", [True, False])
def test_a_peer_that_beats_is_told_by_its_word_alone(board: Board, peer: PeerProcess, knows_pid: bool) -> None:
    """Whatever its pid says: here it is this test's own, or none."""
    serial = _assign(board, 3, os.getppid() if knows_pid else 0)
    other = peer_of(board, serial)
    peer.call(_beat, board.path, 3)
    assert other.is_alive()
    peer.kill()
    assert board.session(3).owner == robust.OWNER_DIED
    assert not other.is_alive()


def test_a_line_that_is_given_anew_knows_nothing_of_the_last_ones_end(board: Board, peer: PeerProcess) -> None:
    first = peer_of(board, _assign(board, 3, 0))
    peer.call(_beat, board.path, 3)
    peer.kill()
    serial = first.serial + (1 << 16)
    board.session(3).assign(serial, os.getppid(), start_time(os.getppid()) or 0, pid_namespace(), 1)
    assert board.session(3).owner == 0
    assert peer_of(board, serial).is_alive()
    assert not first.is_alive()


def test_a_serial_of_a_line_that_is_none_is_refused(board: Board) -> None:
    with pytest.raises(ProtocolError):
        peer_of(board, (1 << 16) | SESSIONS)


def test_tmpfs_is_told_from_a_disk() -> None:
    assert is_tmpfs("/dev/shm")
    assert not is_tmpfs("/proc")
    with pytest.raises(FileNotFoundError):
        is_tmpfs("/dev/shm/nothing of that name")


# --- a death between any two stores -----------------------------------------------------------------------------------


class DeadlyWords:
    """The board's words; the process is killed in place of its store number `last`."""

    def __init__(self, words: memoryview, last: int) -> None:
        self._words = words
        self._left = last

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        self._words[index] = value


def _publish(line: SlotLine, _: SessionLine) -> None:
    line.publish(9)


def _complete(line: SlotLine, _: SessionLine) -> None:
    line.store_completed(8)


def _open(line: SlotLine, _: SessionLine) -> None:
    line.open(7)


def _break(line: SlotLine, _: SessionLine) -> None:
    line.break_at(6)


def _close(line: SlotLine, _: SessionLine) -> None:
    line.finish(CLOSED)


def _assign_anew(_: SlotLine, line: SessionLine) -> None:
    line.assign(0x8_0000, 100, 101, 102, 103)


STEPS = {function.__name__: function for function in (_publish, _complete, _open, _break, _close, _assign_anew)}


def _words_of(slot: SlotLine, session: SessionLine) -> dict[str, Any]:
    names = ("incarnation", "state", "recorder", "watermark", "recorded", "completed")
    words: dict[str, Any] = {name: getattr(slot, name) for name in names}
    return words | {"session": (session.state, session.serial, session.process, session.heartbeat)}


def _die_at_each_store(path: str, name: str, state: int) -> list[dict[str, Any]]:
    """What is on the board after a child of this process was killed at each store in turn; at last, after none."""
    board = Board.open(path)
    slot, session = board.slot(0), board.session(0)
    words = board.words
    found: list[dict[str, Any]] = []
    survived = False
    while not survived:
        slot.open(6)
        slot.break_at(2)
        slot.set_recorder(3)
        slot.publish(5)
        slot.store_completed(4)
        slot.finish(state)
        session.assign(0x7_0000, 10, 11, 12, 13)
        session.set_state(FREE)
        if (child := os.fork()) == 0:
            board.words = DeadlyWords(words, len(found))  # type: ignore[assignment] # what the lines below index
            STEPS[name](board.slot(0), board.session(0))
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        found.append(_words_of(slot, session))
    return found


def _deaths(board: Board, peer: PeerProcess, step: Callable[..., None], state: int) -> list[dict[str, Any]]:
    found = peer.call(_die_at_each_store, board.path, step.__name__, state)
    assert len(found) >= 2
    return found


@pytest.mark.parametrize(("step", "word", "values"), [(_publish, "recorded", [5, 9]), (_complete, "completed", [4, 8])])
def test_a_count_is_the_old_or_the_new_one_whenever_its_writer_dies(
    board: Board, peer: PeerProcess, step: Callable[..., None], word: str, values: list[int]
) -> None:
    found = _deaths(board, peer, step, OPEN)
    assert [each[word] for each in found] == values
    assert all({**each, word: 0} == {**found[0], word: 0} for each in found), "and nothing else was touched"


def test_a_slot_is_open_only_once_all_of_its_new_use_is_there(board: Board, peer: PeerProcess) -> None:
    *dead, last = _deaths(board, peer, _open, FREE)
    assert {each["state"] for each in dead} == {FREE}
    assert (last["state"], last["incarnation"], last["recorder"], last["watermark"]) == (OPEN, 7, 0, 0)
    assert {(each["recorded"], each["completed"]) for each in (*dead, last)} == {(5, 4)}, "counts never go back"


def test_a_broken_slot_always_says_what_stays_good(board: Board, peer: PeerProcess) -> None:
    *dead, last = _deaths(board, peer, _break, OPEN)
    assert {each["state"] for each in dead} == {OPEN}
    assert (last["state"], last["watermark"]) == (BROKEN, 6)


def test_a_slot_is_finished_in_one_store(board: Board, peer: PeerProcess) -> None:
    assert [each["state"] for each in _deaths(board, peer, _close, OPEN)] == [OPEN, CLOSED]


def test_a_session_lives_only_once_all_of_it_is_there(board: Board, peer: PeerProcess) -> None:
    *dead, last = _deaths(board, peer, _assign_anew, OPEN)
    assert {each["session"][0] for each in dead} == {FREE}
    assert last["session"] == (LIVE, 0x8_0000, (100, 101, 102), 103)
