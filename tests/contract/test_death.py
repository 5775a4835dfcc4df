"""Processes killed by SIGKILL: what they finished stays finished, and the others go on."""

from __future__ import annotations

import os
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


def test_a_record_of_a_survivor_replaces_the_one_that_a_dead_process_left_pending(
    drv: ModuleType, new_stream: Any, event: Any, peer: Peer, third: Peer
) -> None:
    share(drv, event, peer, third)
    peer.call(actions.hold, "s")
    assert peer.call(actions.record, "e", "s") == kit.SUCCESS
    peer.kill()
    recorder, waiter = new_stream(), new_stream()
    latch = Latch(recorder)
    ok(drv.cuEventRecord(event, recorder))
    ok(drv.cuStreamWaitEvent(waiter, event, 0))
    assert third.call(actions.query, "e") == kit.NOT_READY
    latch.open()
    finish(waiter)
    complete(event)
    third.call(actions.complete, "e")


def test_who_is_blocked_by_a_dead_recorder_can_be_killed(
    drv: ModuleType, stream: Any, event: Any, peer: Peer, third: Peer
) -> None:
    share(drv, event, peer, third)
    peer.call(actions.hold, "s")
    assert peer.call(actions.record, "e", "s") == kit.SUCCESS
    third.begin(actions.synchronize, "e")
    peer.kill()
    third.kill()
    ok(drv.cuEventRecord(event, stream))
    complete(event)


def test_a_record_left_pending_by_a_dead_process_stays_pending(
    drv: ModuleType, stream: Any, event: Any, peer: Peer, third: Peer
) -> None:
    if os.environ.get("IPCSYNC_HOST_DEATH") != "pending":
        pytest.skip("the software driver was told otherwise")
    share(drv, event, peer, third)
    peer.call(actions.hold, "s")
    assert peer.call(actions.record, "e", "s") == kit.SUCCESS
    # The blocked stream is one of `third`, which ends with the test: here it would block every later cuCtxSynchronize.
    assert third.call(actions.wait, "s", "e") == kit.SUCCESS
    peer.kill()
    finish(stream)
    assert code(drv.cuEventQuery(event)) == kit.NOT_READY
    assert third.call(actions.query, "e") == kit.NOT_READY
    assert third.call(actions.query_stream, "s") == kit.NOT_READY
    assert third.call(actions.destroy_stream, "s") == kit.SUCCESS  # does not block, though it will never be done


def test_a_survivor_blocked_for_ever_can_still_exit(
    drv: ModuleType, event: Any, peer: Peer, third: Peer, kind: str
) -> None:
    if kind == "gpu":
        pytest.skip("whether a GPU's driver lets it exit is its own affair; ipcsync kills by SIGKILL")
    share(drv, event, peer, third)
    peer.call(actions.hold, "s")
    assert peer.call(actions.record, "e", "s") == kit.SUCCESS
    assert third.call(actions.wait, "s", "e") == kit.SUCCESS
    peer.kill()
    third.close()
