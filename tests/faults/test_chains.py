"""Rows 44 to 46: A records, B's stream waits for that and B records behind it, C waits for B's record; A dies."""

from __future__ import annotations

import pytest

import ipcsync
from tests.faults import chain_actions as do
from tests.faults.chain_line import Line, NewPeer, of_events, waits
from tests.kit.until import until

pytestmark = [pytest.mark.keeper, pytest.mark.core]

WAYS = list(do.WAYS)


# --- row 44 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_row_44_timeline_one_remove_raises_behind(timeline: Line, way: str) -> None:
    point = timeline.follow("b", timeline.begin())
    c = timeline.add("c", records=False)
    timeline.assert_lost((timeline.kill_a(), c.call(do.await_end, point, way))[1], timeline.peers["a"].pid)


def test_row_44_timeline_two_removes_raises_behind(timeline: Line) -> None:
    point = timeline.follow("bb", timeline.follow("b", timeline.begin()))
    c = timeline.add("c", records=False)
    pid = timeline.kill_a()
    loss = c.call(do.await_end, point)
    timeline.assert_lost(loss, pid)
    assert loss is not None
    assert loss["event"] == "bb/out"


def test_row_44_b_raises_at_its_next_record(line: Line) -> None:
    point = line.follow("b", line.begin())
    b, pid = line.peers["b"], line.kill_a()
    line.until_seen(lambda: b.call(do.loss_of, do.record, "b/out") is not None)
    loss = b.call(do.loss_of, do.record, "b/out")
    line.assert_lost(loss, pid)
    assert loss is not None
    assert loss["generation"] >= 2
    assert "generation 1 of 'a/out', whose recorder 'a'" in loss["text"]
    assert str(pid) in loss["text"]
    line.assert_lost(b.call(do.await_end, point), pid)


def test_row_44_nothing_counts_that_was_recorded_over_a_released_wait(timeline: Line) -> None:
    """B's stream is held until the wait was released; so its record ran over what A never did."""
    data = timeline.begin()
    b = timeline.add("b")
    b.call(do.wait, data)
    b.call(do.hold)
    point = b.call(do.record, "b/out")
    c = timeline.add("c", records=False)
    pid = timeline.kill_a()
    b.call(do.open_gate)
    timeline.assert_lost(c.call(do.await_end, point), pid)
    assert b.call(do.words, "b/out")["lost"] == 1


# --- row 45 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("death", ["complete", "pending"])
def test_row_45_event(coordinator: ipcsync.Coordinator, new_peer: NewPeer, death: str, way: str) -> None:
    line = of_events(coordinator, new_peer, death)
    point = line.follow("b", line.begin())
    c = line.add("c", records=False)
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point, way), pid)


@pytest.mark.parametrize("death", ["complete", "pending"])
@pytest.mark.parametrize("engines", [("event", "timeline"), ("timeline", "event")], ids="-".join)
def test_row_45_the_engines_of_a_chain_may_differ(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer, engines: tuple[str, str], death: str
) -> None:
    line = Line(coordinator.endpoint, new_peer, engines[0], death)
    data = line.begin()
    line.engine = engines[1]
    point = line.follow("b", data)
    c = line.add("c", records=False)
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


@pytest.mark.parametrize("death", ["complete", "pending"])
def test_row_45_event_two_removes(coordinator: ipcsync.Coordinator, new_peer: NewPeer, death: str) -> None:
    line = of_events(coordinator, new_peer, death)
    point = line.follow("bb", line.follow("b", line.begin()))
    c = line.add("c", records=False)
    pid = line.kill_a()
    line.assert_lost(c.call(do.await_end, point), pid)


@pytest.mark.parametrize("death", ["complete", "pending"])
def test_row_45_once_its_event_is_broken_the_recorder_itself_takes_nothing_for_complete(
    coordinator: ipcsync.Coordinator, new_peer: NewPeer, death: str
) -> None:
    """Whatever the driver says of its own work, which ran over a wait that was lost."""
    line = of_events(coordinator, new_peer, death)
    point = line.follow("b", line.begin())
    b, pid = line.peers["b"], line.kill_a()
    until(lambda: b.call(do.state_of, point) == "broken", "the coordinator has broken the event")
    b.call(do.beat)
    for way in ("query", "synchronize"):
        line.assert_lost(b.call(do.await_end, point, way), pid)


def test_row_45_a_waiter_that_began_before_the_death_learns_it_too(line: Line) -> None:
    point = line.follow("b", line.begin())
    c = line.add("c", records=False)
    c.begin(do.await_end, point)
    until(lambda: waits(c), "the waiter waits")
    pid = line.kill_a()
    loss = c.result()
    assert loss is not None, "a silent pass"
    assert (loss["cause"], loss["session"], loss["pid"]) == ("behind", "a", pid)


# --- row 46 -----------------------------------------------------------------------------------------------------------


def _complete(line: Line) -> bytes:
    a = line.add("a")
    return a.call(do.record, "a/out")


def test_row_46_closed_drained_is_good(line: Line) -> None:
    point = line.follow("b", _complete(line))
    c = line.add("c", records=False)
    line.peers["a"].call(do.close_client)
    assert c.call(do.await_end, point) is None
    b = line.peers["b"]
    until(lambda: b.call(do.is_settled, "b/out"), "B finds that all is well")
    assert b.call(do.words, "b/out") == {"recorded": 1, "completed": 1, "behind": 0, "lost": 0, "bits": 0}


def test_row_46_closed_undrained_is_good(line: Line) -> None:
    point = line.follow("b", line.begin())
    a, c = line.peers["a"], line.add("c", records=False)
    a.call(do.close_client)
    assert c.call(do.error_of, do.synchronize_briefly, point) == "WaitTimeout"
    a.call(do.open_gate)
    assert c.call(do.await_end, point) is None


def test_row_46_settled_before_death_is_good(line: Line) -> None:
    point = line.follow("b", _complete(line))
    b = line.peers["b"]
    until(lambda: b.call(do.is_settled, "b/out"), "B settles it at a beat")
    line.kill_a()
    assert line.add("c", records=False).call(do.await_end, point) is None
    assert b.call(do.loss_of, do.record, "b/out") is None


def test_row_46_other_stream_is_good(line: Line) -> None:
    line.follow("b", line.begin())
    b = line.peers["b"]
    b.call(do.open_event, "b/other", line.engine)
    line.kill_a()
    point = b.call(do.record, "b/other", "another stream")
    assert line.add("c", records=False).call(do.await_end, point) is None


def test_row_46_other_event_is_good(line: Line) -> None:
    data = line.begin()
    b = line.add("b")
    b.call(do.open_event, "b/before", line.engine)
    before = b.call(do.record, "b/before")
    b.call(do.wait, data)
    behind = b.call(do.record, "b/out")
    pid = line.kill_a()
    c = line.add("c", records=False)
    line.assert_lost(c.call(do.await_end, behind), pid)
    assert c.call(do.await_end, before) is None


def test_row_46_earlier_generation_is_good(line: Line) -> None:
    data = line.begin()
    b = line.add("b")
    before = b.call(do.record, "b/out")
    b.call(do.wait, data)
    behind = b.call(do.record, "b/out")
    pid = line.kill_a()
    c = line.add("c", records=False)
    line.assert_lost(c.call(do.await_end, behind), pid)
    assert c.call(do.await_end, before) is None
