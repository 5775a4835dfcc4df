"""The bridge's looks at this node's events: who wakes it, and who need not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipcsync._board import OPEN, Board, SlotLine, layout
from ipcsync._linux.futex import OWNER_DIED
from ipcsync._wire.messages import Attachment
from ipcsync.errors import QuotaExceeded
from ipcsync_bridge.exports import Export, Exports
from tests.kit import boards
from tests.kit.until import until
from tests.unit.engines.chain_row import BASE, COUNT, ME, Row


class Recorder:
    """One slot's, as the compiled core is one: it wakes whoever asked for it."""

    def __init__(self, line: SlotLine, words: memoryview) -> None:
        self._line = line
        self._words = words
        self.count = self.wakes = 0

    @property
    def is_asked(self) -> bool:
        """Whether the next record is to wake anybody."""
        return bool(self._line.awaited or self._line.followed)

    def record(self, *, completes: bool = True) -> None:
        """One more, which is complete at once."""
        self.count += 1
        self._line.publish(self.count)
        if completes:
            self._line.store_completed(self.count)
        if self.is_asked:
            self.wakes += 1
            self._line.futex.wake()


def attachment(slot: int) -> Attachment:
    return Attachment(
        name="e",
        slot=slot,
        incarnation=1,
        base=0,
        device="",
        engine="timeline",
        depth=1,
        recorder=False,
        handles=[b""],
    )


class Scene:
    """A board, of which the first slot is exported."""

    def __init__(self, path: Path) -> None:
        self.board = Board.create(str(path), b"e" * 16, 1, 200)
        self.recorder = Recorder(self.open(0), self.board.words)
        self.told: list[int] = []
        self.exports = Exports(self.board, self._changed, self._failed)
        self.exports.put(attachment(0))

    def open(self, slot: int) -> SlotLine:
        line = self.board.slot(slot)
        line.open(1)
        assert line.state == OPEN
        return line

    def _changed(self, changed: list[Export]) -> None:
        self.told += [export.row.completed for export in changed]

    def _failed(self, error: Exception) -> None:
        raise error

    def close(self) -> None:
        self.exports.close()
        boards.end(self.board)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "board")
    yield scene
    scene.close()


def test_a_record_wakes_the_bridge_that_sleeps(scene: Scene) -> None:
    for count in range(1, 20):
        until(lambda: scene.recorder.is_asked, "the bridge is about to sleep")
        scene.recorder.record()
        until(lambda count=count: count in scene.told, "it was told")  # type: ignore[misc]
    assert scene.recorder.wakes >= 19


def test_many_records_between_two_looks_wake_nobody_until_the_bridge_sleeps_again(scene: Scene) -> None:
    until(lambda: scene.recorder.is_asked, "the bridge is about to sleep")
    for _ in range(1_000_000):
        scene.recorder.record()
        if not scene.recorder.is_asked:
            break
    assert not scene.recorder.is_asked, "the bridge looks by itself"
    until(lambda: scene.recorder.is_asked, "it sleeps again")
    until(lambda: scene.told[-1:] == [scene.recorder.count], "the newest state was told")
    scene.recorder.record()
    until(lambda: scene.told[-1:] == [scene.recorder.count], "and the next one")


def test_work_in_flight_is_looked_for_and_wakes_nobody(scene: Scene) -> None:
    scene.recorder.record(completes=False)
    until(lambda: not scene.recorder.is_asked, "the bridge looks by itself")
    scene.recorder.record()
    until(lambda: scene.told[-1:] == [2], "it was told")
    until(lambda: scene.recorder.is_asked, "it sleeps again")


def test_what_another_export_of_the_use_has_stored_is_put_right_by_the_next_look(scene: Scene) -> None:
    until(lambda: scene.recorder.is_asked, "the bridge is about to sleep")
    scene.board.slot(0).followed = False
    scene.exports.kick()
    until(lambda: scene.recorder.is_asked, "it asks again")


def test_a_look_by_another_thread_takes_nothing_from_the_one_that_watches(scene: Scene) -> None:
    recorder = Recorder(scene.open(1), scene.board.words)
    export = Export(scene.board, attachment(1))
    recorder.record(completes=False)
    assert export.has_changed()
    assert not export.row.completed
    scene.board.slot(1).store_completed(1)
    assert export.read()[0].completed == 1
    assert export.follow(), "it looks again soon, and finds what is not told yet"
    assert export.has_changed()
    assert not export.follow()


def test_what_is_pending_below_a_lost_generation_is_looked_for(scene: Scene) -> None:
    recorder = Recorder(scene.open(1), scene.board.words)
    export = Export(scene.board, attachment(1))
    for _ in range(4):
        recorder.record(completes=False)
    scene.board.slot(1).lose(3, 0)
    assert export.has_changed()
    assert export.row.lost == 3
    assert export.follow()
    scene.board.slot(1).store_completed(2)
    assert export.has_changed()
    assert export.row.completed == 2
    assert not export.follow()


@pytest.mark.parametrize("end", ["stopped", "died"])
def test_what_stands_behind_a_session_that_lives_counts_until_the_coordinator_is_over(row: Row, end: str) -> None:
    """Then nobody would say that a session is lost, and the streams that wait for it go on."""
    export = Export(row.board, row.reply(ME, recorder=False))
    row.complete(ME, 2)
    row.line.valid_as_of, row.line.first_dependent = COUNT, BASE + 2
    boards.store_bits(row.line, 0b1)
    for is_over in (False, True):
        if is_over:
            words = {"stopped": (layout.H_STATE, layout.STOPPED), "died": (layout.H_OWNER, OWNER_DIED)}
            at, value = words[end]
            row.board.words[at] = value
        known, is_unclear = export.read()
        assert (known.recorded, known.completed, known.state, is_unclear) == (2, 2 - is_over, "open", is_over)


def test_an_export_without_a_thread_that_looks_at_it_is_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    recorder = Recorder(scene.open(1), scene.board.words)
    exports = Exports(scene.board, scene._changed, scene._failed)
    with monkeypatch.context() as limit:
        limit.setattr("_thread.start_new_thread", refuse)
        limit.setattr(threading.Thread, "start", refuse)
        with pytest.raises(QuotaExceeded, match="events that other nodes wait for"):
            exports.put(attachment(1))
    assert not exports
    exports.put(attachment(1))
    recorder.record()
    until(lambda: scene.told[-1:] == [1], "it was told")
    exports.close()


def test_threads_that_watch_nothing_end(scene: Scene) -> None:
    def watchers() -> int:
        return [thread.name for thread in threading.enumerate()].count("ipcsync-exports")

    for slot in range(1, 200):
        scene.open(slot)
        scene.exports.put(attachment(slot))
    assert watchers() == 2
    for slot in range(200):
        scene.exports.drop((slot, 1))
    until(lambda: watchers() == 1, "one is left")
