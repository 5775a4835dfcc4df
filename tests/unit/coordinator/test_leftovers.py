"""Who keeps what the dead left: all of it is told by one look at the processes, and freed once nobody does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from ipcsync._board import Board
from ipcsync._board.board import _held
from ipcsync._linux.files import holders
from ipcsync._linux.process import pid_namespace
from ipcsync_coordinator import deaths
from ipcsync_coordinator.deaths import Leftovers
from ipcsync_coordinator.registry import Registry
from ipcsync_coordinator.state import UNKNOWN, Session
from ipcsync_keeper.config import Settings
from tests.kit.boards import end

_LATER_NS = 10**10


class Scene:
    """A registry and a board, with recorders that are gone, and whose locks this process holds."""

    def __init__(self, board: Board) -> None:
        self.registry = Registry(Settings(pool=8, max_sessions=8))
        self.board = board
        self.kept = Leftovers(self.registry, board)

    def recorder(self, name: str, *, has_lock: bool = True) -> Session:
        """A recorder that is gone; what it left is kept."""
        session = self.registry.open_session(name, name)
        line = self.board.session(session.line)
        line.assign(session.serial, os.getpid(), 1, pid_namespace(), 1)
        if has_lock:
            self.board.show_end(session.serial)
        self.registry.create(session, name, recorder=True, device="d", engine="timeline", depth=1, ring=[])
        self.registry.release_dead(session, held=line.lock if has_lock else UNKNOWN)
        return session

    def look(self, now_ns: int) -> None:
        """Look, and wait until what it found was told."""
        self.kept.look(now_ns)
        for thread in threading.enumerate():
            if thread.name == "ipcsync-kept":
                thread.join()


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Nothing is kept yet; the locks are released afterwards."""
    board = Board.create(f"/dev/shm/ipcsync-board-{os.getuid()}-{os.urandom(16).hex()}", os.urandom(16), 8, 1)
    yield Scene(board)
    lock = _held.pop(board.epoch, None)
    if lock is not None:
        lock.drop()
    end(board)


def test_many_are_told_of_by_one_look_at_the_processes_and_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A look for each of them, all at once, would hold the coordinator up for seconds."""
    looks: list[set[int]] = []
    monkeypatch.setattr(deaths, "holders", lambda inodes: looks.append(inodes) or holders(inodes))  # type: ignore[func-returns-value]
    for name in "abc":
        scene.recorder(name)
    scene.recorder("under MPS", has_lock=False)
    with caplog.at_level(logging.WARNING, "ipcsync.coordinator"):
        for now_ns in (1, _LATER_NS, 2 * _LATER_NS):
            scene.look(now_ns)
    told = sorted((str(record.fields["name"]), record.fields.get("held_by")) for record in caplog.records)  # type: ignore[attr-defined]
    assert told == [*((name, str(os.getpid())) for name in "abc"), ("under MPS", None)]
    assert len(looks) == 1


def test_without_a_thread_they_are_told_of_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def has_none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    scene.recorder("a")
    scene.look(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", has_none)
        scene.look(_LATER_NS)
    assert not caplog.records
    scene.look(2 * _LATER_NS)
    assert len(caplog.records) == 1


def test_what_nobody_keeps_any_more_is_freed(scene: Scene) -> None:
    recorder, other = scene.recorder("a"), scene.recorder("under MPS", has_lock=False)
    scene.look(1)
    assert scene.registry.kept.by_recorder.keys() == {recorder.serial, other.serial}
    _held.pop(scene.board.epoch).drop()
    scene.look(2)
    assert scene.registry.kept.by_recorder.keys() == {other.serial}
    assert [scene.registry.kept.counts(0)["timeline"], scene.registry.in_use] == [1, 0]
