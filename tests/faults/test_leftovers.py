"""Row 49: what is used for a moment, again and again, leaves nothing, with the garbage collector off.

IPCSYNC_MANY=5000 makes it 10,000 streams and threads.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ipcsync
from tests.faults import chain_actions as do
from tests.faults.fixtures import ENGINES
from tests.kit.descriptors import descriptors
from tests.kit.peer import Peer
from tests.kit.until import until

pytestmark = pytest.mark.keeper

MANY = int(os.environ.get("IPCSYNC_MANY", "300"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """As servers for inference have it: `gc.disable()`, or `gc.freeze()`."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_row_49_short_lived_streams_and_threads_use_up_no_events(client: ipcsync.Client, no_collector: None) -> None:
    for _ in range(2 * MANY):
        client.record(ipcsync.Stream()).synchronize(10)
    for _ in range(MANY // 8):
        threads = [threading.Thread(target=lambda: client.record().synchronize(10)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert client.stats()["pool_in_use"] <= 32 + 2 * 8


def _boards() -> int:
    return sum(path.startswith("/dev/shm/ipcsync") for path in descriptors().values())


def test_row_49_connecting_and_closing_leaves_nothing_for_the_collector(
    coordinator: ipcsync.Coordinator, no_collector: None
) -> None:
    for _ in range(3):
        ipcsync.connect(coordinator.endpoint).close()
    threads, files = threading.active_count(), len(descriptors())
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(MANY // 5):
        with ipcsync.connect(coordinator.endpoint) as client, client.event("e", recorder=True) as event:
            event.record(ipcsync.Stream()).synchronize(10)
    until(lambda: threading.active_count() <= threads, "the end of the threads")
    # ZeroMQ closes its sockets a moment later, on a thread of its own.
    until(lambda: len(descriptors()) <= files + 3, "the end of the descriptors")
    until(lambda: len(Path("/proc/self/maps").read_text().splitlines()) <= mappings + 20, "the end of the mappings")


@pytest.mark.parametrize("engine", ENGINES)
def test_row_49_a_stream_keeps_nothing_of_the_sessions_that_had_it_wait(
    coordinator: ipcsync.Coordinator,
    new_peer: Callable[..., Peer],
    engine: ipcsync.typing.EngineName,
    no_collector: None,
) -> None:
    recorder, stream = new_peer(), ipcsync.Stream()
    recorder.call(do.connect, coordinator.endpoint, "recorder")
    recorder.call(do.open_event, "e", engine)
    data = recorder.call(do.record, "e")

    def wait() -> None:
        with ipcsync.connect(coordinator.endpoint) as client:
            client.point(data).wait(stream)
            stream.synchronize()

    boards = _boards()
    for _ in range(3):
        wait()
    until(lambda: _boards() <= boards, "the end of the boards")  # an earlier test's may end too


def test_row_49_nor_of_those_whose_recorder_was_lost_but_that_it_was(
    coordinator: ipcsync.Coordinator, new_peer: Callable[..., Peer], no_collector: None
) -> None:
    stream = ipcsync.Stream()
    boards = _boards()
    for name in ("first", "second", "third"):
        recorder = new_peer()
        recorder.call(do.connect, coordinator.endpoint, name)
        recorder.call(do.open_event, name, "timeline")
        recorder.call(do.hold)
        with ipcsync.connect(coordinator.endpoint) as client:
            client.point(recorder.call(do.record, name)).wait(stream)
            recorder.kill()
            stream.synchronize()
        del client, recorder
    until(lambda: _boards() <= boards, "the end of the boards")  # an earlier test's may end too
    with ipcsync.connect(coordinator.endpoint) as client:
        for _ in range(2):
            with pytest.raises(ipcsync.RecorderLost, match="generation 1 of 'first'"):
                client.record(stream)
        client.resume(stream, 10)
        client.record(stream).synchronize(10)


@pytest.mark.parametrize("engine", ENGINES)
def test_row_49_slots_that_a_peer_used_for_a_moment_are_free_long_before_its_ttl(
    new_coordinator: Callable[..., ipcsync.Coordinator], engine: ipcsync.typing.EngineName
) -> None:
    """It takes a point, and keeps nothing: the next events must not wait for a third of ten minutes."""
    pool = MANY // 2
    coordinator = new_coordinator(lease_ttl=600.0, pool=pool)
    with (
        ipcsync.connect(coordinator.endpoint, name="maker") as maker,
        ipcsync.connect(coordinator.endpoint, name="user") as user,
    ):
        stream = ipcsync.Stream()
        for number in range(2 * pool):
            with maker.event(f"e{number}", recorder=True, engine=engine) as event:
                user.point(bytes(event.record(stream))).synchronize(10)
        until(lambda: maker.stats()["quarantined"] == 0, "the end of the quarantine")
