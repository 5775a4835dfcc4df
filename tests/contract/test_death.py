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
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    share(drv, ipc_event, partner, third)
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    partner.call(actions.complete, "e")
    partner.kill()
    assert code(drv.cuEventQuery(ipc_event)) == kit.SUCCESS
    assert third.call(actions.query, "e") == kit.SUCCESS
    assert code(drv.cuEventSynchronize(ipc_event)) == kit.SUCCESS
    ok(drv.cuStreamWaitEvent(stream, ipc_event, 0))
    finish(stream)


def test_the_death_of_a_waiting_process_disturbs_nobody(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    share(drv, ipc_event, partner, third)
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    for each in (partner, third):
        assert each.call(actions.wait, "s", "e") == kit.SUCCESS
    partner.kill()
    assert third.call(actions.query_stream, "s") == kit.NOT_READY
    latch.open()
    third.call(actions.finish, "s")
    complete(ipc_event)


def test_a_process_killed_inside_synchronize_disturbs_nobody(
    drv: ModuleType, stream: Any, ipc_event: Any, partner: Peer, third: Peer
) -> None:
    share(drv, ipc_event, partner, third)
    latch = Latch(stream)
    ok(drv.cuEventRecord(ipc_event, stream))
    partner.begin(actions.synchronize, "e")
    third.begin(actions.synchronize, "e")
    partner.kill()
    latch.open()
    assert third.result() == kit.SUCCESS
    assert code(drv.cuEventQuery(ipc_event)) == kit.SUCCESS


# ---- records left pending


@pytest.fixture
def survivor(partner: Peer, new_peer: Callable[..., Peer]) -> Peer:
    """The exporter of an event that `partner` was killed amid a record of.

    A process of its own: whatever is blocked for ever ends with it, and no later event is made in the event's place.
    """
    made = new_peer(IPCSYNC_HOST_DEATH="pending")
    made.call(actions.start)
    leave_a_record_pending(partner, made.call(actions.share_event, "e"))
    for stream in ("s", "another", "other"):
        made.call(actions.create_stream, stream)
    return made


def leave_a_record_pending(partner: Peer, handle: bytes) -> None:
    """Kill it when its record is pending."""
    assert partner.call(actions.open_event, "e", handle) == kit.SUCCESS
    partner.call(actions.create_stream, "s")
    partner.call(actions.hold, "s")
    assert partner.call(actions.record, "e", "s") == kit.SUCCESS
    partner.kill()


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
    drv: ModuleType, stream: Any, ipc_event: Any, survivor: Peer
) -> None:
    survivor.begin(actions.synchronize, "e")
    survivor.kill()
    ok(drv.cuEventRecord(ipc_event, stream))
    complete(ipc_event)


def test_a_survivor_blocked_for_ever_can_still_exit(survivor: Peer, kind: str) -> None:
    if kind == "gpu":
        pytest.skip("whether a GPU's driver lets it exit is its own affair; ipcsync kills by SIGKILL")
    assert survivor.call(actions.wait, "s", "e") == kit.SUCCESS
    assert survivor.call(actions.destroy_stream, "s") == kit.SUCCESS  # does not block, though it will never be done
    survivor.close()
