"""Who waits for the kernel's marks: each death is told once, with `futex_waitv` and without."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ipcsync._board import Board, Peer
from ipcsync._linux import futex
from ipcsync._linux.futex import OWNER_DIED, WAITERS, DeathMark
from ipcsync._linux.process import pid_namespace, start_time
from ipcsync_coordinator import deaths
from ipcsync_coordinator.deaths import DeathWatch, has_ended
from tests.kit.boards import end
from tests.kit.peer import Peer as PeerProcess
from tests.kit.until import DEADLINE_S

_kept: list[Any] = []


def _show(path: str, index: int) -> int:
    """In a peer: have its death marked on that session line; its pid."""
    board = Board.open(path)
    mark = DeathMark(board.session(index).owner_address, board.session(index).doorbell)
    mark.show()
    _kept.append((board, mark))
    return os.getpid()


def _second_thread() -> int:
    """In a peer: the id of another thread, which lives as long as the peer does."""
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    assert thread.native_id is not None
    return thread.native_id


def _assign(board: Board, index: int, pid: int) -> Peer:
    serial = (7 << 16) | index
    board.session(index).assign(serial, pid, start_time(pid) or 0, pid_namespace(), 1)
    return Peer(board, serial)


@pytest.fixture
def board() -> Iterator[Board]:
    """A board with more session lines than one call of the kernel takes."""
    made = Board.create(f"/dev/shm/ipcsync-board-{os.getuid()}-{os.urandom(16).hex()}", os.urandom(16), 130, 1)
    yield made
    end(made)


@pytest.fixture
def died() -> queue.Queue[int]:
    """The serials that were told of."""
    return queue.Queue()


@pytest.fixture
def watch(died: queue.Queue[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[DeathWatch]:
    """Its slices do not end within the test: it is the kernel, or the look where there is no futex_waitv."""
    monkeypatch.setattr(deaths, "_SLICE_NS", int(2 * DEADLINE_S * 1e9))
    made = DeathWatch(died.put)
    yield made
    made.close()


def _refused(code: int) -> Callable[..., int]:
    def call(number: int, *arguments: Any) -> int:
        if number == futex._SYS_FUTEX_WAITV:
            ctypes.set_errno(code)
            return -1
        return int(futex._libc.syscall(number, *arguments))

    return call


@pytest.mark.parametrize("refusal", [None, "ENOSYS", "EPERM", "EINVAL", "ENOMEM"])
def test_a_death_is_told_once(
    board: Board,
    watch: DeathWatch,
    died: queue.Queue[int],
    peer: PeerProcess,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str | None,
) -> None:
    if refusal:
        monkeypatch.setattr(futex, "_syscall", _refused(getattr(errno, refusal)))
    others = [_assign(board, index, os.getpid()) for index in range(128)]
    for other in others:
        other.line.owner = WAITERS | 17
        watch.watch(other)
    dying = _assign(board, 128, peer.pid)
    peer.call(_show, board.path, 128)
    watch.watch(dying)
    assert dying.line.owner & WAITERS
    peer.kill()
    assert died.get(timeout=DEADLINE_S) == dying.serial
    assert dying.line.owner == WAITERS | OWNER_DIED
    watch.watch(others[0])  # has the threads look once more
    assert died.empty()


def test_who_is_marked_already_is_told_of_and_who_is_forgotten_is_not(
    board: Board, watch: DeathWatch, died: queue.Queue[int]
) -> None:
    first, second, third = (_assign(board, index, os.getpid()) for index in range(3))
    for each in (first, second):
        each.line.owner = WAITERS | 17
        watch.watch(each)
    watch.forget(first.serial)
    for each in (first, third):
        each.line.owner = WAITERS | OWNER_DIED
    watch.watch(third)
    assert died.get(timeout=DEADLINE_S) == third.serial
    assert died.empty()


def test_a_process_that_no_descriptor_is_left_to_look_at_counts_as_alive_and_keeps_no_other_back(
    board: Board, watch: DeathWatch, died: queue.Queue[int], peer: PeerProcess
) -> None:
    def none_left(*_: int) -> None:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    unmarked, marked = _assign(board, 0, peer.pid), _assign(board, 1, os.getpid())
    marked.line.owner = WAITERS | OWNER_DIED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ipcsync._board.board.Process", none_left)
        watch.watch(unmarked)
        watch.watch(marked)
        assert died.get(timeout=DEADLINE_S) == marked.serial
    peer.kill()
    assert died.get(timeout=DEADLINE_S) == unmarked.serial


def test_a_process_that_the_kernel_does_not_mark_is_looked_at(
    board: Board, watch: DeathWatch, died: queue.Queue[int], peer: PeerProcess
) -> None:
    dying = _assign(board, 1, peer.pid)
    watch.watch(dying)
    peer.kill()
    assert died.get(timeout=DEADLINE_S) == dying.serial


def test_a_process_whose_number_is_a_thread_of_another_one_now_has_ended(peer: PeerProcess) -> None:
    thread = peer.call(_second_thread)
    try:
        os.close(os.pidfd_open(thread))
    except FileNotFoundError:
        pass
    except OSError:
        pytest.skip("before Linux 6.15 the kernel says EINVAL of a thread's number, as it does where it has no pidfds")
    assert has_ended(thread, start_time(thread) or 0) is True
    assert has_ended(peer.pid, start_time(peer.pid) or 0) is False
