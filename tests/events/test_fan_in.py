"""One wait for many points: order, timeouts, and recorders that die while others are waited for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync.testing import StreamGate
from ipcsync.typing import EngineName
from tests.kit import remote
from tests.kit.peer import Peer

READERS = 3


def _open(peer: Peer, endpoint: str, name: str, engine: EngineName) -> None:
    peer.call(remote.connect, endpoint, name)
    peer.call(remote.open_event, name, {"recorder": True, "engine": engine})


@pytest.fixture
def readers(new_peer: Callable[..., Peer], coordinator: ipcsync.Coordinator, engine: EngineName) -> list[Peer]:
    """Three processes, each the recorder of an event of its own."""
    peers = [new_peer() for _ in range(READERS)]
    for number, peer in enumerate(peers):
        _open(peer, coordinator.endpoint, f"reader-{number}", engine)
    return peers


@pytest.fixture
def points(client: ipcsync.Client, readers: list[Peer]) -> list[ipcsync.Point]:
    """The first generation of each reader's event, recorded by none yet."""
    return [client.event(f"reader-{number}").at(1) for number in range(len(readers))]


def _acknowledge(reader: Peer, number: int) -> None:
    reader.call(remote.record, f"reader-{number}")


def test_all_are_waited_for_on_the_host(points: list[ipcsync.Point], readers: list[Peer]) -> None:
    for number in (2, 0):
        _acknowledge(readers[number], number)
    with pytest.raises(ipcsync.WaitTimeout, match=r"within 0\.2 s") as caught:
        ipcsync.synchronize_all(points, timeout=0.2)
    assert (caught.value.event, caught.value.timeout) == ("reader-1", 0.2)
    _acknowledge(readers[1], 1)
    assert ipcsync.synchronize_all(iter(points), timeout=30) == []
    assert all(point.query() for point in points)


def test_a_stream_waits_for_all(points: list[ipcsync.Point], readers: list[Peer]) -> None:
    for number, reader in enumerate(readers):
        reader.call(remote.hold, "main")
        _acknowledge(reader, number)
    stream = ipcsync.Stream()
    assert ipcsync.wait_all(points, stream, timeout=30) == []
    behind = stream.record_event()
    for reader in readers:
        assert not behind.query()
        reader.call(remote.let_go, "main")
    behind.synchronize()
    assert all(point.query() for point in points)


@pytest.mark.parametrize("wait", ["synchronize_all", "wait_all"])
def test_the_death_of_any_ends_the_wait_though_the_first_may_still_come(
    wait: str, points: list[ipcsync.Point], readers: list[Peer]
) -> None:
    raised: list[ipcsync.RecorderLost] = []

    def blocked() -> None:
        try:
            getattr(ipcsync, wait)(points, timeout=30)
        except ipcsync.RecorderLost as error:
            raised.append(error)

    thread = threading.Thread(target=blocked)
    thread.start()
    readers[2].kill()
    began = time.monotonic()
    thread.join(30)
    assert [error.event for error in raised] == ["reader-2"]
    assert time.monotonic() - began < 25, "by the death, not by the timeout"


@pytest.mark.parametrize("wait", ["synchronize_all", "wait_all"])
def test_dead_readers_are_left_out_and_said(wait: str, points: list[ipcsync.Point], readers: list[Peer]) -> None:
    for number in (0, 2):
        readers[number].kill()
    _acknowledge(readers[1], 1)
    assert getattr(ipcsync, wait)(points, timeout=30, lost="skip") == [points[0], points[2]]


def test_what_a_dead_reader_acknowledged_counts(points: list[ipcsync.Point], readers: list[Peer]) -> None:
    for number, reader in enumerate(readers):
        reader.call(remote.record, f"reader-{number}")
    ipcsync.synchronize_all(points, timeout=30)
    readers[0].kill()
    assert ipcsync.synchronize_all(points, timeout=30, lost="skip") == []


def test_bad_arguments_are_refused(client: ipcsync.Client) -> None:
    with client.event("e", recorder=True) as event:
        stream = ipcsync.Stream()
        with StreamGate(stream):
            point = event.record(stream)
            wrong: list[dict[str, Any]] = [{"lost": "ignore"}, {"timeout": -1}, {"timeout": float("nan")}]
            for options in wrong:
                with pytest.raises(ValueError, match=r"lost is|timeout is"):
                    ipcsync.synchronize_all([point], **options)
        assert ipcsync.synchronize_all([]) == []
        assert ipcsync.wait_all([], stream) == []


@pytest.mark.parametrize("wait", [ipcsync.synchronize_all, ipcsync.wait_all])
def test_what_is_no_point_is_refused_and_an_asynchronous_one_said_how_to_await(
    coordinator: ipcsync.Coordinator, client: ipcsync.Client, wait: Callable[[Any], object]
) -> None:
    async def scenario() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as other:
            point = await other.record(ipcsync.Stream())
            with pytest.raises(TypeError, match=r"but got AsyncPoint: an asynchronous client has methods"):
                wait([client.record(), point])

    asyncio.run(scenario())
    for wrong in (None, b"48 bytes", bytes(client.record())):
        with pytest.raises(TypeError, match=r"points are ipcsync\.Points, but got"):
            wait([wrong])
    with pytest.raises(TypeError, match=r"points takes ipcsync\.Points, in a list or another iterable, but got Point"):
        wait(client.record())
