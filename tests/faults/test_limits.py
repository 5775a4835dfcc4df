"""Every limit refuses what is beyond it, and nobody else notices: rows 24, 32 and 33."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

import ipcsync
from ipcsync._linux.child import Worker
from ipcsync._wire import codec, endpoints, messages
from ipcsync.typing import EngineName
from ipcsync_coordinator.gate import UNREAD_BYTES
from ipcsync_keeper import config
from tests.faults import fixtures
from tests.kit.peer import Peer
from tests.kit.raw_client import Raw, request, resident_kib
from tests.kit.until import until

pytestmark = [pytest.mark.keeper, pytest.mark.own_coordinator]

NewCoordinator = Callable[..., ipcsync.Coordinator]
_TTL_S = 3.0  # longer than a busy machine keeps a session from its heartbeat


# --- row 24 -----------------------------------------------------------------------------------------------------------


def test_row_24_a_client_that_never_reads_its_replies_is_dropped_and_counted(
    new_coordinator: NewCoordinator,
) -> None:
    coordinator = new_coordinator(reply_queue=8)
    with ipcsync.connect(coordinator.endpoint, name="good") as good:
        for number in range(60):
            good.event(f"an/event/with/a/long/name/to/fill/the/replies/{number:03}", recorder=True)
        with Raw(coordinator.endpoint, receive_queue=1) as deaf:
            token = deaf.hello("deaf").token
            ask = codec.encode_request(5, messages.ListEvents(), token, 0)

            def refused() -> bool:
                for _ in range(50):
                    deaf.send(ask)
                return "slow_client" in good.stats()["refusals"]

            until(refused, "replies to the deaf one are dropped")
            before = resident_kib(fixtures.serving(coordinator))
            for _ in range(2000):
                deaf.send(ask)
            assert good.stats()["requests"]["events"] > 0
            assert good.event("f", recorder=True).record(ipcsync.Stream()).generation == 1
            assert resident_kib(fixtures.serving(coordinator)) - before < 8 * 1024
            # It is served again as soon as it has read what waited for it; until then replies are still dropped.
            other = codec.encode_request(6, messages.ListSessions(), token, 0)

            def served() -> bool:
                deaf.send(other)
                return any(codec.decode_reply(frame)[0] == 6 for frame in iter(lambda: deaf.receive_bytes(0.3), None))

            until(served, "it is served again")


def test_row_24_the_replies_that_a_client_never_reads_are_bounded_by_their_bytes_too(
    new_coordinator: NewCoordinator,
) -> None:
    coordinator = new_coordinator()
    ask = codec.encode_request(5, messages.ListEvents(), b"", 0)
    with ipcsync.connect(coordinator.endpoint, name="good") as good:
        good.events([f"{number:03}{'long' * 60}" for number in range(400)], engine="timeline")
        with Raw(coordinator.endpoint, receive_queue=1) as deaf:
            size, before = len(deaf.exchange(ask)), resident_kib(fixtures.serving(coordinator))
            for _ in range(500):  # fewer than its queue holds
                deaf.send(ask)
            until(lambda: good.stats()["requests"]["events"] > 500, "all its questions were taken")
            assert 500 * size > 3 * UNREAD_BYTES
            assert resident_kib(fixtures.serving(coordinator)) - before < 2 * UNREAD_BYTES // 1024
            assert good.stats()["refusals"]["slow_client"] > 300
            assert len(good.list_events()) == 400
            other = codec.encode_request(6, messages.ListEvents(), b"", 0)

            def served() -> bool:
                deaf.send(other)
                return any(codec.decode_reply(frame)[0] == 6 for frame in iter(lambda: deaf.receive_bytes(0.3), None))

            until(served, "it is served again once it has read what waited")


# --- row 32 -----------------------------------------------------------------------------------------------------------


def test_row_32_more_sessions_than_may_be_are_refused_and_those_that_exist_go_on(
    new_coordinator: NewCoordinator,
) -> None:
    coordinator = new_coordinator(max_sessions=3, lease_ttl=_TTL_S)
    clients = [ipcsync.connect(coordinator.endpoint) for _ in range(3)]
    try:
        with Raw(coordinator.endpoint) as raw:
            hello = messages.Hello(os.urandom(16), ipcsync.driver_name())
            for _ in range(200):
                error = raw.refused(hello, b"")
                assert isinstance(error, ipcsync.QuotaExceeded)
                assert error.limit == 3
        with pytest.raises(ipcsync.QuotaExceeded, match="--max-sessions"):
            ipcsync.connect(coordinator.endpoint)
        assert clients[0].stats()["refusals"] == {"QuotaExceeded": 201}
        _assert_leases_kept(clients)
        clients.pop().close()
        clients.append(ipcsync.connect(coordinator.endpoint))
    finally:
        for client in clients:
            client.close()


def _assert_leases_kept(clients: list[ipcsync.Client]) -> None:
    """More than a TTL later, by the coordinator's clock, they all are there."""
    began = clients[0].stats()["uptime_s"]
    until(lambda: clients[0].stats()["uptime_s"] > began + 1.5 * _TTL_S, "more than a TTL has passed")
    assert all(client.is_connected and client.stats() for client in clients)
    assert clients[0].stats()["deaths"] == {"pidfd": 0, "ttl": 0}


def _connect_many(endpoint: str, most: int) -> tuple[int, int, str]:
    """In the peer: how many sessions there came to be, the limit told, and by which error."""
    kept: list[ipcsync.Client] = []
    try:
        while len(kept) < most:
            kept.append(ipcsync.connect(endpoint))
    except ipcsync.QuotaExceeded as error:
        return len(kept), error.limit, str(error)
    finally:
        for client in kept:
            client.close()
    return len(kept), 0, ""


def test_row_32_sessions_are_refused_before_the_file_descriptors_are_used_up(
    new_coordinator: NewCoordinator, peer: Peer
) -> None:
    coordinator = new_coordinator(lease_ttl=_TTL_S)
    resource.prlimit(fixtures.serving(coordinator), resource.RLIMIT_NOFILE, (90, 90))
    with ipcsync.connect(coordinator.endpoint) as client:
        opened, limit, why = peer.call(_connect_many, coordinator.endpoint, 100)
        assert opened == limit - 1  # the other one is ours
        assert "ulimit -n" in why
        assert 2 < limit < 30
        _assert_leases_kept([client])


def test_row_32_connections_that_use_up_the_descriptors_are_kept_out_and_sessions_keep_their_leases(
    new_coordinator: NewCoordinator, peer: Peer
) -> None:
    coordinator = new_coordinator(lease_ttl=_TTL_S, handshake_s=600)
    limit = 300
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(fixtures.serving(coordinator), resource.RLIMIT_NOFILE, (limit, limit))
    crowd: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ipcsync.connect(coordinator.endpoint) as client:
            until(lambda: not _crowd_in(crowd, coordinator.endpoint, 2 * limit), "the door is shut")
            assert len(crowd) < limit
            assert coordinator.is_running
            assert not os.path.exists(endpoints.socket_path(coordinator.endpoint))
            assert client.event("e", recorder=True).record(ipcsync.Stream()).generation == 1
            _assert_leases_kept([client])
            assert client.stats()["refusals"]["descriptors"] == 1
            assert peer.call(_cannot_connect, coordinator.endpoint)
            for one in crowd:
                one.close()
            with ipcsync.connect(coordinator.endpoint, timeout=20) as late:
                assert late.list_events()
    finally:
        for one in crowd:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _crowd_in(crowd: list[socket.socket], endpoint: str, most: int) -> bool:
    """Connect, and say nothing, until nobody can; whether anybody could."""
    could = False
    while len(crowd) < most:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        try:
            one.connect(endpoints.socket_path(endpoint))
        except BlockingIOError:
            one.close()
            return True  # those before it are still to be accepted
        except (FileNotFoundError, ConnectionRefusedError):
            one.close()
            return could
        could = True
        crowd.append(one)
    raise AssertionError("the door was never shut")


def _cannot_connect(endpoint: str) -> bool:
    try:
        ipcsync.connect(endpoint, timeout=0.5)
    except ipcsync.ConnectError:
        return True
    return False


# --- row 33 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["event", "timeline"])
def test_row_33_an_exhausted_pool_is_refused_with_its_limit_and_a_close_makes_room(
    new_coordinator: NewCoordinator, engine: EngineName
) -> None:
    coordinator = new_coordinator(pool=3)
    with ipcsync.connect(coordinator.endpoint) as client:
        events = [client.event(f"e{number}", recorder=True, engine=engine) for number in range(3)]
        for _ in range(50):
            with pytest.raises(ipcsync.QuotaExceeded, match="--pool") as caught:
                client.event("more", engine=engine)
            assert caught.value.limit == 3
        with pytest.raises(ipcsync.QuotaExceeded):
            client.record(ipcsync.Stream())
        assert client.event("e1", engine=engine).name == "e1"  # what is there can be joined
        stats = client.stats()
        assert (stats["pool_in_use"], stats["pool_size"], stats["pool_high_water"]) == (3, 3, 3)
        assert stats["refusals"]["QuotaExceeded"] == 51
        events[0].close()
        assert client.event("more", recorder=True, engine=engine).record(ipcsync.Stream()).generation == 1


def test_row_33_quarantined_slots_count_and_the_holders_death_makes_room(
    new_coordinator: NewCoordinator, peer: Peer
) -> None:
    coordinator = new_coordinator(pool=1)
    with ipcsync.connect(coordinator.endpoint) as client:
        peer.call(_hold, coordinator.endpoint)
        joined = client.event("e")
        peer.kill()
        until(lambda: client.stats()["deaths"]["pidfd"] == 1, "the death was seen")
        assert client.stats()["quarantined"] == 1
        with pytest.raises(ipcsync.QuotaExceeded):
            client.event("f")
        joined.close()
        until(lambda: client.stats()["quarantined"] == 0, "the end of the process, whose death was seen before")
        assert client.event("f", recorder=True).record(ipcsync.Stream()).generation == 1


_held: list[object] = []


def _hold(endpoint: str) -> None:
    """In the peer: record on an event, and keep it."""
    client = ipcsync.connect(endpoint)
    _held.extend([client, client.event("e", recorder=True)])


@pytest.mark.skipif(ipcsync.driver_name() != "host", reason="only the software driver makes up a second device")
def test_row_33_what_one_device_has_spare_keeps_no_other_from_its_events(
    new_coordinator: NewCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_DEVICES", "2")
    coordinator = new_coordinator(max_cuda_events=200)
    with Worker(env={"IPCSYNC_HOST_DEVICES": "2"}) as one:
        one.call(_move_to_another_device, coordinator.endpoint)


def _move_to_another_device(endpoint: str) -> None:
    """In the worker: use up the events on one device, close them, and have as many on the other."""
    with ipcsync.connect(endpoint) as client:
        for device in (0, 1, 0):
            wanted = partial(client.event, recorder=True, engine="event", device=device, depth=60)
            held = [wanted(f"{device}-{number}") for number in range(3)]
            for event in held:
                event.close()
            until(lambda: client.stats()["pool_in_use"] == 0, "all were released")


@pytest.mark.skipif(ipcsync.driver_name() != "host", reason="only the software driver makes up a second device")
def test_row_33_no_device_s_first_event_is_one_too_many(
    new_coordinator: NewCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_DEVICES", "2")
    coordinator = new_coordinator(max_cuda_events=20)
    with Worker(env={"IPCSYNC_HOST_DEVICES": "2"}) as one:
        assert one.call(_use_up_and_move, coordinator.endpoint) == 20


def _use_up_and_move(endpoint: str) -> object:
    """In the worker: how many CUDA events there are once one device has all, and the other one wants some."""
    with ipcsync.connect(endpoint) as client:
        wanted = partial(client.event, recorder=True, engine="event")
        for name, device, depth in (("a", 0, 19), ("b", 0, 18), ("c", 1, 1)):  # two of the 20 test each device
            with suppress(ipcsync.QuotaExceeded):
                wanted(name, device=device, depth=depth)
        return client.stats()["cuda_events"]


@pytest.mark.skipif(ipcsync.driver_name() != "host", reason="only the software driver is told how many events it makes")
def test_row_33_a_driver_that_makes_no_spare_events_makes_those_that_are_needed(
    new_coordinator: NewCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPCSYNC_HOST_EVENT_LIMIT", "20")
    coordinator = new_coordinator()
    with ipcsync.connect(coordinator.endpoint) as client:
        held = [client.event(f"e{number}", recorder=True, engine="event", depth=6) for number in range(3)]
        with pytest.raises(ipcsync.DriverError, match="OUT_OF_MEMORY"):
            client.event("e3", engine="event", depth=6)
        held[0].close()
        until(lambda: client.stats()["pool_in_use"] == 2, "it was released")
        client.event("e3", engine="event", depth=6)


def test_row_33_cuda_events_streams_and_attachments_have_limits_too(new_coordinator: NewCoordinator) -> None:
    coordinator = new_coordinator(max_cuda_events=64, max_streams=2, max_attachments=3)
    with ipcsync.connect(coordinator.endpoint) as client:
        with pytest.raises(ipcsync.QuotaExceeded, match="--max-cuda-events") as caught:
            client.event("e", engine="event", depth=65)
        assert caught.value.limit == 64
        client.stream("a")
        client.stream("b")
        with pytest.raises(ipcsync.QuotaExceeded, match="streams") as caught:
            client.stream("c")
        assert caught.value.limit == 2
        assert client.stream("a")
        held = [client.event(f"e{number}", recorder=True) for number in range(3)]
        with pytest.raises(ipcsync.QuotaExceeded, match="attached to 3") as caught:
            client.event("e3")
        assert caught.value.limit == 3
        held[0].close()
        client.event("e3", recorder=True)


def test_every_limit_is_a_setting_with_a_default() -> None:
    limits = {
        "max_frame", "max_frames", "max_name", "max_sessions", "max_attachments", "max_streams",
        "max_cuda_events", "pool", "reply_queue", "feed_queue", "remembered_requests", "handshake_s",
    }  # fmt: skip
    assert limits <= set(config.FIELDS)
    assert all(getattr(config.Settings(), name) > 0 for name in limits)


def test_limits_on_frames_are_those_that_were_set(new_coordinator: NewCoordinator) -> None:
    coordinator = new_coordinator(max_frame=200_000, max_frames=2, max_name=10)
    with Raw(coordinator.endpoint) as raw:
        token = raw.hello().token
        raw.send(codec.encode_request(50, messages.ListEvents(), token, 0), b"ignored")
        assert raw.receive() == (50, messages.EventList([]))
        for size, code in ((150_000, "invalid"), (250_000, "too_large")):
            failure = raw_failure(raw, request("events", {"prefix": "x" * size}))
            assert failure.attributes["code"] == code
        assert isinstance(raw.refused(messages.Open("12345678901"), token), ipcsync.ProtocolError)
        raw.ask(messages.Open("1234567890"), token, messages.Attachment)


def raw_failure(raw: Raw, frame: bytes) -> messages.Failure:
    """The failure that a frame is answered with."""
    _, body = codec.decode_reply(raw.exchange(frame))
    assert isinstance(body, messages.Failure)
    return body
