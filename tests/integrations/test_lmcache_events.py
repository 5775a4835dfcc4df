"""LMCache's event backends without LMCache: a peer that died costs the call that meets it, and no later one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

import ipcsync
from ipcsync import integrations
from ipcsync.integrations.lmcache import CpuEventBackend, IpcSyncEventBackend
from ipcsync.testing import StreamGate
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = [pytest.mark.driver, pytest.mark.process]

_held: list[object] = []


def _export_held_back() -> bytes:
    """In an engine: the event of a transfer that is not over while this process lives."""
    stream = ipcsync.default_stream()
    _held.append(StreamGate(stream))
    return bytes(ipcsync.default_client().record(stream, engine="timeline"))  # a stream gets past its loss anywhere


def _export() -> bytes:
    backend = IpcSyncEventBackend()
    event = backend.create_event(0)
    backend.record_event(event, ipcsync.default_stream())
    return backend.export_event(event, 0)


@pytest.fixture
def process(coordinator: ipcsync.Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process's default client is of the test's coordinator."""
    monkeypatch.setenv("IPCSYNC_ENDPOINT", coordinator.endpoint)
    yield
    ipcsync.default_client().close()


@pytest.mark.usefixtures("process")
def test_a_servers_stream_serves_the_next_engine_after_one_that_died(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrations, "_RESUME_S", 30.0)
    backend, stream = IpcSyncEventBackend(), ipcsync.Stream()
    dead, healthy = (new_peer(IPCSYNC_ENDPOINT=coordinator.endpoint) for _ in range(2))
    backend.wait_event(backend.import_event(dead.call(_export_held_back), 0), stream)
    dead.kill()
    with pytest.raises(ipcsync.RecorderLost):
        until(lambda: backend.record_event(backend.create_event(0), stream), "the loss is seen")
    for _ in range(3):
        backend.wait_event(backend.import_event(healthy.call(_export), 0), stream)
        event = backend.create_event(0)
        backend.record_event(event, stream)
        backend.synchronize_event(event, 0)


@pytest.mark.usefixtures("process")
def test_an_engine_may_have_a_stream_wait_by_the_event_itself() -> None:
    backend, source, stream = IpcSyncEventBackend(), ipcsync.Stream(), ipcsync.Stream()
    event = backend.create_event(0)
    with pytest.raises(RuntimeError, match="not recorded"):
        event.wait(stream)
    with StreamGate(source):
        backend.record_event(event, source)
        event.wait(stream)  # LMCache's protocol IPCEvent, which its transfer contexts give to engines
        event.wait()
        assert not stream.query()
    stream.synchronize()
    assert backend.query_event(event)


@pytest.mark.usefixtures("process")
def test_on_the_cpu_a_server_serves_the_next_engine_after_one_that_died(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]
) -> None:
    backend = CpuEventBackend()
    dead, healthy = (new_peer(IPCSYNC_ENDPOINT=coordinator.endpoint) for _ in range(2))
    event = backend.import_event(dead.call(_export_held_back), 0)
    assert not backend.query_event(event)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(backend.wait_event, event, None)
        assert not wait([waiting], 0.2).done, "it waits"
        dead.kill()
        with pytest.raises(ipcsync.RecorderLost):
            waiting.result(30)
    for _ in range(3):
        backend.wait_event(backend.import_event(healthy.call(_export), 0), None)
        event = backend.create_event(0)
        backend.record_event(event, None)
        backend.synchronize_event(event, 0)
