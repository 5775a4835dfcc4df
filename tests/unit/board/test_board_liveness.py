"""Whose process lives, by the board: lifelines, the word that the kernel marks, and what the kernel is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from ipcsync._board import Board, layout, peer_of
from ipcsync._board.board import is_abandoned
from ipcsync._linux import futex
from ipcsync._linux.process import pid_namespace, start_time
from ipcsync.errors import CoordinatorLost, ProtocolError
from tests.kit.descriptors import none_left
from tests.kit.peer import Peer as PeerProcess
from tests.unit.conftest import EPOCH, SESSIONS, SLOTS

kept: dict[str, Any] = {}


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


def test_a_closed_board_keeps_no_lifeline_by_a_childs_copy_of_its_file(board: Board) -> None:
    other = Board.open(board.path)
    line = board.session(2)
    assert other.hold_lifeline(line)
    copy = os.dup(other.descriptor)  # as a child has that was forked in the middle of the close
    try:
        other.close()
        assert not board.has_lifeline(line)
    finally:
        os.close(copy)


def test_what_is_not_there_is_not_abandoned(tmp_path: Path) -> None:
    assert not is_abandoned(str(tmp_path / "nothing"))


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


# --- the coordinator's mark -------------------------------------------------------------------------------------------


def _make(path: str, stops: bool = False) -> None:
    board = kept["board"] = Board.create(path, EPOCH, SESSIONS, SLOTS)
    board.show_life()
    board.check()
    if stops:
        board.stop()


def test_the_header_tells_of_the_coordinators_death_to_who_opened_it_before_or_after(
    tmp_path: Path, peer: PeerProcess
) -> None:
    path = str(tmp_path / "board")
    peer.call(_make, path)
    before = Board.open(path)
    assert before.has_mark
    assert not before.coordinator_is_over
    assert before.header == before.running_header
    before.check()
    peer.kill()
    after = Board.open(path)
    assert not after.has_mark
    for board in (before, after):
        assert board.coordinator_is_over
        assert board.header != board.running_header
        with pytest.raises(CoordinatorLost, match="died"):
            board.check()
        board.close()


def test_a_coordinator_that_stopped_has_stopped_and_not_died(tmp_path: Path, peer: PeerProcess) -> None:
    path = str(tmp_path / "board")
    peer.call(_make, path, True)
    board = Board.open(path)
    for is_dead in (False, True):
        if is_dead:
            peer.kill()
        assert board.coordinator_is_over
        with pytest.raises(CoordinatorLost, match="stopped"):
            board.check()
    board.close()


@pytest.mark.parametrize("value", [0, 3, futex.OWNER_DIED + 1, 2**64 - 1])
def test_a_mark_that_was_overwritten_is_no_death(board: Board, value: int) -> None:
    board.show_life()
    other = Board.open(board.path)
    held = board.words[layout.H_OWNER]
    board.words[layout.H_OWNER] = value
    assert not other.coordinator_is_over
    with pytest.raises(ProtocolError):
        other.check()
    board.words[layout.H_OWNER] = held
    other.close()


def test_without_robust_futexes_the_header_has_no_mark(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_SYS_SET", -1)
    board.show_life()
    other = Board.open(board.path)
    assert not board.has_mark
    assert not other.has_mark
    other.check()
    other.close()


def test_a_board_that_is_closed_releases_its_mark(board: Board) -> None:
    board.show_life()
    assert board.words[layout.H_OWNER]
    board.close()
    assert not board.words[layout.H_OWNER]


# --- whose process lives ----------------------------------------------------------------------------------------------


def _assign(board: Board, index: int, pid: int, *, namespace: int | None = None) -> int:
    serial = (9 << 16) | index
    namespace = pid_namespace() if namespace is None else namespace
    board.session(index).assign(serial, pid, start_time(pid) or 0, namespace, 1)
    return serial


def test_this_processs_own_session_lives_as_long_as_it_has_its_line(board: Board) -> None:
    serial = _assign(board, 1, os.getpid())
    mine = peer_of(board, serial)
    board.session(1).owner = futex.OWNER_DIED  # as this process marks it before it ends
    assert mine.is_alive()
    assert mine.is_over() is None
    board.session(1).assign(serial + (1 << 16), os.getpid(), 0, 0, 1)
    assert not mine.is_alive()


def _knows_its_own_with_no_descriptor_left(path: str) -> bool:
    board = kept["board"] = Board.open(path)
    serial = _assign(board, 1, os.getpid())
    with none_left():
        return peer_of(board, serial).is_alive()


def test_a_first_look_at_a_peer_needs_no_descriptor(board: Board, peer: PeerProcess) -> None:
    assert peer.call(_knows_its_own_with_no_descriptor_left, board.path)


@pytest.mark.process
def test_a_peer_is_dead_once_it_was_killed_reaped_or_not(board: Board) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        peer = peer_of(board, _assign(board, 2, process.pid))
        assert peer.is_alive()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not peer.is_alive()
    assert not peer.is_alive()


@pytest.mark.process
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
        with futex.held(board.session(index).owner_address):
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
    assert board.session(3).owner == futex.OWNER_DIED
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


def test_a_serial_of_a_line_that_does_not_exist_is_refused(board: Board) -> None:
    with pytest.raises(ProtocolError):
        peer_of(board, (1 << 16) | SESSIONS)
