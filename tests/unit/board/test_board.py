"""The board: where its words lie, and which files are not boards."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ipcsync._board import INT64_MAX, LIVE, OPEN, Board, layout
from ipcsync._board.runtime_dir import is_tmpfs
from ipcsync._linux.process import pid_namespace, start_time
from ipcsync.errors import CoordinatorLost, ProtocolError
from tests.kit.boards import bits_of, enter, store_bits
from tests.kit.descriptors import descriptors
from tests.kit.peer import Peer as PeerProcess
from tests.unit.conftest import EPOCH, SESSIONS, SLOTS

# --- the layout -------------------------------------------------------------------------------------------------------


def test_the_layout_is_the_one_that_other_versions_read() -> None:
    """Whoever changes one of these changes layout.VERSION."""
    assert layout.VERSION == 4
    assert (layout.LINE, layout.HEADER, layout.LABEL) == (128, 4096, 64)
    assert layout.MAGIC.to_bytes(8, "little") == b"PIBOARD1"
    small, exact, wide = layout.Layout(1, 32), layout.Layout(32, 32), layout.Layout(513, 1)
    assert (small.slots, exact.slots, layout.Layout(33, 1).slots) == (8192, 8192, 12288)
    assert (exact.bits, layout.Layout(512, 1).bits_row, wide.bits_row) == (12288, 64, 128)
    assert (exact.hazards, layout.Layout(64, 1).hazards_row, layout.Layout(65, 1).hazards_row) == (16384, 64, 128)
    assert (exact.labels, layout.Layout(33, 1).labels) == (20480, 24576)
    assert (exact.size, layout.Layout(65, 1).size) == (24576, 36864)


_OTHERS_WORDS = (
    *(layout.S_HEARTBEAT, layout.S_OWNER, layout.S_DOORBELL),
    *(
        layout.L_RECORDED,
        layout.L_COMPLETED,
        layout.L_FIRST_DEPENDENT,
        layout.L_VALID_AS_OF,
        layout.L_LOST,
        layout.L_ROOT_CAUSE,
    ),
    layout.L_ANNOUNCED,
)


def test_no_two_lines_overlap_and_none_crosses_a_page(board: Board) -> None:
    starts = [board.session(index).offset for index in range(SESSIONS)]
    starts += [board.slot(index).address - board.address for index in range(SLOTS)]
    assert starts[0] == layout.HEADER
    assert all(start % layout.LINE == 0 for start in starts)
    assert all(next_ - start >= layout.LINE for start, next_ in pairwise(starts))
    assert starts[-1] + layout.LINE <= board.layout.labels
    assert board.layout.labels + SESSIONS * layout.LABEL <= board.layout.size
    # The pages of the slots are registered with CUDA; whoever registers one registers no session's line.
    assert (board.address + board.layout.slots) % layout.PAGE == 0
    assert starts[SESSIONS - 1] + layout.LINE <= board.layout.slots == starts[SESSIONS]


def test_the_bits_of_no_two_slots_and_no_slots_words_share_a_cache_line(board: Board) -> None:
    everybody = (1 << SESSIONS) - 1
    for index in range(SLOTS):
        store_bits(board.slot(index), everybody)
        assert [bits_of(board.slot(each)) for each in range(SLOTS)] == [
            everybody * (each <= index) for each in range(SLOTS)
        ]
    assert board.layout.bits_row % 64 == 0
    assert board.layout.bits % layout.PAGE == 0
    assert not any(board.words[: board.layout.bits // 8][layout.HEADER // 8 :])


def test_the_visits_of_no_two_slots_share_a_cache_line(board: Board) -> None:
    for index in range(SLOTS):
        line = board.slot(index)
        enter(line, 0)
        enter(line, SESSIONS - 1)
        assert line.hazards() == {0: 1, SESSIONS - 1: 1}
        assert all(board.slot(each).hazards() == {} for each in range(index + 1, SLOTS))
        assert line.hazards_address % 64 == 0
    assert board.layout.hazards_row % 64 == 0
    assert board.layout.hazards % layout.PAGE == 0
    assert not any(board.words[board.layout.labels // 8 :])


def test_the_visits_of_a_session_that_is_gone_are_ended_on_every_slot(board: Board) -> None:
    for index in range(SLOTS):
        enter(board.slot(index), 1)
        enter(board.slot(index), 2)
    assert board.slot(0).hazards() == {1: 1, 2: 1}
    board.end_visits(1)
    assert [board.slot(index).hazards() for index in range(SLOTS)] == [{2: 1}] * SLOTS
    board.end_visits(1)
    assert board.slot(SLOTS - 1).hazards() == {2: 1}


def test_a_new_use_has_no_visits_of_the_last_ones_dead(board: Board) -> None:
    line = board.slot(1)
    enter(line, 2)
    line.open(2)
    assert line.hazards() == {}
    line._hazards[2] = 1
    assert line.hazards() == {}, "nobody has said that there are any"
    enter(line, 0)
    assert line.hazards() == {0: 1, 2: 1}


def test_a_loss_is_told_with_its_root_cause(board: Board) -> None:
    line = board.slot(1)
    line.lose(7, 5 << 16)
    assert (line.lost, line.root_cause) == (7, 5 << 16)
    line.valid_as_of = 3
    line.first_dependent = 6
    assert (line.first_dependent, line.valid_as_of) == (6, 3)
    board.newest = 9
    assert board.newest == 9


def test_a_new_use_has_nothing_of_what_the_last_recorder_stood_behind(board: Board) -> None:
    """One that died before it published a record left words about the number that the new use's first record gets."""
    line = board.slot(1)
    line.publish(5)
    store_bits(line, 0b11)
    line.valid_as_of = 3
    line.first_dependent = 6
    line.lose(6, 5 << 16)
    line.open(2)
    assert (line.recorded, line.first_dependent, line.valid_as_of, line.lost, line.root_cause, bits_of(line)) == (
        5,
        0,
        0,
        0,
        0,
        0,
    )
    assert line.state == OPEN


def test_what_the_coordinator_and_the_others_write_share_no_cache_line() -> None:
    coordinators = [layout.S_STATE, layout.S_SERIAL, layout.S_PID, layout.S_START, layout.S_NAMESPACE]
    coordinators += [layout.L_INCARNATION, layout.L_STATE, layout.L_RECORDER, layout.L_WATERMARK, layout.L_EXPIRED]
    assert all(word * 8 < 64 for word in coordinators)
    assert all(64 <= word * 8 < layout.LINE for word in _OTHERS_WORDS)


def test_the_words_lie_where_they_are_said_to(board: Board) -> None:
    line = board.slot(3)
    line.open(5)
    line.recorder = 6
    line.watermark = 7
    line.publish(8)
    line.store_completed(9)
    with open(board.path, "rb") as file:
        file.seek(board.layout.slots + 3 * layout.LINE)
        words = struct.unpack("=16Q", file.read(layout.LINE))
    assert words[:4] == (5, OPEN, 6, 7)
    assert words[8:10] == (8, 9)
    assert line.completed_address == line.address + 72
    assert (line.incarnation, line.state, line.recorder, line.watermark) == (5, OPEN, 6, 7)
    assert (line.recorded, line.completed) == (8, 9)
    assert ctypes.c_uint64.from_address(line.completed_address).value == 9


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


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("decode-3", "decode-3"),
        ("", ""),
        ("x" * 64, "x" * 64),
        ("x" * 65, "x" * 64),
        ("é" * 40, "é" * 32),
        ("x" + "é" * 40, "x" + "é" * 31),  # cut between two characters, not inside of one
    ],
)
def test_a_session_is_called_by_its_name_until_its_line_is_anothers(board: Board, label: str, shown: str) -> None:
    line, other = board.session(SESSIONS - 1), Board.open(board.path)
    serial = 0x7_0000 | SESSIONS - 1
    line.assign(serial, 11, 12, 13, 14, "the one before, with a longer name")
    line.assign(serial, 11, 12, 13, 14, label)
    assert (line.label, other.who(serial)) == (shown, (shown, 11))
    line.assign(serial + (1 << 16), 21, 12, 13, 14, "another")
    assert (other.who(serial), other.who(serial + (1 << 16))) == (("", 0), ("another", 21))
    other.close()


@pytest.mark.parametrize("index", [-1, SESSIONS, 1 << 40])
def test_a_session_that_does_not_exist_is_refused(board: Board, index: int) -> None:
    with pytest.raises(ProtocolError):
        board.session(index)


@pytest.mark.parametrize("index", [-1, SLOTS, 1 << 40])
def test_a_slot_that_does_not_exist_is_refused(board: Board, index: int) -> None:
    with pytest.raises(ProtocolError):
        board.slot(index)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_allocated_in_full_private_and_not_inherited(board: Board) -> None:
    status = os.stat(board.path)
    assert status.st_size == board.layout.size
    assert status.st_blocks * 512 >= status.st_size, "a sparse file is SIGBUS on a tmpfs that is full"
    assert status.st_mode & 0o777 == 0o600
    assert not any(os.get_inheritable(fd) for fd in _descriptors(board.path))


def _descriptors(path: str) -> list[int]:
    """This process's descriptors of the file, or of what lies in the folder, also what has no name there (yet)."""
    return [fd for fd, found in descriptors().items() if found == path or found.startswith(f"{path}/")]


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
    places = {
        "magic": layout.H_MAGIC,
        "version": layout.H_VERSION,
        "sessions": layout.H_SESSIONS,
        "slots": layout.H_SLOTS,
    }

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
    assert caught.value.code == ("version" if name == "another version" else "board")
    assert not _descriptors(str(path))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Board.open(str(tmp_path / "nothing"))


def test_the_mapping_outlives_the_descriptor(board: Board) -> None:
    other = Board.open(board.path)
    line = other.slot(0)
    other.close()
    other.close()
    board.slot(0).publish(3)
    assert line.recorded == 3


def test_tmpfs_is_told_from_a_disk() -> None:
    assert is_tmpfs("/dev/shm")
    assert not is_tmpfs("/proc")
    with pytest.raises(FileNotFoundError):
        is_tmpfs("/dev/shm/nothing of that name")


# --- the header -------------------------------------------------------------------------------------------------------


def test_a_good_header_passes_and_a_stopped_coordinator_is_lost(board: Board) -> None:
    other = Board.open(board.path)
    other.check()
    board.heartbeat = 12345
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
    assert peer.result() == layout.STOPPED


def _wait_for_the_stop(path: str) -> int:
    board = Board.open(path)
    while board.words[layout.H_STATE] != layout.STOPPED:
        board.slot(2).futex.wait(0, 50_000_000)
    return board.words[layout.H_STATE]
