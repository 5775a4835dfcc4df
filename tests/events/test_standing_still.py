"""What a program is told that stands still or asks for what it does not get: once, with the way out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator

import pytest

import ipcsync
from ipcsync._engines import core
from ipcsync.testing import StreamGate
from tests.events.stage import NewClient
from tests.kit.until import until

pytestmark = pytest.mark.driver


def _told(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [text for record in caplog.records if what in (text := record.getMessage())]


def _hold_up(gate: StreamGate, record: Callable[[], object], has_told: Callable[[], bool]) -> None:
    """Have a record wait for room until that was told."""
    thread = threading.Thread(target=record)
    thread.start()
    try:
        until(has_told, "the log says it")
    finally:
        gate.open()
        thread.join()


def test_a_full_ring_is_told_once_with_the_way_out(client: ipcsync.Client, caplog: pytest.LogCaptureFixture) -> None:
    stream, event = ipcsync.Stream(), client.event("kv", recorder=True, engine="event", depth=2)
    for _ in range(2):
        with StreamGate(stream) as gate:
            event.record(stream)
            event.record(stream)
            _hold_up(gate, lambda: event.record(stream), lambda: bool(_told(caplog, "all depth=2 are in flight")))
        stream.synchronize()
    (text,) = _told(caplog, "all depth=2 are in flight")
    for part in ("'kv'", "larger depth", "engine='timeline'"):
        assert part in text


def test_an_asynchronous_record_that_waits_for_room_says_so_too(
    coordinator: ipcsync.Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    async def fill() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as client:
            stream = ipcsync.Stream()
            with StreamGate(stream) as gate:
                await client.record(stream, engine="event", depth=1)
                waiting = asyncio.create_task(client.record(stream, engine="event"))
                while not _told(caplog, "all depth=1 are in flight"):
                    await asyncio.sleep(0.01)
                gate.open()
                await waiting

    asyncio.run(asyncio.wait_for(fill(), 30))
    assert len(_told(caplog, "all depth=1 are in flight")) == 1


def test_another_depth_than_an_open_events_is_told_and_ignored(
    new_client: NewClient, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = new_client(), new_client()
    assert first.event("plain", recorder=True, engine="event").depth == ipcsync.DEFAULT_DEPTH == 16
    first.event("kv", recorder=True, engine="event", depth=4)
    assert second.event("kv").depth == 4
    assert not _told(caplog, "is ignored"), "nobody asked for a depth"
    assert second.event("kv", depth=8).depth == 4
    assert second.event("kv", depth=8).depth == 4
    assert _told(caplog, "is ignored") == ["depth=8 is ignored: 'kv' is open, with the depth 4 of who opened it first"]
    with ipcsync.connect(second.endpoint, depth=2) as third:
        assert third.event("kv").depth == 4
    assert len(_told(caplog, "is ignored")) == 1, "a client's depth is that of what it creates"
    second.event("plain", depth=8)
    assert first.event("plain", depth=16).depth == 16
    with pytest.raises(ValueError, match="depth is from 1 to 1024, but got 0"):
        second.event("kv", depth=0)
    caplog.clear()
    stream = ipcsync.Stream()
    for _ in range(3):
        first.record(stream, engine="event", depth=32)
    first.record(stream, engine="event", depth=64)
    (text,) = _told(caplog, "depth=64 is ignored")
    assert "with the depth 32" in text
    first.event("word", recorder=True, engine="timeline", depth=2)
    second.event("word", depth=3)
    assert len(_told(caplog, "is ignored")) == 1, "a timeline has no depth"


@pytest.fixture
def soon() -> Iterator[None]:
    """A wait for a name that nobody records is told at once."""
    core.set_times(nobody_ns=1)
    yield
    core.set_times()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("by", ["a thread", "a task"])
def test_a_wait_for_a_name_that_nobody_records_is_told_once(
    client: ipcsync.Client,
    coordinator: ipcsync.Coordinator,
    caplog: pytest.LogCaptureFixture,
    by: str,
) -> None:
    told = "still waiting for 'kv/raedy': nobody has opened the event as its recorder"

    async def wait() -> None:
        async with ipcsync.aconnect(coordinator.endpoint) as other:
            event = await other.event("kv/raedy")
            waiting = asyncio.create_task(event.at(1).wait(ipcsync.Stream()))
            while not _told(caplog, told):
                await asyncio.sleep(0.01)
            waiting.cancel()

    if by == "a task":
        asyncio.run(asyncio.wait_for(wait(), 30))
    else:
        event = client.event("kv/raedy")

        def is_told() -> bool:  # in eight looks; on a busy machine in fewer, and one is too few
            with pytest.raises(ipcsync.WaitTimeout):
                event.at(1).synchronize(0.4)
            return bool(_told(caplog, told))

        until(is_told, "the log says it")
    assert len(_told(caplog, told)) == 1
    assert {record.levelno for record in caplog.records if told in record.getMessage()} == {logging.WARNING}


@pytest.mark.usefixtures("soon")
def test_a_wait_for_a_recorder_that_is_there_says_nothing(
    new_client: NewClient, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = new_client(), new_client()
    first.event("kv", recorder=True)
    with pytest.raises(ipcsync.WaitTimeout):
        second.event("kv").at(1).synchronize(0.3)
    assert not _told(caplog, "still waiting")
