"""Row 3 at every step of the compiled core: who is killed there publishes nothing by halves, and every wait ends."""

from __future__ import annotations

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import actions, fixtures
from tests.faults.fixtures import Blocked, until_lost
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = [pytest.mark.core, pytest.mark.driver]

_STEPS = {"event": 15, "timeline": 16}  # of a record; a wait that is queued takes no more than these
_WAIT_STEPS = {"event": 31, "timeline": 24}
_BEFORE_PUBLISHED = {"event": 9, "timeline": 10}


def _warm(coordinator: ipcsync.Coordinator, peer: Peer, engine: EngineName) -> None:
    """A recorder that has recorded on all of its ring."""
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
    for _ in range(5):
        peer.call(actions.record_complete, "e")


def test_a_record_has_the_steps_that_are_killed_below(
    coordinator: ipcsync.Coordinator, peer: Peer, engine: EngineName
) -> None:
    _warm(coordinator, peer, engine)
    assert peer.call(actions.steps_of, "record", "e") == _STEPS[engine]


@pytest.mark.thorough
@pytest.mark.parametrize("at", range(max(_STEPS.values())))
def test_row_03_a_recorder_killed_before_any_compiled_step_leaves_nothing_half_published(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName, at: int
) -> None:
    if at >= _STEPS[engine]:
        return  # a record on this engine has one step less
    _warm(coordinator, peer, engine)
    event = client.event("e", engine=engine)
    stream = ipcsync.Stream()
    sixth = event.at(6)
    is_published = at >= _BEFORE_PUBLISHED[engine] + 1
    waiting = [Blocked(sixth.synchronize)]
    if engine == "timeline" or not is_published:  # else a stream may stand for ever behind what the dead has recorded
        waiting.append(Blocked(lambda: sixth.wait(stream)))

    peer.begin(actions.die_at_step, "record", "e", at)

    outcomes = [call.outcome() for call in waiting]
    assert event.generation == (6 if is_published else 5)
    for outcome in outcomes:
        assert isinstance(outcome, ipcsync.RecorderLost) or (is_published and outcome is None)
    until_lost(client, "pidfd")
    assert event.at(5).query()
    with pytest.raises(ipcsync.RecorderLost):
        event.at(7).query()
    with client.event("e", recorder=True, engine=engine) as anew:
        fixtures.finish(anew.record(ipcsync.Stream() if is_published else stream))


@pytest.mark.thorough
@pytest.mark.parametrize("at", range(max(_WAIT_STEPS.values())))
def test_row_03_a_waiter_killed_before_any_compiled_step_harms_nobody(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName, at: int
) -> None:
    event = client.event("e", recorder=True, engine=engine)
    stream = ipcsync.Stream()
    peer.call(actions.connect, coordinator.endpoint, "waiter")
    with StreamGate(stream) as gate:
        point = event.record(stream)
        peer.call(actions.take, bytes(point), "p")
        peer.call(actions.wait_on_stream, "p")
        steps = peer.call(actions.steps_of, "wait", "p")
        assert steps <= _WAIT_STEPS[engine]
        peer.begin(actions.die_at_step, "wait", "p", min(at, steps - 1))
        until_lost(client, "pidfd")
        assert (event.state, event.completed) == ("open", 0)
        gate.open()
        fixtures.finish(point)
    fixtures.finish(event.record(stream))
    event.close()
    until(lambda: client.stats()["pool_in_use"] == 0, "the slot free again")


_CHAINED_STEPS = {"event": 34, "timeline": 36}  # of a record behind a wait that one before is behind too


def _warm_chain(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName, point: ipcsync.Point
) -> None:
    """A recorder whose last record stands behind a wait for `point`, and that has queued one more."""
    _warm(coordinator, peer, engine)
    peer.call(actions.take, bytes(point), "p")
    peer.call(actions.wait_on_stream, "p")
    peer.call(actions.record, "e")  # the chain's first entry, so that the records below extend it
    peer.call(actions.record, "e")


def test_a_record_behind_a_wait_has_the_steps_that_are_killed_below(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    stream = ipcsync.Stream()
    with client.event("above", recorder=True, engine=engine) as above, StreamGate(stream) as gate:
        _warm_chain(coordinator, client, peer, engine, above.record(stream))
        assert peer.call(actions.steps_of, "record", "e") == _CHAINED_STEPS[engine]
        gate.open()


@pytest.mark.thorough
@pytest.mark.parametrize("at", range(max(_CHAINED_STEPS.values())))
def test_row_03_a_recorder_killed_at_any_step_of_a_record_behind_others_leaves_a_loss(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName, at: int
) -> None:
    if at >= _CHAINED_STEPS[engine]:
        return  # a record on this engine has fewer
    stream, mine = ipcsync.Stream(), ipcsync.Stream()
    above = client.event("above", recorder=True, engine=engine)
    with StreamGate(stream) as gate:
        point = above.record(stream)
        _warm_chain(coordinator, client, peer, engine, point)
        event = client.event("e", engine=engine)
        waiting = [Blocked(event.at(8).synchronize), Blocked(event.at(7).synchronize)]

        peer.begin(actions.die_at_step, "record", "e", at)

        for call in waiting:
            assert isinstance(call.outcome(), ipcsync.RecorderLost)
        until_lost(client, "pidfd")
        assert event.generation in (7, 8)
        assert event.at(5).query()
        gate.open()
        fixtures.finish(point)  # who was waited for loses nothing
    event.close()
    with client.event("e", recorder=True, engine=engine) as anew:
        fixtures.finish(anew.record(mine))
    above.close()
    until(lambda: client.stats()["pool_in_use"] == 0, "both slots free again")
