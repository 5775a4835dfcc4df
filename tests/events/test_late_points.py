"""A point that a process sees for the first time when its sender is gone: good as far as it was known complete."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync._session import connection
from ipcsync._wire.codec import pack, unpack
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.events.stage import NewClient
from tests.faults import actions
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = [pytest.mark.core, pytest.mark.driver, pytest.mark.keeper]

ENDS: dict[str, Callable[[Peer], object]] = {"closed": lambda peer: peer.call(remote.close_client), "died": Peer.kill}


@pytest.fixture
def sender(peer: Peer, coordinator: ipcsync.Coordinator, engine: EngineName) -> Peer:
    """A sender, with a named event."""
    peer.call(actions.open_recorder, coordinator.endpoint, "ckpt", engine)
    return peer


def _end(peer: Peer, cause: str, client: ipcsync.Client) -> None:
    ENDS[cause](peer)
    until(lambda: client.stats()["pool_in_use"] == 0, "no session has the slot any more")


def _next(data: bytes) -> bytes:
    key = unpack(data)
    return pack(key._replace(generation=key.generation + 1))


@pytest.mark.parametrize("cause", list(ENDS))
def test_what_was_known_complete_is_complete(
    client: ipcsync.Client, sender: Peer, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_RETRY_NS", 60_000_000_000)  # a busy machine may owe a reply for a second
    data = sender.call(actions.record_complete, "ckpt")
    _end(sender, cause, client)
    asked = client.messages_sent
    point = client.point(data)
    point.synchronize(0)
    point.wait(ipcsync.Stream(), timeout=0)
    point.wait(ipcsync.Stream(), ahead=True)
    assert point.query()
    assert point.is_recorded
    assert point.exception() is None
    assert (point.event_name, point.generation, point.node) == ("ckpt", 1, "")
    assert point.device.index == 0
    assert ipcsync.synchronize_all([point], timeout=1) == ipcsync.wait_all([point]) == []
    assert client.record(after=[point]).query() in (True, False)
    assert bytes(client.point(data)) == data
    assert client.point(data) == point == pickle.loads(pickle.dumps(point))
    assert client.messages_sent - asked == 2, "one for the point, one for the first record"


def test_no_such_point_can_be_used_once_its_client_is_closed(
    new_client: NewClient, client: ipcsync.Client, sender: Peer
) -> None:
    data = sender.call(actions.record_complete, "ckpt")
    _end(sender, "closed", client)
    other = new_client("other")
    point, still = other.point(data), client.point(data)
    assert point.query()
    other.close()
    for use in (point.query, point.synchronize, point.wait, lambda: point.is_recorded):
        with pytest.raises(ipcsync.EventClosed, match="'ckpt' was closed in this process"):
            use()
    assert isinstance(point.exception(), ipcsync.EventClosed)
    assert still.query(), "another client's"


@pytest.mark.parametrize("cause", list(ENDS))
def test_what_was_not_recorded_is_lost_with_its_sender(client: ipcsync.Client, sender: Peer, cause: str) -> None:
    data = sender.call(actions.record_complete, "ckpt")
    _end(sender, cause, client)
    lost = client.point(_next(data))
    done: list[ipcsync.Point] = []
    lost.add_done_callback(done.append)
    for use in (lost.query, lost.synchronize, lost.wait, lambda: client.record(after=[lost])):
        with pytest.raises(ipcsync.RecorderLost) as raised:
            use()
    assert raised.value.cause == "behind"
    error = lost.exception()
    assert isinstance(error, ipcsync.RecorderLost)
    assert (error.event, error.generation, error.session, error.pid) == ("ckpt", 2, "recorder", sender.pid)
    assert error.cause == cause
    until(lambda: bool(done), "the callback was called")
    assert client.point(data).query()


def test_work_in_flight_of_a_killed_sender_is_lost(client: ipcsync.Client, sender: Peer) -> None:
    sender.call(remote.hold)
    data = sender.call(actions.record, "ckpt")
    _end(sender, "died", client)
    point = client.point(data)
    with pytest.raises(ipcsync.RecorderLost) as raised:
        point.synchronize(10)
    assert raised.value.cause == "died"
    assert client.wait_over(point, timeout=10)


def test_an_asynchronous_client_is_told_the_same(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, sender: Peer
) -> None:
    data = sender.call(actions.record_complete, "ckpt")
    _end(sender, "closed", client)

    async def use() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as other:
            point = await other.point(data)
            await point.synchronize(5)
            await point.wait(ipcsync.Stream(), timeout=5)
            assert await point.query()
            assert await point.exception() is None

    asyncio.run(use())


def test_ones_own_closed_event_leaves_its_points_to_others(new_client: NewClient, engine: EngineName) -> None:
    sender, receiver = new_client(), new_client()
    with sender.event("e", recorder=True, engine=engine) as event:
        point = event.record(ipcsync.Stream())
        point.synchronize(10)
    until(lambda: receiver.stats()["pool_in_use"] == 0, "the slot is free")
    assert receiver.point(bytes(point)).query()
    with pytest.raises(ipcsync.EventClosed):
        point.query()


def test_a_slot_rests_before_it_is_used_again(new_client: NewClient, engine: EngineName) -> None:
    sender, receiver = new_client(), new_client()
    with sender.event("e", recorder=True, engine=engine) as event:
        point = event.record(ipcsync.Stream())
        point.synchronize(10)
    until(lambda: receiver.stats()["pool_in_use"] == 0, "the slot is free")
    for number in range(100):
        receiver.event(f"other/{number}", recorder=True, engine=engine).close()
    assert receiver.point(bytes(point)).query()


def test_once_its_slot_is_anothers_a_point_is_gone(
    new_coordinator: Callable[..., ipcsync.Coordinator], engine: EngineName
) -> None:
    with ipcsync.connect(new_coordinator(pool=1).endpoint) as client:
        with client.event("e", recorder=True, engine=engine) as event:
            data = bytes(event.record(ipcsync.Stream()))
        until(lambda: client.stats()["pool_in_use"] == 0, "the slot is free")
        kept = client.point(data)
        with client.event("e", recorder=True, engine=engine):
            assert kept.query(), "who has asked knows for ever"
            del kept
            with pytest.raises(ipcsync.RecorderLost, match="is gone") as raised:
                client.point(data)
            assert raised.value.cause == "gone"


def test_a_later_coordinator_knows_how_it_ended(
    new_coordinator: Callable[..., ipcsync.Coordinator], new_peer: Callable[..., Peer]
) -> None:
    coordinator = new_coordinator(keeper=True)
    with ipcsync.connect(coordinator.endpoint) as client:
        peer = new_peer()
        peer.call(actions.open_recorder, coordinator.endpoint, "ckpt", "event")
        data = peer.call(actions.record_complete, "ckpt")
        _end(peer, "died", client)
        starts = client.stats()["starts"]
        os.kill(client.stats()["pid"], signal.SIGKILL)
        until(lambda: client.stats(timeout=DEADLINE_S)["starts"] > starts, "the next coordinator serves")
        assert client.point(data).query()
        with pytest.raises(ipcsync.RecorderLost) as raised:
            client.point(_next(data)).query()
        assert (raised.value.session, raised.value.pid, raised.value.cause) == ("recorder", peer.pid, "died")


# --- stale points -----------------------------------------------------------------------------------------------------


def test_a_point_of_another_coordinator_is_stale_and_the_session_is_healthy(
    client: ipcsync.Client, new_coordinator: Callable[..., ipcsync.Coordinator]
) -> None:
    with ipcsync.connect(new_coordinator().endpoint) as elsewhere:
        stale = elsewhere.record(ipcsync.Stream())
        data, pickled = bytes(stale), pickle.dumps(stale)
    for use in (lambda: client.point(data), lambda: pickle.loads(pickled).query()):
        with pytest.raises(ipcsync.StalePoint, match="this session is healthy") as raised:
            use()
        assert isinstance(raised.value, ipcsync.RecorderLost)
        assert not isinstance(raised.value, ipcsync.SessionLost)
    with StreamGate(stream := ipcsync.Stream()):
        point = client.record(stream)
    point.synchronize(10)
    assert client.is_connected


def test_a_loss_within_a_call_of_a_healthy_client_names_the_coordinator_that_is_lost(
    client: ipcsync.Client, new_coordinator: Callable[..., ipcsync.Coordinator]
) -> None:
    theirs = new_coordinator()
    elsewhere = ipcsync.connect(theirs.endpoint)
    point, own = elsewhere.record(ipcsync.Stream()), client.record(ipcsync.Stream())
    theirs.stop()
    until(lambda: not elsewhere.is_connected, "its client has noticed")
    uses: list[Callable[[], object]] = [
        point.query,
        lambda: client.record(ipcsync.Stream(), after=[point]),
        lambda: client.wait_over(point, 0),
        lambda: ipcsync.synchronize_all([own, point], timeout=10),
        lambda: ipcsync.wait_all([own, point], ipcsync.Stream(), timeout=10),
    ]
    for use in uses:
        with pytest.raises(ipcsync.CoordinatorLost) as raised:
            use()
        assert raised.value.endpoint == theirs.endpoint != client.endpoint
    client.record(ipcsync.Stream(), after=[own]).synchronize(10)
    assert client.is_connected
    elsewhere.close()
