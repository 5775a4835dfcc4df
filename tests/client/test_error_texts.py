"""What an error says: who, what happened, and what to do."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults import actions, fixtures
from tests.faults.fixtures import until_lost
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

TTL_S = 2.0  # on a busy machine, half a second without a heartbeat is no stop


def _loss(point: ipcsync.Point) -> ipcsync.RecorderLost:
    """What the point raises, as it comes out of a pickle."""
    with pytest.raises(ipcsync.RecorderLost) as caught:
        point.synchronize(10)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, ipcsync.RecorderLost)
    assert (error.event, error.generation) == ("e", point.generation)
    return error


# --- RecorderLost -----------------------------------------------------------------------------------------------------


def test_a_dead_recorder_is_named_with_its_process(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
    event = client.event("e")
    peer.kill()
    error = _loss(event.at(1))
    assert (error.cause, error.pid) == ("died", peer.pid)
    assert f"its recorder {error.session!r} (pid {peer.pid}) died" in str(error)
    until_lost(client, "pidfd")
    until(lambda: _loss(event.at(1)).over, "the end of the process")
    again = _loss(event.at(1))  # now by the coordinator's word
    assert {**vars(again), "over": error.over} == vars(error)


def test_a_recorder_that_expired_is_told_from_one_that_died(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: EngineName
) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "e", engine, TTL_S)
    event = client.event("e")
    fixtures.stop(peer.pid)
    until_lost(client, "ttl")
    error = _loss(event.at(1))
    assert (error.cause, error.pid, error.over) == ("expired", peer.pid, None)
    assert "silent for longer than its lease's TTL" in str(error)
    peer.kill()
    until(lambda: all(row.state != "open" for row in client.list_events()), "the end of its session")
    assert _loss(event.at(1)).cause == "expired", "that it died later was not what lost the event"


def test_a_recorder_that_closed_is_told_from_one_that_died(
    new_client: Callable[..., ipcsync.Client], engine: EngineName
) -> None:
    waiter, recorder = new_client("waiter"), new_client("prefill")
    event = waiter.event("e", engine=engine)
    ours = recorder.event("e", recorder=True)
    ours.record(ipcsync.Stream())
    ours.close()
    event.at(1).synchronize(10)
    error = _loss(event.at(2))
    assert (error.cause, error.session, error.pid) == ("closed", "prefill", os.getpid())
    assert "its recorder 'prefill'" in str(error)
    assert "closed the event" in str(error)


def test_a_recorder_without_a_name_is_called_by_its_id(coordinator: ipcsync.Coordinator, engine: EngineName) -> None:
    with ipcsync.connect(coordinator.endpoint) as waiter, ipcsync.connect(coordinator.endpoint) as recorder:
        event = waiter.event("e", engine=engine)
        recorder.event("e", recorder=True).close()
        assert _loss(event.at(1)).session == recorder.session_id


def test_a_recorder_is_still_named_when_others_have_connected_since(
    new_coordinator: Callable[..., ipcsync.Coordinator], peer: Peer, engine: EngineName
) -> None:
    """Its line on the board is another session's by then."""
    coordinator = new_coordinator(max_sessions=3)
    with ipcsync.connect(coordinator.endpoint) as waiter:
        peer.call(actions.open_recorder, coordinator.endpoint, "e", engine)
        event = waiter.event("e")
        with pytest.raises(ipcsync.WaitTimeout):
            event.at(1).synchronize(0.1)
        peer.kill()
        until_lost(waiter, "pidfd")
        lines: set[int] = set()

        def has_had_both() -> bool:  # the dead one's too, once the kernel has let go of it
            with ipcsync.connect(coordinator.endpoint) as other:
                lines.add(other._session.lease.welcome.line)
            return len(lines) == 2

        until(has_had_both, "each of the others' lines")
        assert (_loss(event.at(1)).pid, _loss(event.at(1)).cause) == (peer.pid, "died")


# --- the session ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGTERM, "stopped"), (signal.SIGKILL, "died")])
def test_a_lost_coordinator_is_named(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, number: signal.Signals, cause: str
) -> None:
    pid = coordinator.pid
    if number == signal.SIGKILL:
        fixtures.kill(coordinator, client)
    else:
        os.kill(pid, number)
    until(lambda: not client.is_connected or not coordinator.is_running, "its end")
    for use in (client.stats, client.list_events):
        with pytest.raises(ipcsync.SessionLost) as caught:
            use()
        error = caught.value
        assert isinstance(error, ipcsync.CoordinatorLost)
        assert (error.endpoint, error.pid, error.cause) == (coordinator.endpoint, pid, cause)
        assert f"(pid {pid}) has {cause}" in str(error)
        assert "connect again" in str(error)


def _what_an_expired_session_says() -> tuple[str, str, str]:
    with pytest.raises(ipcsync.SessionLost) as caught:
        remote.client().stats()
    error = caught.value
    assert isinstance(error, ipcsync.SessionExpired)
    return error.endpoint, error.session, str(error)


def test_an_expired_session_is_named(coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer) -> None:
    peer.call(actions.open_recorder, coordinator.endpoint, "e", "event", TTL_S)
    name = next(row.name or row.id for row in client.list_sessions() if row.pid == peer.pid)
    fixtures.stop(peer.pid)
    until_lost(client, "ttl")
    fixtures.resume(peer.pid)
    endpoint, session, text = peer.call(_what_an_expired_session_says)
    assert (endpoint, session) == (coordinator.endpoint, name)
    assert f"pid {peer.pid}" in text
    assert f"{TTL_S:g} s" in text


def test_a_closed_client_is_named(coordinator: ipcsync.Coordinator) -> None:
    client = ipcsync.connect(coordinator.endpoint, name="decode")
    client.close()
    with pytest.raises(ipcsync.ClientClosed, match=r"'decode'.*connect again") as caught:
        client.stats()
    assert (caught.value.client, caught.value.endpoint) == ("decode", coordinator.endpoint)


# --- the recorder's role ----------------------------------------------------------------------------------------------


def test_who_records_is_named_to_those_who_may_not(new_client: Callable[..., ipcsync.Client]) -> None:
    recorder, other = new_client("prefill"), new_client("decode")
    event = other.event("e")
    with pytest.raises(ipcsync.NotRecorder, match="recorder=True") as refused:
        event.record()
    assert (refused.value.event, refused.value.recorder, refused.value.pid) == ("e", "", 0)
    recorder.event("e", recorder=True)
    for use in (event.record, lambda: other.event("e", recorder=True)):
        with pytest.raises(ipcsync.NotRecorder, match=rf"'prefill' \(pid {os.getpid()}\)") as refused:
            use()
        assert (refused.value.event, refused.value.recorder, refused.value.pid) == ("e", "prefill", os.getpid())


# --- timeouts ---------------------------------------------------------------------------------------------------------


def test_a_wait_for_an_event_that_nobody_records_on_says_so(client: ipcsync.Client, engine: EngineName) -> None:
    event = client.event("e", engine=engine)
    with pytest.raises(ipcsync.WaitTimeout, match=r"nobody has opened the event as its recorder \(recorder=True\)"):
        event.at(1).synchronize(0.01)
    client.event("e", recorder=True)
    with pytest.raises(ipcsync.WaitTimeout) as late:
        event.at(1).synchronize(0.01)
    assert str(late.value) == "generation 1 of 'e' was not recorded within 0.01 s"


def test_a_full_ring_says_what_it_waits_for(client: ipcsync.Client) -> None:
    event = client.event("e", recorder=True, engine="event", depth=2)
    stream = ipcsync.Stream()
    with StreamGate(stream):
        for _ in range(2):
            event.record(stream)
        with pytest.raises(
            ipcsync.WaitTimeout, match=r"all depth=2 are in flight, and generation 1 of 'e', the oldest"
        ):
            event.record(stream, timeout=0.01)


def test_an_unnamed_event_has_something_to_be_called(client: ipcsync.Client) -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream):
        point = client.record(stream)
        with pytest.raises(ipcsync.WaitTimeout, match=r"of an unnamed event \(slot \d+\) was not complete"):
            point.synchronize(0.01)
    reservation = client.reserve()
    point = reservation.point
    reservation.close()
    with pytest.raises(ipcsync.EventClosed, match=r"^an unnamed event \(slot \d+\) was closed in this process"):
        point.synchronize(0.01)


def test_a_name_that_is_too_long_is_shown_with_its_end_and_its_length(client: ipcsync.Client) -> None:
    with pytest.raises(ipcsync.ProtocolError, match=f"^the name '{'x' * 80}'… has 300 bytes, but 1 to 255 are allowed"):
        client.event("x" * 300)


async def _list_events(endpoint: str, timeout: float) -> object:
    async with ipcsync.aconnect(endpoint) as client:
        return await client.list_events(timeout=timeout)


@pytest.mark.parametrize("wrong", ["5", [], object, True, False])
def test_a_timeout_that_is_no_number_is_shown(client: ipcsync.Client, wrong: object) -> None:
    seconds: float = wrong  # type: ignore[assignment]
    event, stream = client.event("e", recorder=True), ipcsync.Stream()
    calls: list[Callable[[], object]] = [
        lambda: event.at(1).synchronize(seconds),
        lambda: event.at(1).wait(stream, timeout=seconds),
        lambda: event.record(stream, timeout=seconds),
        lambda: stream.synchronize(seconds),
        lambda: client.list_events(timeout=seconds),
        lambda: asyncio.run(_list_events(client.endpoint, seconds)),
        lambda: next(client.watch(timeout=seconds)),
        lambda: ipcsync.connect(client.endpoint, timeout=seconds),
        lambda: setattr(client, "timeout", seconds),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"^timeout is a number of seconds from 0 up") as caught:
            call()
        assert str(caught.value).endswith(f"not {wrong!r}")


@pytest.mark.parametrize("name", ["x" * 300, "ü" * 128, "a\nb", "a//b", "\udc80"])
def test_an_invalid_name_of_a_session_is_shown_with_what_is_wrong(coordinator: ipcsync.Coordinator, name: str) -> None:
    with pytest.raises(ipcsync.ProtocolError, match=r"^the session's name '.+ (has|is) ") as caught:
        ipcsync.connect(coordinator.endpoint, name=name)
    assert caught.value.code == "name"


def test_an_endpoint_that_is_no_str_is_told() -> None:
    endpoint: str = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"^an endpoint is a str, but got int"):
        ipcsync.connect(endpoint)


def test_one_str_is_not_taken_for_many_names(client: ipcsync.Client) -> None:
    with pytest.raises(TypeError, match="but got one str, 'abc'"):
        client.events("abc")
    with pytest.raises(TypeError, match="names takes names, in a list or another iterable, but got int"):
        client.events(3)  # type: ignore[arg-type]
    assert client.list_events() == []
