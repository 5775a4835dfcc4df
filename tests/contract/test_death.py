"""Processes killed by SIGKILL: what they finished stays finished, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.contract import actions
from tests.contract.sharing import share
from tests.kit import driver_kit as kit
from tests.kit.driver_kit import Latch, code, complete, finish, ok
from tests.kit.peer import Peer

pytestmark = [pytest.mark.driver, pytest.mark.process]


def test_what_a_process_completed_stays_complete_after_its_death(
    drv: ModuleType, stream: Any, event: Any, peer: Peer, third: Peer
) -> None:
    share(drv, event, peer, third)
    assert peer.call(actions.record, "e", "s") == kit.SUCCESS
    peer.call(actions.complete, "e")
    peer.kill()
    assert code(drv.cuEventQuery(event)) == kit.SUCCESS
    assert third.call(actions.query, "e") == kit.SUCCESS
    assert code(drv.cuEventSynchronize(event)) == kit.SUCCESS
    ok(drv.cuStreamWaitEvent(stream, event, 0))
    finish(stream)


def test_the_death_of_a_waiting_process_disturbs_nobody(
    drv: ModuleType, stream: Any, event: Any, peer: Peer, third: Peer
) -> None:
    share(drv, event, peer, third)
    latch = Latch(stream)
    ok(drv.cuEventRecord(event, stream))
    for each in (peer, third):
        assert each.call(actions.wait, "s", "e") == kit.SUCCESS
    peer.kill()
    assert third.call(actions.query_stream, "s") == kit.NOT_READY
    latch.open()
    third.call(actions.finish, "s")
    complete(event)


def test_a_process_killed_inside_synchronize_disturbs_nobody(
    drv: ModuleType, stream: Any, event: Any, peer: Peer, third: Peer
) -> None:
    share(drv, event, peer, third)
    latch = Latch(stream)
    ok(drv.cuEventRecord(event, stream))
    peer.begin(actions.synchronize, "e")
    third.begin(actions.synchronize, "e")
    peer.kill()
    latch.open()
    assert third.result() == kit.SUCCESS
    assert code(drv.cuEventQuery(event)) == kit.SUCCESS


# ---- records left pending


@pytest.fixture
def survivor(peer: Peer, new_peer: Callable[..., Peer]) -> Peer:
    """The exporter of an event that `peer` was killed amid a record of. A process of its own: whatever is blocked for
    ever ends with it, and no later event is made in the event's place.
    """
    made = new_peer({"IPCSYNC_HOST_DEATH": "pending"})
    made.call(actions.start)
    leave_a_record_pending(peer, made.call(actions.share_event, "e"))
    for stream in ("s", "another", "other"):
        made.call(actions.create_stream, stream)
    return made


def leave_a_record_pending(peer: Peer, handle: bytes) -> None:
    """Kill the peer when its record is pending."""
    assert peer.call(actions.open_event, "e", handle) == kit.SUCCESS
    peer.call(actions.create_stream, "s")
    peer.call(actions.hold, "s")
    assert peer.call(actions.record, "e", "s") == kit.SUCCESS
    peer.kill()


def test_a_record_left_pending_by_a_dead_process_stays_so_and_blocks_who_waits_for_it(survivor: Peer) -> None:
    assert survivor.call(actions.wait, "s", "e") == kit.SUCCESS
    survivor.call(actions.finish, "other")
    assert survivor.call(actions.query, "e") == kit.NOT_READY
    assert survivor.call(actions.query_stream, "s") == kit.NOT_READY


def test_a_record_left_pending_by_a_dead_process_blocks_every_later_record_and_its_stream(survivor: Peer) -> None:
    for stream in ("s", "another"):
        assert survivor.call(actions.record, "e", stream) == kit.SUCCESS
        survivor.call(actions.finish, "other")
        assert survivor.call(actions.query, "e") == kit.NOT_READY
        assert survivor.call(actions.query_stream, stream) == kit.NOT_READY


def test_who_is_blocked_by_a_dead_recorder_can_be_killed(
    drv: ModuleType, stream: Any, event: Any, survivor: Peer
) -> None:
    survivor.begin(actions.synchronize, "e")
    survivor.kill()
    ok(drv.cuEventRecord(event, stream))
    complete(event)


def test_a_survivor_blocked_for_ever_can_still_exit(survivor: Peer, kind: str) -> None:
    if kind == "gpu":
        pytest.skip("whether a GPU's driver lets it exit is its own affair; ipcsync kills by SIGKILL")
    assert survivor.call(actions.wait, "s", "e") == kit.SUCCESS
    assert survivor.call(actions.destroy_stream, "s") == kit.SUCCESS  # does not block, though it will never be done
    survivor.close()
