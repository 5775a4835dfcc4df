"""LMCache's event backend between two processes, without LMCache; `make test-lmcache` runs it in LMCache's own."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

import ipcsync
from ipcsync.integrations.lmcache import IpcSyncEventBackend
from tests.kit import remote
from tests.kit.peer import Peer, PeerError

pytestmark = pytest.mark.driver

_ours = IpcSyncEventBackend()


@pytest.fixture
def new_worker(coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer]) -> Callable[[], Peer]:
    """Starts processes whose default clients are of the test's coordinator."""
    return lambda: new_peer(IPCSYNC_ENDPOINT=coordinator.endpoint)


def _export(times: int = 1) -> bytes:
    event = _ours.create_event(0)
    for _ in range(times):
        _ours.record_event(event, remote.stream())
    return _ours.export_event(event, 0)


def _query(handle: bytes) -> bool:
    return _ours.query_event(_ours.import_event(handle, 0))


def _synchronize(handle: bytes) -> None:
    _ours.synchronize_event(_ours.import_event(handle, 0), 0)


def _record_behind(handle: bytes) -> bytes:
    _ours.wait_event(_ours.import_event(handle, 0), remote.stream())
    return _export()


def _support() -> str | None:
    try:
        _ours.check_event_support(0)
    except RuntimeError as error:
        return str(error)
    return None


def _export_unrecorded() -> None:
    _ours.export_event(_ours.create_event(0), 0)


def test_a_process_that_reaches_the_coordinator_is_supported(new_worker: Callable[[], Peer]) -> None:
    assert new_worker().call(_support) is None


def test_a_process_without_a_coordinator_is_told_so_before_any_transfer(new_peer: Callable[..., Peer]) -> None:
    peer = new_peer(IPCSYNC_ENDPOINT="ipc:///nonexistent/coordinator.sock")
    assert "no coordinator" in (peer.call(_support) or "")


def test_what_follows_an_imported_event_is_complete_after_it(new_worker: Callable[[], Peer]) -> None:
    engine, server = new_worker(), new_worker()
    engine.call(remote.hold)
    computed = engine.call(_export)
    stored = server.call(_record_behind, computed)
    assert not engine.call(_query, stored)
    assert not server.call(_query, computed)
    engine.call(remote.let_go)
    engine.call(_synchronize, stored)
    assert server.call(_query, computed)


def test_an_exported_event_keeps_its_record_when_it_is_recorded_again(new_worker: Callable[[], Peer]) -> None:
    engine, server = new_worker(), new_worker()
    first, third = engine.call(_export), engine.call(_export, 2)
    assert first != third
    server.call(_synchronize, first)
    server.call(_synchronize, third)


def test_an_event_that_was_never_recorded_is_not_exported(new_worker: Callable[[], Peer]) -> None:
    with pytest.raises(PeerError, match="not recorded yet"):
        new_worker().call(_export_unrecorded)


def test_the_death_of_the_exporter_ends_a_host_wait(new_worker: Callable[[], Peer]) -> None:
    engine, server = new_worker(), new_worker()
    engine.call(remote.hold)
    computed = engine.call(_export)
    assert not server.call(_query, computed)
    server.begin(_synchronize, computed)
    engine.signal(signal.SIGKILL)
    with pytest.raises(PeerError, match="RecorderLost"):
        server.result()
