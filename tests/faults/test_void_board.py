"""Row 73: coordinator and keeper are killed, and nobody is left who releases the streams that wait for words."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

import ipcsync
from tests.faults import actions, fixtures, standing_actions
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until
from tests.kit.zygote import children_of

pytestmark = [pytest.mark.driver, pytest.mark.own_coordinator]

NewPeer = Callable[..., Peer]


@pytest.fixture
def kept(new_coordinator: Callable[..., ipcsync.Coordinator]) -> ipcsync.Coordinator:
    return new_coordinator(keeper=True)


@pytest.fixture
def recorder(kept: ipcsync.Coordinator, new_peer: NewPeer) -> Peer:
    """Two timelines, each with a record that is not complete."""
    peer = new_peer()
    peer.call(actions.connect, kept.endpoint, "recorder")
    peer.call(remote.hold)
    for name in ("kv", "other"):
        peer.call(actions.open_event, name, "timeline")
    return peer


def _kill(coordinator: ipcsync.Coordinator) -> None:
    """SIGKILL both."""
    both = [coordinator.pid, *children_of(coordinator.pid)]
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    for pid in both:
        until(lambda: fixtures.has_ended(pid), "both gone")  # noqa: B023 - called at once


def test_row_73_the_streams_of_a_client_go_on_and_what_is_behind_them_is_lost(
    kept: ipcsync.Coordinator, recorder: Peer, new_peer: NewPeer
) -> None:
    waiter = new_peer()
    point, other = recorder.call(actions.record, "kv"), recorder.call(actions.record, "other")
    waiter.call(standing_actions.wait_for, kept.endpoint, point)
    waiter.call(actions.take, other, "not waited for")
    waiter.begin(standing_actions.outcome, "Stream.synchronize")
    _kill(kept)
    assert waiter.result() == ("", "", 0, "")
    assert waiter.call(actions.error_of, actions.synchronize, "p") == "CoordinatorLost"
    assert waiter.call(standing_actions.is_released, "p")
    assert not waiter.call(standing_actions.is_released, "not waited for"), "another's word was touched"
    recorder.call(remote.let_go)


def test_row_73_a_client_that_was_closed_lets_its_streams_go_on_too(
    kept: ipcsync.Coordinator, recorder: Peer, new_peer: NewPeer
) -> None:
    waiter = new_peer()
    waiter.call(standing_actions.wait_for, kept.endpoint, recorder.call(actions.record, "kv"))
    waiter.call(remote.close_client)
    assert not waiter.call(remote.stream_is_idle)
    _kill(kept)
    assert waiter.call(standing_actions.outcome, "Stream.synchronize") == ("", "", 0, "")
    recorder.call(remote.let_go)


def test_row_73_of_a_coordinator_and_a_keeper_that_are_only_silent_nothing_is_released(
    kept: ipcsync.Coordinator, recorder: Peer, new_peer: NewPeer
) -> None:
    waiter = new_peer()
    waiter.call(standing_actions.wait_for, kept.endpoint, recorder.call(actions.record, "kv"))
    both = [kept.pid, *children_of(kept.pid)]
    for pid in both:
        fixtures.stop(pid)
    try:
        waiter.call(standing_actions.beat_often)
        assert not waiter.call(standing_actions.is_released, "p")
        assert not waiter.call(remote.stream_is_idle)
        recorder.call(remote.let_go)
        until(lambda: waiter.call(remote.stream_is_idle), "the record, which is good")
    finally:
        for pid in reversed(both):
            os.kill(pid, signal.SIGCONT)
