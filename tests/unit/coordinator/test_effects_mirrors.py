"""What follows from a change of a mirror: of another node's event, whose recorder here is the bridge."""

from __future__ import annotations

import time

import pytest

from ipcsync._board import BROKEN, FREE, INT64_MAX, Board
from ipcsync._wire.codec import Origin
from ipcsync_coordinator.effects import Effects
from ipcsync_coordinator.state import Session, Slot, Tombstone, Tombstones
from tests.unit.coordinator.effects_scene import Scene

_ORIGIN = Origin(b"e" * 16, 3, 2)


class MirrorScene(Scene):
    """One with a bridge, and with the tombstones that others share."""

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self.tombstones = Tombstones()
        self.effects = Effects(board, self.outside, self.feed, self.outside.forgotten.append, self.tombstones)
        self.bridge = self.registry.open_session("id-bridge", "bridge", "bridge")
        self.settle()

    def mirror(self) -> Slot:
        slot = self.registry.create(self.bridge, "", recorder=True, device="gpu", origin=_ORIGIN, node="two")
        self.settle()
        self.outside.heard()
        return slot

    def wait_on(self, slot: Slot, name: str = "w") -> Session:
        waiter = self.session(name)
        self.registry.attach(waiter, slot.index, slot.incarnation)
        self.settle()
        self.outside.heard()
        return waiter

    def heard(self) -> list[tuple[str, int, int]]:
        return [(each.kind, each.slot, each.incarnation) for each in self.outside.heard()]


@pytest.fixture
def scene(board: Board) -> MirrorScene:
    return MirrorScene(board)


@pytest.mark.parametrize(
    ("reason", "told", "has_expired"),
    [("silent", "silent", False), ("expired", "", True), ("died", "", False), ("EXPIRED", "", False)],
)
def test_a_mirror_that_is_lost_says_what_stays_good_and_why(
    scene: MirrorScene, reason: str, told: str, has_expired: bool
) -> None:
    slot = scene.mirror()
    scene.wait_on(slot)
    line = scene.board.slot(slot.index)
    line.publish(slot.base + 5)
    line.store_completed(slot.base + 3)
    scene.registry.finish_mirror(scene.bridge, slot.index, slot.incarnation, "broken", reason)
    scene.settle()
    assert (line.state, line.watermark, line.has_expired, line.reason) == (BROKEN, slot.base + 3, has_expired, told)
    assert line.completed == INT64_MAX
    assert slot.good == 3
    assert scene.heard() == [("broken", slot.index, slot.incarnation)]


def test_a_mirror_of_which_nothing_was_complete_keeps_nothing_good(scene: MirrorScene) -> None:
    slot = scene.mirror()
    scene.wait_on(slot)
    scene.registry.finish_mirror(scene.bridge, slot.index, slot.incarnation, "broken", "silent")
    scene.settle()
    assert slot.good == 0


def test_a_lost_mirror_that_nobody_uses_any_more_leaves_a_tombstone(scene: MirrorScene) -> None:
    slot = scene.mirror()
    waiter = scene.wait_on(slot)
    line = scene.board.slot(slot.index)
    line.publish(slot.base + 5)
    line.store_completed(slot.base + 3)
    scene.registry.finish_mirror(scene.bridge, slot.index, slot.incarnation, "broken", "silent")
    scene.settle()
    assert scene.tombstones.find(_ORIGIN) is None
    for session in (waiter, scene.bridge):
        scene.registry.close(session, slot.index, slot.incarnation, released=True)
    scene.settle()
    assert line.state == FREE
    assert scene.tombstones.find(_ORIGIN) == Tombstone("two", 3, "silent")
    assert slot.quarantined_s(time.monotonic_ns()) is None


def test_a_lost_mirror_that_nobody_wants_is_released(scene: MirrorScene) -> None:
    slot = scene.mirror()
    for state in ("broken", "unwanted"):
        scene.registry.finish_mirror(scene.bridge, slot.index, slot.incarnation, state, "")
    scene.settle()
    assert scene.board.slot(slot.index).state == FREE


def test_a_mirror_that_ended_well_leaves_none(scene: MirrorScene) -> None:
    slot = scene.mirror()
    scene.registry.finish_mirror(scene.bridge, slot.index, slot.incarnation, "closed", "")
    scene.registry.close(scene.bridge, slot.index, slot.incarnation, released=True, drained=True)
    scene.settle()
    assert scene.board.slot(slot.index).state == FREE
    assert scene.tombstones.everything() == []


@pytest.mark.parametrize(("reason", "told", "has_expired"), [("silent", "silent", False), ("expired", "", True)])
def test_what_is_restored_is_good_as_far_as_its_tombstone_says(
    scene: MirrorScene, reason: str, told: str, has_expired: bool
) -> None:
    waiter = scene.session("w")
    scene.outside.heard()
    slot = scene.registry.restore_from_tombstone(waiter, _ORIGIN, Tombstone("two", 4, reason), "gpu")
    line = scene.board.slot(slot.index)
    scene.settle()
    assert (line.state, line.recorded, line.watermark) == (BROKEN, slot.base + 4, slot.base + 4)
    assert (line.has_expired, line.reason, line.completed) == (has_expired, told, INT64_MAX)
    scene.effects.redo([], [slot])
    assert (line.state, line.recorded, line.watermark) == (BROKEN, slot.base + 4, slot.base + 4)


def test_the_bridge_is_told_of_a_mirror_that_nobody_else_uses(scene: MirrorScene) -> None:
    slot = scene.mirror()
    waiter = scene.wait_on(slot)
    scene.registry.close(waiter, slot.index, slot.incarnation, released=True)
    scene.settle()
    assert scene.heard() == [("unwanted", slot.index, slot.incarnation)]


def test_nobody_is_told_of_one_that_is_used_again_meanwhile(scene: MirrorScene) -> None:
    slot = scene.mirror()
    waiter = scene.wait_on(slot)
    scene.registry.close(waiter, slot.index, slot.incarnation, released=True)
    scene.registry.attach(waiter, slot.index, slot.incarnation)
    scene.settle()
    assert scene.heard() == []
