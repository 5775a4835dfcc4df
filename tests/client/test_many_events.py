"""Opening many shared events at once: as one by one, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ipcsync
from ipcsync._session import connection
from tests.faults import fixtures
from tests.kit.until import until

pytestmark = pytest.mark.driver

NAMES = [f"cache/{number}" for number in range(150)]
NewCoordinator = Callable[..., ipcsync.Coordinator]


@pytest.mark.parametrize(
    ("remembered", "reply_queue", "window"),
    [
        (1, 512, 1),
        (7, 512, 7),
        (64, 512, 64),
        (1000, 512, 256),
        (1000, 9999, 256),
        (64, 64, 32),
        (64, 8, 4),
        (64, 1, 1),
    ],
)
def test_they_come_in_the_order_of_their_names_and_work(
    new_coordinator: NewCoordinator, remembered: int, reply_queue: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_RETRY_NS", 60_000_000_000)  # a busy machine may owe a reply for a second
    coordinator = new_coordinator(remembered_requests=remembered, reply_queue=reply_queue)
    with ipcsync.connect(coordinator.endpoint) as client, ipcsync.connect(coordinator.endpoint) as other:
        assert client._session.connection.window == window, "what fits the queues of both sides"
        ipcsync.Stream()  # with a context here, no event is asked for before it is opened
        before = client.messages_sent
        recorders = client.events(NAMES, recorder=True, depth=1)
        assert client.messages_sent == before + len(NAMES), "none was sent again"
        assert [event.name for event in recorders] == NAMES
        waiters = other.events(reversed(NAMES))
        stream = ipcsync.Stream()
        for recorder, waiter in zip(recorders, reversed(waiters), strict=True):
            other.point(bytes(recorder.record(stream))).synchronize(10)
            assert (waiter.name, waiter.generation) == (recorder.name, 1)


def test_none_are_none_and_a_name_twice_is_two_objects_over_one_attachment(client: ipcsync.Client) -> None:
    assert client.events([]) == []
    one, two = client.events(["e", "e"])
    one.close()
    assert two.state == "open"


def test_a_role_that_is_taken_leaves_none_open(client: ipcsync.Client, coordinator: ipcsync.Coordinator) -> None:
    with ipcsync.connect(coordinator.endpoint) as other:
        taken = other.event(NAMES[70], recorder=True)
        with pytest.raises(ipcsync.RecorderTaken):
            client.events(NAMES, recorder=True, depth=1)
        only_that = [(taken.name, 1)]
        until(lambda: [(each.name, each.attached) for each in other.list_events()] == only_that, "all are given back")
        taken.close()
    assert len(client.events(NAMES, recorder=True, depth=1)) == len(NAMES)


def test_a_quota_leaves_none_open(new_coordinator: NewCoordinator) -> None:
    coordinator = new_coordinator(pool=100)
    with ipcsync.connect(coordinator.endpoint) as client:
        with pytest.raises(ipcsync.QuotaExceeded):
            client.events(NAMES, depth=1)
        until(lambda: client.list_events() == [], "all are given back")
        assert len(client.events(NAMES[:100], depth=1)) == 100


@pytest.mark.own_coordinator
def test_requests_that_were_sent_twice_are_done_once(client: ipcsync.Client, coordinator: ipcsync.Coordinator) -> None:
    before = client.messages_sent
    fixtures.stop(coordinator.pid)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(client.events, NAMES, recorder=True, depth=1, timeout=30)
        try:
            until(
                lambda: client.messages_sent >= before + 2 * client._session.connection.window,
                "the first are sent again",
            )
        finally:
            fixtures.resume(coordinator.pid)
        events = opening.result(30)
    assert [event.name for event in events] == NAMES
    assert client.stats()["requests"]["open"] == len(NAMES)
    assert {info.attached for info in client.list_events()} == {1}


@pytest.mark.parametrize(
    ("names", "options", "error"),
    [
        (["good", ""], {}, ipcsync.ProtocolError),
        (["good", "x" * 256], {}, ipcsync.ProtocolError),
        (["good", 5], {}, TypeError),
        (5, {}, TypeError),
        (["good"], {"depth": 0}, ValueError),
        (["good"], {"engine": "none"}, ValueError),
        (["good"], {"timeout": -1.0}, ValueError),
        (["good"], {"timeout": float("nan")}, ValueError),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_asked(
    client: ipcsync.Client, names: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    before = client.messages_sent
    with pytest.raises(error):
        client.events(names, **options)
    assert client.messages_sent == before


def test_a_task_opens_many(coordinator: ipcsync.Coordinator) -> None:
    async def go() -> None:
        async with await ipcsync.aconnect(coordinator.endpoint) as client:
            events = await client.events(NAMES, recorder=True, depth=1)
            assert [event.name for event in events] == NAMES
            point = await events[3].record(ipcsync.Stream())
            await point.synchronize(10)

    asyncio.run(go())
