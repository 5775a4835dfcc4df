"""Points that travel before their record: what becomes of whoever waits for one, however the reservation ends."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.faults.fixtures import Blocked
from tests.kit import driver_functions, remote
from tests.kit.peer import Peer
from tests.kit.until import DEADLINE_S, until

pytestmark = pytest.mark.driver


@pytest.fixture
def reserver(request: pytest.FixtureRequest, peer: Peer, coordinator: ipcsync.Coordinator) -> Peer:
    """A process that reserves, with a short lease where that is to run out."""
    is_to_expire = "end" in request.fixturenames and request.getfixturevalue("end") == _EXPIRED
    peer.call(remote.connect, coordinator.endpoint, "reserver", {"lease_ttl": 2.0 if is_to_expire else 3.0})
    return peer


@pytest.fixture
def point(reserver: Peer, client: ipcsync.Client, engine: EngineName) -> ipcsync.Point:
    """A point of the reserver's that is not recorded, as another process sees it."""
    return client.point(reserver.call(remote.reserve, "r", {"engine": engine}))


# --- the table: each way to wait, and each way in which it can end ----------------------------------------------------


def _synchronize(point: ipcsync.Point) -> Callable[[], bool]:
    call = Blocked(point.synchronize)

    def is_past() -> bool:
        error = call.outcome()
        if isinstance(error, BaseException):
            raise error
        return True

    return is_past


def _wait_on_stream(point: ipcsync.Point) -> Callable[[], bool]:
    stream = ipcsync.Stream()
    call = Blocked(lambda: point.wait(stream))

    def is_past() -> bool:
        error = call.outcome()
        if isinstance(error, BaseException):
            raise error
        stream.synchronize()
        return point.query()

    return is_past


def _wait_ahead(point: ipcsync.Point) -> Callable[[], bool]:
    stream = ipcsync.Stream()
    point.wait(stream, ahead=True)
    assert not stream.query()

    def is_past() -> bool:
        stream.synchronize()
        return point.query()

    return is_past


def _callback(point: ipcsync.Point) -> Callable[[], bool]:
    called = threading.Event()
    point.add_done_callback(lambda _: called.set())
    assert not called.wait(0.05)

    def is_past() -> bool:
        assert called.wait(DEADLINE_S)
        error = point.exception()
        if error is not None:
            raise error
        return True

    return is_past


USES = {"synchronize": _synchronize, "wait": _wait_on_stream, "ahead": _wait_ahead, "callback": _callback}


def _killed(reserver: Peer) -> None:
    reserver.kill()


def _closed(reserver: Peer) -> None:
    reserver.call(remote.close_reserved, "r")


def _client_closed(reserver: Peer) -> None:
    reserver.call(remote.close)


def _dropped(reserver: Peer) -> None:
    assert reserver.call(remote.drop_reserved, "r") == 1


def _expired(reserver: Peer) -> None:
    os.kill(reserver.pid, signal.SIGSTOP)


_EXPIRED = "stopped for longer than its TTL"


ENDS: dict[str, tuple[Callable[[Peer], None], str]] = {
    "killed": (_killed, "died"),
    "closed": (_closed, "closed"),
    "its client closed": (_client_closed, "closed"),
    "dropped": (_dropped, "closed"),
    _EXPIRED: (_expired, "expired"),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_waits_goes_on_once_what_was_recorded_is_complete(
    reserver: Peer, point: ipcsync.Point, engine: EngineName, use: str
) -> None:
    if (use, engine) == ("ahead", "event"):
        with pytest.raises(ipcsync.EngineMismatch):
            point.wait(ipcsync.Stream(), ahead=True)
        return
    is_past = USES[use](point)
    assert (point.query(), point.is_recorded, point.exception()) == (False, False, None)
    reserver.call(remote.hold)
    assert reserver.call(remote.record_reserved, "r") == bytes(point)
    until(lambda: point.is_recorded, "the record")
    assert not point.query()  # it was made, and its work is held
    reserver.call(remote.let_go)
    assert is_past()


def _table() -> list[Any]:
    """Each way to wait with each end; what is neither a wait on the host, nor an end of the usual ones, is thorough."""
    often = {"synchronize", "ahead"}, {"killed", "closed"}
    return [
        pytest.param(use, end, marks=() if use in often[0] and end in often[1] else pytest.mark.thorough)
        for use in USES
        for end in ENDS
    ]


@pytest.mark.parametrize(("use", "end"), _table())
def test_whoever_waits_for_what_is_never_recorded_gets_recorder_lost(
    reserver: Peer, point: ipcsync.Point, engine: EngineName, use: str, end: str
) -> None:
    if (use, engine) == ("ahead", "event"):
        use = "synchronize"
    is_past = USES[use](point)
    make_end, cause = ENDS[end]
    make_end(reserver)
    try:
        with pytest.raises(ipcsync.RecorderLost) as caught:
            is_past()
        assert (caught.value.generation, caught.value.cause) == (1, cause)
        with pytest.raises(ipcsync.RecorderLost):  # for ever
            point.query()
    finally:
        if end == _EXPIRED:
            os.kill(reserver.pid, signal.SIGCONT)


def test_a_timeout_ends_a_wait_for_what_is_not_recorded(point: ipcsync.Point) -> None:
    with pytest.raises(ipcsync.WaitTimeout, match="not recorded within"):
        point.synchronize(0.05)
    with pytest.raises(ipcsync.WaitTimeout, match="not recorded within"):
        point.wait(ipcsync.Stream(), timeout=0.05)


def test_what_an_earlier_use_of_the_slot_completed_is_not_taken_for_the_record(
    new_coordinator: Callable[..., ipcsync.Coordinator], engine: EngineName
) -> None:
    endpoint = new_coordinator(pool=1).endpoint
    client, other = (ipcsync.connect(endpoint, lease_ttl=2) for _ in range(2))
    stream = ipcsync.Stream()
    places = set()
    for _ in range(3):
        with client.reserve(engine=engine) as reservation:
            point = other.point(bytes(reservation.point))
            assert not point.query()
            with pytest.raises(ipcsync.WaitTimeout):
                point.wait(ipcsync.Stream(), timeout=0)
            reservation.record(stream).synchronize(DEADLINE_S)
            point.synchronize(DEADLINE_S)
            places.add(point._bound().engine.slot)
            del point
        until(lambda: client.stats()["pool_in_use"] == 0, "the slot free again")
    assert len(places) == 1
    client.close()
    other.close()


# --- the record -------------------------------------------------------------------------------------------------------


def test_it_is_recorded_on_whichever_stream_and_covers_the_work_there(
    client: ipcsync.Client, engine: EngineName
) -> None:
    with client.reserve(engine=engine) as reservation:
        stream = ipcsync.Stream()
        with StreamGate(stream) as gate:
            point = reservation.record(stream)
            assert point == reservation.point
            assert not point.query()
            gate.open()
            point.synchronize(DEADLINE_S)


def test_a_second_record_is_refused(client: ipcsync.Client, engine: EngineName) -> None:
    with client.reserve(engine=engine) as reservation:
        reservation.record()
        with pytest.raises(ipcsync.EventClosed, match="for one record"):
            reservation.record()
        reservation.point.synchronize(DEADLINE_S)
    with pytest.raises(ipcsync.EventClosed):
        reservation.record()


def test_a_record_waits_for_its_points_as_long_as_its_timeout(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, engine: EngineName
) -> None:
    event = client.event("e", recorder=True)
    with client.reserve(engine=engine) as reservation:
        with pytest.raises(ipcsync.WaitTimeout):
            reservation.record(timeout=0.02, after=[event.at(1)])
        event.record()
        reservation.record(timeout=DEADLINE_S, after=[event.at(1)]).synchronize(DEADLINE_S)

    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as mine, await mine.reserve(engine=engine) as reservation:
            seen = await mine.event("e")
            with pytest.raises(ipcsync.WaitTimeout):
                await reservation.record(timeout=0.02, after=[seen.at(2)])
            event.record()
            point = await reservation.record(timeout=DEADLINE_S, after=[seen.at(2)])
            await point.synchronize(DEADLINE_S)

    asyncio.run(scenario())


def test_a_record_that_was_refused_can_be_tried_again(client: ipcsync.Client, engine: EngineName) -> None:
    with client.reserve(engine=engine) as reservation:
        with pytest.raises(TypeError):
            reservation.record("no stream")  # type: ignore[arg-type]
        assert not reservation.point.is_recorded
        reservation.record().synchronize(DEADLINE_S)


@pytest.mark.parametrize("is_made", [False, True])
def test_after_a_refusal_the_point_covers_what_is_recorded_then(
    client: ipcsync.Client, engine: EngineName, is_made: bool
) -> None:
    """Or the record is refused: a timeline's first record writes the word, whatever the second one stands behind.

    The retry does not wait for the host: the first record may have been made behind work that never ends.
    """
    with client.reserve(engine=engine) as reservation:
        one, other = ipcsync.Stream(), ipcsync.Stream()
        refused = driver_functions.refused_once(driver_functions.RECORD[engine], is_made=is_made)
        with StreamGate(one) as first, StreamGate(other) as second:
            with driver_functions.replaced(refused), pytest.raises(ipcsync.DriverError):
                reservation.record(one)
            if engine == "timeline":
                with pytest.raises(ipcsync.EventClosed, match="the GPU may have it"):
                    reservation.record(other)
                assert not reservation.point.query()
                return
            reservation.record(other)
            first.open()
            one.synchronize()
            assert not reservation.point.query()
            second.open()
            reservation.point.synchronize(DEADLINE_S)


def test_of_two_threads_one_records(client: ipcsync.Client, engine: EngineName) -> None:
    for _ in range(20):
        with client.reserve(engine=engine) as reservation:
            barrier, outcomes = threading.Barrier(2), []

            def record() -> None:
                barrier.wait()  # noqa: B023 - joined below
                try:
                    reservation.record()
                    outcomes.append("recorded")  # noqa: B023
                except ipcsync.EventClosed:
                    outcomes.append("refused")  # noqa: B023

            threads = [threading.Thread(target=record) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(outcomes) == ["recorded", "refused"]
            assert reservation._event.generation == 1
            reservation.point.synchronize(DEADLINE_S)


def _record_behind(data: bytes, engine: EngineName) -> bytes:
    """In a peer: a reservation recorded behind a wait for that point."""
    remote.wait(data)
    remote.reserve("behind", {"engine": engine})
    return remote.record_reserved("behind")


def _loss_of(data: bytes) -> tuple[str, str]:
    with pytest.raises(ipcsync.RecorderLost) as caught:
        remote.client().point(data).synchronize(DEADLINE_S / 2)
    return str(caught.value.cause), str(caught.value.session)


def test_it_stands_behind_what_its_stream_waits_for(
    coordinator: ipcsync.Coordinator,
    reserver: Peer,
    point: ipcsync.Point,
    new_peer: Callable[..., Peer],
    engine: EngineName,
) -> None:
    """Along a chain of reservations, a death is no silent pass."""
    reserver.call(remote.hold)
    reserver.call(remote.record_reserved, "r")
    behind = new_peer()  # whose stream never ends
    behind.call(remote.connect, coordinator.endpoint)
    data = behind.call(_record_behind, bytes(point), engine)
    reserver.kill()
    assert behind.call(_loss_of, data) == ("behind", "reserver")


# --- the reservation --------------------------------------------------------------------------------------------------


def test_its_place_is_free_once_it_is_closed_and_complete(client: ipcsync.Client, engine: EngineName) -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate:
        reservation = client.reserve(engine=engine)
        reservation.record(stream)
        reservation.close()
        reservation.close()
        assert client.stats()["pool_in_use"] == 1
        gate.open()
        until(lambda: client.stats()["pool_in_use"] == 0, "the slot free again")
    for use in (reservation.record, reservation.point.query):
        with pytest.raises(ipcsync.EventClosed):
            use()


def test_reservations_are_bounded_by_the_pool(new_coordinator: Callable[..., ipcsync.Coordinator]) -> None:
    with ipcsync.connect(new_coordinator(pool=2).endpoint) as client:
        kept = [client.reserve(), client.reserve()]
        with pytest.raises(ipcsync.QuotaExceeded):
            client.reserve()
        kept.pop().close()
        until(lambda: client.stats()["pool_in_use"] == 1, "a slot free again")
        kept.append(client.reserve())
        for reservation in kept:
            reservation.close()


def test_it_does_not_travel(client: ipcsync.Client) -> None:
    with client.reserve() as reservation, pytest.raises(TypeError, match=r"bytes\(reservation\.point\)"):
        pickle.dumps(reservation)


def test_it_says_what_it_is(client: ipcsync.Client) -> None:
    with client.reserve() as reservation:
        assert "not recorded" in repr(reservation)
        reservation.record().synchronize(DEADLINE_S)
        assert repr(reservation).endswith(" recorded>")
    assert "closed" in repr(reservation)


def test_one_that_is_dropped_after_its_client_was_closed_says_nothing(
    new_client: Callable[..., ipcsync.Client],
) -> None:
    client = new_client()
    reservation = client.reserve()
    client.close()
    del reservation  # a warning would be an error here
