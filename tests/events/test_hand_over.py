"""A record in one process, waited for in another; by the fixtures that users of ipcsync have too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName

if TYPE_CHECKING:
    from ipcsync.pytest_plugin.spawned import Child

pytestmark = pytest.mark.driver


def _record_gated(client: ipcsync.Client, engine: EngineName) -> bytes:
    """In the child: record on "e" behind a gate, which opens once "open" was recorded; the point."""
    stream = ipcsync.Stream()
    with StreamGate(stream) as gate, client.event("e", recorder=True, engine=engine) as event:
        point = event.record(stream)
        client.event("open").at(1).synchronize(20)
        gate.open()
        point.synchronize(10)
        client.event("seen").at(1).synchronize(20)
        return bytes(point)


def _let(client: ipcsync.Client, name: str) -> None:
    """Tell the child that it may go on."""
    client.event(name, recorder=True).record(ipcsync.Stream())


@pytest.mark.process
def test_a_point_is_complete_only_once_the_recorders_work_is(
    ipcsync_client: ipcsync.Client, ipcsync_spawn: Callable[..., Child], engine: EngineName
) -> None:
    point = ipcsync_client.event("e", engine=engine).at(1)
    child = ipcsync_spawn(_record_gated, engine)
    stream = ipcsync.Stream()
    point.wait(stream, timeout=20)
    assert point.is_recorded
    assert not point.query()
    assert not stream.query()
    with pytest.raises(ipcsync.WaitTimeout):
        point.synchronize(0.05)
    _let(ipcsync_client, "open")
    point.synchronize(10)
    stream.synchronize()
    assert point.query()
    _let(ipcsync_client, "seen")
    assert child.result() == bytes(point)
    assert ipcsync_client.point(bytes(point)) == point


def test_a_generation_not_recorded_yet_is_waited_for(
    ipcsync_client: ipcsync.Client, ipcsync_namespace: str, ipcsync_spawn: Callable[..., Child], engine: EngineName
) -> None:
    point = ipcsync_client.event("e", engine=engine).at(1)
    assert not point.is_recorded
    assert not point.query()
    with pytest.raises(ipcsync.WaitTimeout) as caught:
        point.wait(ipcsync.Stream(), timeout=0.05)
    assert (caught.value.event, caught.value.generation) == (f"{ipcsync_namespace}/e", 1)
    _let(ipcsync_client, "open")
    _let(ipcsync_client, "seen")
    child = ipcsync_spawn(_record_gated, engine)
    point.synchronize(20)
    assert child.result() == bytes(point)


def test_steady_state_sends_no_message(new_client: Callable[..., ipcsync.Client], engine: EngineName) -> None:
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
