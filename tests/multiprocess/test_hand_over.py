"""A record in one process, waited for in another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from tests.peer import Peer

_kept: dict[str, object] = {}


def _record_gated(endpoint: str, name: str, engine: str) -> bytes:
    """In the peer: record behind a closed gate, and keep everything."""
    client = ipcsync.connect(endpoint, name="recorder")
    stream = ipcsync.Stream()
    gate = StreamGate(stream)
    gate.__enter__()
    event = client.event(name, recorder=True, engine=engine)
    point = event.record(stream)
    _kept.update(client=client, stream=stream, gate=gate, event=event)
    return bytes(point)


def _open_gate() -> None:
    gate = _kept["gate"]
    assert isinstance(gate, StreamGate)
    gate.open()


def _end() -> None:
    client = _kept["client"]
    assert isinstance(client, ipcsync.Client)
    gate = _kept["gate"]
    assert isinstance(gate, StreamGate)
    gate.__exit__(None, None, None)
    client.close()


@pytest.fixture(params=["event", "timeline"])
def engine(request: pytest.FixtureRequest) -> str:
    """Both engines, one after the other."""
    return str(request.param)


def test_a_point_is_complete_only_once_the_recorders_work_is(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: str
) -> None:
    data = peer.call(_record_gated, coordinator.endpoint, "e", engine)
    point = client.point(data)
    assert point.is_recorded
    assert not point.query()
    with pytest.raises(ipcsync.WaitTimeout):
        point.synchronize(0.05)
    stream = ipcsync.Stream()
    point.wait(stream)
    assert not stream.query()
    peer.call(_open_gate)
    point.synchronize(10)
    stream.synchronize()
    assert point.query()
    peer.call(_end)


def test_a_generation_not_recorded_yet_is_waited_for(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, peer: Peer, engine: str
) -> None:
    point = client.event("e", engine=engine).at(1)
    assert not point.is_recorded
    assert not point.query()
    with pytest.raises(ipcsync.WaitTimeout) as caught:
        point.wait(ipcsync.Stream(), timeout=0.05)
    assert (caught.value.event, caught.value.generation) == ("e", 1)
    peer.call(_record_gated, coordinator.endpoint, "e", engine)
    peer.call(_open_gate)
    point.synchronize(10)
    peer.call(_end)


def test_steady_state_sends_no_message(new_client: Callable[..., ipcsync.Client], engine: str) -> None:
    recorder, waiter = new_client("recorder"), new_client("waiter")
    event = recorder.event("e", recorder=True, engine=engine)
    stream, other = ipcsync.Stream(), ipcsync.Stream()
    waiter.point(bytes(event.record(stream))).synchronize(10)
    before = recorder.messages_sent, waiter.messages_sent
    for _ in range(50):
        point = waiter.point(bytes(event.record(stream)))
        point.wait(other)
        point.synchronize(10)
        assert point.query()
    assert (recorder.messages_sent, waiter.messages_sent) == before
