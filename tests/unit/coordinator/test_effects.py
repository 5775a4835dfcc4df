"""What follows from a registry's change: on the board, in the pool, on the feed, in the journal and in the log."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from ipcsync._board import BROKEN, CLOSED, EXPIRED, FREE, INT64_MAX, LIVE, OPEN, Board
from ipcsync._wire.messages import Announcement
from ipcsync.typing import EngineName
from ipcsync_coordinator.effects import Releaser, watermark
from ipcsync_coordinator.journal import Journal, Record, Transactions, recover
from ipcsync_coordinator.questions import remains_of
from ipcsync_coordinator.state import Recorder, SessionEnd, Slot
from ipcsync_keeper.resources import JournalFiles
from tests.unit.coordinator.effects_scene import Scene


@pytest.fixture
def scene(board: Board) -> Scene:
    return Scene(board)


ENGINES: list[EngineName] = ["event", "timeline"]


def test_a_session_is_put_on_the_board_and_told_and_taken_off_at_its_end(scene: Scene) -> None:
    before = time.monotonic_ns()
    session = scene.registry.open_session("id-s", "s")
    session.pid, session.started = 17, 170
    scene.settle()
    line = scene.board.session(session.line)
    namespace = scene.board.coordinator[2]
    assert (line.state, line.serial, line.process, line.label) == (LIVE, session.serial, (17, 170, namespace), "s")
    assert before <= line.heartbeat <= time.monotonic_ns()
    assert scene.board.newest == 1
    scene.registry.lose(session, "expired")
    scene.settle()
    assert line.state == EXPIRED
    assert scene.outside.forgotten == []
    scene.registry.release_dead(session)
    scene.settle()
    assert line.state == FREE
    assert scene.outside.forgotten == [session]
    assert scene.outside.heard() == [
        Announcement(number=1, kind="session_opened", name="s", session="id-s"),
        Announcement(number=2, kind="session_closed", name="s", session="id-s", pid=17, cause="expired"),
    ]


def test_the_newest_session_stays_the_newest_when_an_older_one_is_stored_again(scene: Scene) -> None:
    first, second = scene.session("1"), scene.session("2")
    scene.board.session(first.line).state = FREE  # as before it was stored
    scene.effects.redo([first], [])
    assert scene.board.session(first.line).state == LIVE
    assert scene.board.newest == second.serial >> 16 == 2


def test_a_slot_that_is_free_and_used_again_in_one_record_begins_where_its_last_use_ended(scene: Scene) -> None:
    """No memory for the record of the death: the next one has it too, and then the row says only that it is open."""
    dead, session = scene.session("dead"), scene.session("s")
    slot = scene.open(dead, "timeline")
    line = scene.board.slot(slot.index)
    line.publish(3)
    scene.registry.lose(dead, "died")
    scene.settle()
    assert line.completed == INT64_MAX
    scene.registry.release_dead(dead)
    scene.effects.fill_in(scene.registry.touched.slots)  # and could not be appended
    assert scene.open(session, "timeline") is slot
    scene.effects.releaser.reassert()
    assert (line.state, line.incarnation, line.recorded, line.completed) == (OPEN, 2, 3, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_event_is_put_on_the_board_and_told_with_its_handles(scene: Scene, engine: EngineName) -> None:
    session = scene.session("s")
    scene.outside.heard()
    ring = [5, 6]
    slot = scene.registry.create(session, "e", recorder=True, device="gpu", engine=engine, depth=2, ring=ring)
    scene.settle()
    line = scene.board.slot(slot.index)
    assert (line.state, line.incarnation, line.recorder, line.watermark) == (OPEN, 1, session.serial, 0)
    assert scene.outside.heard() == [
        Announcement(
            number=2,
            kind="opened",
            name="e",
            slot=0,
            incarnation=1,
            device="gpu",
            engine=engine,
            handles=[b"five", b"six"],
        )
    ]


def test_a_close_is_told_and_the_slot_waits_for_the_last_who_may_touch_it(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder)
    scene.registry.join(waiter, slot, recorder=False, device="", engine="auto")
    ring, line = slot.ring, scene.board.slot(0)
    line.publish(2)
    line.store_completed(2)
    assert slot.quarantined_s(time.monotonic_ns()) is None
    scene.registry.close(recorder, 0, 1, released=True)
    scene.settle()
    assert (line.state, line.completed) == (CLOSED, 2)
    ended = {"session": "r", "pid": 17, "cause": "closed"}
    assert scene.outside.heard() == [Announcement(number=4, kind="closed", name="e", slot=0, incarnation=1, **ended)]  # type: ignore[arg-type] # each is of its kind
    assert 0 < (slot.quarantined_s(time.monotonic_ns()) or 0) < 60
    scene.registry.close(waiter, 0, 1, released=True)
    scene.settle()
    assert (line.state, line.completed) == (FREE, 2)
    assert (scene.outside.returned, scene.outside.destroyed, slot.ring) == ([ring], [], [])
    assert scene.outside.heard() == []
    assert slot.quarantined_s(time.monotonic_ns()) is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("end", ["expired", "died"])
def test_a_break_says_what_stays_good_and_why(
    scene: Scene, engine: EngineName, end: SessionEnd, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, engine)
    scene.registry.join(waiter, slot, recorder=False, device="", engine="auto")
    line = scene.board.slot(0)
    line.publish(5)
    line.store_completed(3)
    scene.registry.lose(recorder, end)
    scene.outside.heard()
    has_expired = end == "expired"
    with caplog.at_level(logging.WARNING, "ipcsync.coordinator"):
        scene.settle()
    assert slot.good == 3
    assert (line.state, line.watermark, line.has_expired) == (BROKEN, 3, has_expired)
    assert line.completed == (INT64_MAX if engine == "timeline" else 3)
    assert bool(scene.effects.releaser._held) == (engine == "timeline")
    told_of = [(each.kind, each.name, each.slot, each.session, each.pid, each.cause) for each in scene.outside.heard()]
    assert told_of[1:] == [("broken", "e", 0, "r", 17, end)]
    assert slot.quarantined_s(time.monotonic_ns())
    (said,) = caplog.records
    told = {
        "name": "e",
        "slot": 0,
        "recorder": "r",
        "session": "id-r",
        "pid": 17,
        "cause": end,
        "generation": 5,
        "good_to": 3,
    }
    assert (said.getMessage(), said.fields) == ("event broken", told)  # type: ignore[attr-defined] # see _logs


def test_a_broken_ring_is_destroyed_and_a_whole_one_used_again(scene: Scene) -> None:
    for completed, breaks in ((2, False), (1, False), (2, True)):
        recorder = scene.session("r")
        slot = scene.open(recorder)
        ring, line = slot.ring, scene.board.slot(slot.index)
        line.publish(2)
        line.store_completed(completed)
        if breaks:
            scene.registry.release_dead(recorder)
        else:
            scene.registry.end_session(recorder, released=True)
        scene.settle()
        is_reusable = completed == 2 and not breaks
        assert (scene.outside.returned, scene.outside.destroyed) == (([ring], []) if is_reusable else ([], [ring]))
        assert line.completed == 2  # where the next use begins
        scene.outside.returned.clear(), scene.outside.destroyed.clear()


def test_what_remains_of_a_later_use_of_a_slot_counts_from_that_uses_beginning(scene: Scene) -> None:
    for use in (1, 2):
        recorder = scene.session("r")
        slot = scene.open(recorder, "timeline")
        line = scene.board.slot(slot.index)
        line.publish(slot.base + 2)
        line.store_completed(slot.base + 1)
        scene.registry.release_dead(recorder)
        scene.settle()
        assert (slot.index, slot.incarnation) == (0, use)
        remains = remains_of(slot, line.recorded)
        assert (remains.recorded, remains.good) == (2, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_remains_of_a_closed_use_is_all_that_was_recorded(scene: Scene, engine: EngineName) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, engine)
    scene.registry.join(waiter, slot, recorder=False, device="", engine="auto")
    line = scene.board.slot(slot.index)
    line.publish(2)
    line.store_completed(2)
    for session in (recorder, waiter):
        scene.registry.close(session, slot.index, slot.incarnation, released=True)
        scene.settle()
    assert slot.state == "free"
    remains = remains_of(slot, line.recorded)
    assert (remains.recorded, remains.good, remains.cause, remains.session) == (2, 2, "closed", "r")


def test_what_waits_ahead_is_released_once_a_timeline_is_drained_and_until_it_is_used_anew(scene: Scene) -> None:
    recorder, waiter = scene.session("r"), scene.session("w")
    slot = scene.open(recorder, "timeline")
    scene.registry.join(waiter, slot, recorder=False, device="", engine="auto")
    line = scene.board.slot(0)
    line.publish(2)
    line.store_completed(2)
    scene.registry.close(recorder, 0, 1, released=True)
    scene.settle()
    assert (line.watermark, line.completed, bool(scene.effects.releaser._held)) == (2, INT64_MAX, True)
    line.store_completed(2)
    scene.effects.releaser.reassert()
    assert line.completed == INT64_MAX
    scene.registry.close(waiter, 0, 1, released=True)
    scene.settle()
    assert (line.state, line.completed, bool(scene.effects.releaser._held)) == (FREE, 2, False)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("state", "is_drained"), [("broken", False), ("closed", True), ("closed", False)])
def test_a_later_coordinator_releases_what_the_one_before_it_did(
    scene: Scene, engine: EngineName, state: Any, is_drained: bool
) -> None:
    files = JournalFiles.create()
    before = Journal(files, Record)
    before.append(Record(slots=[Slot(0, state, name="e", engine=engine, is_drained=is_drained)]))
    before.carried_out()
    recover(Transactions(scene.registry, scene.effects, files), time.monotonic_ns())
    for descriptor in files.descriptors:
        os.close(descriptor)
    is_held = engine == "timeline" and (state == "broken" or is_drained)
    assert bool(scene.effects.releaser._held) == is_held
    assert scene.board.slot(0).completed == (INT64_MAX if is_held else 0)


def test_a_later_coordinator_stores_again_what_the_one_before_it_may_have(scene: Scene) -> None:
    session = scene.session("s")
    slot = scene.open(session, "timeline")
    line = scene.board.slot(slot.index)
    slot.recorder = Recorder(9, "id", "r")
    rows: tuple[tuple[dict[str, Any], Any], ...] = (
        ({"state": "broken", "reason": "expired"}, (BROKEN, 0, True, INT64_MAX)),
        ({"state": "free"}, (FREE, 0, True, 0)),
        ({"state": "open", "incarnation": 2}, (OPEN, 0, True, 0)),
        ({"state": "closed", "is_drained": True}, (CLOSED, 0, True, INT64_MAX)),
    )
    for row, found in rows:
        for name, value in row.items():
            setattr(slot, name, value)
        for _ in range(2):
            scene.effects.redo([], [slot])
            assert (line.state, line.watermark, line.has_expired, line.completed) == found
    assert (line.incarnation, line.recorder) == (2, 9)
    assert scene.outside.heard() == []  # what it announced, subscribers of this one learn by its snapshot


def test_what_is_in_use_is_not_begun_anew_by_a_row_that_says_no_more(scene: Scene) -> None:
    """A record has whole rows: an event's may be stored again while recorders store beside it."""
    session = scene.session("s")
    slot = scene.open(session, "timeline")
    line = scene.board.slot(slot.index)
    line.publish(2)
    line.first_dependent = 1
    scene.board.session(session.line).heartbeat = 99
    scene.effects.redo([session], [slot])
    assert (line.recorded, line.first_dependent, scene.board.session(session.line).heartbeat) == (2, 1, 99)


def test_a_step_that_fails_is_logged_and_keeps_no_other_back(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    session = scene.session("s")
    slots = [
        scene.registry.create(session, name, recorder=True, device="gpu", engine="event", depth=1, ring=[serial])
        for serial, name in ((5, "a"), (6, "b"))
    ]

    def fail(ring: list[int]) -> None:
        scene.outside.returned.append(ring)
        raise ZeroDivisionError

    scene.outside.destroy = scene.outside.give_back = fail
    scene.registry.release_dead(session)
    scene.settle()
    assert scene.outside.returned == [[5], [6]]
    assert [scene.board.slot(slot.index).state for slot in slots] == [FREE, FREE]
    assert scene.outside.forgotten == [session]
    said = [(record.getMessage(), record.fields, record.exc_info is not None) for record in caplog.records]  # type: ignore[attr-defined] # see _logs
    assert said.count(("change only partly carried out", {"step": "fail"}, True)) == 2


@pytest.mark.parametrize(
    ("engine", "completed", "recorded", "behind", "lost", "good"),
    [
        ("event", 12, 15, 0, 0, 12),
        ("event", 15, 14, 0, 0, 14),  # what was not published was not recorded
        ("event", 7, 15, 0, 0, 10),  # of an earlier use
        ("event", 14, 15, 12, 13, 14),  # an event's recorder publishes only what it judged
        ("timeline", 14, 15, 0, 0, 14),
        ("timeline", 14, 15, 12, 0, 11),
        ("timeline", 14, 15, 0, 13, 12),
        ("timeline", 14, 15, 13, 12, 11),
        ("timeline", 14, 15, 9, 10, 14),  # of an earlier use
        ("timeline", 14, 15, 11, 0, 10),
        ("timeline", 12, 15, 14, 15, 12),
        ("timeline", INT64_MAX, 15, 12, 0, 3),  # released: what counts was kept before
    ],
)
def test_what_stays_good_at_a_break(
    board: Board, engine: EngineName, completed: int, recorded: int, behind: int, lost: int, good: int
) -> None:
    line = board.slot(0)
    line.watermark = 3
    line.publish(recorded)
    line.first_dependent = behind
    line.lose(lost, 0)
    line.store_completed(completed)
    assert watermark(Slot(0, "open", name="e", engine=engine, base=10), line) == good


def test_a_released_word_is_stored_again_each_millisecond_at_first_and_less_often_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[float, Callable[[], None]]] = []
    releaser, line = Releaser(lambda *call: calls.append(call)), scene.board.slot(0)
    for index in (0, 1):
        releaser.hold(index, scene.board.slot(index))
    for fresh_ns, seconds in ((10**12, 0.001), (0, 0.05)):
        ((_, again),) = calls
        calls.clear()
        line.store_completed(3)
        monkeypatch.setattr(releaser, "_fresh_until", fresh_ns and time.monotonic_ns() + fresh_ns)
        again()
        assert line.completed == INT64_MAX
        assert calls == [(seconds, releaser._again)]
    for index in (0, 1):
        releaser.reset(index, scene.board.slot(index), 3)
    calls.pop()[1]()
    assert not calls, "nothing is held any more"


def test_a_word_that_is_released_beside_old_ones_is_stored_again_at_once_too(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Timer:
        def __init__(self, seconds: float, _: Callable[[], None]) -> None:
            timers.append(seconds)
            self.seconds = seconds

        def cancel(self) -> None:
            timers.remove(self.seconds)

    timers: list[float] = []
    releaser = Releaser(Timer)  # type: ignore[arg-type] # as much of a timer as it needs
    releaser.hold(0, scene.board.slot(0))
    timers.clear()
    monkeypatch.setattr(releaser, "_fresh_until", 0)
    releaser._again()
    assert timers == [0.05]
    for index in (1, 2):
        releaser.hold(index, scene.board.slot(index))
        assert timers == [0.001]
