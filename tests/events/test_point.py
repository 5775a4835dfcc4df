"""Points: what they name, how they travel, and how they are waited for."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

import ipcsync
from ipcsync._wire import codec as wire
from ipcsync.client.point import _unpickle
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import remote
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.driver

NewClient = Callable[..., ipcsync.Client]


# --- a value ----------------------------------------------------------------------------------------------------------


def test_a_point_says_what_it_is_of(event: ipcsync.SharedEvent) -> None:
    point = event.at(1)
    assert (point.event_name, point.generation, point.device) == ("e", 1, event.device)
    assert not point.is_recorded
    assert event.record(ipcsync.Stream()) == point
    assert point.is_recorded
    assert repr(point) == "<ipcsync.Point e generation=1>"


def test_a_point_cannot_be_changed(event: ipcsync.SharedEvent) -> None:
    point = event.at(1)
    for name in ("generation", "event_name", "device", "is_recorded", "other"):
        with pytest.raises(AttributeError):
            setattr(point, name, 2)


def test_equal_points_are_the_same_record_and_hash_alike(
    client: ipcsync.Client, event: ipcsync.SharedEvent, new_client: NewClient
) -> None:
    point = event.record(ipcsync.Stream())
    same = [
        event.at(1),
        event.latest,
        client.point(bytes(point)),
        new_client().point(bytes(point)),
        pickle.loads(pickle.dumps(point)),
    ]
    for other in same:
        assert other == point
        assert hash(other) == hash(point)
    assert len({point, *same}) == 1
    assert event.at(2) != point
    assert client.event("other").at(1) != point
    assert point != bytes(point)
    assert point != 1


def test_a_points_bytes_are_48_and_any_bytes_like_makes_it_again(
    client: ipcsync.Client, event: ipcsync.SharedEvent
) -> None:
    point = event.record(ipcsync.Stream())
    data = bytes(point)
    assert len(data) == 48
    for kind in (bytes, bytearray, memoryview):
        assert client.point(kind(data)) == point
    assert bytes(client.point(data)) == data


@pytest.mark.parametrize("data", [b"", b"\0" * 48, b"x" * 48, bytes(47), bytes(49)])
def test_bytes_that_are_no_point_are_refused(client: ipcsync.Client, data: bytes) -> None:
    with pytest.raises(ipcsync.ProtocolError) as caught:
        client.point(data)
    assert caught.value.code == "point"


def test_one_wrong_bit_anywhere_is_refused(client: ipcsync.Client, event: ipcsync.SharedEvent) -> None:
    data = bytes(event.record(ipcsync.Stream()))
    for bit in range(48 * 8):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ipcsync.ProtocolError):
            client.point(wrong)


@pytest.mark.parametrize("data", ["x" * 48, 48, None, [0] * 48])
def test_what_is_no_bytes_is_a_type_error(client: ipcsync.Client, data: Any) -> None:
    with pytest.raises(TypeError):
        client.point(data)


# --- on its way -------------------------------------------------------------------------------------------------------


def _query_pickled(data: bytes) -> bool:
    point = pickle.loads(data)
    assert isinstance(point, ipcsync.Point)
    return point.query()


def _generation_of_pickled(data: bytes) -> int:
    point = pickle.loads(data)
    assert isinstance(point, ipcsync.Point)
    assert point == pickle.loads(data)
    return point.generation


def test_an_unpickled_point_belongs_to_the_processs_client(
    coordinator: ipcsync.Coordinator, event: ipcsync.SharedEvent, peer: Peer
) -> None:
    stream = ipcsync.Stream()
    with StreamGate(stream):
        data = pickle.dumps(event.record(stream))
        assert peer.call(_generation_of_pickled, data) == 1
        error = peer.call(remote.error_of, _query_pickled, data)
        assert error is not None
        assert error[0] == "ConnectError"
        assert "connect" in error[1]
        peer.call(remote.connect, coordinator.endpoint)
        assert peer.call(_query_pickled, data) is False
    event.at(1).synchronize(10)
    assert peer.call(_query_pickled, data) is True


def test_an_unpickled_point_takes_the_first_client_that_is_still_open(
    new_client: NewClient, engine: EngineName
) -> None:
    recorder = new_client()
    point = recorder.event("e", recorder=True, engine=engine).record(ipcsync.Stream())
    first, second = new_client(), new_client()
    recorder_lives = pickle.loads(pickle.dumps(point))
    assert recorder_lives.event_name == "e"
    attached = [row.attached for row in second.list_events("e")]
    first.close()
    assert pickle.loads(pickle.dumps(point)).event_name == "e"
    assert [row.attached for row in second.list_events("e")] == attached


def test_a_point_of_another_coordinator_is_refused(
    new_coordinator: Callable[..., ipcsync.Coordinator], event: ipcsync.SharedEvent
) -> None:
    data = bytes(event.record(ipcsync.Stream()))
    with ipcsync.connect(new_coordinator().endpoint) as elsewhere, pytest.raises(ipcsync.StalePoint):
        elsewhere.point(data)


def test_an_unpickled_point_of_none_of_several_coordinators_says_to_ask_the_right_client(
    new_coordinator: Callable[..., ipcsync.Coordinator], client: ipcsync.Client
) -> None:
    """It may be of another node, which only the client that has a bridge could ask."""
    data = wire.pack(wire.PointKey(b"one that is gone", 0, 1, 1))
    with ipcsync.connect(new_coordinator().endpoint) as second:
        with pytest.raises(ipcsync.ConnectError, match=r"ask the right one: client\.point\(bytes\(point\)\)$"):
            _unpickle(data).query()
        for each in (client, second):
            with pytest.raises(ipcsync.StalePoint):
                each.point(bytes(_unpickle(data)))
    with pytest.raises(ipcsync.StalePoint):
        _unpickle(data).query()


def test_a_point_of_an_unnamed_event_works_like_any_other(new_client: NewClient, engine: EngineName) -> None:
    recorder, waiter = new_client(), new_client()
    stream, waiting = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(stream) as gate:
        point = recorder.record(stream, engine=engine)
        assert point.event_name == ""
        assert point.generation == 1
        seen = waiter.point(bytes(point))
        assert seen == point
        seen.wait(waiting)
        assert not seen.query()
        gate.open()
        seen.synchronize(10)
    until(waiting.query, "the waiter goes on")
    assert "slot" in repr(seen) or "generation=1" in repr(seen)


def test_points_alone_keep_an_attachment_only_until_the_event_is_over(
    new_client: NewClient, engine: EngineName
) -> None:
    recorder, waiter = new_client(), new_client(lease_ttl=2)
    event = recorder.event("e", recorder=True, engine=engine)
    data = bytes(event.record(ipcsync.Stream()))
    waiter.point(data).synchronize(10)
    assert recorder.list_events("e")[0].attached == 2
    point = waiter.point(data)
    event.close()
    assert point.query()
    del point
    until(lambda: recorder.stats()["pool_in_use"] == 0, "the finished event is let go of")


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_query_is_false_before_the_record_and_while_it_is_pending(event: ipcsync.SharedEvent) -> None:
    stream = ipcsync.Stream()
    point = event.at(1)
    assert point.query() is False
    with StreamGate(stream) as gate:
        event.record(stream)
        assert point.query() is False
        gate.open()
        point.synchronize(10)
    assert point.query() is True
    assert point.exception() is None


def test_a_wait_that_runs_out_of_time_says_what_for(event: ipcsync.SharedEvent) -> None:
    stream = ipcsync.Stream()
    uses: list[tuple[Callable[[ipcsync.Point], object], int]] = [
        (lambda point: point.synchronize(0.02), 1),
        (lambda point: point.synchronize(0), 1),
        (lambda point: point.wait(stream, timeout=0.02), 2),
        (lambda point: point.wait(stream, timeout=0), 2),
    ]
    held = ipcsync.Stream()
    with StreamGate(held):
        event.record(held)
        for use, generation in uses:
            with pytest.raises(ipcsync.WaitTimeout) as caught:
                use(event.at(generation))
            assert isinstance(caught.value, TimeoutError)
            assert (caught.value.event, caught.value.generation) == ("e", generation)
            assert caught.value.timeout in (0, 0.02)
        # A record that was made is no reason to wait on the host.
        event.at(1).wait(stream, timeout=0)
        assert not stream.query()


def test_an_invalid_timeout_is_refused(event: ipcsync.SharedEvent) -> None:
    for timeout in (-1, float("nan"), -(10**400)):
        for use in (event.at(1).synchronize, lambda timeout: event.at(1).wait(timeout=timeout)):
            with pytest.raises(ValueError, match="timeout"):
                use(timeout)


@pytest.mark.parametrize(
    "timeout", [float("inf"), 1e300, 10**400, Decimal(1)], ids=["inf", "1e300", "10**400", "Decimal"]
)
def test_a_timeout_may_be_as_long_as_one_likes(event: ipcsync.SharedEvent, timeout: float) -> None:
    stream = ipcsync.Stream()
    point = event.record(stream, timeout=timeout)
    point.wait(stream, timeout=timeout)
    point.synchronize(timeout)
    assert point.query()


def test_waiting_with_no_stream_holds_the_current_one(event: ipcsync.SharedEvent) -> None:
    held, current = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(held):
        point = event.record(held)
        with ipcsync.stream(current):
            point.wait()
        assert not current.query()
    until(current.query, "the current stream goes on")


def test_only_work_after_the_wait_is_held(event: ipcsync.SharedEvent) -> None:
    held, stream = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(held):
        point = event.record(held)
        before, after = ipcsync.Event(), ipcsync.Event()
        before.record(stream)
        point.wait(stream)
        after.record(stream)
        until(before.query, "what was queued before the wait is done")
        assert not after.query()
    until(after.query, "what was queued after it goes on")


def test_many_streams_and_threads_wait_for_one_point(event: ipcsync.SharedEvent) -> None:
    held = ipcsync.Stream()
    streams = [ipcsync.Stream() for _ in range(8)]
    point = event.at(1)
    errors: list[BaseException] = []

    def wait(stream: ipcsync.Stream) -> None:
        try:
            point.wait(stream, timeout=15)
            point.synchronize(15)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=wait, args=[stream]) for stream in streams]
    for thread in threads:
        thread.start()
    with StreamGate(held):
        event.record(held)
    for thread in threads:
        thread.join(20)
    assert errors == []
    for stream in streams:
        until(stream.query, "each stream goes on")


def test_waiting_on_ever_new_streams_keeps_no_driver_events(event: ipcsync.SharedEvent) -> None:
    held = ipcsync.Stream()
    engine = event._attached.engine
    for _ in range(20):
        with StreamGate(held):
            point = event.record(held)
            for _ in range(8):
                point.wait(ipcsync.Stream())
        point.synchronize(10)
    assert engine.marker_count < 64


def test_a_record_is_not_made_behind_itself_by_another_clients_point(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, engine: EngineName
) -> None:
    """Which is a use of its own, of the same event."""
    event = client.event("behind itself", recorder=True, engine=engine)
    with ipcsync.connect(coordinator.endpoint, name="another") as other:
        same = other.point(bytes(event.at(1)))
        with pytest.raises(ValueError, match="cannot depend on its generation 1"):
            event.record(ipcsync.Stream(), after=[same])
    event.close()


def test_a_copy_is_the_point_itself_of_the_same_client(coordinator: ipcsync.Coordinator) -> None:
    with ipcsync.connect(coordinator.endpoint) as first, ipcsync.connect(coordinator.endpoint) as second:
        point = second.record(ipcsync.Stream())
        message: dict[str, Any] = copy.deepcopy({"after": [point], "shallow": copy.copy(point)})
        first.point(bytes(point))
        first.close()
        assert message == {"after": [point], "shallow": point}
        message["after"][0].synchronize(10)

        async def again() -> None:
            async with ipcsync.aconnect(coordinator.endpoint) as client:
                awaited = await client.record(ipcsync.Stream())
                assert copy.deepcopy(awaited) is awaited
                assert copy.copy(awaited) is awaited

        asyncio.run(again())


class _TorchStream:
    """What torch.cuda.Stream has for this: `wait_event(event)` is `event.wait(self)`."""

    def __init__(self, stream: ipcsync.Stream) -> None:
        self.cuda_stream = stream.cuda_stream
        self.device_index = stream.device_index

    def wait_event(self, event: ipcsync.Point) -> None:
        event.wait(self)


def test_a_torch_streams_own_wait_event_takes_a_point(new_client: NewClient, engine: EngineName) -> None:
    recorder, waiter = new_client(), new_client()
    stream, waiting = ipcsync.Stream(), ipcsync.Stream()
    with StreamGate(stream) as gate:
        point = waiter.point(bytes(recorder.record(stream, engine=engine)))
        _TorchStream(waiting).wait_event(point)
        assert not waiting.query()
        gate.open()
        waiting.synchronize()
    assert point.query()
